"""Where a peer stands in the rounds: which boundaries are due, and whether it may take a step.

Bookkeeping only: no clock is read here, no thread, no network. By the clock (`ClockPosition`) a
peer always may step, and a boundary is due when its time has come. With fixed steps
(`CountedPosition`) rounds are counted: a boundary is due when the steps before it are done, the
next steps wait until the outer round of that level has ended, and the clock only sets limits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace

from dipaco.modules.config import RoundsConfig
from dipaco.modules.grid import Grid

# Boundaries that came lately and are remembered.
REMEMBERED = 1024


@dataclass(frozen=True, order=True)
class Boundary:
    """The end of one round of one level."""

    time_s: float
    """By the clock: when it comes. With fixed steps: when it came here."""
    round_index: int
    level: str
    meet_until_s: float = 0.0
    """With fixed steps: when the group that meets at it closes, whoever is missing."""


class RoundSchedule:
    """Boundaries of a run. Used by the session, the publisher and the status of a peer."""

    def __init__(self, rounds: RoundsConfig, grid: Grid, start_s: float) -> None:
        self.rounds = rounds
        self.grid = grid
        self.start_s = start_s

    @property
    def duration_s(self) -> float:
        """Seconds of a round; with fixed steps its limit."""
        return self.rounds.duration_s

    @property
    def fixed_steps(self) -> int:
        """Inner steps of a round in the fixed-steps mode, else 0."""
        return self.rounds.inner_steps

    def round_at(self, now_s: float) -> int:
        """Return the round that `now_s` lies in by the clock; negative before the run starts."""
        return self.rounds.round_at(now_s - self.start_s)

    def boundary(self, round_index: int, level: str) -> Boundary:
        """Return the end of `round_index` for `level` by the clock."""
        offset = self.grid.level_offset(level)
        return Boundary(self.start_s + (round_index + offset) * self.duration_s, round_index, level)

    def next_boundary(self, level: str, now_s: float) -> Boundary:
        """Return the first boundary of `level` by the clock that is later than `now_s`."""
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
        """Return the same level's next boundary by the clock."""
        return self.boundary(boundary.round_index + 1, boundary.level)

    def steps_before(self, level: str) -> int:
        """Fixed-steps mode: inner steps of a round that lie before `level`'s boundary."""
        return self.grid.steps_before(level, self.fixed_steps)


class RoundPosition(ABC):
    """The round that a peer is in, and which levels are closed. Used on the session's thread.

    A boundary comes (`due`) before its outer round ends (`closed`), and may be missed altogether,
    so the two are kept apart. A round ends when every level is closed: each has had its turn, or
    has missed it, before the peer scores, saves and thinks of moving.
    """

    def __init__(self, schedule: RoundSchedule) -> None:
        self._schedule = schedule
        self._levels = schedule.grid.levels_in_time_order()
        self.round_index = 0
        self.steps_in_round = 0
        self.opens_s = schedule.start_s
        """When the first step may be taken at the latest."""
        self._closed: set[str] = set()

    @abstractmethod
    def enter(self, now_s: float, round_index: int) -> None:
        """Start to take part at `now_s`; with fixed steps in `round_index`."""

    @abstractmethod
    def due(self, now_s: float, step_s: float) -> list[Boundary]:
        """Return the boundaries that have come, each once, earliest first."""

    @abstractmethod
    def next_round(self, now_s: float, round_index: int) -> None:
        """Go on to the next round; with fixed steps to `round_index` if that is later."""

    @abstractmethod
    def clock_went_back(self, now_s: float) -> None:
        """Note that the clock was put back: boundaries that were near are far off now."""

    @abstractmethod
    def may_step(self, now_s: float) -> bool:
        """Tell whether an inner step may be taken now."""

    @abstractmethod
    def slack_s(self, now_s: float, step_s: float) -> float:
        """Return how long other work may keep the next inner step waiting.

        `step_s` is what an inner step takes.
        """

    @abstractmethod
    def missing_steps(self, level: str) -> int:
        """Fixed-steps mode: inner steps not done though the boundary of `level` has come."""

    def closed(self, boundary: Boundary) -> None:
        """Note that the outer round at `boundary` ended, with a commit or without."""
        if boundary.round_index >= self.round_index:
            self._closed.add(boundary.level)

    def round_ended(self, running: Collection[str]) -> bool:
        """Tell whether all levels of the round are closed and none of `running` is left."""
        return not running and len(self._closed) == len(self._levels)

    def came_to_nothing(self, boundary: Boundary) -> None:  # noqa: B027  counted rounds go on
        """Note that nobody saw anything of the outer round at `boundary`: it may come again, should
        the clock be put back."""

    def again(self, boundary: Boundary) -> None:  # noqa: B027  by the clock the next one is near
        """With fixed steps: let a boundary come again; others had a newer anchor."""

    def open(self, now_s: float) -> None:  # noqa: B027  the clock alone opens its rounds
        """With fixed steps: every path has a trainer, so the first round may begin."""

    def stepped(self) -> None:
        """Count one inner step."""
        self.steps_in_round += 1


def round_position(schedule: RoundSchedule) -> RoundPosition:
    """Return a position for the mode of the run."""
    return CountedPosition(schedule) if schedule.fixed_steps else ClockPosition(schedule)


class ClockPosition(RoundPosition):
    """Rounds that follow the clock: a peer never waits, and takes the boundaries as they come."""

    def __init__(self, schedule: RoundSchedule) -> None:
        super().__init__(schedule)
        self._next: dict[str, Boundary] = {}
        # Boundaries that came in time: when the clock is put back they do not come again.
        self._taken: dict[tuple[str, int], None] = {}

    def enter(self, now_s: float, round_index: int = 0) -> None:
        """Start at the next boundary of every level."""
        self.steps_in_round = 0
        self._next = {level: self._following(level, now_s) for level in self._levels}
        self.round_index = min(boundary.round_index for boundary in self._next.values())
        self._close_passed()

    def _following(self, level: str, now_s: float, after: Boundary | None = None) -> Boundary:
        """Return the next boundary of a level that has not come yet, `after` another one."""
        boundary = self._schedule.next_boundary(level, now_s)
        if after is not None:
            boundary = max(boundary, self._schedule.following(after))
        while (level, boundary.round_index) in self._taken:
            boundary = self._schedule.following(boundary)
        return boundary

    def _close_passed(self) -> None:
        self._closed = {
            level
            for level, boundary in self._next.items()
            if boundary.round_index > self.round_index
        }

    def due(self, now_s: float, step_s: float) -> list[Boundary]:
        """Return the boundaries that have come, each once, earliest first.

        One nearer than half an inner step (`step_s`) counts as come: waiting for the step would
        miss it by more. So does one that the next step would miss by so much that the group might
        have closed: with steps of many seconds a peer comes early, and goes on training.
        """
        reach_s = max(0.5 * step_s, step_s - 0.5 * self._schedule.rounds.matchmaking_s)
        found = []
        for level in self._levels:
            boundary = self._next[level]
            if now_s + reach_s < boundary.time_s:
                continue
            found.append(boundary)
            if now_s < boundary.time_s + self._schedule.duration_s:
                self._taken[level, boundary.round_index] = None
            self._next[level] = self._following(level, now_s, boundary)
        while len(self._taken) > REMEMBERED:
            del self._taken[next(iter(self._taken))]
        return sorted(found)

    def next_s(self, level: str) -> float:
        """Return when the next boundary of a level comes."""
        return self._next[level].time_s

    def next_round_index(self, level: str) -> int:
        """Return the round that the next boundary of a level ends."""
        return self._next[level].round_index

    def take_early(self, level: str, now_s: float) -> Boundary:
        """Return the next boundary of a level as if it came now; it does not come again."""
        boundary = self._next[level]
        self._taken[level, boundary.round_index] = None
        self._next[level] = self._schedule.following(boundary)
        return replace(boundary, time_s=min(now_s, boundary.time_s))

    def came_to_nothing(self, boundary: Boundary) -> None:
        """Let a boundary be taken once more if the clock was ahead and nothing came of it."""
        self._taken.pop((boundary.level, boundary.round_index), None)

    def clock_went_back(self, now_s: float) -> None:
        """Take the boundaries from the present time on."""
        if self._next:
            steps = self.steps_in_round
            self.enter(now_s)
            self.steps_in_round = steps

    def next_round(self, now_s: float, round_index: int = 0) -> None:
        """Go on to the next round, or to the present one when rounds were missed."""
        self.steps_in_round = 0
        present = min(boundary.round_index for boundary in self._next.values())
        self.round_index = max(self.round_index + 1, present)
        self._close_passed()

    def may_step(self, now_s: float) -> bool:
        """Tell whether the run has started."""
        return now_s >= self.opens_s

    def slack_s(self, now_s: float, step_s: float) -> float:
        """Return the time until the next boundary."""
        return min(self._next.values()).time_s - now_s

    def missing_steps(self, level: str) -> int:
        """By the clock no step is ever missing."""
        return 0


class CountedPosition(RoundPosition):
    """Rounds of a fixed number of steps: a round ends when everybody is done.

    `duration_s` is the limit. A boundary comes when the steps before it are done, and at the
    latest when the level's share of `duration_s` has passed since the round was entered; half a
    commit window later its group closes, whoever is missing. Nobody waits for the clock.

    A run whose first round nobody has ended begins when every path has a trainer, or one
    `duration_s` after its start: a swarm equals the simulator from the first step on.
    """

    def __init__(self, schedule: RoundSchedule) -> None:
        super().__init__(schedule)
        self._came: set[str] = set()
        self._forfeited_steps = 0
        self._entered_s = 0.0

    def enter(self, now_s: float, round_index: int) -> None:
        """Start with `round_index`: the one after the newest that this peer's anchors count."""
        schedule = self._schedule
        limit_s = schedule.duration_s if round_index == 0 else 0.0
        self.opens_s = schedule.start_s + limit_s
        self._set_round(now_s, round_index)

    def _set_round(self, now_s: float, round_index: int) -> None:
        self.round_index = round_index
        self.steps_in_round = self._forfeited_steps = 0
        self._entered_s = now_s
        self._closed, self._came = set(), set()

    def open(self, now_s: float) -> None:
        """Every path has a trainer: the first round begins, unless the run has not started."""
        self.opens_s = min(self.opens_s, max(now_s, self._schedule.start_s))

    def latest_s(self, level: str) -> float:
        """Return when the boundary of `level` comes at the latest in this round."""
        begin_s = max(self._entered_s, self.opens_s)
        return begin_s + self._schedule.grid.level_offset(level) * self._schedule.duration_s

    def _quota(self) -> int:
        """Return the steps of this round that may be done before the next gate."""
        for level in self._levels:
            if level not in self._closed:
                return self._schedule.steps_before(level)
        return self._schedule.fixed_steps

    def _steps(self) -> int:
        return self.steps_in_round + self._forfeited_steps

    def due(self, now_s: float, step_s: float) -> list[Boundary]:
        """Return the boundaries whose steps are done or whose limit has passed."""
        if now_s < self.opens_s:
            return []
        found: list[Boundary] = []
        quota = self._quota()
        for level in self._levels:
            before = self._schedule.steps_before(level)
            if level in self._came or before > quota:
                continue
            if self._steps() < before and now_s < self.latest_s(level):
                continue
            rounds = self._schedule.rounds
            meet_until_s = max(
                self.latest_s(level) + 0.5 * rounds.window_s, now_s + rounds.matchmaking_s
            )
            found.append(Boundary(now_s, self.round_index, level, meet_until_s))
            self._came.add(level)
        return found

    def again(self, boundary: Boundary) -> None:
        """Let a boundary come again; others had a newer anchor, and it is here by now."""
        if boundary.round_index == self.round_index:
            self._came.discard(boundary.level)

    def closed(self, boundary: Boundary) -> None:
        """Take note of the end; steps that the limit did not leave time for are given up."""
        if boundary.round_index == self.round_index:
            self._forfeited_steps += self.missing_steps(boundary.level)
        super().closed(boundary)

    def round_ended(self, running: Collection[str]) -> bool:
        """Tell whether all levels are closed and the steps behind the last one are done."""
        return super().round_ended(running) and self._steps() >= self._schedule.fixed_steps

    def next_round(self, now_s: float, round_index: int) -> None:
        """Go on to the next round, or to a later one in which the others are."""
        self._set_round(now_s, max(self.round_index + 1, round_index))

    def clock_went_back(self, now_s: float) -> None:
        """Count the limit from now on: it would be far off."""
        self._entered_s = min(self._entered_s, now_s)

    def may_step(self, now_s: float) -> bool:
        """Tell whether the run has begun and the next gate is not reached."""
        return now_s >= self.opens_s and self._steps() < self._quota()

    def slack_s(self, now_s: float, step_s: float) -> float:
        """Return the time until the limit of the next boundary, less that of the steps before."""
        for level in self._levels:
            if level not in self._closed:
                steps = self._schedule.steps_before(level) - self._steps()
                return self.latest_s(level) - now_s - max(0, steps) * step_s
        return 0.0

    def missing_steps(self, level: str) -> int:
        """Return the steps before the boundary of `level` that its limit left no time for."""
        return max(0, self._schedule.steps_before(level) - self._steps())
