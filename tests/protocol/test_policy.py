"""The rules of what peers train and keep, and their promises, by simulation."""

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco.protocol.config import GridConfig, ModelConfig
from dipaco.protocol.coverage import scope_of
from dipaco.protocol.grid import Grid
from dipaco.protocol.policy import choose_own_path, choose_path, lead_rank, resolve_collision, should_move
from dipaco.protocol.records import Claim, ProgressEntry
from dipaco.protocol.view import SwarmView
from support.runs.make_plan import make_plan
from support.wire.peers import peer

DURATION_S = 100.0


@lru_cache(maxsize=64)
def grid_of(modules_per_level=(2, 2), private=False):
    return Grid(
        ModelConfig(vocabulary_size=64, block_count=4, hidden_size=8, head_count=1, sequence_length=16),
        GridConfig(
            modules_per_level=modules_per_level,
            level_starts=tuple(range(len(modules_per_level))),
            private_blocks=(3,) if private else (),
        ),
    )


def claim(number, path, since_s=0.0, state="training", round_index=0):
    return Claim(peer_id=peer(number), path=path, state=state, since_s=since_s, round=round_index)


def progress(path, last_round):
    return ProgressEntry.model_construct(path=path, last_round=last_round)


def view_of(claims=(), last_rounds=None, now_s=0.0, **fields):
    return SwarmView(
        now_s=now_s,
        claims={c.peer_id: c for c in claims},
        progress={p: progress(p, r) for p, r in (last_rounds or {}).items()},
        duration_s=DURATION_S,
        **fields,
    )


# -- choosing a path


def test_a_newcomer_takes_the_path_with_the_fewest_trainers():
    view = view_of([claim(1, 0), claim(2, 1), claim(3, 3)], {2: 50})
    decision = choose_path(view, grid_of(), peer(9))
    assert decision.path == 2
    assert decision.reason == "nobody has trained it since round 50"


def test_among_unserved_paths_the_one_that_waited_longest_comes_first():
    view = view_of([claim(1, 0)], {0: 9, 1: 7, 2: 5, 3: 6})
    assert choose_path(view, grid_of(), peer(9)).path == 2
    view = view_of([claim(1, 0)], {0: 9, 1: 7, 2: 5})
    assert choose_path(view, grid_of(), peer(9)).path == 3


def test_own_claim_and_leaving_peers_do_not_count_as_service():
    view = view_of([claim(1, 0, state="leaving"), claim(9, 1), claim(2, 2), claim(3, 3)], {1: 5})
    assert choose_path(view, grid_of(), peer(9)).path == 0


def test_a_peer_with_texts_begins_where_most_are_and_gives_each_path_its_share_of_the_rounds():
    sequences, rounds = {1: 60, 2: 30, 3: 9, 5: 1}, Counter()
    first = choose_own_path(sequences, rounds, 2)
    assert (first.path, first.reason) == (1, "60% of your texts are for it")
    for _ in range(500):
        rounds[choose_own_path(sequences, rounds, 2).path] += 2
    assert {path: round(100 * count / rounds.total()) for path, count in rounds.items()} == {1: 60, 2: 30, 3: 9, 5: 1}


def test_a_pinned_path_is_taken_whatever_the_view_says():
    view = view_of([claim(n, 3) for n in range(5)])
    assert choose_path(view, grid_of(), peer(9), pinned=3).path == 3


def test_newcomers_to_an_empty_swarm_spread_over_the_paths():
    grid = grid_of((4, 4))
    chosen = Counter(choose_path(view_of(), grid, peer(n)).path for n in range(160))
    assert len(chosen) == 16
    assert max(chosen.values()) < 25


# -- collisions


def test_of_two_that_join_one_path_exactly_one_gives_way():
    grid = grid_of()
    view = view_of([claim(1, 0, state="joining"), claim(2, 0, state="joining")])
    moves = [resolve_collision(view, grid, peer(n)) for n in (1, 2)]
    assert sum(move is None for move in moves) == 1
    (moved,) = (move for move in moves if move is not None)
    assert moved.path != 0


def test_who_trains_already_stays_and_the_newcomer_gives_way():
    view = view_of([claim(1, 0, since_s=5.0), claim(2, 0, since_s=0.0, state="joining")])
    decision = resolve_collision(view, grid_of(), peer(2))
    assert decision.path != 0


def test_nobody_gives_way_when_no_path_is_worse_served():
    claims = [claim(n, n) for n in range(4)] + [claim(9, 0, state="joining")]
    assert resolve_collision(view_of(claims), grid_of(), peer(9)) is None
    assert resolve_collision(view_of(), grid_of(), peer(9)) is None
    alone = view_of([claim(1, 0, state="joining"), claim(2, 0, state="joining")])
    assert resolve_collision(alone, grid_of((1,)), peer(2)) is None


# -- moving


def test_a_spare_replica_goes_to_an_unserved_path_at_once():
    claims = [claim(1, 0), claim(2, 0, since_s=5.0), claim(3, 1), claim(4, 2)]
    view = view_of(claims, {0: 3, 1: 3, 2: 3, 3: 1})
    moves = {n: should_move(view, grid_of(), peer(n), rounds_on_path=0, dwell_rounds=2) for n in (1, 2, 3, 4)}
    assert {n: move.path for n, move in moves.items() if move} == {2: 3}


def test_nobody_moves_before_the_dwell_is_over():
    view = view_of([claim(1, 0, round_index=5)], {0: 5})
    me = peer(1)
    assert should_move(view, grid_of(), me, rounds_on_path=1, dwell_rounds=2) is None
    assert should_move(view, grid_of(), me, rounds_on_path=2, dwell_rounds=2) is not None


def test_nobody_moves_to_a_path_that_waited_less():
    view = view_of([claim(1, 0, round_index=2)], {0: 1, 1: 9, 2: 9, 3: 9})
    assert should_move(view, grid_of(), peer(1), rounds_on_path=4, dwell_rounds=1) is None


@pytest.mark.parametrize(("last_round", "moves"), [(3, True), (4, False)])
def test_a_path_has_waited_longer_when_its_last_round_is_before_the_one_that_was_trained_last(last_round, moves):
    """Its own record may not have come yet: in round 5, round 4 is the last that the peer has trained."""
    view = view_of([claim(1, 0, round_index=5)], {1: last_round, 2: 4, 3: 4})
    assert bool(should_move(view, grid_of(), peer(1), rounds_on_path=4, dwell_rounds=1)) is moves


@pytest.mark.parametrize(("dwell_rounds", "patience_s"), [(1, 600.0), (2, 900.0)])
def test_a_lead_whose_turn_it_is_is_waited_for_three_dwells_and_three_rounds(dwell_rounds, patience_s):
    """A trainer that hangs, or is older than this rule, never moves: the next one goes then (promise 6)."""
    claims = [claim(1, 0, 0.0, round_index=9), claim(2, 1, 100.0, round_index=9), claim(3, 2, 200.0, round_index=9)]

    def movers(now_s):
        view = view_of(claims, {0: 8, 1: 8, 2: 8, 3: 0}, now_s)
        return [
            n for n in (1, 2, 3) if should_move(view, grid_of(), peer(n), rounds_on_path=9, dwell_rounds=dwell_rounds)
        ]

    assert movers(patience_s) == [1]
    assert movers(patience_s + 1.0) == [2]


def test_beside_a_trainer_that_never_moves_nobody_else_need_stay():
    others = [claim(2, 0, since_s=5.0), claim(3, 1), claim(4, 2)]
    pinned = claim(1, 0).model_copy(update={"pinned": True})
    last_rounds = {0: 3, 1: 3, 2: 3, 3: 1}

    def movers(claims):
        view = view_of(claims, last_rounds)
        return {
            n: move.path
            for n in (1, 2, 3, 4)
            if (move := should_move(view, grid_of(), peer(n), rounds_on_path=0, dwell_rounds=2))
        }

    assert movers([pinned, *others]) == {2: 3}
    assert movers(others) == {}, "alone it stays"


@pytest.mark.parametrize(("elsewhere", "moves"), [(1, [2]), (2, [])])
def test_a_path_of_three_trainers_gives_one_to_a_path_of_one_and_none_to_a_path_of_two(elsewhere, moves):
    claims = [claim(n, 0, since_s=n) for n in range(3)]
    claims += [claim(10 * path + n, path) for path in (1, 2, 3) for n in range(elsewhere)]
    view = view_of(claims)
    peers = [n for n in range(3) if should_move(view, grid_of(), peer(n), rounds_on_path=9, dwell_rounds=1)]
    assert peers == moves


def test_two_movers_take_different_paths():
    view = view_of([claim(1, 0, round_index=5), claim(2, 1, round_index=5)], {0: 4, 1: 4})
    targets = {
        move.path for n in (1, 2) if (move := should_move(view, grid_of(), peer(n), rounds_on_path=1, dwell_rounds=1))
    }
    assert targets == {2, 3}


def test_replicas_even_out():
    claims = [*(claim(n, 0, since_s=n) for n in range(3)), *(claim(10 + n, n) for n in (1, 2, 3))]
    view = view_of(claims)
    moves = [n for n in range(3) if should_move(view, grid_of(), peer(n), rounds_on_path=2, dwell_rounds=2)]
    assert moves == [2]
    two = view_of([claim(1, 0), claim(2, 0), *(claim(10 + n, n) for n in (1, 2, 3))])
    assert should_move(two, grid_of(), peer(2), rounds_on_path=9, dwell_rounds=1) is None


def test_who_passes_over_all_other_paths_stays():
    claims = [*(claim(n, 0, since_s=n) for n in range(3)), *(claim(10 + n, n) for n in (1, 2, 3))]
    view, me = view_of(claims), peer(2)
    others = {1, 2, 3}
    for left in others:
        exclude = others - {left}
        moved = should_move(view, grid_of(), me, rounds_on_path=2, dwell_rounds=2, exclude=exclude)
        assert moved.path == left
    for exclude in (others, {0, *others}):
        assert not should_move(view, grid_of(), me, rounds_on_path=2, dwell_rounds=2, exclude=exclude)
    assert choose_path(view, grid_of(), peer(9), exclude=others).path == 0
    assert choose_path(view, grid_of(), peer(9), exclude={0, *others}).path in others


class Swarm:
    """Peers that follow the policy, round by round, without a network.

    `stale` is the share of decisions made from the view at the round's end; the others see the
    moves made before theirs.
    """

    def __init__(self, grid, dwell_rounds, stale, seed):
        self.grid = grid
        self.dwell_rounds = dwell_rounds
        self.stale = stale
        self.random = random.Random(seed)
        self.round = 0
        self.claims = {}
        self.pinned = set()
        self.expires = {}
        self.rounds_on_path = {}
        self.last_rounds = {}
        self.born = 0

    def view(self):
        now_s = self.round * DURATION_S + self.random.random()
        return view_of(self.claims.values(), self.last_rounds, now_s)

    def join(self, pinned=None):
        me = peer(self.born)
        self.born += 1
        if pinned is not None:
            self.pinned.add(me)
        self._take(me, choose_path(self.view(), self.grid, me, pinned=pinned).path)

    def kill(self):
        """End a peer; its claim stands for another round."""
        self.expires[self.random.choice(sorted(self.rounds_on_path))] = self.round + 1
        self.rounds_on_path = {p: n for p, n in self.rounds_on_path.items() if p not in self.expires}

    def _take(self, me, path):
        since_s = self.round * DURATION_S + self.random.random()
        for _ in range(5):
            self.claims[me] = Claim(
                peer_id=me, path=path, state="joining", since_s=since_s, round=self.round, pinned=me in self.pinned
            )
            if me in self.pinned:
                break
            better = resolve_collision(self.view(), self.grid, me)
            if better is None:
                break
            path = better.path
        self.rounds_on_path[me] = 0

    def train(self):
        """Train one round, then think about moving in a random order."""
        for me in self.rounds_on_path:
            self.claims[me] = self.claims[me].model_copy(update={"state": "training", "round": self.round + 1})
            self.last_rounds[self.claims[me].path] = self.round
            self.rounds_on_path[me] += 1
        self.round += 1
        for me in [gone for gone, when in self.expires.items() if when <= self.round]:
            self.claims.pop(me, None)
            del self.expires[me]
        before = self.view()
        order = sorted(self.rounds_on_path)
        self.random.shuffle(order)
        for me in order:
            seen = before if self.random.random() < self.stale else self.view()
            move = should_move(
                seen, self.grid, me, rounds_on_path=self.rounds_on_path[me], dwell_rounds=self.dwell_rounds
            )
            if move is not None and me not in self.pinned:
                self._take(me, move.path)

    def longest_wait(self):
        """Rounds since the path that waited longest was trained."""
        paths = range(self.grid.path_count)
        return max(self.round - 1 - self.last_rounds.get(path, -1) for path in paths)


class DeceivedSwarm(Swarm):
    """One record says of every path that it was trained just now, and later than any other."""

    waiting: Mapping[int, int] = {}

    def view(self):
        lies = {p: 10**6 + self.round - p for p in range(self.grid.path_count)}
        plan = make_plan(duration_s=DURATION_S, start_s=0.0)
        now_s = self.round * DURATION_S + self.random.random()
        view = view_of(self.claims.values(), lies, now_s).watched(plan, self.grid, self.waiting)
        self.waiting = view.waiting
        return view


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(2, 2), (2, 3), (3, 3), (4, 4)]),
    peers=st.integers(1, 12),
    dwell_rounds=st.integers(1, 4),
    stale=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_whoever_says_that_all_paths_are_served_keeps_nobody_from_moving(shape, peers, dwell_rounds, stale, seed):
    grid = grid_of(shape)
    swarm = DeceivedSwarm(grid, dwell_rounds, stale, seed)
    for _ in range(peers):
        swarm.join()
    bound = (math.ceil(grid.path_count / peers) + 1) * dwell_rounds + 1
    for _ in range(4 * bound + 10):
        swarm.train()
        assert swarm.longest_wait() <= bound


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(2, 2), (2, 3), (3, 3), (2, 2, 2), (4, 4)]),
    peers=st.integers(1, 20),
    stale=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_no_path_waits_longer_than_its_turn(shape, peers, stale, seed):
    grid = grid_of(shape)
    swarm = Swarm(grid, dwell_rounds=1, stale=stale, seed=seed)
    for _ in range(peers):
        swarm.join()
    bound = math.ceil(grid.path_count / peers) + 1
    for _ in range(4 * bound + 10):
        swarm.train()
        assert swarm.longest_wait() <= bound


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(2, 2), (3, 3), (4, 4)]),
    peers=st.integers(1, 12),
    dwell_rounds=st.integers(1, 4),
    pinned=st.booleans(),
    stale=st.floats(0, 1),
    seed=st.integers(0, 2**16),
    events=st.lists(st.sampled_from(["join", "kill", "train", "train"]), max_size=25),
)
def test_paths_come_round_after_any_churn(shape, peers, dwell_rounds, pinned, stale, seed, events):
    grid = grid_of(shape)
    swarm = Swarm(grid, dwell_rounds, stale, seed)
    for number in range(peers):
        swarm.join(pinned=0 if pinned and number == 0 else None)
    for event in events:
        if event == "kill" and len(swarm.rounds_on_path) > 1:
            swarm.kill()
        elif event == "join":
            swarm.join()
        else:
            swarm.train()
    free = len(swarm.rounds_on_path) - len(swarm.pinned & set(swarm.rounds_on_path))
    if free == 0:
        return
    turns = math.ceil(grid.path_count / free) + 2
    for _ in range(3 * dwell_rounds + 6 + turns * dwell_rounds * 2):
        swarm.train()
    for _ in range(turns * dwell_rounds * 2):
        swarm.train()
        assert swarm.longest_wait() <= (turns + 1) * dwell_rounds


@settings(max_examples=40, deadline=None)
@given(extra=st.integers(0, 6), stale=st.floats(0, 1), seed=st.integers(0, 2**16))
def test_with_enough_peers_every_path_is_trained_every_round(extra, stale, seed):
    grid = grid_of((2, 3))
    swarm = Swarm(grid, dwell_rounds=2, stale=stale, seed=seed)
    for _ in range(grid.path_count + extra):
        swarm.join()
    for _ in range(8):
        swarm.train()
        assert swarm.longest_wait() == 0


def test_a_peer_that_never_moves_does_not_hold_up_the_others():
    swarm = Swarm(grid_of(), dwell_rounds=1, stale=0.0, seed=1)
    swarm.join(pinned=0)
    swarm.join()
    for _ in range(40):
        swarm.train()
    assert swarm.longest_wait() <= 4


# -- leads and groups


def test_the_oldest_claim_leads_and_a_tie_goes_to_the_smaller_peer_id():
    view = view_of([claim(1, 0, 5.0), claim(2, 0, 3.0), claim(3, 0, 5.0), claim(4, 1, 1.0)])
    assert [lead_rank(view, one, 0) for one in (peer(2), *sorted((peer(1), peer(3))))] == [0, 1, 2]
    assert lead_rank(view, peer(4), 0) == 3


def test_the_expected_group_is_who_trains_a_path_through_the_module():
    claims = [claim(0, 0), claim(1, 1), claim(2, 2), claim(3, 0, state="joining")]
    view = view_of([*claims, claim(4, 1, state="leaving")])
    assert view.group(grid_of(), "L0.E0", joining=False) == {peer(0), peer(1)}
    assert view.group(grid_of(), "L1.E0", joining=False) == {peer(0), peer(2)}
    assert view.group(grid_of((2, 2), private=True), "P1", joining=False) == {peer(1)}


def test_movers_that_see_different_paths_go_to_different_modules():
    grid = grid_of((64, 64))
    targets = set()
    for bucket in range(16):
        # Of this peer's bucket no other path has ever been trained.
        mine = claim(1, 64 * 62 + bucket, round_index=9)
        view = replace(view_of([mine], now_s=1000.0), scope=scope_of((), (bucket,), grid))
        decision = should_move(view, grid, peer(1), rounds_on_path=9, dwell_rounds=2)
        targets.add(grid.modules_of_path(decision.path)[0])
    assert len(targets) > 8
