"""Where a peer stands in the rounds: which boundaries are due, and whether it may take a step.

There are two kinds. By the clock a peer always may step, and a boundary is due when its time has
come. Counted (`inner_steps`), a boundary is due when the steps before it are done; the next ones
wait until that outer round has ended here. Bookkeeping only: no clock is read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from dipaco.protocol.config import RoundsConfig
from dipaco.protocol.grid import Grid


@dataclass(frozen=True, order=True)
class Boundary:
    """The end of one round of one level."""

    time_s: float
    """By the clock, the time at which it comes; with fixed steps, the time at which it came
    here."""
    round_index: int
    """With fixed steps, the round of this peer; the round of a module follows its anchor."""
    level: str


class RoundSchedule:
    """The boundaries of a run."""

    def __init__(self, rounds: RoundsConfig, grid: Grid, start_s: float) -> None:
        self.rounds, self.grid, self.start_s = rounds, grid, start_s
        self.duration_s = rounds.duration_s
        """Seconds of a round; with fixed steps, its limit."""
        self.fixed_steps = rounds.inner_steps
        """Inner steps of a counted round; 0 if rounds follow the clock."""

    @property
    def is_counted(self) -> bool:
        """Whether rounds are counted in inner steps, and do not follow the clock."""
        return bool(self.fixed_steps)

    def round_at(self, now_s: float) -> int:
        """Return the round that `now_s` lies in by the clock; negative before the run starts."""
        return self.rounds.round_at(now_s - self.start_s)

    def boundary(self, round_index: int, level: str) -> Boundary:
        """Return the end of `round_index` for `level` by the clock."""
        offset = self.grid.level_offset(level)
        return Boundary(self.start_s + (round_index + offset) * self.duration_s, round_index, level)

    def passed(self, level: str, now_s: float) -> int:
        """Return the last round of a level that has ended by the clock; -1 for none."""
        offset = self.grid.level_offset(level)
        found = math.floor((now_s - self.start_s) / self.duration_s - offset)
        # One rounding either way decides which side of the boundary `now_s` is on.
        while self.boundary(found + 1, level).time_s <= now_s:
            found += 1
        while self.boundary(found, level).time_s > now_s:
            found -= 1
        return max(-1, found)


class Rounds(ABC):
    """The round that a peer is in, and which of its levels have come and are over."""

    def __init__(self, schedule: RoundSchedule) -> None:
        self._schedule = schedule
        self._levels = schedule.grid.levels_in_time_order()
        self.present_round = 0
        """The round that the peer is in. A module's own may differ (`situation.Round`)."""
        self.steps_in_round = 0
        """How many inner steps were taken in it."""
        self.opens_s = schedule.start_s
        """The latest time of the first step."""
        self._came: dict[str, int] = {}
        """The last round whose boundary came, by level."""
        self._over: dict[str, int] = {}
        """The last round that is over, by level."""

    @staticmethod
    def of(schedule: RoundSchedule) -> Rounds:
        """Return the rounds of a run, of the kind that it has."""
        return _CountedRounds(schedule) if schedule.is_counted else _ClockRounds(schedule)

    @abstractmethod
    def enter(self, now_s: float, round_index: int) -> None:
        """Begin to take part at `now_s`; where rounds are counted, in `round_index`."""

    @abstractmethod
    def due(self, now_s: float, step_s: float) -> list[Boundary]:
        """Return the boundaries that have come, each once, earliest first.

        :param step_s: what an inner step takes
        """

    @abstractmethod
    def may_step(self, now_s: float) -> bool:
        """Tell whether an inner step may be taken now."""

    @abstractmethod
    def next_round(self) -> None:
        """Go on to the next round, or to the present one when rounds were missed."""

    def open(self, now_s: float) -> None:
        """Begin the first round, because every path has a trainer, unless the run has not
        started."""
        self.opens_s = min(self.opens_s, max(now_s, self._schedule.start_s))

    def over(self, level: str) -> None:
        """Note that the outer round whose boundary came last has ended, with a step or without."""
        self._over[level] = self._came[level]

    def over_before(self, boundary: Boundary) -> None:
        """Note that the outer round before a boundary has ended: it brought no step until now."""
        before = boundary.round_index - 1
        self._over[boundary.level] = max(self._over[boundary.level], before)

    def has_ended(self) -> bool:
        """Tell whether all levels of the round are over, and all its steps are done."""
        is_over = min(self._over.values()) >= self.present_round
        return is_over and self.steps_in_round >= self._schedule.fixed_steps

    def next_boundary(self, level: str) -> Boundary:
        """Return the next boundary of a level by the clock."""
        return self._schedule.boundary(self._came[level] + 1, level)

    def take_early(self, boundary: Boundary) -> None:
        """Let a boundary count as come; it does not come again."""
        self._came[boundary.level] = boundary.round_index


class _ClockRounds(Rounds):
    """Rounds that follow the clock."""

    def enter(self, now_s: float, round_index: int) -> None:
        self.steps_in_round = 0
        self._came = {level: self._schedule.passed(level, now_s) for level in self._levels}
        self._over = dict(self._came)
        self.present_round = min(self._came.values()) + 1

    def due(self, now_s: float, step_s: float) -> list[Boundary]:
        # The next one counts as come where it is nearer than half an inner step. Those of rounds
        # that were slept through do not come.
        found, schedule = [], self._schedule
        for level in self._levels:
            next_at_most = schedule.passed(level, now_s) + 1
            passed = min(next_at_most, schedule.passed(level, now_s + 0.5 * step_s))
            if passed < self._came[level] - 1:
                # The clock was set back by whole rounds.
                self._came[level] = self._over[level] = passed
                self.present_round = min(self.present_round, passed + 1)
            if passed > self._came[level]:
                self._came[level] = passed
                found.append(schedule.boundary(passed, level))
        return sorted(found)

    def may_step(self, now_s: float) -> bool:
        return now_s >= self.opens_s

    def next_round(self) -> None:
        self.steps_in_round = 0
        self.present_round = min(self._came.values()) + 1


class _CountedRounds(Rounds):
    """Rounds of so many inner steps."""

    def __init__(self, schedule: RoundSchedule) -> None:
        super().__init__(schedule)
        before = schedule.grid.steps_before
        self._steps = {level: before(level, schedule.fixed_steps) for level in self._levels}
        """How many steps of a round lie before the boundary of each level."""

    def enter(self, now_s: float, round_index: int) -> None:
        schedule = self._schedule
        self.steps_in_round = 0
        first_s = schedule.duration_s if round_index == 0 else 0.0
        self.opens_s = max(schedule.start_s, now_s) + first_s
        self.present_round = round_index
        self._came = dict.fromkeys(self._levels, round_index - 1)
        self._over = dict(self._came)

    def due(self, now_s: float, step_s: float) -> list[Boundary]:
        found: list[Boundary] = []
        if now_s < self.opens_s:
            return found
        for level in self._levels:
            is_new = self._came[level] < self.present_round
            if is_new and self.steps_in_round >= self._steps[level] <= self._quota():
                self._came[level] = self.present_round
                found.append(Boundary(now_s, self.present_round, level))
        return found

    def _quota(self) -> int:
        """Return the steps of this round that may be done before the next gate."""
        for level in self._levels:
            if self._over[level] < self.present_round:
                return self._steps[level]
        return self._schedule.fixed_steps

    def may_step(self, now_s: float) -> bool:
        return now_s >= self.opens_s and self.steps_in_round < self._quota()

    def next_round(self) -> None:
        self.steps_in_round = 0
        self.present_round = max(self.present_round, *self._over.values()) + 1
