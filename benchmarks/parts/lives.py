"""What happens to a swarm under churn, and what its event logs say then: no processes here.

`schedule` makes the faults from a seed. The other functions read the events of all lives: a life is
one process of a peer, from its start to its end. Times are of one clock, that of who watched.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Event = dict[str, Any]
FaultKind = Literal["kill", "leave", "stop", "continue", "return", "join"]
Ending = Literal["killed", "left", "stayed", "by itself"]
ModulesOf = Callable[[int], Sequence[str]]
"""The modules of a path."""

MEAN_LIFE_ROUNDS = 5.0
MEAN_ABSENCE_ROUNDS = 0.5
STOP_ROUNDS = (0.2, 2.5)
"""How long a suspension is at least and at most."""
QUIET_ROUNDS = 3.0
"""Nothing happens in the last rounds, so that what was begun can come to rest."""
SLACK_S = 1e-3
"""Boundaries of one time are computed in several ways."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to the peer of a slot."""

    at_rounds: float
    slot: int
    kind: FaultKind


def schedule(peers: int, rounds: float, seed: int, elders: int = 0) -> list[Fault]:
    """Return the faults of a run in order of time; none happens to the first `elders` peers.

    After a life of `MEAN_LIFE_ROUNDS` on average a peer is killed, leaves or is stopped, each as
    likely. A stopped one continues later. In place of one that has gone comes, after a short
    while, the same peer with its disk, or one that was never there.
    """
    found = []
    last = rounds - QUIET_ROUNDS
    for slot in range(elders, peers):
        generator = random.Random(f"{seed}-{slot}")
        at = generator.expovariate(1 / MEAN_LIFE_ROUNDS)
        while at < last:
            kind = generator.choice(("kill", "leave", "stop"))
            found.append(Fault(at, slot, kind))
            if kind == "stop":
                at = min(at + generator.uniform(*STOP_ROUNDS), last)
                found.append(Fault(at, slot, "continue"))
            else:
                at = min(at + generator.expovariate(1 / MEAN_ABSENCE_ROUNDS), last)
                found.append(Fault(at, slot, generator.choice(("return", "join"))))
            at += generator.expovariate(1 / MEAN_LIFE_ROUNDS)
    return sorted(found, key=lambda fault: (fault.at_rounds, fault.slot))


@dataclass(frozen=True)
class Life:
    """What one process of a peer logged, and how it ended."""

    name: str
    peer_id: str
    ending: Ending
    events: Sequence[Event]
    began_s: float = 0.0
    """When its process was started."""
    ended_s: float = math.inf
    """When it was killed, told to leave or seen to have ended."""
    stops: Sequence[tuple[float, float]] = ()
    """From when until when it was suspended."""
    is_join: bool = False
    """It was not among the first."""


# -- what is kept


@dataclass
class Work:
    """Tokens of one life, counted for each module that a step trained."""

    trained: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    """What was in no step when the peer moved to another path."""
    missed: Counter[str] = field(default_factory=Counter)
    """What a boundary had when a step came without it."""
    pending: Counter[str] = field(default_factory=Counter)
    """What was in no step when the life ended."""


def work_of(
    life: Life,
    modules_of: ModulesOf,
    tokens_per_step: int,
    stepped_by_others: frozenset[tuple[str, int, str]],
) -> Work:
    """Follow the tokens of a life; `stepped_by_others` has (module, round, peer) of all groups.

    An `outer_round` says how many tokens the contribution has. A peer that was killed between the
    step of the others and its own has its work in that step.
    """
    work = Work()
    pending: dict[str, int] = {}
    boundary: dict[str, tuple[int, int]] = {}
    for event in life.events:
        module = event.get("module", "")
        match event["event"]:
            case "training":
                work.moved.update(pending)
                pending = dict.fromkeys(modules_of(event["path"]), 0)
                boundary.clear()
            case "inner":
                for each in pending:
                    pending[each] += tokens_per_step
                    work.trained[each] += tokens_per_step
            case "outer_round" if module in pending:
                pending[module] = event["tokens"]
                boundary[module] = event["round"], event["tokens"]
            case "outer_step" | "adopt" if module in boundary:
                # In the new anchor, or lost: what goes on is what was trained since the snapshot.
                tokens = boundary.pop(module)[1]
                pending[module] -= tokens
                is_stepped = event["event"] == "outer_step"
                if not (life.peer_id in event["group"] if is_stepped else event["is_own_in"]):
                    work.missed[module] += tokens
    for module, (round_index, tokens) in boundary.items():
        if (module, round_index, life.peer_id) in stepped_by_others:
            pending[module] -= tokens
    work.pending.update(pending)
    return work


@dataclass
class Counts:
    """What the lives of a run add up to."""

    versions: int
    forked: dict[tuple[str, int], set[str]]
    outbid: int
    """Forked versions of which one step has all rows of the others and more: no work is lost."""
    final: dict[str, Event]
    """The last state of each module: the event that says most of it."""
    agreed: bool
    tokens: dict[str, int]
    """Trained, in the final states, missed by a step, left behind by moves, and pending by how
    lives ended."""

    @property
    def share(self) -> float:
        """Trained tokens in the final states; what crashes took and is under way is no loss."""
        tokens = self.tokens
        due = tokens["trained"] - tokens["pending, killed"] - tokens["pending, stayed"]
        return tokens["final"] / due if due else math.nan


def count(lives: Sequence[Life], modules_of: ModulesOf, tokens_per_step: int) -> Counts:
    """Add up what all lives did."""
    steps = of(lives, "outer_step")
    in_steps = frozenset((e["module"], e["round"], peer) for e in steps for peer in e["group"])
    digests: dict[tuple[str, int], set[str]] = {}
    for event in _states(lives):
        digests.setdefault((event["module"], event["version"]), set()).add(event["digest"])
    final, agreed = last_states(lives)
    sums = Counter({"final": sum(event["tokens"] for event in final.values())})
    for life in lives:
        work = work_of(life, modules_of, tokens_per_step, in_steps)
        sums["trained"] += work.trained.total()
        sums["moved"] += work.moved.total()
        sums["missed"] += work.missed.total()
        sums[f"pending, {life.ending}"] += work.pending.total()
    forked = {version: found for version, found in digests.items() if len(found) > 1}
    rows = {e["digest"]: frozenset((e["round"], peer) for peer in e["group"]) for e in steps}
    return Counts(
        versions=len(digests),
        forked=forked,
        outbid=sum(_is_outbid([rows.get(d, frozenset()) for d in f]) for f in forked.values()),
        final=final,
        agreed=agreed,
        tokens=sums,
    )


def _is_outbid(steps: Sequence[frozenset[tuple[int, str]]]) -> bool:
    """Tell whether one of the steps, each known by its rows, has the rows of all others."""
    return all(steps) and frozenset().union(*steps) in steps


def last_states(lives: Sequence[Life]) -> tuple[dict[str, Event], bool]:
    """Return the last state of each module at the peers that stayed, and whether they agree.

    Where they do not, it is the state that most of them have; of these the one with more tokens.
    A peer that has not said on which state it stands agrees with nobody.
    """
    known = {event["digest"]: event for event in _states(lives)}
    held: dict[str, list[str]] = {}
    for life in lives:
        if life.ending == "stayed":
            for module, digest in _anchors(life).items():
                held.setdefault(module, []).append(digest)
    final = {}
    for module, digests in sorted(held.items()):
        made = [known[digest] for digest in digests if digest in known]
        if made:
            votes = Counter(digests)
            final[module] = max(made, key=lambda e: (votes[e["digest"]], e["tokens"]))
    agreed = all(len(set(digests)) == 1 for digests in held.values())
    return final, agreed


def _anchors(life: Life) -> dict[str, str]:
    """Return the digest of each module that a peer trained last; empty where it has told none."""
    anchors: dict[str, str] = {}
    for event in life.events:
        match event["event"]:
            case "training":
                anchors = dict.fromkeys(event["modules"], "")
            case "outer_step" | "adopt":
                anchors[event["module"]] = event["digest"]
            case "carry_on":
                anchors[event["module"]] = event["anchor"]
            case "round":
                anchors.update(event["digests"])
    return anchors


def _states(lives: Iterable[Life]) -> Iterable[Event]:
    return (e for life in lives for e in life.events if e["event"] in ("outer_step", "adopt"))


def of(lives: Sequence[Life], kind: str) -> list[Event]:
    """Return all events of a kind."""
    return [event for life in lives for event in life.events if event["event"] == kind]


# -- joins, rounds, paths, speed


@dataclass(frozen=True)
class Clock:
    """When the rounds of a run end: each module's at its level's part of a round."""

    start_s: float
    round_s: float
    offsets: Mapping[str, float]

    def boundary_s(self, module: str, round_index: int) -> float:
        """Return when a round of a module ends."""
        return self.start_s + (round_index + self.offsets[module]) * self.round_s

    def next_round(self, module: str, now_s: float) -> int:
        """Return the round of a module that ends next."""
        return math.floor((now_s - self.start_s) / self.round_s - self.offsets[module]) + 1


@dataclass(frozen=True)
class Join:
    """What came of one process that was started while others trained."""

    name: str
    start_s: float
    """From its start until it trained; infinite when it never did."""
    had_time: bool
    """It could have been in the steps of two rounds."""
    has_contributed: bool
    """Work of it was in a step of one of these rounds."""
    is_everywhere: bool
    """It was for each module of its path."""


def joins(
    lives: Sequence[Life],
    modules_of: ModulesOf,
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
    for event in of(lives, "outer_step"):
        for peer in event["group"]:
            groups.setdefault(peer, set()).add((event["module"], event["round"]))
    found = []
    for life in (life for life in lives if life.is_join):
        until_s = min([life.ended_s, *(begin_s for begin_s, _ in life.stops)])
        training = next((e for e in life.events if e["event"] == "training"), None)
        if training is None or training["time_s"] > until_s:
            had_time = until_s - life.began_s >= patience_s
            found.append(Join(life.name, math.inf, had_time, False, False))
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
        had_time = until_s >= second_s + step_s
        start_s, is_everywhere = trains_s - life.began_s, helped.issuperset(modules)
        found.append(Join(life.name, start_s, had_time, bool(helped), is_everywhere))
    return found


def rounds_without_step(
    lives: Sequence[Life], clock: Clock, begin_s: float, end_s: float
) -> tuple[int, int]:
    """Return how many rounds of modules that ended meanwhile had no step, and of how many.

    `end_s` leaves the last round its time for a step.
    """
    taken = {(event["module"], event["round"]) for event in of(lives, "outer_step")}
    due = [
        (module, number)
        for module in clock.offsets
        for number in range(clock.next_round(module, begin_s), clock.next_round(module, end_s))
    ]
    return sum(each not in taken for each in due), len(due)


def greatest_wait_s(
    lives: Sequence[Life], paths: int, begin_s: float, end_s: float
) -> tuple[int, float]:
    """Return the path that went longest without its work in a step of any module, and how long."""
    times: dict[int, set[float]] = {path: {begin_s, end_s} for path in range(paths)}
    for event in of(lives, "outer_step"):
        if begin_s <= event["time_s"] <= end_s:
            for path in event["paths"]:
                times[path].add(event["time_s"])
    gaps = [
        (path, after - before)
        for path, found in times.items()
        for before, after in itertools.pairwise(sorted(found))
    ]
    return max(gaps, key=lambda gap: gap[1], default=(-1, math.nan))


def tokens_per_s(
    lives: Sequence[Life], tokens_per_step: int, begin_s: float, end_s: float
) -> tuple[float, float]:
    """Return the tokens trained for each second of a process that is not suspended, and for each
    such second since it began to train."""
    trained = tokens_per_step * sum(begin_s <= e["time_s"] < end_s for e in of(lives, "inner"))
    awake_s = training_s = 0.0
    for life in lives:
        trains_s = min((e["time_s"] for e in life.events if e["event"] == "training"), default=1e99)
        awake_s += _awake_s(life, max(life.began_s, begin_s), end_s)
        training_s += _awake_s(life, max(trains_s, begin_s), end_s)
    return (trained / awake_s, trained / training_s) if training_s else (math.nan, math.nan)


def _awake_s(life: Life, begin_s: float, end_s: float) -> float:
    """Return for how long a process was there in this time, without suspensions."""
    end_s = min(life.ended_s, end_s)
    there = max(0.0, end_s - begin_s)
    for stop_s, continue_s in life.stops:
        there -= max(0.0, min(continue_s, end_s) - max(stop_s, begin_s))
    return there
