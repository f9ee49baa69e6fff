"""What is wrong with a swarm, found in a view of it: the worst first, and never many lines. Pure.

Records are all there is to judge by. What lasts only a moment, such as a peer that is a version
behind while it fetches the newest, is no problem; what lasts for rounds is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dipaco.protocol.chain.steps import Head
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.records import Claim
from dipaco.protocol.view import SwarmView, present_round

ProblemKind = Literal[
    "untrained", "stalled", "forked", "behind", "broken", "copies", "waiting", "undialable"
]

# Rounds without a step: one or two are ordinary, and the next one carries the work.
_STALLED_ROUNDS = 3
# A peer that missed a step has the state within two rounds.
_BEHIND_ROUNDS = 2
# Copies of a new state are there within two rounds (promise 7).
_COPYING_ROUNDS = 2
# Records are some seconds on their way; with very short rounds that is several of them.
_NEWS_S = 10.0
# More problems of one kind than this become one.
MAX_ALIKE = 3
# At most so many modules, paths or peers are named.
_NAMED = 3


@dataclass(frozen=True)
class Problem:
    """Something that a person should know."""

    kind: ProblemKind
    what: str
    remedy: str
    """What to do about it."""
    since_round: int | None = None
    """Since when, -1 for the beginning of the run; None when that is not known."""
    subjects: tuple[str, ...] = ()
    """All modules, paths ("path 3") or peers that it is about; `what` names only a few."""

    @property
    def text(self) -> str:
        """The line for people."""
        since = ""
        if self.since_round is not None:
            began = self.since_round < 0
            since = " since the run began" if began else f" since round {self.since_round}"
        return f"{self.what}{since}; {self.remedy}"


@dataclass(frozen=True)
class _Swarm:
    """A view, with what several checks derive from it."""

    view: SwarmView
    plan: RunPlan
    grid: Grid
    round_index: int
    claims: Mapping[str, tuple[Claim, ...]]
    """Module to the claims of those who train it."""

    @property
    def late_rounds(self) -> int:
        """Rounds by which the records may be late."""
        return int(_NEWS_S // self.plan.rounds.duration_s)

    @cached_property
    def trainer_count(self) -> int:
        return sum(claim.state != "leaving" for claim in self.view.claims.values())

    @cached_property
    def usual_wait_rounds(self) -> int:
        """Rounds for which a path may wait: all have their turn, if there are fewer peers."""
        if self.trainer_count >= self.grid.path_count:
            return 0
        turns = -(-self.grid.path_count // max(1, self.trainer_count)) + 1
        return turns * self.plan.rounds.dwell_rounds + 2

    def complete_rounds_since(self, round_index: int) -> int:
        """Return how many whole rounds have gone by after a round."""
        return max(0, self.round_index - round_index - 1)


def problems(view: SwarmView, plan: RunPlan, grid: Grid) -> tuple[Problem, ...]:
    """Return what is wrong, the worst first, at most `MAX_ALIKE` of each kind."""
    trained: dict[str, list[Claim]] = {}
    for claim in view.claims.values():
        if claim.state == "training":
            for module in grid.modules_of_path(claim.path):
                trained.setdefault(module, []).append(claim)
    swarm = _Swarm(
        view=view,
        plan=plan,
        grid=grid,
        round_index=present_round(plan, view),
        claims={module: tuple(claims) for module, claims in trained.items()},
    )
    return (
        *_untrained(swarm),
        *_stalled(swarm),
        *_parted(swarm),
        *_copies(swarm),
        *_waiting(swarm),
        *_undialable(swarm),
    )


def short_peer(peer: str) -> str:
    """Shorten a peer id: all of them begin alike."""
    return f"..{peer[-8:]}"


def path_name(path: int) -> str:
    """Return how the subjects of a problem name a path."""
    return f"path {path}"


def _named(names: Sequence[str]) -> str:
    """Name all, or a few of many."""
    if len(names) <= _NAMED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"


def _together(
    found: Sequence[Problem], what: str, remedy: str, names: Sequence[str] = ()
) -> tuple[Problem, ...]:
    """Make one problem out of many that are alike; `found` begins with the worst.

    In `what`, "{count}" and "{names}" stand for how many `names` there are (by default the
    subjects), and for a few of them.
    """
    if len(found) <= MAX_ALIKE:
        return tuple(found)
    subjects = tuple(dict.fromkeys(name for problem in found for name in problem.subjects))
    began = [problem.since_round for problem in found if problem.since_round is not None]
    named = [short_peer(name) if len(name) > 20 else name for name in names or subjects]
    return (
        Problem(
            kind=found[0].kind,
            what=what.format(count=len(named), names=_named(named)),
            remedy=remedy,
            since_round=min(began) if began else None,
            subjects=subjects,
        ),
    )


# -- nobody trains


def _untrained(swarm: _Swarm) -> tuple[Problem, ...]:
    if swarm.trainer_count:
        return ()
    what, remedy = "no peer trains", "start one: dipaco-peer ADDR"
    return (Problem("untrained", what, remedy),)


# -- modules without a step


def _stalled(swarm: _Swarm) -> tuple[Problem, ...]:
    """Find modules without a step for rounds in which they were trained."""
    found = []
    for module in swarm.grid.modules():
        claims = swarm.claims.get(module, ())
        newest = swarm.view.heaviest(module)
        last_round = newest.round_index if newest else -1
        # Those who have trained it for so long show it.
        held = int(max((swarm.view.rounds_held(claim) for claim in claims), default=0))
        missed = min(swarm.complete_rounds_since(last_round), held)
        # So does what was said of its paths, also by others before them. With fewer peers than
        # paths it may have waited for most of that time.
        trained = max(map(swarm.view.last_round, swarm.grid.paths_of_module(module)))
        without_step = min(trained, swarm.round_index) - last_round
        if without_step - swarm.usual_wait_rounds >= _STALLED_ROUNDS:
            missed = max(missed, without_step)
        if missed >= _STALLED_ROUNDS + swarm.late_rounds:
            trainers = _named([short_peer(claim.peer_id) for claim in claims])
            problem = Problem(
                kind="stalled",
                what=f"{module} has had no step for {missed} rounds,",
                remedy=f"look at what its trainers print: {trainers or 'they have moved on'}",
                since_round=last_round,
                subjects=(module,),
            )
            found.append((-missed, problem))
    found.sort(key=lambda entry: entry[0])
    return _together(
        [problem for _, problem in found],
        "{count} modules have no steps ({names}), the first of them",
        "look at what their trainers print",
    )


# -- trainers of a module that hold different states


def _parted(swarm: _Swarm) -> tuple[Problem, ...]:
    """Find trainers that hold different states of a module: on two chains, an old one for rounds,
    or a wrong one. A fault of a machine shows in all of its modules, and is reported once."""
    forked: list[Problem] = []
    wrong: dict[str, list[Head]] = {}
    late: dict[str, list[Head]] = {}
    for module in swarm.grid.modules():
        held = _held_by_trainers(swarm, module)
        newest = min(held.values(), key=lambda head: head.rank, default=None)
        if newest is None:
            continue
        at_once = {head for head in held.values() if head.version == newest.version}
        if len(sides := {head.step[:8] for head in at_once}) > 1:
            what = f"{module} is forked: its trainers hold {_named(sorted(sides))}"
            forked.append(Problem("forked", what, _REACH, newest.round_index, (module,)))
        elif len(at_once) > 1:
            agreed = swarm.view.agreed_head(module, newest.step)
            for peer, head in held.items():
                if head in at_once and head != agreed:
                    wrong.setdefault(peer, []).append(head)
        for peer, head in held.items():
            if _is_behind(swarm, peer, head, newest):
                late.setdefault(peer, []).append(head)
    return (
        *_of_machines(
            "broken",
            wrong,
            "computed another state than most of {modules}; that machine may be broken,",
            "{count} machines computed other states than most ({names}), the first of them",
            "check memory and processor there",
        ),
        *_together(
            forked,
            "the trainers of {count} modules hold different states ({names}), the first of them",
            _REACH,
        ),
        *_of_machines(
            "behind",
            late,
            "holds an older state of {modules},",
            "{count} peers hold older states ({names}), the first of them",
            "check the network and the load there",
        ),
    )


_REACH = "if it lasts two rounds, check that these peers reach each other"


def _of_machines(
    kind: ProblemKind, held: Mapping[str, Sequence[Head]], one: str, many: str, remedy: str
) -> tuple[Problem, ...]:
    """Return a problem for each machine, or one for many; `held` is what each of them holds."""
    found = []
    for peer, heads in sorted(held.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        modules = tuple(head.module for head in heads)
        since_round = min(head.round_index for head in heads)
        what = f"{short_peer(peer)} {one.format(modules=_named(modules))}"
        found.append(Problem(kind, what, remedy, since_round, (peer, *modules)))
    return _together(found, many, remedy, sorted(held))


def _held_by_trainers(swarm: _Swarm, module: str) -> dict[str, Head]:
    trainers = {claim.peer_id for claim in swarm.claims.get(module, ())}
    held = swarm.view.holdings.get(module, ())
    return {holding.peer_id: holding.head for holding in held if holding.peer_id in trainers}


def _is_behind(swarm: _Swarm, peer: str, head: Head, newest: Head) -> bool:
    """Tell whether a peer has held an older state than `newest` for rounds."""
    if head.version >= newest.version:
        return False
    missed = newest.version - head.version - 1 + swarm.complete_rounds_since(newest.round_index)
    missed = min(missed, int(swarm.view.rounds_held(swarm.view.claims[peer])))
    return missed >= _BEHIND_ROUNDS + swarm.late_rounds


def forked_modules(found: Sequence[Problem]) -> frozenset[str]:
    """Return the modules whose trainers hold different states for more than a moment."""
    return frozenset(
        name
        for problem in found
        if problem.kind in ("forked", "broken")
        for name in problem.subjects
    )


# -- copies


def _copies(swarm: _Swarm) -> tuple[Problem, ...]:
    """Find trained modules that too few peers hold, once there was time to copy them."""
    found = [
        (count, Problem("copies", what, remedy, None, (module,)))
        for module, count, what, remedy in _few_copies(swarm)
    ]
    found.sort(key=lambda entry: entry[0])
    return _together(
        [problem for _, problem in found],
        f"{{count}} modules have few copies ({{names}}), the least {found[0][0] if found else 0}",
        found[0][1].remedy if found else "",
    )


def callable_peers(view: SwarmView) -> frozenset[str]:
    """Return the peers that others can call, as far as is known: they can keep copies."""
    return frozenset(
        peer
        for peer, record in view.peers.items()
        if record.state != "leaving" and record.reachable != "outgoing"
    )


def _few_copies(swarm: _Swarm) -> Iterator[tuple[str, int, str, str]]:
    able = callable_peers(swarm.view)
    patience = _COPYING_ROUNDS + swarm.late_rounds
    for module, held in swarm.view.holdings.items():
        newest = swarm.view.heaviest(module)
        if newest is None or newest.version == 0:
            continue
        is_old = swarm.complete_rounds_since(newest.round_index) >= patience
        if newest.version <= patience and not is_old:
            continue
        # While it is trained, copies come a little later than the state.
        holders = {
            holding.peer_id
            for holding in held
            if holding.head.version >= newest.version - (0 if is_old else patience)
        }
        # Where there are fewer machines, more copies cannot be had.
        wanted = min(swarm.plan.rounds.copies, len(able | holders))
        if len(holders) >= wanted:
            continue
        copies = "copy" if len(holders) == 1 else "copies"
        what = f"{module} has {len(holders)} {copies} of {wanted}"
        remedy = "see whether other peers can be called, or start another bootstrap node"
        yield module, len(holders), what, remedy


# -- paths that wait


def _waiting(swarm: _Swarm) -> tuple[Problem, ...]:
    """Find paths that nobody trains though there are peers enough, and those that wait too long."""
    view, grid, count = swarm.view, swarm.grid, swarm.trainer_count
    if not count:
        return ()
    patience = swarm.usual_wait_rounds + swarm.late_rounds
    served: dict[int, list[Claim]] = {}
    for claim in view.claims.values():
        if claim.state != "leaving":
            served.setdefault(claim.path, []).append(claim)
    found = []
    for path in range(grid.path_count):
        last_round = _last_round(view, grid, path)
        waited = swarm.complete_rounds_since(last_round)
        claims = served.get(path, [])
        if claims:
            waited = min(waited, int(max(view.rounds_held(claim) for claim in claims)))
            if waited < _STALLED_ROUNDS + swarm.late_rounds:
                continue
            names = _named([short_peer(claim.peer_id) for claim in claims])
            what = f"path {path} is claimed and has made no progress for {waited} rounds,"
            remedy = f"look at what {names} print" + ("s" if len(claims) == 1 else "")
        elif count >= grid.path_count:
            what = f"path {path} has no trainer"
            remedy = f"if it lasts two rounds: dipaco-peer --path {path}"
        elif waited > patience:
            what = f"path {path} has waited {waited} rounds ({patience} are usual),"
            remedy = (
                f"{'1 peer trains' if count == 1 else f'{count} peers train'}: start another one"
            )
        else:
            continue
        problem = Problem("waiting", what, remedy, last_round, (path_name(path),))
        found.append((-waited, problem))
    found.sort(key=lambda entry: entry[0])
    return _together(
        [problem for _, problem in found],
        "{count} paths wait ({names}), the first of them",
        "start more peers",
    )


def _last_round(view: SwarmView, grid: Grid, path: int) -> int:
    """Return the last round in which a path was trained; -1 for never.

    A run that was brought back from a backup has nobody who tells it, but private modules.
    """
    said = view.last_round(path)
    if said >= 0 or not grid.has_private:
        return said
    head = view.heaviest(grid.modules_of_path(path)[-1])
    return said if head is None else head.round_index


# -- peers that cannot be called


def _undialable(swarm: _Swarm) -> tuple[Problem, ...]:
    """Say when there is no mailbox: then peers that cannot be called do not find each other."""
    view = swarm.view
    able = [p for p, r in view.peers.items() if r.reachable != "outgoing"]
    closed = sorted(view.peers.keys() - set(able))
    if able or len(closed) < 2:
        return ()
    what = f"none of {len(closed)} peers can be called, so they cannot hear of each other"
    remedy = "start a bootstrap node, or forward a port on one of them"
    return (Problem("undialable", what, remedy, None, tuple(closed)),)
