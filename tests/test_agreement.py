"""Which group may commit and which state wins: the same answer on every peer."""

from __future__ import annotations

import itertools

import pytest
from dipaco.dht.agreement import better_state, enough_for_commit, expected_group, winning_state
from dipaco.dht.records import ClaimRecord, HoldingRecord
from dipaco.dht.view import SwarmView
from dipaco.modules.config import GridConfig
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from hypothesis import given
from hypothesis import strategies as st
from support.make_plan import make_plan

PEERS = tuple("Qm" + "1" * 43 + letter for letter in "ABCDEFGH")


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return make_plan(
        duration_s=100.0, grid=GridConfig(modules_per_level=(2, 2), private_blocks=(3,))
    )


@pytest.fixture(scope="module")
def grid(plan: RunPlan) -> Grid:
    return Grid(plan.model, plan.grid)


def claim(number: int, path: int, state: str = "training") -> ClaimRecord:
    return ClaimRecord.model_validate(
        {"peer_id": PEERS[number], "path": path, "state": state, "since_s": 1.0, "round": 0}
    )


def holding(number: int, tokens: int, digest: str, **fields: object) -> HoldingRecord:
    values = {"version": 1, "round": 0, "bytes": 1, "module": "L0.E0", **fields}
    return HoldingRecord.model_validate(
        {"peer_id": PEERS[number], "tokens": tokens, "digest": digest * 64, **values}
    )


def test_everybody_who_trains_through_a_module_is_expected(grid: Grid) -> None:
    claims = [claim(0, 0), claim(1, 1), claim(2, 3), claim(3, 0, "joining"), claim(4, 0, "leaving")]
    view = SwarmView(now_s=0.0, claims={c.peer_id: c for c in claims})
    assert expected_group(view, grid, "L0.E0") == {PEERS[0], PEERS[1]}
    assert expected_group(view, grid, "L1.E1") == {PEERS[1], PEERS[2]}
    assert expected_group(view, grid, "P3") == {PEERS[2]}
    assert expected_group(view, grid, "P2") == frozenset()


@pytest.mark.parametrize(
    ("group", "expected", "enough"),
    [(1, 1, True), (1, 2, True), (1, 3, False), (2, 4, True), (2, 5, False), (3, 1, True)],
)
def test_half_is_enough(group: int, expected: int, enough: bool) -> None:
    assert enough_for_commit(group, expected) is enough


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from("abc"), st.sampled_from("abc"))
def test_the_order_of_states_is_strict_and_total(a: int, b: int, x: str, y: str) -> None:
    assert not better_state((a, x), (a, x))
    if (a, x) != (b, y):
        assert better_state((a, x), (b, y)) != better_state((b, y), (a, x))


def test_the_winner_does_not_depend_on_the_order(plan: RunPlan, grid: Grid) -> None:
    view = SwarmView(now_s=plan.start_s + 250.0)
    found = [holding(0, 10, "c"), holding(1, 20, "b"), holding(2, 20, "a"), holding(3, 5, "f")]
    winners = {
        winning_state(order, own=(10, "d" * 64), view=view, grid=grid, plan=plan)
        for order in itertools.permutations(found)
    }
    assert winners == {found[2]}


@pytest.mark.parametrize(
    "invented",
    [
        holding(0, 2**53, "a"),
        holding(0, 100, "a", version=1000),
        holding(0, 100, "a", round=1000),
        holding(0, 100, "a", version=0),
    ],
)
def test_what_the_time_does_not_allow_is_not_believed(
    plan: RunPlan, grid: Grid, invented: HoldingRecord
) -> None:
    view = SwarmView(now_s=plan.start_s + 250.0)
    honest = holding(1, 50, "b")
    found = winning_state([invented, honest], own=(1, "c"), view=view, grid=grid, plan=plan)
    assert found == honest
    assert winning_state([invented], own=(1, "c"), view=view, grid=grid, plan=plan) is None


def test_nothing_replaces_a_state_as_heavy_with_a_smaller_digest(plan: RunPlan, grid: Grid) -> None:
    view = SwarmView(now_s=plan.start_s + 250.0)
    others = [holding(0, 20, "b"), holding(1, 19, "0"), holding(2, 20, "a")]
    assert winning_state(others, own=(20, "a" * 64), view=view, grid=grid, plan=plan) is None
