"""Chats as people keep them: three forms of a row, recognised by its keys, made into one.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"prompt": "...", "completion": "..."}

Other keys of a row are left alone, as those of a text are, but for what would change the chat.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dipaco.base.errors import CorpusError, nearest_name
from dipaco.base.files import canonical_json

from .quoting import quoted

_PAIR = ("prompt", "completion")
_FORMS = (("messages",), ("conversations",), _PAIR)
FORMS_SAID = "messages, conversations, or prompt and completion"
_KEYS = tuple(key for form in _FORMS for key in form)
# What would be part of the chat, and is not trained on.
_REFUSED = ("tools", "functions", "system")
_ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "gpt": "assistant",
    "developer": "system", "model": "assistant",
}  # fmt: skip
# What a row is looked at for.
CHAT_KEYS = (*_KEYS, *_REFUSED)
# How like one of the keys another must be to be taken for a slip.
_ALIKE = 0.75


@dataclass(frozen=True)
class Message:
    """What one side says."""

    role: str
    content: str

    def plain(self) -> dict[str, str]:
        """Return what a chat template sees."""
        return {"role": self.role, "content": self.content}


Chat = tuple[Message, ...]


def chat_content(chat: Chat) -> bytes:
    """Return what is hashed where a chat is chosen by its content."""
    return canonical_json([[message.role, message.content] for message in chat])


def first_question(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that a chat is routed by: the first turn of the user, or else what is said
    first. A template begins all chats alike, so its text would send them all to one path."""
    questions = [message for message in messages if message["role"] == "user"]
    content = (questions or messages)[0]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def is_chat(row: Mapping[str, Any], text_field: str) -> bool:
    """Tell whether a row has the keys of a chat. A row without a text also counts if it has some of
    these keys, or one that looks like a slip."""
    return bool(_forms(row) or (text_field not in row and (_half(row) or _slips(row))))


def says_nothing(row: Mapping[str, Any], text_field: str) -> bool:
    """Tell whether a row has keys of a chat and none of them says anything: joined tables are
    filled up with such rows."""
    values = [row.get(key) for key in (*CHAT_KEYS, text_field)]
    return any(key in row for key in _KEYS) and all(value is None for value in values)


def read_chat(
    row: Mapping[str, Any], text_field: str, place: str, label_field: str | None = None
) -> Chat:
    """Return the chat of a row. Raises CorpusError; `place` is where it stands, as file:line."""
    forms = _forms(row)
    if says_nothing(row, text_field):
        return ()
    if not forms:
        for key, meant in _slips(row):
            raise CorpusError(f"{place} has the key '{quoted(key)}'; did you mean '{meant}'?")
        if half := _half(row):
            there, missing = half
            others = [key for key in row if key not in (there, label_field)]
            meant = f"'{quoted(others[0])}'" if len(others) == 1 else "the key that is meant to be"
            to = f"to '{missing}'" if len(others) == 1 else f"'{missing}'"
            raise CorpusError(
                f"{place} has the key '{there}' and no '{missing}'; rename {meant} {to}, or write "
                f"text_field = '{there}' under [data] to train on it as a text"
            )
        keys = ", ".join(sorted(row))
        raise CorpusError(
            f"{place} is no chat, as the documents before it are; it has the keys "
            f"{quoted(keys, len(keys)) or 'of nothing'}, and a chat has {FORMS_SAID}"
        )
    named = [" and ".join(form) for form in forms]
    if row.get(text_field) is not None:
        named.append(text_field)
    if len(named) > 1:
        raise CorpusError(
            f"{place} has the keys of {len(named)} forms, {'; '.join(named)}; leave all but one out"
        )
    for key in _REFUSED:
        if row.get(key):
            raise CorpusError(
                f"{place} has the key '{key}', which is not trained on; leave it out"
                + (", or write it as the first message" if key == "system" else "")
            )
    if forms[0] == ("messages",):
        return _turns(row["messages"], "messages", ("role", "content"), place)
    if forms[0] == ("conversations",):
        return _turns(row["conversations"], "conversations", ("from", "value"), place)
    return (
        *_part(row["prompt"], "prompt", "user", place),
        *_part(row["completion"], "completion", "assistant", place),
    )


def _forms(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [form for form in _FORMS if all(row.get(key) is not None for key in form)]


def _half(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the one of prompt and completion that a row has, and the other, which it lacks."""
    prompt, completion = (row.get(key) is not None for key in _PAIR)
    if prompt == completion:
        return None
    return _PAIR if prompt else (_PAIR[1], _PAIR[0])


def _slips(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the keys that may be meant to be those of a chat, each with what is meant."""
    found = []
    for key in row:
        if key not in _KEYS:
            alike = difflib.get_close_matches(key, _KEYS, n=1, cutoff=_ALIKE)
            found += [(key, name) for name in alike]
    return found


def _part(value: Any, key: str, role: str, place: str) -> Chat:
    if isinstance(value, str):
        return (Message(role, value),)
    return _turns(value, key, ("role", "content"), place)


def _turns(value: Any, name: str, keys: tuple[str, str], place: str) -> Chat:
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        shown = quoted(json.dumps(value, default=str))
        if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
            shown = f"a text with JSON in it, {quoted(value)}"
        raise CorpusError(
            f"{place}: {name} is {shown}, and must be a list of "
            f'{{"{keys[0]}": "...", "{keys[1]}": "..."}}'
        )
    return tuple(
        _turn(turn, keys, f"{place}: {name}[{number}]") for number, turn in enumerate(value)
    )


def _turn(turn: Mapping[str, Any], keys: tuple[str, str], place: str) -> Message:
    for key in keys:
        if turn.get(key) is None:
            slip = nearest_name(key, (other for other in turn if other not in keys))
            raise CorpusError(
                f"{place} has no '{key}'"
                + (f"; is '{quoted(slip)}' meant to be it?" if slip else "")
            )
    for key, value in turn.items():
        # A list of nothing is what a table has for those that call no tool.
        if key not in keys and value not in (None, [], ""):
            raise CorpusError(
                f"{place} has the key '{quoted(key)}', which is not trained on; leave it out"
            )
    role, content = (turn[key] for key in keys)
    if not isinstance(role, str) or role not in _ROLES:
        guess = nearest_name(str(role), _ROLES)
        raise CorpusError(
            f"{place} is said by '{quoted(str(role))}'; "
            + (f"did you mean '{guess}'? There are " if guess else "there are ")
            + ", ".join(_ROLES)
        )
    return Message(_ROLES[role], _text(content, keys[1], place))


def _text(content: Any, key: str, place: str) -> str:
    """Return a text, or that of a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        shown = quoted(json.dumps(content, default=str))
        raise CorpusError(f"{place}: {key} is {shown}; only text is trained on")
    return "".join(str(text) for text in texts)
