"""Which paths a member chooses among, and what it reads of the swarm: what it needs, and no more.

See design 4.6, claims, and design 4.8, the DHT stays small. At every refresh that is the modules
that it trains or keeps copies of, and the bucket of its path. Where that bucket has few peers,
nobody could be found in it to keep a copy, so the next ones are read too. A peer that chooses a
path looks into a few buckets more: others each time. Paths that it could not begin it leaves alone
for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from dipaco.protocol.coverage import (
    ENOUGH_PEERS,
    Scope,
    bucket_count,
    home_bucket,
    next_buckets,
    sampled_buckets,
    scope_of,
)
from dipaco.protocol.policy import (
    Decision,
    choose_own_path,
    choose_path,
    lead_rank,
    should_move,
)
from dipaco.protocol.view import SwarmView

from .actions import Look, Watch
from .knowledge import Knowledge

# A path that could not be begun is passed over for so many dwells.
_PASSED_OVER_DWELLS = 4


class PathChoice:
    """Works out the scope, and says which paths are passed over."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._known = knowledge
        self._count = bucket_count(knowledge.grid.path_count)
        self._scope: Scope | None = None
        self._needs: tuple[Collection[object], ...] = ()
        self._has_few_neighbours = False
        self._failed_s: dict[int, float] = {}
        """When each path could not be begun."""
        self._sampled: tuple[int, ...] = ()
        self._own_rounds = Counter[int]()
        """Rounds on each path, for a peer that trains on texts of its owner."""

    @property
    def is_whole(self) -> bool:
        """Whether all paths are in sight anyway."""
        return self._count == 1

    def watch(self, wanted: tuple[int | None, ...], followed: Collection[str]) -> None:
        """Have read what a peer needs that trains or is to train these paths and follows these
        modules besides, before anything else."""
        known = self._known
        needs = (wanted, tuple(followed), (self._has_few_neighbours,))
        if needs == self._needs:
            return
        self._needs = needs
        paths = [path for path in wanted if path is not None]
        homes = {home_bucket(known.me, path, self._count) for path in paths or (None,)}
        buckets = set(homes)
        if self._has_few_neighbours:
            for home in homes:
                buckets.update(next_buckets(home, self._count))
        modules = {module for path in paths for module in known.grid.modules_of_path(path)}
        scope = scope_of(modules | frozenset(followed), buckets, known.grid)
        if scope != self._scope:
            self._scope = scope
            known.actions.insert(0, Watch(scope))

    def is_worth_a_look(self, rounds_on_path: int) -> bool:
        """Tell whether this peer might move if it saw more paths than its own view covers.

        A trainer that others make up for may go at any time; any other after its dwell, and all
        that it sees being trained, it need not look every round.
        """
        known, dwell = self._known, self._known.plan.rounds.dwell_rounds
        if lead_rank(known.view, known.me, known.path or 0) > 0:
            return True
        if rounds_on_path < dwell:
            return False
        waits = any(not known.view.claimants(path) for path in known.view.paths(known.grid))
        return waits or rounds_on_path % dwell == 0

    def look(self, *, anew: bool = False) -> None:
        """Look at the swarm to choose a path; `anew`: into other buckets than the last time."""
        known = self._known
        if anew and not self.is_whole:
            home = home_bucket(known.me, known.path, self._count)
            self._sampled = sampled_buckets(known.me, int(known.now_s), home, self._count)
        known.do(Look(self._sampled))

    def first_path(self) -> Decision:
        """Return the path that this peer is to claim, of those in sight: what its owner asks for,
        or the one with the least service."""
        known, over = self._known, self.passed_over()
        if known.settings.own_texts:
            return self._own_path()
        pinned = known.settings.pinned
        return choose_path(known.view, known.grid, known.me, pinned=pinned, exclude=over)

    def next_own_path(self, rounds_on_path: int) -> Decision | None:
        """Return the path that a peer with texts of its owner goes to at the end of a round; None
        to stay."""
        known, path = self._known, self._known.path
        assert path is not None
        self._own_rounds[path] += 1
        if rounds_on_path < known.plan.rounds.dwell_rounds:
            return None
        decision = self._own_path()
        return None if decision.path == path else decision

    def _own_path(self) -> Decision:
        own, over = self._known.settings.own_texts, self.passed_over()
        left = {path: count for path, count in own.items() if path not in over} or own
        return choose_own_path(left, self._own_rounds, self._known.plan.rounds.dwell_rounds)

    def better_path(self, rounds_on_path: int) -> Decision | None:
        """Return the path that needs this peer more than its own, of those in sight."""
        known, over = self._known, self.passed_over()
        times = {"rounds_on_path": rounds_on_path, "dwell_rounds": known.plan.rounds.dwell_rounds}
        decision = should_move(known.view, known.grid, known.me, **times, exclude=over)
        if decision is None or decision.path == known.path or known.path is None:
            self.settle()
            return None
        return decision

    def pass_over(self, path: int) -> None:
        """Leave a path that could not be begun to others for a while."""
        self._failed_s[path] = self._known.now_s

    def passed_over(self) -> frozenset[int]:
        """Return the paths that this peer does not choose, as it could not begin them."""
        rounds, now_s = self._known.plan.rounds, self._known.now_s
        limit_s = _PASSED_OVER_DWELLS * rounds.dwell_rounds * rounds.duration_s
        return frozenset(p for p, s in self._failed_s.items() if 0.0 <= now_s - s < limit_s)

    def settle(self) -> None:
        """Stop looking at the sampled buckets, because a path is chosen."""
        self._sampled = ()

    def learn(self, view: SwarmView) -> None:
        """Take a new view; the answer to a look has the buckets that were sampled, too."""
        known = self._known
        known.view, known.has_view = view, True
        home = home_bucket(known.me, known.path, self._count)
        neighbours = sum(
            record.state != "leaving" and home_bucket(peer, record.path, self._count) == home
            for peer, record in view.peers.items()
        )
        self._has_few_neighbours = neighbours < ENOUGH_PEERS
