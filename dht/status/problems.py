"""What is wrong with a swarm, told from a view of it: the worst first, and never many lines. Pure.

Records are all there is to tell by. What only a moment brings, such as a peer that is a version
behind while it fetches the newest, is no problem; what lasts for rounds is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from dipaco.dht.certificates import CertificateBook
from dipaco.dht.policy import CANNOT_LEAD
from dipaco.dht.records import Claim, Holding
from dipaco.dht.view import SwarmView, present_round
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference, heaviest

ProblemKind = Literal[
    "untrained", "stalled", "forked", "isolated", "copies", "waiting", "undialable"
]

# Rounds without a commit: one or two failed meetings are ordinary, and the work is carried on.
STALLED_ROUNDS = 3
# Who missed a commit has the state within two rounds (promise 8).
BEHIND_ROUNDS = 2
# Copies of a new state are there within two rounds (promise 7).
COPYING_ROUNDS = 2
# Records are some seconds on their way; with very short rounds that is several of them.
NEWS_S = 10.0
# More problems of one kind than this become one.
MOST_ALIKE = 3
# Of many modules, paths or peers so many are named.
NAMED = 3
# How a peer without an address that others can call says so.
CANNOT_BE_CALLED = ("outgoing",)


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
    """All modules, paths ("path 3") or peers that it is about; `what` names a few of many."""

    @property
    def text(self) -> str:
        """The line for people."""
        since = ""
        if self.since_round is not None:
            began = self.since_round < 0
            since = " since the run began" if began else f" since round {self.since_round}"
            # Holders of two chains go on: when they parted is not in the newest states.
            since += " or before" if self.kind in ("forked", "isolated") and not began else ""
        return f"{self.what}{since}; {self.remedy}"


@dataclass(frozen=True)
class _Swarm:
    """A view with what several of the checks need of it."""

    view: SwarmView
    plan: RunPlan
    grid: Grid
    book: CertificateBook
    round_index: int
    claims: Mapping[str, tuple[Claim, ...]]
    """Module to the claims of those who train it."""

    @property
    def late_rounds(self) -> int:
        """Rounds by which the records may be late."""
        return int(NEWS_S // self.plan.rounds.duration_s)

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

    def held_by_trainers(self, module: str) -> list[Holding]:
        trainers = {claim.peer_id for claim in self.claims.get(module, ())}
        return [h for h in self.view.holdings.get(module, ()) if h.peer_id in trainers]

    def complete_rounds_since(self, round_index: int) -> int:
        """Return how many whole rounds have gone by after a round."""
        return max(0, self.round_index - round_index - 1)


def problems(
    view: SwarmView, plan: RunPlan, grid: Grid, *, book: CertificateBook | None = None
) -> tuple[Problem, ...]:
    """Return what is wrong, the worst first, at most `MOST_ALIKE` of each kind.

    `book` holds what certificates the caller has. Where they are silent, two states are told to
    be of different chains by their versions, rounds and tokens.
    """
    trained: dict[str, list[Claim]] = {}
    for claim in view.claims.values():
        if claim.state == "training":
            for module in grid.modules_of_path(claim.path):
                trained.setdefault(module, []).append(claim)
    swarm = _Swarm(
        view=view,
        plan=plan,
        grid=grid,
        book=book or CertificateBook(),
        round_index=present_round(plan, view),
        claims={module: tuple(claims) for module, claims in trained.items()},
    )
    splits = {module: _split(swarm, module) for module in grid.modules()}
    alone = _isolated(swarm, splits)
    return (
        *_untrained(swarm),
        *_stalled(swarm),
        *_forked(splits, alone),
        *_isolated_problems(splits, alone),
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
    if len(names) <= NAMED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def _together(found: Sequence[Problem], what: str, remedy: str) -> tuple[Problem, ...]:
    """Make one problem of many that are alike; `found` begins with the worst.

    In `what`, "{count}" and "{names}" stand for how many they are and for a few of them.
    """
    if len(found) <= MOST_ALIKE:
        return tuple(found)
    subjects = tuple(dict.fromkeys(name for problem in found for name in problem.subjects))
    began = [problem.since_round for problem in found if problem.since_round is not None]
    named = [short_peer(name) if len(name) > 20 else name for name in subjects]
    return (
        Problem(
            kind=found[0].kind,
            what=what.format(count=len(subjects), names=_named(named)),
            remedy=remedy,
            since_round=min(began) if began else None,
            subjects=subjects,
        ),
    )


# -- nobody trains


def _untrained(swarm: _Swarm) -> tuple[Problem, ...]:
    if swarm.trainer_count:
        return ()
    what, remedy = "no peer trains", "start one: dipaco-peer --initial-peers ADDR"
    return (Problem("untrained", what, remedy),)


# -- modules without a commit


def _stalled(swarm: _Swarm) -> tuple[Problem, ...]:
    """Find modules that have not committed for rounds in which they were trained."""
    found = []
    for module in swarm.grid.modules():
        claims = swarm.claims.get(module, ())
        newest = heaviest(swarm.view.states(module))
        last_round = newest.last_round if newest else -1
        # Told by those who have trained it for so long.
        held = int(max((swarm.view.rounds_held(claim) for claim in claims), default=0))
        missed = min(swarm.complete_rounds_since(last_round), held)
        # And by what was said of its paths, also by others before. With fewer peers than paths
        # it may have waited for most of that time.
        trained = max(map(swarm.view.last_round, swarm.grid.paths_of_module(module)))
        unmerged = min(trained, swarm.round_index) - last_round
        if unmerged - swarm.usual_wait_rounds >= STALLED_ROUNDS:
            missed = max(missed, unmerged)
        if missed >= STALLED_ROUNDS + swarm.late_rounds:
            trainers = _named([short_peer(claim.peer_id) for claim in claims])
            problem = Problem(
                kind="stalled",
                what=f"{module} has not committed for {missed} rounds,",
                remedy=f"look at what its trainers print: {trainers or 'they have moved on'}",
                since_round=last_round,
                subjects=(module,),
            )
            found.append((-missed, problem))
    found.sort(key=lambda entry: entry[0])
    return _together(
        [problem for _, problem in found],
        "{count} modules do not commit ({names}), the first of them",
        "look at what their trainers print",
    )


# -- trainers of a module that hold different states


@dataclass(frozen=True)
class _Split:
    """How the trainers of a module differ, where more than a moment parts them."""

    module: str
    trainers: frozenset[str]
    forked: tuple[StateReference, ...] = ()
    """States of which none descends from another."""
    behind: frozenset[str] = frozenset()
    """Who has held an older state than the others for rounds."""
    apart: frozenset[str] = frozenset()
    """Who is not in a line with what more than half of the trainers hold, or is behind."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """Digest to how many trainers hold it."""
    since_round: int = -1

    @property
    def line(self) -> str:
        if not self.forked:
            count, others = len(self.behind), len(self.trainers) - len(self.behind)
            hold = "holds" if count == 1 else "hold"
            return (
                f"{count} of {count + others} trainers of {self.module} {hold} an older state "
                "than the others"
            )
        sides = [f"{s.digest[:8]} ({self.holders[s.digest]})" for s in self.forked]
        count = len(self.trainers)
        return f"{self.module} is forked: its {count} trainers hold {_named(sides)}"


def _parted(book: CertificateBook, older: StateReference, newer: StateReference) -> bool:
    """Tell whether two states are of different chains: neither is made from the other.

    `older` has the lower version. By certificates where they reach; otherwise by what every
    outer step adds to: the version, the last round and the tokens.
    """
    ancestor = book.common_ancestor(older.module, older.digest, newer.digest)
    if ancestor is not None:
        return ancestor not in (older.digest, newer.digest)
    versions = newer.version - older.version
    rounds = newer.last_round - older.last_round
    return versions <= 0 or rounds < versions or newer.tokens < older.tokens


def _split(swarm: _Swarm, module: str) -> _Split:
    held = swarm.held_by_trainers(module)
    trainers = frozenset(holding.peer_id for holding in held)
    states = {holding.digest: holding.reference for holding in held}
    if len(states) < 2:
        return _Split(module, trainers)
    line = sorted(states.values(), key=lambda s: (s.version, s.last_round, s.tokens, s.digest))
    holders = {digest: sum(h.digest == digest for h in held) for digest in states}
    pairs = [pair for pair in itertools.pairwise(line) if _parted(swarm.book, *pair)]
    forked = dict.fromkeys(itertools.chain.from_iterable(pairs))
    behind = _behind(swarm, held, line[-1])
    common = max(line, key=lambda s: (holders[s.digest], s.version))
    apart = set(behind)
    if 2 * holders[common.digest] > len(trainers):
        apart |= {
            holding.peer_id
            for holding in held
            if holding.digest != common.digest
            and _parted(swarm.book, *sorted((states[holding.digest], common), key=line.index))
        }
    earliest = min(
        (h.reference.last_round for h in held if h.peer_id in behind or h.reference in forked),
        default=-1,
    )
    return _Split(
        module=module,
        trainers=trainers,
        forked=tuple(sorted(forked, key=lambda s: (-holders[s.digest], s.digest))),
        behind=behind,
        apart=frozenset(apart),
        holders=holders,
        since_round=earliest,
    )


def _behind(swarm: _Swarm, held: Sequence[Holding], newest: StateReference) -> frozenset[str]:
    """Return who has held an older state than `newest` for rounds.

    Between two versions of a module lies at least a round.
    """
    behind = set()
    for holding in held:
        claim = swarm.view.claims[holding.peer_id]
        missed = newest.version - holding.version - 1
        missed += swarm.complete_rounds_since(newest.last_round)
        missed = min(missed, int(swarm.view.rounds_held(claim)))
        if holding.version < newest.version and missed >= BEHIND_ROUNDS + swarm.late_rounds:
            behind.add(holding.peer_id)
    return frozenset(behind)


def _forked(splits: Mapping[str, _Split], alone: frozenset[str]) -> tuple[Problem, ...]:
    """Name forks, and old states in training; not the latter where an isolated peer explains it."""
    shown = [s for s in splits.values() if s.forked or s.behind - alone]
    shown.sort(key=lambda s: (not s.forked, s.since_round))
    remedy = "if it lasts two rounds, check that these peers reach each other"
    return _together(
        [
            Problem("forked", split.line, remedy, split.since_round, (split.module,))
            for split in shown
        ],
        "the trainers of {count} modules hold different states ({names}), the first of them",
        remedy,
    )


def forked_modules(found: Sequence[Problem]) -> frozenset[str]:
    """Return the modules whose trainers hold different states for more than a moment."""
    return frozenset(
        name for problem in found if problem.kind == "forked" for name in problem.subjects
    )


# -- peers on their own


def _isolated(swarm: _Swarm, splits: Mapping[str, _Split]) -> frozenset[str]:
    """Return the peers that differ from the others in every module that they share.

    Of two who differ, nobody can tell which one is cut off; so those count that train a module
    with two others at least.
    """
    apart: set[str] = set()
    together: set[str] = set()
    for split in splits.values():
        if len(split.trainers) > 2:
            few = split.apart if 2 * len(split.apart) < len(split.trainers) else frozenset()
            apart |= few
            together |= split.trainers - few
    return frozenset(apart - together)


def _isolated_problems(splits: Mapping[str, _Split], alone: frozenset[str]) -> tuple[Problem, ...]:
    remedy = "check the network there, then start dipaco-peer again"
    found = []
    for peer in sorted(alone):
        modules = [s for s in splits.values() if peer in s.apart and len(s.trainers) > 2]
        names = _named([split.module for split in modules])
        problem = Problem(
            kind="isolated",
            what=f"peer {short_peer(peer)} is on its own in all that it shares ({names})",
            remedy=remedy,
            since_round=min(split.since_round for split in modules),
            subjects=(peer,),
        )
        found.append(problem)
    found.sort(key=lambda problem: problem.since_round or 0)
    return _together(found, "{count} peers are on their own ({names}), the first of them", remedy)


# -- copies


def _copies(swarm: _Swarm) -> tuple[Problem, ...]:
    """Find trained modules that too few peers hold, once there was time to copy them."""
    wanted = swarm.plan.rounds.copies
    found = [
        (count, Problem("copies", what, remedy, None, (module,)))
        for module, count, what, remedy in _few_copies(swarm, wanted)
    ]
    found.sort(key=lambda entry: entry[0])
    return _together(
        [problem for _, problem in found],
        f"{{count}} modules have fewer than {wanted} copies ({{names}}), "
        f"the least {found[0][0] if found else 0}",
        found[0][1].remedy if found else "",
    )


def _few_copies(swarm: _Swarm, wanted: int) -> Iterator[tuple[str, int, str, str]]:
    able = sum(
        record.state != "leaving" and record.reachable not in CANNOT_BE_CALLED
        for record in swarm.view.peers.values()
    )
    every = swarm.plan.rounds.replication_every_rounds
    patience = every + COPYING_ROUNDS + swarm.late_rounds
    for module, held in swarm.view.holdings.items():
        newest = heaviest(holding.reference for holding in held)
        if newest is None or newest.version == 0:
            continue
        is_old = swarm.complete_rounds_since(newest.last_round) >= patience
        if newest.version <= patience and not is_old:
            continue
        # While it is trained, copies come a little later than the state.
        holders = {
            holding.peer_id
            for holding in held
            if holding.version >= newest.version - (every if is_old else patience)
        }
        if len(holders) >= wanted:
            continue
        copies = "copy" if len(holders) == 1 else "copies"
        what = f"{module} has {len(holders)} {copies} of {wanted}"
        remedy = "see whether other peers can be called, or start another bootstrap node"
        if able < wanted:
            peers = "1 peer" if able == 1 else f"{able} peers"
            remedy = f"{peers} can keep copies: start another one or a bootstrap node"
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
        waited = swarm.complete_rounds_since(view.last_round(path))
        claims = served.get(path, [])
        if claims:
            waited = min(waited, int(max(view.rounds_held(claim) for claim in claims)))
            if waited < STALLED_ROUNDS + swarm.late_rounds:
                continue
            names = _named([short_peer(claim.peer_id) for claim in claims])
            what = f"path {path} is claimed and gets nowhere, {waited} rounds,"
            remedy = f"look at what {names} print" + ("s" if len(claims) == 1 else "")
        elif count >= grid.path_count:
            what = f"path {path} has no trainer"
            remedy = f"if it lasts two rounds: dipaco-peer --path {path}"
        elif waited > patience:
            what = f"path {path} has waited {waited} rounds ({patience} are usual),"
            remedy = f"{count} peers train: start another one"
        else:
            continue
        problem = Problem("waiting", what, remedy, view.last_round(path), (path_name(path),))
        found.append((-waited, problem))
    found.sort(key=lambda entry: entry[0])
    return _together(
        [problem for _, problem in found],
        "{count} paths wait ({names}), the first of them",
        "start more peers",
    )


# -- peers that cannot be called


def _undialable(swarm: _Swarm) -> tuple[Problem, ...]:
    """Name the modules whose trainers never meet, and the peers that others cannot call."""
    apart = [
        module
        for module, claims in sorted(swarm.claims.items())
        if len(claims) > 1 and all(swarm.view.reachable(c.peer_id) in CANNOT_LEAD for c in claims)
    ]
    found: tuple[Problem, ...] = ()
    if apart:
        what = f"nobody who trains {_named(apart)} can be called: they do not meet, and take turns"
        remedy = "forward a port on one of them, or start a peer that can be called"
        found = (Problem("undialable", what, remedy, None, tuple(apart)),)
    peers = tuple(
        peer
        for peer, record in sorted(swarm.view.peers.items())
        if record.state in ("training", "serving") and record.reachable in CANNOT_BE_CALLED
    )
    if not peers:
        return found
    who = f"peer {short_peer(peers[0])}"
    if len(peers) > 1:
        who = f"{len(peers)} peers ({_named([short_peer(peer) for peer in peers])})"
    remedy = "training goes on; if others wait for them, forward a port and --announce-maddrs"
    return *found, Problem("undialable", f"{who} cannot be called by others", remedy, None, peers)
