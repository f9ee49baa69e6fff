"""From a chat to tokens, of which those are marked to be learned that the assistant says.

What the assistant says is the difference that an answer makes: the template is filled in with the
messages before it, and with the answer too. Marks that some templates have of their own are not
relied on. Each side's text is tokenised by itself, as it is when the model is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dipaco.base.errors import ConfigurationError
from dipaco.routing.documents.chat_template import ChatTemplate, TemplateError
from dipaco.routing.documents.chats import Chat, first_question

from .tokenizer import Tokenizer

SPECIAL_NAMES = ("unk_token", "bos_token", "eos_token", "pad_token")
# What a template writes in front of an answer without thoughts (Qwen3). It teaches not to think.
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


class _Filled(Protocol):
    """Fills in a template: `ChatTemplate.render` without the names of special tokens."""

    def __call__(self, chat: Chat, *, answer_follows: bool) -> str: ...


class UnusableChatError(Exception):
    """A chat in which nothing is to be learned; the message says why, for many alike."""


class ChatTokens(NamedTuple):
    """A chat as a document of a shard."""

    tokens: np.ndarray
    """int64 [N], marked (`dipaco.modules.marked_tokens`)."""
    beginning: np.ndarray
    """int64 [at most `prefix_tokens`]: what routing sees of it."""


class ChatEncoder:
    """Makes tokens of chats with the tokenizer and the chat template of a run's base.

    Raises ConfigurationError if there is no template, or one that is no template.
    """

    def __init__(self, tokenizer: Tokenizer, prefix_tokens: int) -> None:
        if tokenizer.chat_template is None:
            raise ConfigurationError(
                "[data] holds chats, and the tokenizer of this run has no chat template; give a "
                "base that has one beside a tokenizer.json, with base = 'FOLDER', or texts"
            )
        self._tokenizer = tokenizer
        self._prefix_tokens = prefix_tokens
        self._template = ChatTemplate(tokenizer.chat_template)
        self._special = special_names(tokenizer)

    def encode(self, chat: Chat) -> ChatTokens:
        """Return a chat as tokens. Raises UnusableChatError."""
        if not any(message.role == "assistant" for message in chat):
            raise UnusableChatError("the assistant says nothing")
        if not any(m.content.strip() for m in chat if m.role == "assistant"):
            raise UnusableChatError("the answer is empty")
        try:
            text, answers = _answer_spans(chat, self._filled, self._special["eos_token"])
        except TemplateError as error:
            raise UnusableChatError(f"the chat template refuses it: {error}") from None
        if not answers:
            if any(m.role == "assistant" and m.content.strip() for m in chat[1:]):
                raise UnusableChatError(
                    "the chat template does not show the answer right after its question"
                )
            raise UnusableChatError("there is no answer that follows a question")
        return ChatTokens(
            _marked_chat(self._tokenizer, text, answers),
            np.asarray(routed_tokens(self._tokenizer, [m.plain() for m in chat]))[
                : self._prefix_tokens
            ],
        )

    def asked_otherwise(self, chat: Chat) -> tuple[str, str] | None:
        """Return what the template writes in front of the last answer where it asks for one, and
        what stands there once the answer is known; None if that is the same. The chat is one that
        `encode` takes."""
        last = max(
            number
            for number, message in enumerate(chat)
            if number and message.role == "assistant" and message.content.strip()
        )
        asked = self._filled(chat[:last], answer_follows=True)
        shown = self._filled(chat[: last + 1], answer_follows=False)
        start = _alike(asked, shown)
        if start == len(asked):
            return None
        # The line in which they part, or the one before where that is empty in one of them.
        line = asked.rfind("\n", 0, max(0, start - 1)) + 1
        answer = shown.find(chat[last].content.strip()[:20], line)
        return asked[line:], shown[line:answer] if answer >= 0 else shown[line : len(asked)]

    def close(self) -> None:
        """End the process that fills in the template."""
        self._template.close()

    def _filled(self, chat: Chat, *, answer_follows: bool) -> str:
        shielded = self._tokenizer.shielded
        messages = [message.plain() | {"content": shielded(message.content)} for message in chat]
        return self._template.render(messages, self._special, answer_follows=answer_follows)


def _answer_spans(chat: Chat, filled: _Filled, end_name: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat and where in it the answers lie, as (start, end). `end_name` is
    what the end of a text is called.

    An answer that the whole text shows otherwise than it was given (as some templates leave earlier
    thoughts out) is not among them, nor one whose question is shown otherwise once it is answered,
    nor an empty one, nor one that nothing comes before.
    """
    whole = filled(chat, answer_follows=False)
    spans = []
    for number, message in enumerate(chat):
        if number == 0 or message.role != "assistant" or not message.content.strip():
            continue
        is_last = number == len(chat) - 1
        with_answer = whole if is_last else filled(chat[: number + 1], answer_follows=False)
        if not whole.startswith(with_answer):
            # Some templates (Phi 3) end the text there, which goes on in the whole.
            with_answer = with_answer.removesuffix(end_name)
        before = filled(chat[:number], answer_follows=True)
        start = _alike(before, with_answer)
        if start < len(before):
            # What asks for an answer may end otherwise than what stands in front of one.
            question = filled(chat[:number], answer_follows=False)
            if start < _alike(question, before):
                continue
        if not whole.startswith(with_answer[:start]):
            continue
        answer = with_answer[start:]
        thought = _EMPTY_THOUGHT.match(answer)
        said = answer[thought.end() :] if thought else answer
        for written in (answer, said):
            if said and whole.startswith(written, start):
                end = start + len(written)
                spans.append((end - len(said), end))
                break
    return whole, spans


def _alike(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    if other.startswith(one):
        return len(one)
    pairs = zip(one, other, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b), min(map(len, (one, other)))
    )


def _marked_chat(tokenizer: Tokenizer, text: str, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the marked tokens of a chat's text, int64 [N], with the answers to be learned.

    An answer is learned up to the token that ends it, not what a template writes behind it. If the
    last one has no such token, it gets that of a text: an answer ends.
    """
    # Whether the template writes it or not: a text begins once.
    tokens = [~token for token in _begin_lacking(tokenizer, text)]
    position = 0
    for start, end in answers:
        tokens += [~token for token in tokenizer.encode_marked(text, position, start)]
        said = tokenizer.encode_marked(text, start, end)
        end_place = next((n for n, token in enumerate(said) if token in tokenizer.ends), None)
        has_end = end_place is not None
        learned = len(said) if end_place is None else end_place + 1
        tokens += said[:learned]
        tokens += [~token for token in said[learned:]]
        position = end
    rest = text[position:]
    if not rest.strip() and not has_end:
        tokens.append(tokenizer.end)
    else:
        tokens += [~token for token in tokenizer.encode_marked(text, position)]
    return np.asarray(tokens, dtype=np.int64)


def turn_end(template: str, special: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return which of these tokens' `names` a chat template writes behind an answer, the first of
    several; None if it writes none, or cannot be used. `special` is as for `ChatTemplate.render`.
    """
    question, answer = "What is two and two?", "It is four, as everybody knows."
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        filled = ChatTemplate(template)
    except ConfigurationError:
        return None
    try:
        behind = filled.render(chat, special, answer_follows=False).rpartition(answer)[2]
    except TemplateError:
        return None
    finally:
        filled.close()
    found = {behind.find(name): name for name in sorted(names, key=len) if name in behind}
    return found[min(found)] if found else None


def question_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a chat's text up to where the answer begins."""
    return [*_begin_lacking(tokenizer, text), *tokenizer.encode_marked(text)]


def routed_tokens(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return what a chat is routed by: the first turn of the user, as a text."""
    return tokenizer.beginning(first_question(messages))


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Return what a chat template is told of special tokens: `bos_token` and so on."""
    named = zip(SPECIAL_NAMES, tokenizer.special_names, strict=True)
    return {key: name for key, name in named if name is not None}


def _begin_lacking(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return what stands in front of texts, if a template has not written it itself."""
    name = special_names(tokenizer).get("bos_token")
    return () if name and text.startswith(name) else tokenizer.begin
