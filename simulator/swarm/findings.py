"""What the watch of a history writes down: violations, stays of peers, and figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """What did not hold, when, and at whom."""

    invariant: str
    time_s: float
    what: str


@dataclass
class Stay:
    """Steps of a peer while it trained a module: [begin, end); no end while it lasts."""

    begin: int
    end: int | None = None


@dataclass
class Figures:
    """What a history came to, besides violations."""

    commits: int = 0
    forks: int = 0
    adoptions: int = 0
    put_back: int = 0
    trained_steps: int = 0
    kept_steps: int = 0
    greatest_requests: int = 0
    greatest_states: float = 0.0
    rounds_to_rest: float = 0.0
    found_out: int = 0
    """How often a member heard that a reducer had averaged wrongly."""
