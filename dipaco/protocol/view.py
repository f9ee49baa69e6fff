"""The swarm as one peer sees it at one moment: what policy decides from. Pure and immutable."""

from __future__ import annotations

import math
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .chain.steps import MAX_ROWS, Head, Row
from .coverage import Scope
from .grid import Grid
from .plan import RunPlan
from .records import (
    Claim,
    Holding,
    ModuleRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
    Reachability,
)

# Clocks differ; a record from a little in the future is believed.
_ROUND_SLACK = 1
_CLOCK_SLACK_S = 15.0
# No volunteer's machine trains a path faster; a higher count is invented.
_MAX_TOKENS_PER_S = 5e6
# Even a round of few steps takes this long.
_SHORTEST_ROUND_S = 0.01
# The greatest round that the key of a group has room for.
_MAX_ROUND = 2**31


@dataclass(frozen=True)
class SwarmView:
    """Everything fresh and plausible that the DHT shows about a run."""

    now_s: float
    claims: Mapping[str, Claim] = field(default_factory=dict)
    peers: Mapping[str, PeerRecord] = field(default_factory=dict)
    holdings: Mapping[str, tuple[Holding, ...]] = field(default_factory=dict)
    progress: Mapping[int, ProgressEntry] = field(default_factory=dict)
    waiting: Mapping[int, int] = field(default_factory=dict)
    """Paths that nobody claims, and the round in which their reader first saw that."""
    duration_s: float = math.inf
    """Seconds of a round."""
    scope: Scope | None = None
    """What was read; None for everything. Nothing is known about the rest."""

    def covers_module(self, module: str) -> bool:
        """Tell whether the trainers and holders of a module were read."""
        return self.scope is None or self.scope.covers_module(module)

    def covers_path(self, path: int) -> bool:
        """Tell whether the claims on a path, and how far it is, were read."""
        return self.scope is None or self.scope.covers_path(path)

    def paths(self, grid: Grid) -> Sequence[int]:
        """Return the paths whose trainers and progress were read."""
        return range(grid.path_count) if self.scope is None else self.scope.paths(grid.path_count)

    def narrowed(self, scope: Scope, grid: Grid) -> SwarmView:
        """Return the view without buckets that `scope` has not.

        Records under the keys of modules stay, with all peers that they name.
        """
        if self.scope is None or set(self.scope.buckets) <= set(scope.buckets):
            return self
        buckets = tuple(b for b in self.scope.buckets if b in scope.buckets)
        kept = replace(self.scope, buckets=buckets)
        holders = {holding.peer_id for held in self.holdings.values() for holding in held}
        in_sight = kept.paths_in_sight(grid)
        # With many peers on few paths, each question about a path is answered once.
        paths = {path for record in self.peers.values() if (path := record.path) is not None}
        covered = set(filter(kept.covers_path, paths))
        return replace(
            self,
            claims={p: c for p, c in self.claims.items() if c.path in in_sight or p in holders},
            peers={
                peer: record
                for peer, record in self.peers.items()
                if record.path in covered or (record.path is None and kept.covers_peer(peer))
            },
            progress={p: s for p, s in self.progress.items() if kept.covers_path(p)},
            scope=kept,
        )

    @property
    def present(self) -> list[str]:
        """The peers that have not said goodbye, in order."""
        return sorted(peer for peer, record in self.peers.items() if not record.has_left)

    @cached_property
    def from_elsewhere(self) -> frozenset[str]:
        """Peers that claim or hold something here, and whose own record was not read."""
        if self.scope is None:
            return frozenset()
        scope, peers, claims = self.scope, self.peers, self.claims
        holders = {holding.peer_id for held in self.holdings.values() for holding in held}
        silent = holders - claims.keys() - peers.keys()
        found = {peer for peer in silent if not scope.covers_peer(peer)}
        found.update(
            peer
            for peer, claim in claims.items()
            if peer not in peers and not scope.covers_path(claim.path)
        )
        return frozenset(found)

    @cached_property
    def _by_path(self) -> dict[int, list[Claim]]:
        """The claims on each path by peers that mean to stay, in no order."""
        found: defaultdict[int, list[Claim]] = defaultdict(list)
        for claim in self.claims.values():
            if claim.state != "leaving":
                found[claim.path].append(claim)
        return dict(found)

    @cached_property
    def _in_order(self) -> dict[int, tuple[Claim, ...]]:
        """The answers that `claimants` has given, by path."""
        return {}

    def group(self, grid: Grid, module: str, *, joining: bool) -> frozenset[str]:
        """Return the trainers of paths through a module, with `joining` also those that begin."""
        place = grid, module, joining
        found = self._groups.get(place)
        if found is None:
            by_path, paths = self._by_path, grid.paths_of_module(module)
            found = self._groups[place] = frozenset(
                claim.peer_id
                for path in paths
                for claim in by_path.get(path, ())
                if joining or claim.state == "training"
            )
        return found

    @cached_property
    def _groups(self) -> dict[tuple[Grid, str, bool], frozenset[str]]:
        return {}

    def heads(self, module: str) -> tuple[Head, ...]:
        """Return the announced states of a module, each as often as it is announced."""
        return tuple(holding.head for holding in self.holdings.get(module, ()))

    def holders(self, module: str, step: str) -> tuple[str, ...]:
        """Return the peers that announce the state after a step."""
        return tuple(h.peer_id for h in self.holdings.get(module, ()) if h.head.step == step)

    def agreed_head(self, module: str, step: str) -> Head | None:
        """Return the state after a step as most of its holders announce it; None if nobody does.

        A machine that computes wrongly announces another digest than the others; of as many the
        smaller digest is taken.
        """
        said = Counter(head for head in self.heads(module) if head.step == step)
        return min(said, key=lambda head: (-said[head], head.digest), default=None)

    def heaviest(self, module: str) -> Head | None:
        """Return the heaviest announced state of a module, as it is announced: unchecked."""
        found = min(self.heads(module), key=lambda head: head.rank, default=None)
        return None if found is None else self.agreed_head(module, found.step)

    def reachable(self, peer: str) -> Reachability:
        """Return how others call a peer, as it says in any of its records."""
        claim, record = self.claims.get(peer), self.peers.get(peer)
        if claim is None or record is None or claim.reachable == record.reachable:
            said = claim or record
            return said.reachable if said is not None else "unknown"
        return "outgoing" if "outgoing" in (claim.reachable, record.reachable) else "direct"

    def trained_in_sight(self, grid: Grid, path: int) -> tuple[int, int]:
        """Return how many paths are trained, of how many of which that was read.

        These include all that share a module with `path`, the reader's: whom it meets trains one.
        """
        modules = [module for module in grid.modules_of_path(path) if self.covers_module(module)]
        sharing = (shared for module in modules for shared in grid.paths_of_module(module))
        in_sight = {*self.paths(grid), *sharing}
        trained = {claim.path for claim in self.claims.values() if claim.state == "training"}
        return len(in_sight & trained), len(in_sight)

    def claimants(self, path: int) -> tuple[Claim, ...]:
        """Return the claims on a path by peers that mean to stay, oldest first."""
        found = self._in_order.get(path)
        if found is None:
            claims = self._by_path.get(path)
            if claims is None:
                return ()
            ordered = sorted(claims, key=lambda c: (c.since_s, c.peer_id)) if claims[1:] else claims
            found = self._in_order[path] = tuple(ordered)
        return found

    def claim_count(self, path: int) -> int:
        """Return how many peers claim a path and mean to stay."""
        return len(self._by_path.get(path, ()))

    def last_round(self, path: int) -> int:
        """Return the last round in which a path is known to have been trained; -1 for never.

        While the reader sees that nobody claims it, no record makes that later.
        """
        service = self.progress.get(path)
        said = service.last_round if service else -1
        return min(said, self.waiting.get(path, said))

    def watched(self, plan: RunPlan, grid: Grid, before: Mapping[int, int]) -> SwarmView:
        """Return the view with `waiting`, of that of the reader's view before."""
        now = present_round(plan, self)
        free = [path for path in self.paths(grid) if not self.claim_count(path)] if now >= 0 else []
        return replace(self, waiting={path: before.get(path, now) for path in free})

    def rounds_held(self, claim: Claim) -> float:
        """Return how many rounds a claim has stood."""
        return max(0.0, (self.now_s - claim.since_s) / self.duration_s)


def present_round(plan: RunPlan, view: SwarmView) -> int:
    """Return the round that the run is in, for people and for patience.

    With fixed steps that is the middle one of those that the trainers say: a few liars don't move
    it. Negative before the run starts, or when nobody trains.
    """
    if not plan.rounds.inner_steps:
        return plan.rounds.round_at(view.now_s - plan.start_s)
    rounds = [claim.round for claim in view.claims.values() if claim.state == "training"]
    return statistics.median_high(rounds) if rounds and view.now_s >= plan.start_s else -1


def view_of_records(
    *,
    now_s: float,
    plan: RunPlan,
    grid: Grid,
    peers: Iterable[PeerRecord],
    modules: Mapping[str, Iterable[ModuleRecord]],
    progress: Iterable[ProgressRecord],
    scope: Scope | None = None,
) -> SwarmView:
    """Make a view of the records under the keys of a scope.

    A peer says what it trains under several keys, and moves: what it said last counts.
    """
    newest: dict[str, PeerRecord] = {}
    for record in peers:
        peer = record.peer_id
        if peer not in newest or record.age > newest[peer].age:
            newest[peer] = record
    said: dict[str, PeerRecord | ModuleRecord] = dict(newest)
    holdings: dict[str, list[Holding]] = {}
    for module, records in modules.items():
        held = holdings.setdefault(module, [])
        for found in records:
            holding, peer = found.holding, found.peer_id
            if holding is not None:
                held.append(holding)
            if peer not in said or found.age > said[peer].age:
                said[peer] = found
    return build_view(
        now_s=now_s,
        plan=plan,
        grid=grid,
        claims=[claim for record in said.values() if (claim := record.claim) is not None],
        peers=newest.values(),
        holdings=holdings,
        progress=progress,
        scope=scope,
    )


def build_view(
    *,
    now_s: float,
    plan: RunPlan,
    grid: Grid,
    claims: Iterable[Claim],
    peers: Iterable[PeerRecord],
    holdings: Mapping[str, Iterable[Holding]],
    progress: Iterable[ProgressRecord],
    scope: Scope | None = None,
) -> SwarmView:
    """Make a view of records, leaving out what this run cannot have.

    Dropped: unknown paths and modules, rounds of the future, versions beyond what the elapsed time
    allows. Expired records do not get here.
    """
    counted = plan.rounds.inner_steps > 0
    latest = plan.rounds.round_at(now_s - plan.start_s) + _ROUND_SLACK
    if counted:
        latest = max_rounds(plan, now_s) - 1
    path_count, latest_s = grid.path_count, now_s + _CLOCK_SLACK_S
    believed = {
        claim.peer_id: claim
        for claim in claims
        if claim.path < path_count
        and claim.since_s <= latest_s
        and (not counted or claim.round <= latest)
    }
    return SwarmView(
        now_s=now_s,
        claims=believed,
        peers={p.peer_id: p for p in peers},
        holdings={
            module: tuple(h for h in held if is_plausible_head(h.head, plan, now_s))
            for module, held in holdings.items()
            if grid.has_module(module)
        },
        progress=_merged_progress(progress, grid.path_count, latest),
        duration_s=plan.rounds.duration_s,
        scope=scope,
    )


def max_rounds(plan: RunPlan, now_s: float) -> int:
    """Return how many rounds of a run can have begun by `now_s`.

    By the clock, those that have, and one more because clocks differ. With fixed steps rounds are
    counted and only `_MAX_TOKENS_PER_S` bounds them: so many tokens an invented count can
    have in both modes.
    """
    elapsed_s = max(0.0, now_s - plan.start_s)
    return min(math.floor(elapsed_s / least_round_s(plan)) + 1 + _ROUND_SLACK, _MAX_ROUND)


def least_round_s(plan: RunPlan) -> float:
    """Return the seconds that a round takes at least; by the clock all take the same."""
    if not plan.rounds.inner_steps:
        return plan.rounds.duration_s
    return max(_SHORTEST_ROUND_S, _tokens_of_steps(plan) / _MAX_TOKENS_PER_S)


def _tokens_of_steps(plan: RunPlan) -> int:
    """How many tokens one peer trains in a round of fixed steps."""
    return plan.rounds.inner_steps * plan.inner.batch_sequences * plan.model.sequence_length


def max_contribution_tokens(plan: RunPlan, now_s: float, round_index: int) -> int:
    """Return how many tokens one peer can have trained by `now_s` since its last step.

    With fixed steps it follows from `round_index`, which all members of a group share.
    """
    if plan.rounds.inner_steps:
        return (round_index + 1 + _ROUND_SLACK) * _tokens_of_steps(plan)
    return int(max_rounds(plan, now_s) * plan.rounds.duration_s * _MAX_TOKENS_PER_S)


def claimed_tokens(plan: RunPlan, tokens: int, round_index: int) -> int:
    """Return how many of the tokens that a peer trained since its last step its row may say.

    With fixed steps others believe no more than there were rounds.
    """
    if not plan.rounds.inner_steps:
        return tokens
    return min(tokens, max_contribution_tokens(plan, 0.0, round_index))


def is_plausible_row(row: Row, plan: RunPlan, now_s: float) -> bool:
    """Tell whether a peer can have trained so much in a round that can have ended by `now_s`."""
    if row.round_index >= max_rounds(plan, now_s):
        return False
    return row.tokens <= max_contribution_tokens(plan, now_s, row.round_index)


def is_plausible_head(head: Head, plan: RunPlan, now_s: float) -> bool:
    """Tell whether a state can have got this far since the run began.

    Also in a successor run: its genesis has version 0.
    """
    if head.version == 0:
        return head.weight == 0
    rounds = max_rounds(plan, now_s)
    if head.round_index >= rounds or head.version > head.round_index + 1:
        return False
    return head.version <= head.weight <= MAX_ROWS * head.version


def _merged_progress(
    records: Iterable[ProgressRecord], path_count: int, latest_round: int
) -> dict[int, ProgressEntry]:
    """Keep the newest entry of every path: the latest round, then the most tokens.

    Held-out scores are the newest there are, which may be of an earlier round. A peer trains one
    path in a round, so of what it says of a round the first counts: one liar could say that all
    are served, and nobody would move to those that wait.
    """
    said = set[tuple[str, int]]()
    newest: dict[int, ProgressEntry] = {}
    scored: dict[int, ProgressEntry] = {}
    for record in sorted(records, key=operator.attrgetter("peer_id")):
        for entry in record.entries:
            path, last_round = entry.path, entry.last_round
            if path >= path_count or last_round > latest_round:
                continue
            if (record.peer_id, last_round) in said:
                continue
            said.add((record.peer_id, last_round))
            known = newest.get(path)
            if known is None or (last_round, entry.tokens) > (known.last_round, known.tokens):
                newest[path] = entry
            if entry.validation_tokens:
                known = scored.get(path)
                if known is None or (last_round, entry.tokens) > (known.last_round, known.tokens):
                    scored[path] = entry
    return {
        path: entry.scored_as(scored.get(path, entry)) for path, entry in sorted(newest.items())
    }
