"""What a complaint about a document shows of it: its first characters, or nothing.

An operator wants to see what is wrong. The texts of a volunteer are in no line that a program
prints, because a log is what is sent with a question (design 4.14, texts).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SHOWN_CHARACTERS = 60
_IS_HIDDEN = ContextVar("documents are not quoted", default=False)


@contextmanager
def nothing_quoted() -> Iterator[None]:
    """Let complaints of the body, and of what it iterates over, show nothing of documents."""
    token = _IS_HIDDEN.set(True)
    try:
        yield
    finally:
        _IS_HIDDEN.reset(token)


def is_quoted() -> bool:
    """Tell whether complaints may show something of documents, names of their fields included."""
    return not _IS_HIDDEN.get()


def quoted(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """Return how a complaint shows a part of a document."""
    return text[:characters] if is_quoted() else "(not shown)"
