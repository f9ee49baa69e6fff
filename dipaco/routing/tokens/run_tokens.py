"""The tokens of texts that come to a service, and what is never one of a text.

Prompts go to llama.cpp as the tokens that the run has for them: its own tokenizer takes names of
special tokens in a text for these, and puts no begin in front where a base's tokenizer does not.

A tokenizer came with a run, from somebody: its parts can fill any memory, and its patterns can loop
over a text that somebody else wrote. So a process of its own (`dipaco.base.bounded_process`) reads
it first, which writes and reads texts of all kinds in it, and cuts the texts of a service.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dipaco.base.bounded_process import BoundedProcess, RefusedError, answer_lines
from dipaco.base.errors import ConfigurationError
from dipaco.routing.tokens.chat_tokens import routed_tokens, special_names
from dipaco.routing.tokens.tokenizer_kinds import is_json, read_tokenizer

# Routing looks at the first few dozen tokens, and so many characters hold them.
_ROUTED_LETTERS = 2**14
_MEMORY_BYTES = 2 * 2**30


class RunTokens:
    """The tokens of a run, by the blob of its tokenizer. Used by one thread at a time.

    Raises ConfigurationError for a tokenizer that cannot be read within `read_limit_s` and 2 GiB.
    Its methods raise RefusedError for a text that cannot be cut within `limit_s`.
    """

    def __init__(self, blob: bytes, limit_s: float = 5.0, read_limit_s: float = 60.0) -> None:
        first = base64.b64encode(blob).decode()
        # One of a large model is read in three seconds, on a busy machine.
        self._process = BoundedProcess(__name__, first, limit_s=limit_s, first_s=read_limit_s)
        try:
            self._process.start()
        except RefusedError as error:
            raise ConfigurationError(f"the run's tokenizer cannot be used: {error}") from None
        about: dict[str, Any] = self._process.first_answer
        self.never_chosen: tuple[int, ...] = tuple(about["never_chosen"])
        """What is no part of a text: never chosen, as in `dipaco-generate`."""
        self.rows: int = about["rows"]
        """Numbers that a prompt of tokens may have."""
        self.longest: int = about["longest"]
        """Letters of the longest token."""
        self.chat_template: str | None = about["chat_template"]
        """What came with the tokenizer."""
        self.special_names: dict[str, str] = about["special_names"]
        """What a chat template is told of special tokens."""
        self.control_names: list[str] = about["control_names"]
        """Names that llama.cpp takes for special tokens wherever a chat has them."""

    def of_text(self, text: str) -> list[int]:
        """Return a text's tokens, with what stands in front of it."""
        return self._asked("of_text", text)

    def routed_by_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens that a chat is routed by: those of the user's first turn."""
        cut = [{"role": m["role"], "content": m["content"][:_ROUTED_LETTERS]} for m in messages]
        return self._asked("routed_by_chat", cut)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _asked(self, what: str, of: Any) -> list[int]:
        found: list[int] = self._process.ask([what, of])
        return found


def read_first(blob: bytes) -> None:
    """Have a tokenizer of a run read in such a process, before this one reads it.

    Raises ConfigurationError as `RunTokens` does.
    """
    if is_json(blob):
        RunTokens(blob).close()


def _begin(blob: str) -> tuple[dict[str, Any], Callable[[tuple[str, Any]], list[int]]]:
    """Read a tokenizer; return what `RunTokens` says of it, and what answers its methods."""
    tokenizer = read_tokenizer(base64.b64decode(blob))
    size = tokenizer.vocabulary_size
    about = {
        "never_chosen": tokenizer.never_chosen,
        "rows": size,
        "longest": max(len(tokenizer.decode([token])) for token in range(size)),
        "chat_template": tokenizer.chat_template,
        "special_names": special_names(tokenizer),
        "control_names": tokenizer.control_names(),
    }
    ways: dict[str, Callable[[Any], list[int]]] = {
        "of_text": tokenizer.beginning,
        "routed_by_chat": lambda messages: routed_tokens(tokenizer, messages),
    }
    return about, lambda question: ways[question[0]](question[1])


if __name__ == "__main__":
    answer_lines(_MEMORY_BYTES, _begin)
