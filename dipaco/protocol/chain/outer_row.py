"""The part of a row that an outer step needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OuterRow:
    """A peer's contribution to a module, as the outer step weighs it."""

    path: int
    peer: str
    tokens: int
