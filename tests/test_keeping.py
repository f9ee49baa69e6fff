"""Who keeps copies: enough of them, and few that move when a peer comes or goes."""

from __future__ import annotations

from collections import Counter

import pytest
from dipaco.dht.keeping import keepers, modules_to_keep
from dipaco.dht.records import ClaimRecord, HoldingRecord, PeerRecord
from dipaco.dht.view import SwarmView
from dipaco.modules.config import GridConfig
from dipaco.modules.grid import Grid
from hypothesis import given, settings
from hypothesis import strategies as st
from support.make_plan import make_plan

COPIES = 3


@pytest.fixture(scope="module")
def grid() -> Grid:
    plan = make_plan(grid=GridConfig(modules_per_level=(2, 2), private_blocks=(3,)))
    return Grid(plan.model, plan.grid)


def name(number: int) -> str:
    return "Qm" + "1" * 42 + chr(ord("A") + number // 8) + chr(ord("a") + number % 8)


def holding(number: int, module: str, tokens: int = 9, digest: str = "a") -> HoldingRecord:
    return HoldingRecord(
        peer_id=name(number),
        module=module,
        version=1 if tokens else 0,
        digest=digest * 64,
        tokens=tokens,
        round=0,
        bytes=1,
    )


def peer(number: int, state: str = "training") -> PeerRecord:
    return PeerRecord.model_validate(
        {
            "peer_id": name(number),
            "protocol": 1,
            "software": "",
            "device": "",
            "state": state,
            "path": None,
            "tokens_per_s": 0.0,
            "round": 0,
            "reachable": "direct",
            "addresses": (),
            "bytes_up": 0,
            "bytes_down": 0,
        }
    )


def view_of(
    grid: Grid, trained: list[int], bystanders: int, holdings: dict[str, list[HoldingRecord]]
) -> SwarmView:
    """Peer n trains path `trained[n]`; the others only serve."""
    claims = [
        ClaimRecord(peer_id=name(n), path=path, state="training", since_s=0.0, round=0)
        for n, path in enumerate(trained)
    ]
    peers = [peer(n) for n in range(len(trained))]
    peers += [peer(len(trained) + n, "serving") for n in range(bystanders)]
    return SwarmView(
        now_s=0.0,
        claims={c.peer_id: c for c in claims},
        peers={p.peer_id: p for p in peers},
        holdings={module: tuple(found) for module, found in holdings.items()},
    )


@given(st.integers(1, 40), st.integers(1, 6), st.text(max_size=8))
def test_keepers_are_few_moves_away_from_one_another(count: int, copies: int, what: str) -> None:
    peers = [name(n) for n in range(count)]
    before = keepers(what, peers, copies)
    assert len(set(before)) == min(copies, count)
    assert keepers(what, [*peers[::-1], peers[0]], copies) == before
    joined = keepers(what, [*peers, name(63)], copies)
    assert len(set(before) - set(joined)) <= 1
    for gone in peers:
        left = keepers(what, [p for p in peers if p != gone], copies)
        assert set(before) - {gone} <= set(left)


def test_the_load_is_spread() -> None:
    peers = [name(n) for n in range(16)]
    load = Counter(peer for n in range(200) for peer in keepers(f"P{n}", peers, COPIES))
    assert len(load) == 16
    assert max(load.values()) < 3 * min(load.values())


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=10), st.integers(0, 6))
def test_every_module_has_enough_holders_when_there_are_enough_peers(
    trained: list[int], bystanders: int
) -> None:
    plan = make_plan(grid=GridConfig(modules_per_level=(2, 2), private_blocks=(3,)))
    grid = Grid(plan.model, plan.grid)
    trainers = {
        module: {n for n, path in enumerate(trained) if path in grid.paths_of_module(module)}
        for module in grid.modules()
    }
    held = {m: [holding(min(ns), m)] for m, ns in trainers.items() if ns}
    view = view_of(grid, trained, bystanders, held)
    count = len(trained) + bystanders
    keeping = {
        n: {h.module for h in modules_to_keep(view, grid, name(n), COPIES)} for n in range(count)
    }
    for module in held:
        copying = {n for n, modules in keeping.items() if module in modules}
        assert not copying & trainers[module]
        assert len(copying | trainers[module]) == max(len(trainers[module]), min(COPIES, count))


def test_a_leaving_peer_keeps_nothing_new(grid: Grid) -> None:
    view = view_of(grid, [0], 4, {"P0": [holding(0, "P0")]})
    peers = {**view.peers, name(1): peer(1, "leaving")}
    view = SwarmView(now_s=0.0, claims=view.claims, peers=peers, holdings=view.holdings)
    wanted = [n for n in range(5) if modules_to_keep(view, grid, name(n), COPIES)]
    assert 1 not in wanted
    assert len(wanted) == COPIES - 1


def test_genesis_needs_no_copies_and_the_heaviest_is_copied(grid: Grid) -> None:
    light, heavy = holding(0, "P0", 5, "a"), holding(4, "P0", 7, "b")
    view = view_of(grid, [0], 2, {"P0": [light, heavy], "P1": [holding(0, "P1", 0)]})
    kept = (heavy.reference,)
    assert [modules_to_keep(view, grid, name(n), COPIES) for n in (1, 2)] == [kept, kept]


def test_a_state_that_nobody_can_have_does_not_stop_the_true_one(grid: Grid) -> None:
    true, invented = holding(0, "P0", 5, "a"), holding(4, "P0", 9999, "b")
    view = view_of(grid, [0], 2, {"P0": [true, invented]})
    assert modules_to_keep(view, grid, name(1), COPIES) == (invented.reference,)
    found = modules_to_keep(view, grid, name(1), COPIES, unavailable={invented.digest})
    assert found == (true.reference,)
    both = {true.digest, invented.digest}
    assert modules_to_keep(view, grid, name(1), COPIES, unavailable=both) == ()
