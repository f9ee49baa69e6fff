"""What is known of an outer round from its boundary to its end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from .rounds import Boundary


class Phase(Enum):
    """What an outer round waits for."""

    COPYING = auto()
    MEETING = auto()
    PAUSING = auto()
    ASKING = auto()
    TRACING = auto()
    STEPPING = auto()


@dataclass
class RoundUnderWay:
    """An outer round under way."""

    module: str
    boundary: Boundary
    anchor: str
    """Digest of the state that it started from."""
    phase: Phase = Phase.COPYING
    attempt: int = 0
    tokens: int = 0
    expected: int = 1
    group: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    alive: frozenset[str] | None = None
    culprits: frozenset[str] = frozenset()
    failure: str = "the commit window had passed"
    had_members: bool = False
    awaited: frozenset[str] | None = None
    close_s: float = 0.0
    until_s: float = math.inf
    """When the present phase ends at the latest, where nothing else ends it."""
