"""How a long run under churn went: joins, rounds without a step, waits of paths, speed.

Pure functions of what all lives logged. Times are of one clock, that of who watched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .churn_counts import Event, Life

SLACK_S = 1e-3
"""Boundaries of one time are computed in several ways."""


@dataclass(frozen=True)
class Clock:
    """When the rounds of a run end: each module's at its level's part of a round."""

    start_s: float
    round_s: float
    offsets: Mapping[str, float]

    def boundary_s(self, module: str, round_index: int) -> float:
        return self.start_s + (round_index + self.offsets[module]) * self.round_s

    def next_round(self, module: str, now_s: float) -> int:
        """Return the round of a module that ends next."""
        return math.floor((now_s - self.start_s) / self.round_s - self.offsets[module]) + 1


@dataclass(frozen=True)
class Join:
    """What came of one process that was started while others trained."""

    name: str
    began_s: float
    start_s: float
    """From its start until it trained; infinite when it never did."""
    lived_s: float
    """Until it ended, or was suspended first."""
    had_time: bool
    """It could have been in the steps of two rounds."""
    has_contributed: bool
    """Work of it was in a step of one of these rounds."""
    is_everywhere: bool
    """It was for each module of its path."""


def joins(
    lives: Sequence[Life],
    modules_of: Callable[[int], Sequence[str]],
    clock: Clock,
    *,
    patience_s: float,
    step_s: float,
) -> list[Join]:
    """Look at every join: was it in a step of its first or second round?

    These are the rounds that end next when it begins to train. It had time for it if it was there,
    and was not suspended, until `step_s` after the end of the second one; or, if it never trained,
    for `patience_s`.
    """
    groups: dict[str, set[tuple[str, int]]] = {}
    for event in _of(lives, "outer_step"):
        for peer in event["group"]:
            groups.setdefault(peer, set()).add((event["module"], event["round"]))
    found = []
    for life in lives:
        if not life.is_join:
            continue
        until_s = min([life.ended_s, *(begin_s for begin_s, _ in life.stops)])
        training = next((e for e in life.events if e["event"] == "training"), None)
        lived_s = until_s - life.began_s
        if training is None or training["time_s"] > until_s:
            had_time = lived_s >= patience_s
            found.append(Join(life.name, life.began_s, math.inf, lived_s, had_time, False, False))
            continue
        trains_s, modules = training["time_s"], modules_of(training["path"])
        ends = [clock.boundary_s(module, clock.next_round(module, trains_s)) for module in modules]
        first_s, second_s = min(ends), max(ends) + clock.round_s
        # A peer that moves meanwhile contributes to other modules.
        helped = {
            module
            for module, round_index in groups.get(life.peer_id, ())
            if first_s - SLACK_S <= clock.boundary_s(module, round_index) <= second_s + SLACK_S
        }
        found.append(
            Join(
                life.name,
                life.began_s,
                trains_s - life.began_s,
                lived_s,
                until_s >= second_s + step_s,
                bool(helped),
                helped.issuperset(modules),
            )
        )
    return found


def rounds_without_step(
    lives: Sequence[Life], clock: Clock, begin_s: float, end_s: float
) -> dict[str, tuple[int, int]]:
    """Return, for each module, how many rounds that ended meanwhile had no step, and of how many.

    `end_s` leaves the last round its time for a step.
    """
    taken: dict[str, set[int]] = {module: set() for module in clock.offsets}
    for event in _of(lives, "outer_step"):
        taken[event["module"]].add(event["round"])
    found = {}
    for module, rounds in taken.items():
        due = range(clock.next_round(module, begin_s), clock.next_round(module, end_s))
        found[module] = len(set(due) - rounds), len(due)
    return found


def greatest_wait_s(
    lives: Sequence[Life], paths: int, begin_s: float, end_s: float
) -> tuple[int, float]:
    """Return the path that went longest without its work in a step of any module, and how long."""
    times: dict[int, set[float]] = {path: {begin_s, end_s} for path in range(paths)}
    for event in _of(lives, "outer_step"):
        if begin_s <= event["time_s"] <= end_s:
            for path in event["paths"]:
                times[path].add(event["time_s"])
    gaps = [
        (path, after - before)
        for path, found in times.items()
        for before, after in itertools.pairwise(sorted(found))
    ]
    return max(gaps, key=lambda gap: gap[1], default=(-1, math.nan))


@dataclass(frozen=True)
class Speed:
    """How much was trained in some time. A suspended process has no peer-seconds."""

    trained_per_s: float
    """Tokens trained a peer-second."""
    trained_per_training_s: float
    """The same without the time until a process began to train."""
    counted_per_s: float
    """Tokens that came into states a peer-second; of a token in several modules the mean."""
    peers: float
    """Processes on average."""


def speed(
    lives: Sequence[Life],
    tokens_per_step: int,
    modules_of_a_path: int,
    begin_s: float,
    end_s: float,
) -> Speed:
    """Measure from `begin_s` to `end_s`."""
    peer_s = sum(_awake_s(life, life.began_s, begin_s, end_s) for life in lives)
    training_s = sum(_awake_s(life, _trains_s(life), begin_s, end_s) for life in lives)
    steps = sum(begin_s <= event["time_s"] < end_s for event in _of(lives, "inner"))
    counted = _counted(lives, end_s) - _counted(lives, begin_s)
    if not training_s:
        return Speed(math.nan, math.nan, math.nan, 0.0)
    return Speed(
        steps * tokens_per_step / peer_s,
        steps * tokens_per_step / training_s,
        counted / modules_of_a_path / peer_s,
        peer_s / (end_s - begin_s),
    )


def _awake_s(life: Life, from_s: float, begin_s: float, end_s: float) -> float:
    """Return for how long a process was there in this time since `from_s`, without suspensions."""
    begin_s, end_s = max(from_s, begin_s), min(life.ended_s, end_s)
    there = max(0.0, end_s - begin_s)
    for stop_s, continue_s in life.stops:
        there -= max(0.0, min(continue_s, end_s) - max(stop_s, begin_s))
    return there


def _trains_s(life: Life) -> float:
    """Return when a process began to train."""
    return min((e["time_s"] for e in life.events if e["event"] == "training"), default=math.inf)


def _counted(lives: Sequence[Life], until_s: float) -> int:
    """Return what the newest states of all modules counted at a time."""
    newest: dict[str, int] = {}
    for event in _of(lives, "outer_step"):
        if event["time_s"] <= until_s:
            module = event["module"]
            newest[module] = max(newest.get(module, 0), event["tokens"])
    return sum(newest.values())


def _of(lives: Sequence[Life], kind: str) -> list[Event]:
    return [event for life in lives for event in life.events if event["event"] == kind]
