"""Which group may commit and which state wins: the same answer on every peer."""

from __future__ import annotations

import itertools

import pytest
from dipaco.dht.agreement import enough_for_commit, expected_group, winning_state
from dipaco.dht.records import ClaimRecord
from dipaco.dht.view import SwarmView
from dipaco.modules.config import GridConfig
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference
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


def announced(tokens: int, digest: str, version: int = 1, last_round: int = 0) -> StateReference:
    return StateReference("L0.E0", version, digest * 64, tokens, last_round, bytes=1)


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


def test_the_winner_does_not_depend_on_the_order(plan: RunPlan, grid: Grid) -> None:
    view = SwarmView(now_s=plan.start_s + 250.0)
    found = [announced(10, "c"), announced(20, "b"), announced(20, "a"), announced(5, "f")]
    winners = {
        winning_state(order, own=announced(10, "d"), view=view, grid=grid, plan=plan)
        for order in itertools.permutations(found)
    }
    assert winners == {found[2]}


@pytest.mark.parametrize(
    "invented",
    [
        announced(2**53, "a"),
        announced(100, "a", version=1000),
        announced(100, "a", last_round=1000),
        announced(100, "a", version=0),
    ],
)
def test_what_the_time_does_not_allow_is_not_believed(
    plan: RunPlan, grid: Grid, invented: StateReference
) -> None:
    view = SwarmView(now_s=plan.start_s + 250.0)
    honest, own = announced(50, "b"), announced(1, "c")
    found = winning_state([invented, honest], own=own, view=view, grid=grid, plan=plan)
    assert found == honest
    assert winning_state([invented], own=own, view=view, grid=grid, plan=plan) is None


def test_nothing_replaces_a_state_as_heavy_with_a_smaller_digest(plan: RunPlan, grid: Grid) -> None:
    view = SwarmView(now_s=plan.start_s + 250.0)
    others = [announced(20, "b"), announced(19, "0"), announced(20, "a")]
    assert winning_state(others, own=announced(20, "a"), view=view, grid=grid, plan=plan) is None
