"""When outer boundaries fall and how many inner steps come before each (DESIGN 4.1). Pure.

The clock decides everything: round `r` of a level with offset `o` ends at
`start + (r + o) * duration`. In the fixed-steps mode (`RoundsConfig.inner_steps > 0`) a boundary
also says how many inner steps of its round must be behind it, and the peer waits for the outer
step before it goes on; this is the mode in which a swarm equals the simulator bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dipaco.modules.config import RoundsConfig
from dipaco.modules.grid import Grid


@dataclass(frozen=True, order=True)
class Boundary:
    """The end of one round of one level."""

    time_s: float
    round_index: int
    level: str


class RoundSchedule:
    """Boundaries of a run. Used by the session, the publisher and the status of a peer."""

    def __init__(self, rounds: RoundsConfig, grid: Grid, start_s: float) -> None:
        self.rounds = rounds
        self.grid = grid
        self.start_s = start_s

    @property
    def duration_s(self) -> float:
        """Seconds of a round."""
        return self.rounds.duration_s

    @property
    def fixed_steps(self) -> int:
        """Inner steps of a round in the fixed-steps mode, else 0."""
        return self.rounds.inner_steps

    def round_at(self, now_s: float) -> int:
        """Return the round that `now_s` lies in; negative before the run starts."""
        return math.floor((now_s - self.start_s) / self.duration_s)

    def round_start_s(self, round_index: int) -> float:
        """Return when a round begins."""
        return self.start_s + round_index * self.duration_s

    def boundary(self, round_index: int, level: str) -> Boundary:
        """Return the end of `round_index` for `level`."""
        offset = self.grid.level_offset(level)
        return Boundary(self.start_s + (round_index + offset) * self.duration_s, round_index, level)

    def next_boundary(self, level: str, now_s: float) -> Boundary:
        """Return the first boundary of `level` that is later than `now_s`."""
        offset = self.grid.level_offset(level)
        passed = math.floor((now_s - self.start_s) / self.duration_s - offset)
        boundary = self.boundary(passed + 1, level)
        # One rounding either way decides which side of the boundary `now_s` is on.
        while boundary.time_s <= now_s:
            boundary = self.boundary(boundary.round_index + 1, level)
        while boundary.round_index > 0:
            earlier = self.boundary(boundary.round_index - 1, level)
            if earlier.time_s <= now_s:
                break
            boundary = earlier
        return boundary if boundary.round_index >= 0 else self.boundary(0, level)

    def following(self, boundary: Boundary) -> Boundary:
        """Return the same level's next boundary."""
        return self.boundary(boundary.round_index + 1, boundary.level)

    def steps_before(self, level: str) -> int:
        """Fixed-steps mode: inner steps of a round that lie before `level`'s boundary."""
        return self.grid.steps_before(level, self.fixed_steps)

    def ordered_levels(self) -> tuple[str, ...]:
        """Levels in the order of their boundaries inside a round (ties: level order)."""
        names = self.grid.level_names
        return tuple(
            sorted(names, key=lambda name: (self.grid.level_offset(name), names.index(name)))
        )
