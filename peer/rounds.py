"""Where a peer stands in the rounds: which boundaries are due, and whether it may take a step.

Bookkeeping only: no clock is read here, no thread, no network. In the clock mode a peer always
may step, and a boundary is due when its time has come. In the fixed-steps mode a boundary also
closes the gate: the peer waits until the outer round of that level has ended.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection
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
        return self.rounds.round_at(now_s - self.start_s)

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


class RoundPosition:
    """The round that a peer is in, and each level's next boundary. Used on the session's thread.

    A level's next boundary and the levels closed in this round are kept apart, because a boundary
    comes (`due`) before its outer round ends (`closed`), may be missed altogether, and a level
    with an offset can be a round ahead. A round ends when every level is closed, so each level
    has had its turn, or has missed it, before the peer scores, saves and thinks of moving.
    """

    def __init__(self, schedule: RoundSchedule) -> None:
        self._schedule = schedule
        self._levels = schedule.grid.levels_in_time_order()
        self.round_index = 0
        self.steps_in_round = 0
        self._next: dict[str, Boundary] = {}
        self._closed: set[str] = set()

    def enter(self, now_s: float) -> None:
        """Begin to take part at `now_s`: at the first boundary that is not too near."""
        schedule = self._schedule
        self.steps_in_round = 0
        self._closed = set()
        if not schedule.fixed_steps:
            self._next = {level: schedule.next_boundary(level, now_s) for level in self._levels}
            self.round_index = min(boundary.round_index for boundary in self._next.values())
            self._close_passed()
            return
        round_index = max(0, schedule.round_at(now_s))
        self._set_round(round_index)
        self._closed = self._out_of_reach(now_s)
        if len(self._closed) == len(self._levels):
            self._closed = set()
            self._set_round(round_index + 1)

    def _out_of_reach(self, now_s: float) -> set[str]:
        """Fixed-steps mode: levels whose boundary is too near to do the steps before it.

        A peer that is late takes part in the rest of the round. If it left out the whole round,
        two peers that wait for each other might never meet: one in the odd rounds, the other in
        the even ones.
        """
        closed = set()
        begin_s = self._schedule.round_start_s(self.round_index)
        for level in self._levels:
            boundary = self._next[level]
            if now_s > begin_s + 0.5 * (boundary.time_s - begin_s):
                closed.add(level)
                self._next[level] = self._schedule.following(boundary)
            begin_s = max(begin_s, boundary.time_s)
        return closed

    def _set_round(self, round_index: int) -> None:
        self.round_index = round_index
        self._next = {level: self._schedule.boundary(round_index, level) for level in self._levels}

    def _close_passed(self) -> None:
        self._closed |= {
            level
            for level, boundary in self._next.items()
            if boundary.round_index > self.round_index
        }

    def due(self, now_s: float, step_s: float) -> list[Boundary]:
        """Return the boundaries that have come, each once, earliest first.

        By the clock, a boundary nearer than half an inner step (`step_s`) counts as come: waiting
        for the step would miss it by more.
        """
        lead_s = 0.0 if self._schedule.fixed_steps else 0.5 * step_s
        found = []
        for level in self._levels:
            boundary = self._next[level]
            if now_s + lead_s < boundary.time_s:
                continue
            found.append(boundary)
            self._next[level] = max(
                self._schedule.following(boundary), self._schedule.next_boundary(level, now_s)
            )
        return sorted(found)

    def closed(self, boundary: Boundary) -> None:
        """Note that the outer round at `boundary` ended, with a commit or without."""
        if boundary.round_index >= self.round_index:
            self._closed.add(boundary.level)

    def round_ended(self, running: Collection[str]) -> bool:
        """Tell whether all levels of the round are closed and none of `running` is left."""
        return not running and len(self._closed) == len(self._levels)

    def next_round(self, now_s: float) -> None:
        """Go on to the next round, or to the present one when rounds were missed."""
        schedule = self._schedule
        following = self.round_index + 1
        self.steps_in_round = 0
        if not schedule.fixed_steps:
            self.round_index = max(
                following, min(boundary.round_index for boundary in self._next.values())
            )
            self._closed = set()
            self._close_passed()
            return
        if now_s > schedule.boundary(following, self._levels[0]).time_s:
            self.enter(now_s)
            return
        self._closed = set()
        self._set_round(following)

    def stepped(self) -> None:
        """Count one inner step."""
        self.steps_in_round += 1

    def _quota(self) -> int:
        """Fixed-steps mode: steps of this round that may be done before the next gate."""
        for level in self._levels:
            if level not in self._closed:
                return self._schedule.steps_before(level)
        return self._schedule.fixed_steps

    def may_step(self, now_s: float) -> bool:
        """Tell whether an inner step may be taken now."""
        if now_s < self._schedule.start_s:
            return False
        if not self._schedule.fixed_steps:
            return True
        if now_s < self._schedule.round_start_s(self.round_index):
            return False
        return self.steps_in_round < self._quota()

    def slack_s(self, now_s: float, step_s: float) -> float:
        """Return how long other work may keep the next inner step waiting.

        That is until the next boundary, and in the fixed-steps mode without the time that the
        steps before it still take, at `step_s` each.
        """
        boundary = min(self._next.values())
        steps = 0
        if self._schedule.fixed_steps:
            steps = self._schedule.steps_before(boundary.level) - self.steps_in_round
            if boundary.round_index > self.round_index:
                steps += self._schedule.fixed_steps
        return boundary.time_s - now_s - max(0, steps) * step_s

    def missing_steps(self, level: str) -> int:
        """Fixed-steps mode: inner steps not done though the boundary of `level` has come."""
        if not self._schedule.fixed_steps:
            return 0
        return max(0, self._schedule.steps_before(level) - self.steps_in_round)

    def waiting_for(self, now_s: float, running: Collection[str]) -> tuple[float, str]:
        """Return until when there is nothing to train, and what is waited for."""
        schedule = self._schedule
        if now_s < schedule.start_s:
            return schedule.start_s, "the run to start"
        if running:
            return now_s + schedule.duration_s, f"the outer step of {', '.join(sorted(running))}"
        begin_s = schedule.round_start_s(self.round_index)
        if now_s < begin_s:
            return begin_s, f"round {self.round_index} to begin"
        boundary = min(self._next.values())
        return boundary.time_s, f"the boundary of {boundary.level}"


WINDOW_S = 30.0


class RateMeter:
    """Fed after every inner step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._steps: deque[tuple[float, int]] = deque()

    def step(self, seconds: float, tokens: int) -> None:
        """Count one inner step of `seconds` and `tokens`."""
        self.step_s = seconds if self.step_s == 0.0 else 0.9 * self.step_s + 0.1 * seconds
        now = time.monotonic()
        if not self._steps:
            self._steps.append((now - seconds, 0))
        self._steps.append((now, tokens))
        while len(self._steps) > 2 and now - self._steps[0][0] > WINDOW_S:
            self._steps.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of wall time, waiting included, over the last half minute."""
        if len(self._steps) < 2:
            return 0.0
        elapsed_s = max(time.monotonic() - self._steps[0][0], 1e-6)
        return sum(tokens for _, tokens in list(self._steps)[1:]) / elapsed_s
