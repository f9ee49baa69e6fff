"""Of what a swarm under churn is made, and what its event logs say: no processes here.

`schedule` makes the faults from a seed. `count` reads the events of all lives: a life is one
process of a peer, from its start to its end.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Event = dict[str, Any]
FaultKind = Literal["kill", "leave", "stop", "continue", "return", "join"]
Ending = Literal["killed", "left", "stayed", "by itself"]

MEAN_LIFE_ROUNDS = 5.0
MEAN_ABSENCE_ROUNDS = 0.5
STOP_ROUNDS = (0.2, 2.5)
"""How long a suspension is at least and at most."""
QUIET_ROUNDS = 3.0
"""Nothing happens in the last rounds, so that what was begun can come to rest."""


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


@dataclass
class Work:
    """Tokens of one life, by module."""

    trained: Counter[str] = field(default_factory=Counter)
    """In all, one count for every module that the step trained."""
    moved: Counter[str] = field(default_factory=Counter)
    """What was in no step when the peer moved to another path."""
    missed: Counter[str] = field(default_factory=Counter)
    """What a boundary had when a step came without it."""
    pending: Counter[str] = field(default_factory=Counter)
    """What was in no step when the life ended."""


@dataclass
class Counts:
    """What the lives of a run add up to."""

    outer_steps: int
    versions: int
    forked: dict[tuple[str, int], set[str]]
    outbid: int
    """Forked versions of which one state has all rows of the others and more: no work is lost."""
    final: dict[str, Event]
    """The last state of each module: the event that says most of it."""
    agreed: bool
    trained: int
    killed_pending: int
    stayed_pending: int
    left_pending: int
    moved_pending: int
    missed: int
    living_trained: int
    """Of those that left or stayed."""
    living_lost: int
    """Of these: what leaves and moves left behind, and what a step missed."""
    final_tokens: int
    longest_without_step: tuple[str, float]

    @property
    def share(self) -> float:
        """Trained tokens in the final states; what crashes took and is under way is no loss."""
        due = self.trained - self.killed_pending - self.stayed_pending
        return self.final_tokens / due if due else float("nan")

    @property
    def share_of_living(self) -> float:
        """The same for those that left or stayed: the least that it can be.

        Whatever no life knows that it has lost, such as in a fork, is held to be theirs.
        """
        due = self.living_trained - self.stayed_pending
        lost_by_all = self.trained - self.killed_pending - self.stayed_pending - self.final_tokens
        known = self.left_pending + self.moved_pending + self.missed
        lost = self.living_lost + max(0, lost_by_all - known)
        return 1 - lost / due if due else float("nan")


def work_of(
    life: Life,
    modules_of: Callable[[int], Sequence[str]],
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
                if not _has_own(event, life.peer_id):
                    work.missed[module] += tokens
    for module, (round_index, tokens) in boundary.items():
        if (module, round_index, life.peer_id) in stepped_by_others:
            pending[module] -= tokens
    work.pending.update(pending)
    return work


def _has_own(event: Event, peer_id: str) -> bool:
    """Tell whether the state that a peer goes over to has what it last contributed."""
    if event["event"] == "outer_step":
        return peer_id in event["group"]
    return bool(event["is_own_in"])


def count(
    lives: Sequence[Life],
    modules_of: Callable[[int], Sequence[str]],
    tokens_per_step: int,
    end_s: float,
) -> Counts:
    """Add up what all lives did until `end_s`."""
    outer_steps = [e for life in lives for e in life.events if e["event"] == "outer_step"]
    in_steps = frozenset(
        (e["module"], e["round"], peer) for e in outer_steps for peer in e["group"]
    )
    digests: dict[tuple[str, int], set[str]] = {}
    for event in _states(lives):
        digests.setdefault((event["module"], event["version"]), set()).add(event["digest"])
    final, agreed = last_states(lives)
    sums: Counter[str] = Counter()
    for life in lives:
        work = work_of(life, modules_of, tokens_per_step, in_steps)
        sums["trained"] += work.trained.total()
        sums["moved"] += work.moved.total()
        sums["missed"] += work.missed.total()
        sums[life.ending] += work.pending.total()
        if life.ending in ("left", "stayed"):
            sums["living"] += work.trained.total()
            sums["lost"] += work.moved.total() + work.missed.total()
    forked = {version: found for version, found in digests.items() if len(found) > 1}
    rows = {e["digest"]: frozenset((e["round"], peer) for peer in e["group"]) for e in outer_steps}
    return Counts(
        outer_steps=len(outer_steps),
        versions=len(digests),
        forked=forked,
        outbid=sum(_is_outbid([rows.get(d, frozenset()) for d in f]) for f in forked.values()),
        final=final,
        agreed=agreed,
        trained=sums["trained"],
        killed_pending=sums["killed"],
        stayed_pending=sums["stayed"],
        left_pending=sums["left"] + sums["by itself"],
        moved_pending=sums["moved"],
        missed=sums["missed"],
        living_trained=sums["living"],
        living_lost=sums["lost"] + sums["left"],
        final_tokens=sum(event["tokens"] for event in final.values()),
        longest_without_step=_longest_gap(outer_steps, end_s),
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


def _longest_gap(outer_steps: Iterable[Event], end_s: float) -> tuple[str, float]:
    """Return the module that went longest without a step by anybody, and for how long."""
    times: dict[str, list[float]] = {}
    for event in outer_steps:
        times.setdefault(event["module"], []).append(event["time_s"])
    gaps = [
        (module, after - before)
        for module, found in times.items()
        for before, after in itertools.pairwise((*sorted(found), end_s))
    ]
    return max(gaps, key=lambda gap: gap[1], default=("", float("nan")))
