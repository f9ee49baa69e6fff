"""Who comes to a module's outer step: the same answer on every peer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dipaco.dht.agreement import (
    awaited_group,
    expected_group,
    is_overtaken,
    possible_group,
    round_of_others,
    trained_in_sight,
)
from dipaco.dht.records import Claim, Holding
from dipaco.dht.view import SwarmView
from dipaco.modules.config import GridConfig
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
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


def claim(number: int, path: int, state: str = "training", round_index: int = 0) -> Claim:
    return Claim.model_validate(
        {
            "peer_id": PEERS[number],
            "path": path,
            "state": state,
            "since_s": 1.0,
            "round": round_index,
        }
    )


def view_of(*claims: Claim, **fields: Any) -> SwarmView:
    return SwarmView(now_s=0.0, claims={c.peer_id: c for c in claims}, **fields)


def test_everybody_who_trains_through_a_module_is_expected(grid: Grid) -> None:
    claims = [claim(0, 0), claim(1, 1), claim(2, 3), claim(3, 0, "joining"), claim(4, 0, "leaving")]
    view = view_of(*claims)
    assert expected_group(view, grid, "L0.E0") == {PEERS[0], PEERS[1]}
    assert expected_group(view, grid, "L1.E1") == {PEERS[1], PEERS[2]}
    assert expected_group(view, grid, "P3") == {PEERS[2]}
    assert expected_group(view, grid, "P2") == frozenset()


def test_who_is_about_to_train_may_come(grid: Grid) -> None:
    view = view_of(claim(0, 0), claim(3, 1, "joining"), claim(4, 0, "leaving"))
    assert possible_group(view, grid, "L0.E0") == {PEERS[0], PEERS[3]}


def test_with_fixed_steps_who_is_in_a_later_round_is_not_waited_for(grid: Grid) -> None:
    view = view_of(*(claim(n, 0, round_index=n) for n in range(4)))
    assert awaited_group(view, grid, "L0.E0", 2) == set(PEERS[:3])


def test_a_peer_goes_on_in_the_round_of_those_that_share_its_modules(grid: Grid) -> None:
    view = view_of(claim(0, 0, round_index=3), claim(1, 1, round_index=5), claim(2, 3))
    assert round_of_others(view, grid, 0, PEERS[7]) == 5
    assert round_of_others(view, grid, 0, PEERS[1]) == 3
    assert round_of_others(view, grid, 2, PEERS[0]) == 0


def test_a_path_is_trained_by_those_that_train_it(grid: Grid) -> None:
    assert trained_in_sight(view_of(claim(0, 0), claim(1, 2, "joining")), grid, 0) == (1, 4)


@pytest.mark.parametrize(("ahead", "overtaken"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_few_who_say_that_they_are_ahead_overtake_nobody(
    grid: Grid, ahead: int, overtaken: bool
) -> None:
    held = tuple(
        Holding(
            peer_id=PEERS[n],
            module="L0.E0",
            version=2,
            digest="a" * 64,
            tokens=11,
            round=1,
            bytes=1,
        )
        for n in range(ahead)
    )
    view = view_of(*(claim(n, 0) for n in range(5)), holdings={"L0.E0": held})
    assert is_overtaken(view, grid, "L0.E0", PEERS[4], lambda held: held.tokens > 10) is overtaken


def test_a_view_at_another_moment_has_the_same_groups(grid: Grid) -> None:
    module = grid.modules_of_path(1)[0]
    view = SwarmView(now_s=5.0, claims={PEERS[0]: claim(0, 1)}, duration_s=100.0)
    assert expected_group(view, grid, module) == {PEERS[0]}
    later = view.at(205.0)
    assert (later.now_s, later.claims, view.now_s) == (205.0, view.claims, 5.0)
    assert expected_group(later, grid, module) == {PEERS[0]}
    assert later.rounds_held(later.claims[PEERS[0]]) > view.rounds_held(view.claims[PEERS[0]])
    without = replace(later, claims={})
    assert expected_group(without, grid, module) == frozenset()
