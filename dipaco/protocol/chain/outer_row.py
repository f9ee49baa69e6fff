"""The part of a row that an outer step needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OuterRow:
    """How much a peer contributes to a module."""

    path: int
    peer: str
    tokens: int
