"""Newcomers that met on one path, peers that never move, and peers that see each other late."""

from __future__ import annotations

import math
import random

import pytest
from dipaco.dht.policy import choose_path, resolve_collision, should_move
from dipaco.dht.records import Claim
from dipaco.dht.view import PathService, SwarmView
from dipaco.modules.config import GridConfig, ModelConfig
from dipaco.modules.grid import Grid
from hypothesis import given, settings
from hypothesis import strategies as st

DURATION_S = 100.0
PEERS = tuple("Qm" + "1" * 42 + a + b for a in "ABCDEF" for b in "abcdefgh")


def grid_of(*modules_per_level: int) -> Grid:
    model = ModelConfig(
        vocabulary_size=64, block_count=4, hidden_size=8, head_count=1, sequence_length=16
    )
    starts = tuple(range(len(modules_per_level)))
    return Grid(model, GridConfig(modules_per_level=modules_per_level, level_starts=starts))


EIGHT = grid_of(2, 2, 2)


def claim(number: int, path: int, state: str = "training", **fields: object) -> Claim:
    values = {"peer_id": PEERS[number], "path": path, "state": state, "since_s": float(number)}
    return Claim.model_validate({**values, "round": 0, **fields})


def view_of(claims: list[Claim], last_rounds: dict[int, int] | None = None) -> SwarmView:
    return SwarmView(
        now_s=10 * DURATION_S,
        claims={c.peer_id: c for c in claims},
        progress={p: PathService(r, 1, 1.0, 1, 1.0) for p, r in (last_rounds or {}).items()},
        duration_s=DURATION_S,
    )


def looks_until_settled(
    grid: Grid, settled: list[Claim], newcomers: int, last_rounds: dict[int, int]
) -> tuple[int, list[int]]:
    """Let newcomers choose at once, unseen by each other, then look together, again and again."""
    first = len(settled)
    numbers = range(first, first + newcomers)
    chosen = {n: choose_path(view_of(settled, last_rounds), grid, PEERS[n]).path for n in numbers}
    for looks in range(1, 20):
        view = view_of(
            settled + [claim(n, path, "joining") for n, path in chosen.items()], last_rounds
        )
        moves = {n: resolve_collision(view, grid, PEERS[n]) for n in numbers}
        if not any(moves.values()):
            return looks, list(chosen.values())
        chosen = {n: move.path if (move := moves[n]) else chosen[n] for n in numbers}
    raise AssertionError("they never settle")


@settings(max_examples=100, deadline=None)
@given(
    trained=st.lists(st.integers(0, 7), max_size=8),
    newcomers=st.integers(1, 24),
    ages=st.permutations(range(8)),
    fresh=st.booleans(),
)
def test_newcomers_that_see_each_other_late_spread_within_three_looks(
    trained: list[int], newcomers: int, ages: list[int], fresh: bool
) -> None:
    """The worst case: paths of different ages, so all newcomers choose the same one at first."""
    settled = [claim(n, path) for n, path in enumerate(trained)]
    last_rounds = {} if fresh else dict(enumerate(ages))
    looks, chosen = looks_until_settled(EIGHT, settled, newcomers, last_rounds)
    assert looks <= 5  # Of which the last only confirms; `MAX_LOOKS` of a peer.
    counts = [trained.count(path) + chosen.count(path) for path in range(8)]
    unserved = counts.count(0)
    assert unserved == 0 or max(counts[path] for path in chosen) == 1


def test_a_crowd_on_one_path_parts_at_the_first_look() -> None:
    crowd = [claim(n, 3, "joining") for n in range(8)]
    view = view_of(crowd, {path: 10 + path for path in range(8)})
    ends = [
        move.path if (move := resolve_collision(view, EIGHT, PEERS[n])) else 3 for n in range(8)
    ]
    assert sorted(ends) == list(range(8))


def test_two_newcomers_to_a_fresh_swarm_rarely_collide() -> None:
    chosen = [choose_path(view_of([]), EIGHT, peer).path for peer in PEERS]
    pairs = [(a, b) for i, a in enumerate(chosen) for b in chosen[:i]]
    assert sum(a == b for a, b in pairs) < len(pairs) / 4


def test_nobody_gives_way_to_a_peer_that_is_not_seen() -> None:
    view = view_of([claim(1, 3, "joining")])
    assert resolve_collision(view, EIGHT, PEERS[1]) is None
    assert resolve_collision(view, EIGHT, PEERS[2]) is None


def test_a_pinned_newcomer_keeps_its_path_and_the_other_gives_way() -> None:
    view = view_of([claim(1, 3, "joining", pinned=True), claim(2, 3, "joining")])
    decision = resolve_collision(view, EIGHT, PEERS[2])
    assert decision is not None
    assert decision.path != 3


@pytest.mark.parametrize("pinned", [0, 1])
def test_a_pinned_replica_is_not_waited_for(pinned: int) -> None:
    """Path 1 lost its trainer; of the two on path 0 the one that may move does."""
    grid = grid_of(2)
    view = view_of([claim(n, 0, pinned=n == pinned) for n in range(2)])
    free = 1 - pinned
    decision = should_move(view, grid, PEERS[free], rounds_on_path=0, dwell_rounds=2)
    assert decision is not None
    assert decision.path == 1


def test_a_pinned_lead_does_not_take_a_turn() -> None:
    view = view_of([claim(0, 0, pinned=True), claim(1, 1, round=9)], {0: 8, 1: 8})
    decision = should_move(view, grid_of(2, 2), PEERS[1], rounds_on_path=1, dwell_rounds=1)
    assert decision is not None
    assert decision.path == 2


def test_a_lead_that_never_moves_and_does_not_say_so_is_not_waited_for_for_ever() -> None:
    """Three leads, one path that waits: within some rounds it is another's turn."""
    claims = [claim(n, n, round=9, since_s=0.0) for n in range(3)]
    movers = set()
    for round_index in range(10, 40):
        view = SwarmView(
            now_s=round_index * DURATION_S,
            claims={c.peer_id: c for c in claims},
            duration_s=DURATION_S,
        )
        for n in range(3):
            if should_move(view, grid_of(2, 2), PEERS[n], rounds_on_path=9, dwell_rounds=1):
                movers.add(n)
    assert movers == {0, 1, 2}


@settings(max_examples=100, deadline=None)
@given(
    paths=st.lists(st.integers(0, 7), min_size=8, max_size=20),
    pinned=st.sets(st.integers(0, 19), max_size=3),
)
def test_with_enough_peers_a_move_leaves_no_path_alone(paths: list[int], pinned: set[int]) -> None:
    """Everybody decides from one view at the same moment."""
    claims = [claim(n, path, pinned=n in pinned) for n, path in enumerate(paths)]
    view = view_of(claims)
    spare = sum(max(0, paths.count(path) - 1) for path in range(8))
    after, targets = list(paths), []
    for n in range(len(paths)):
        move = should_move(view, EIGHT, PEERS[n], rounds_on_path=1, dwell_rounds=2)
        if move is not None and n not in pinned:
            after[n] = move.path
            targets.append(move.path)
    assert len(targets) == len(set(targets))
    unserved = 8 - len(set(paths))
    if spare >= unserved and not pinned:
        assert set(after) == set(range(8))
    assert set(paths) <= set(after)


@pytest.mark.parametrize("seed", range(8))
def test_three_peers_on_eight_paths_train_them_all_in_turn(seed: int) -> None:
    """Dwell 1: no path waits more than ceil(8/3) + 1 rounds, though all move at the same time."""
    shuffle = random.Random(seed)
    bound = math.ceil(8 / 3) + 1
    names = shuffle.sample(range(len(PEERS)), 3)
    at: dict[int, tuple[int, float]] = {}
    last_rounds: dict[int, int] = {}

    def see(now_round: int) -> SwarmView:
        claims = [
            claim(n, path, since_s=since_s, round=now_round) for n, (path, since_s) in at.items()
        ]
        return view_of(claims, last_rounds)

    for n in names:
        at[n] = choose_path(see(0), EIGHT, PEERS[n]).path, shuffle.random()
    for round_index in range(40):
        for path, _ in at.values():
            last_rounds[path] = round_index
        for path in range(8):
            assert round_index - last_rounds.get(path, -1) <= bound
        view = see(round_index + 1)
        for n in names:
            move = should_move(view, EIGHT, PEERS[n], rounds_on_path=1, dwell_rounds=1)
            if move is not None:
                at[n] = move.path, round_index + 1 + shuffle.random()
        assert len({path for path, _ in at.values()}) == 3
