"""What a member reads of a run of many paths, and that nothing is concluded from the rest."""

from __future__ import annotations

from collections.abc import Iterable

from dipaco.dht.agreement import trained_in_sight
from dipaco.dht.certificates import CertificateBook
from dipaco.dht.coverage import SAMPLED_AT_ONCE, Scope, bucket_count, home_bucket, scope_of
from dipaco.dht.policy import choose_path, resolve_collision, should_move
from dipaco.dht.records import Claim
from dipaco.dht.view import SwarmView
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.beginning import LONGEST_S, WITH_OTHERS_LIMIT_S
from dipaco.peer.member.horizon import Horizon
from dipaco.peer.member.knowledge import Knowledge, MemberSettings
from dipaco.peer.member.member import Member
from support.family import genesis
from support.lone_member import ME, claim, grid_of, holding, of, record, small_plan, view_of

ROUND_S = 200.0
# 512 paths, so eight buckets.
PLAN = small_plan((16, 32), ROUND_S, dwell_rounds=2)
GRID = grid_of(PLAN)
COUNT = bucket_count(GRID.path_count)


def seen(
    now_s: float,
    scope: Scope,
    claims: Iterable[Claim] = (),
    last_rounds: dict[int, int] | None = None,
) -> SwarmView:
    """Return what one sees of `claims` within a scope."""
    covered = [
        made
        for made in claims
        if scope.covers_path(made.path)
        or any(map(scope.covers_module, GRID.modules_of_path(made.path)))
    ]
    view = view_of(now_s, covered, duration_s=ROUND_S, last_rounds=last_rounds)
    peers = {p: r for p, r in view.peers.items() if scope.covers_peer(p, r.path)}
    progress = {p: s for p, s in view.progress.items() if scope.covers_path(p)}
    return SwarmView(now_s, view.claims, peers, {}, progress, duration_s=ROUND_S, scope=scope)


class Peer:
    """A member in a swarm of whom a test says where they are; its looks are answered."""

    def __init__(self, *others: Claim, **settings: object) -> None:
        self.others = list(others)
        self.member = Member(MemberSettings(ME, **settings), PLAN, GRID)  # type: ignore[arg-type]
        self.now_s = PLAN.start_s
        self.scope: Scope | None = None
        self.claim: a.Say | None = None
        self.last_rounds: dict[int, int] = {}
        self.done: list[a.Action] = []
        self.looked: list[tuple[int, ...]] = []
        self.lost: set[int] = set()
        """Paths whose shard nobody has."""
        self.tried: list[tuple[int, float]] = []
        """Paths that this peer began, and when: without attempts that follow at once."""

    def happen(self, event: e.Event) -> None:
        for action in self.member.handle(event, self.now_s):
            self.done.append(action)
            match action:
                case a.Watch():
                    self.scope = action.scope
                case a.Say():
                    self.claim = action
                case a.Look():
                    self.looked.append(action.further)
                    self.happen(e.Viewed(self.view(action.further), is_answer=True))
                case a.FetchPath():
                    if not self.tried or self.tried[-1][0] != action.path:
                        self.tried.append((action.path, self.now_s))
                    failed = e.PathFailed(action.path, "nobody has it")
                    lost = action.path in self.lost
                    self.happen(failed if lost else e.PathReady(action.path))
                case a.FetchState(purpose="begin"):
                    self.happen(
                        e.StateFetched(genesis(action.reference.module), {}, (), action.purpose)
                    )
                case a.TakeSnapshot():
                    self.happen(e.SnapshotTaken(action.module, action.round_index, 0, True))
                case a.TakeStep():
                    self.happen(e.Stepped(10))

    def view(self, further: tuple[int, ...] = ()) -> SwarmView:
        assert self.scope is not None
        claims = list(self.others)
        if self.claim is not None and self.claim.path is not None:
            mine = self.claim
            claims.append(claim(ME, mine.path or 0, mine.state, since_s=mine.since_s))
        return seen(self.now_s, self.scope.with_buckets(further), claims, self.last_rounds)

    def run_until(self, kind: type[a.Action], limit_s: float = 20 * ROUND_S) -> None:
        """Let time pass until it wants something of a kind."""
        until_s = self.now_s + limit_s
        seen_s = self.now_s
        while not of(kind, self.done):
            assert self.now_s < until_s, self.done[-5:]
            self.now_s += 1.0
            if self.now_s - seen_s > ROUND_S / 4:
                seen_s = self.now_s
                self.happen(e.Viewed(self.view()))
            self.happen(e.Turn(1.0))


def everywhere(*but: int) -> list[Claim]:
    """Return two trainers for every path but some."""
    return [
        claim(f"P{path}.{number}", path, since_s=1.0 + number)
        for path in range(GRID.path_count)
        for number in range(2)
        if path not in but
    ]


def test_a_newcomer_looks_into_a_few_buckets_and_then_at_its_own() -> None:
    peer = Peer(*everywhere(3))
    peer.run_until(a.Begun)
    first = peer.looked[0]
    assert len(first) == SAMPLED_AT_ONCE
    home = home_bucket(ME, None, COUNT)
    assert peer.claim is not None
    path = peer.claim.path
    assert path is not None
    # Path 3 waits; it is taken by who sees it and by nobody else.
    assert (path == 3) == (3 % COUNT in {home, *first})
    assert peer.scope == scope_of(GRID.modules_of_path(path), (path % COUNT,), GRID)
    claimed = next(n for n, done in enumerate(peer.done) if isinstance(done, a.Say))
    asked = of(a.Watch, peer.done[:claimed])[-1]
    assert set(GRID.modules_of_path(path)) <= set(asked.scope.modules)


def test_where_there_are_few_peers_the_next_buckets_are_read_too() -> None:
    peer = Peer()
    peer.run_until(a.Begun)
    peer.happen(e.Viewed(peer.view()))
    assert peer.claim is not None
    home = (peer.claim.path or 0) % COUNT
    assert peer.scope is not None
    assert set(peer.scope.buckets) == {(home + step) % COUNT for step in range(5)}


def test_a_spare_trainer_finds_a_path_that_waits_in_another_bucket() -> None:
    peer = Peer(*everywhere())
    peer.run_until(a.Begun)
    assert peer.member.path is not None
    waiting = (peer.member.path + 1) % GRID.path_count
    peer.others = everywhere(waiting)
    peer.run_until(a.Move)
    (move,) = of(a.Move, peer.done)
    assert move.to_path == waiting
    assert len(set(peer.looked)) >= 2
    # What was sampled is not among what it reads all the time.
    peer.done.clear()
    peer.run_until(a.Begun)
    assert peer.scope is not None
    assert peer.scope.buckets == (waiting % COUNT,)
    assert set(GRID.modules_of_path(waiting)) <= set(peer.scope.modules)


def test_a_lone_trainer_looks_no_further_before_its_dwell() -> None:
    peer = Peer(*everywhere(0, 5), pinned=None)
    peer.run_until(a.Begun)
    peer.others = everywhere(5, peer.member.path or 0)
    looks = len(peer.looked)
    peer.run_until(a.EndRound)
    assert len(peer.looked) == looks


def test_sampled_peers_keep_no_copies_and_move_no_one_else() -> None:
    known = Knowledge(MemberSettings(ME), PLAN, GRID, CertificateBook())
    own, wide = scope_of((), (0,), GRID), scope_of((), (0, 1), GRID)
    view = seen(5.0, wide, [claim("A", 0), claim("B", 1)], {0: 1, 1: 2})
    near = view.narrowed(own, GRID)
    assert (set(near.peers), set(near.claims), set(near.progress)) == ({"A"}, {"A"}, {0})
    assert near.scope == own
    known.learn(near)
    assert known.is_here("A")
    assert not known.is_here("B")


def test_policy_takes_what_was_not_read_for_nothing() -> None:
    scope = scope_of((), (1,), GRID)
    mine = claim(ME, 1, "joining", since_s=5.0)
    others = [claim(f"P{path}", path) for path in range(1, GRID.path_count, COUNT)]
    view = seen(10.0, scope, [mine, *others])
    assert choose_path(view, GRID, ME).path % COUNT == 1
    assert resolve_collision(view, GRID, ME) is None
    moving = seen(10.0, scope, [claim(ME, 1, since_s=5.0), *others])
    assert should_move(moving, GRID, ME, rounds_on_path=9, dwell_rounds=2) is None


def test_trainers_are_waited_for_where_it_is_known_who_they_are() -> None:
    modules = GRID.modules_of_path(0)
    scope = scope_of(modules, (0,), GRID)
    view = seen(10.0, scope, [claim("A", 0), claim("B", 1)])
    sharing = {path for module in modules for path in GRID.paths_of_module(module)}
    assert 1 in sharing
    in_sight = sharing | set(range(0, GRID.path_count, COUNT))
    assert trained_in_sight(view, GRID, 0) == (2, len(in_sight))


def test_nobody_is_missing_who_went_where_one_does_not_look() -> None:
    known = Knowledge(MemberSettings(ME), PLAN, GRID, CertificateBook())
    scope = scope_of(GRID.modules_of_path(0), (0,), GRID)
    known.learn(seen(1.0, scope, [claim("A", 0), claim(ME, 0)]))
    gone = seen(2.0, scope, [claim("A", 0, "leaving"), claim(ME, 0)])
    known.learn(gone)
    known.learn(seen(3.0, scope, [claim(ME, 0)]))
    assert not known.is_isolated
    known.learn(seen(4.0, scope, [claim("A", 0), claim(ME, 0)]))
    known.learn(seen(5.0, scope, [claim(ME, 0)]))
    assert known.is_isolated
    # In another bucket nobody was seen yet.
    known.learn(seen(6.0, scope_of((), (1,), GRID), [claim(ME, 1)]))
    assert not known.is_isolated


def test_a_holder_from_another_bucket_is_there_unless_it_is_doubted() -> None:
    known = Knowledge(MemberSettings(ME), PLAN, GRID, CertificateBook())
    module = GRID.modules_of_path(0)[0]
    elsewhere = next(f"K{n}" for n in range(99) if home_bucket(f"K{n}", None, COUNT) not in (0, 1))
    near = next(f"K{n}" for n in range(99) if home_bucket(f"K{n}", None, COUNT) == 0)
    scope = scope_of((module,), (0,), GRID)
    held = {module: tuple(holding(peer, genesis(module)) for peer in (elsewhere, near))}
    known.learn(SwarmView(1.0, {}, {"A": record("A", path=0)}, held, scope=scope))
    assert known.is_here(elsewhere)
    assert not known.is_here(near)
    for _ in range(2):
        known.doubts.called_in_vain([elsewhere])
    known.forget_beliefs()
    assert not known.is_here(elsewhere)


def test_a_newcomer_leaves_a_path_alone_whose_shard_nobody_has() -> None:
    """The least served path is the one that cannot be begun: others can."""
    peer = Peer(*everywhere(5, 300))
    peer.lost = {5, 300}
    peer.run_until(a.Begun)
    paths = [path for path, _ in peer.tried]
    assert paths[-1] not in peer.lost
    assert set(paths[:-1]) <= peer.lost
    assert peer.now_s - PLAN.start_s < (len(paths) - 1) * (WITH_OTHERS_LIMIT_S + 5.0) + 5.0
    warnings = [warn.text for warn in of(a.Warn, peer.done)]
    assert [f"looks for another path than {path}: nobody has it" for path in paths[:-1]] == warnings


def test_a_newcomer_that_can_begin_nothing_gives_up() -> None:
    peer = Peer(*everywhere())
    peer.lost = set(range(GRID.path_count))
    peer.run_until(a.Left, 2 * LONGEST_S)
    (left,) = of(a.Left, peer.done)
    assert left.error == "nobody has it; start again later"
    assert peer.now_s - PLAN.start_s < LONGEST_S + 2 * WITH_OTHERS_LIMIT_S


def test_who_could_not_begin_a_path_tries_it_more_and_more_seldom() -> None:
    """Each time it trains nothing for a while."""
    known = Knowledge(MemberSettings(ME), PLAN, GRID, CertificateBook())
    horizon, dwell_s = Horizon(known), PLAN.rounds.dwell_rounds * ROUND_S
    for dwells in (1, 2, 4, 8, 8):
        horizon.pass_over(3)
        horizon.want_path()
        known.now_s += dwells * dwell_s - 1.0
        assert horizon.passed_over() == {3}
        known.now_s += 1.0
        assert not horizon.passed_over()
    horizon.pass_over(3)
    horizon.pass_over(4)
    horizon.begun(3)
    assert horizon.passed_over() == {4}
    known.now_s -= 1.0
    assert not horizon.passed_over()  # The clock was put back.


def test_a_newcomer_tries_each_path_once() -> None:
    """However short rounds are: else it would go to and fro between two that cannot be begun."""
    known = Knowledge(
        MemberSettings(ME), small_plan((16, 32), 20.0, dwell_rounds=1), GRID, CertificateBook()
    )
    horizon = Horizon(known)
    for path in range(GRID.path_count):
        assert horizon.has_another(path - 1)
        horizon.pass_over(path)
        known.now_s += WITH_OTHERS_LIMIT_S
        assert horizon.passed_over() == set(range(path + 1))
