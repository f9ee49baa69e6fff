"""The view of the swarm: what a run cannot have is left out, whoever signed it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dipaco.dht.agreement import (
    awaited_group,
    is_overtaken,
    round_of_others,
    trained_in_sight,
)
from dipaco.dht.records import (
    Claim,
    HeldState,
    Holding,
    ModuleRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
)
from dipaco.dht.view import (
    SwarmView,
    build_view,
    claimed_tokens,
    greatest_contribution,
    plausible_state,
    present_round,
    round_at,
    view_of_records,
)
from dipaco.modules.config import RoundsConfig
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from support.make_plan import make_plan

PEERS = tuple("Qm" + "1" * 43 + letter for letter in "ABC")


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return make_plan(duration_s=100.0)


@pytest.fixture(scope="module")
def grid(plan: RunPlan) -> Grid:
    return Grid(plan.model, plan.grid)


def claim(peer: str, path: int, **fields: object) -> Claim:
    values = {"peer_id": peer, "path": path, "state": "training", "since_s": 1.0, "round": 0}
    return Claim.model_validate({**values, **fields})


def holding(**fields: object) -> Holding:
    values = {
        "peer_id": PEERS[0],
        "module": "L0.E0",
        "version": 3,
        "digest": "a" * 64,
        "tokens": 3000,
        "round": 3,
        "bytes": 10,
    }
    return Holding.model_validate({**values, **fields})


def progress(peer: str, path: int, last_round: int, tokens: int = 100) -> ProgressRecord:
    entry = ProgressEntry(
        path=path,
        last_round=last_round,
        tokens=tokens,
        validation_nll=20.0,
        validation_tokens=10,
        train_loss=2.0,
    )
    return ProgressRecord(peer_id=peer, entries=(entry,))


def view_at(plan: RunPlan, grid: Grid, round_index: int, **records: object) -> SwarmView:
    given: dict[str, object] = {
        "claims": (),
        "peers": (),
        "holdings": {},
        "progress": (),
        **records,
    }
    now_s = plan.start_s + (round_index + 0.5) * plan.rounds.duration_s
    return build_view(now_s=now_s, plan=plan, grid=grid, **given)  # type: ignore[arg-type]


def peer_said(peer: str, path: int | None, state: str = "training", **said: Any) -> PeerRecord:
    """Return a peer record of a peer that does something."""
    given = {"since_s": 1.0, "round": 0, "reachable": "direct", **said}
    return PeerRecord.model_construct(peer_id=peer, path=path, state=state, **given)


def module_said(
    peer: str, module: str, path: int | None, state: str = "training", **said: Any
) -> ModuleRecord:
    """Return what a peer says under the key of a module."""
    given = {"since_s": 1.0, "round": 0, "reachable": "direct", "held": None, **said}
    return ModuleRecord.model_construct(
        peer_id=peer, module=module, path=path, state=state, **given
    )


def test_of_all_that_a_peer_says_the_newest_counts(plan: RunPlan, grid: Grid) -> None:
    held = HeldState(version=1, digest="a" * 64, tokens=3, round=0, bytes=1)

    def seen(peers: list[PeerRecord], *modules: ModuleRecord) -> SwarmView:
        by_module: dict[str, list[ModuleRecord]] = {}
        for said in modules:
            by_module.setdefault(said.module, []).append(said)
        return view_of_records(
            now_s=plan.start_s + 150.0,
            plan=plan,
            grid=grid,
            peers=peers,
            modules=by_module,
            progress=(),
        )

    moved = seen(
        [peer_said("A", 0), peer_said("B", 1, round=0), peer_said("B", 1, round=1)],
        module_said("A", "L0.E1", 2, "joining", since_s=2.0),
        module_said("A", "L0.E0", 0),
        module_said("K", "L0.E0", None, "serving", since_s=0.0, held=held),
        module_said("C", "L0.E0", 1),
    )
    assert {p: (c.path, c.state, c.round) for p, c in moved.claims.items()} == {
        "A": (2, "joining", 0),
        "B": (1, "training", 1),
        "C": (1, "training", 0),
    }
    assert set(moved.peers) == {"A", "B"}
    assert [h.peer_id for h in moved.holdings["L0.E0"]] == ["K"]
    left = seen([peer_said("A", 0, "leaving")], module_said("A", "L0.E0", 0))
    assert left.claimants(0) == ()
    trains = seen([peer_said("A", 0, "joining")], module_said("A", "L0.E0", 0))
    assert trains.claims["A"].state == "training"


def test_the_round_follows_the_clock(plan: RunPlan) -> None:
    assert [round_at(plan, plan.start_s + s) for s in (-0.1, 0.0, 99.9, 100.0)] == [-1, 0, 0, 1]


def test_claims_on_paths_that_do_not_exist_are_left_out(plan: RunPlan, grid: Grid) -> None:
    view = view_at(plan, grid, 0, claims=(claim(PEERS[0], 3), claim(PEERS[1], 4)))
    assert set(view.claims) == {PEERS[0]}


def test_claimants_are_ordered_by_age_and_leaving_ones_are_none(plan: RunPlan, grid: Grid) -> None:
    claims = (
        claim(PEERS[0], 1, since_s=9.0),
        claim(PEERS[1], 1, since_s=2.0, state="joining"),
        claim(PEERS[2], 1, since_s=1.0, state="leaving"),
    )
    view = view_at(plan, grid, 0, claims=claims)
    assert [c.peer_id for c in view.claimants(1)] == [PEERS[1], PEERS[0]]
    assert view.claimants(0) == ()


@pytest.mark.parametrize(
    ("fields", "plausible"),
    [
        ({}, True),
        ({"version": 0, "tokens": 0, "round": 0}, True),
        ({"version": 0, "tokens": 1}, False),
        ({"version": 10}, True),
        ({"version": 50}, False),
        ({"round": 50}, False),
        ({"tokens": 2**52}, False),
    ],
)
def test_states_that_the_time_does_not_allow_are_not_believed(
    plan: RunPlan, grid: Grid, fields: dict[str, object], plausible: bool
) -> None:
    record = holding(**fields)
    now_s = plan.start_s + 5 * plan.rounds.duration_s
    assert plausible_state(record.reference, plan, grid, now_s) is plausible
    view = view_at(plan, grid, 5, holdings={"L0.E0": (record,), "L9.E9": (record,)})
    assert view.holdings == {"L0.E0": (record,) if plausible else ()}


def test_with_fixed_steps_the_round_bounds_versions_and_tokens(grid: Grid) -> None:
    plan = make_plan(rounds=RoundsConfig(duration_s=100.0, inner_steps=2))
    steps_tokens = 2 * plan.inner.batch_sequences * plan.model.sequence_length

    def believed(now_s: float = plan.start_s + 10.0, **fields: object) -> bool:
        return plausible_state(holding(**fields).reference, plan, grid, now_s)

    # 51 rounds in a tenth of duration_s: nobody waits for the clock.
    honest = 51 * steps_tokens * 2
    assert believed(version=51, round=50, tokens=honest)
    assert not believed(version=51, round=50, tokens=honest * 1000)
    assert not believed(version=52, round=50, tokens=honest)
    assert not believed(version=1, round=5000, tokens=honest)
    assert believed(plan.start_s + 100.0, version=1, round=5000, tokens=honest)


def test_with_fixed_steps_rounds_are_what_the_trainers_say(grid: Grid) -> None:
    plan = make_plan(rounds=RoundsConfig(duration_s=100.0, inner_steps=2))
    now_s = plan.start_s + 5.0

    def view(*rounds: int) -> SwarmView:
        claims = [claim(peer, 0, round=r) for peer, r in zip(PEERS, rounds, strict=False)]
        return build_view(
            now_s=now_s, plan=plan, grid=grid, claims=claims, peers=(), holdings={}, progress=()
        )

    assert present_round(plan, view()) == -1
    assert present_round(plan, view(7, 8, 8)) == 8
    # One that cannot have come is no claim, and a possible one does not move the middle.
    assert set(view(7, 8, 10**6).claims) == set(PEERS[:2])
    assert present_round(plan, view(7, 8, 300)) == 8
    later = view(7, 8, 300)
    assert awaited_group(later, grid, "L0.E0", 7) == {PEERS[0]}
    assert awaited_group(later, grid, "L0.E0", 8) == {PEERS[0], PEERS[1]}
    assert round_of_others(later, grid, 1, PEERS[2]) == 8
    assert round_of_others(later, grid, 3, PEERS[2]) == 0
    assert trained_in_sight(later, grid, 0) == (1, 4)
    # Half of the others have to say that they went on.
    heavier = [holding(peer_id=PEERS[1], tokens=10)]
    known = replace(later, holdings={"L0.E0": tuple(heavier)})
    assert is_overtaken(known, grid, "L0.E0", PEERS[0], lambda held: held.tokens > 9)
    assert not is_overtaken(known, grid, "L0.E0", PEERS[0], lambda held: held.tokens > 10)
    alone = replace(known, holdings={"L0.E0": tuple(holding(peer_id=p) for p in PEERS[:1])})
    assert not is_overtaken(alone, grid, "L0.E0", PEERS[0], lambda held: held.tokens > 0)


def test_the_newest_progress_of_a_path_counts(plan: RunPlan, grid: Grid) -> None:
    records = (
        progress(PEERS[0], 1, 4, tokens=500),
        progress(PEERS[1], 1, 6, tokens=300),
        progress(PEERS[2], 1, 6, tokens=400),
        progress(PEERS[2], 2, 90),
        progress(PEERS[2], 77, 1),
    )
    view = view_at(plan, grid, 6, progress=records)
    assert set(view.progress) == {1}
    assert (view.last_round(1), view.progress[1].tokens) == (6, 400)
    assert view.progress[1].validation_loss == pytest.approx(2.0)
    assert view.last_round(0) == -1
    shuffled = view_at(plan, grid, 6, progress=records[::-1])
    assert shuffled.progress == view.progress


def test_peers_are_found_by_id(plan: RunPlan, grid: Grid) -> None:
    record = PeerRecord(
        peer_id=PEERS[0],
        protocol=1,
        software="dipaco/test",
        device="cpu",
        state="serving",
        path=None,
        tokens_per_s=0.0,
        round=0,
        reachable="unknown",
        addresses=(),
        bytes_up=0,
        bytes_down=0,
    )
    assert view_at(plan, grid, 0, peers=(record,)).peers == {PEERS[0]: record}


def test_with_fixed_steps_nobody_comes_with_more_tokens_than_others_can_believe() -> None:
    """Rounds that came to nothing for one peer may have taken the others no round."""
    counted = make_plan(rounds=RoundsConfig(inner_steps=4))
    a_round = greatest_contribution(counted, 0.0, 1) - greatest_contribution(counted, 0.0, 0)
    assert claimed_tokens(counted, a_round, 0) == a_round
    assert claimed_tokens(counted, 9 * a_round, 1) == greatest_contribution(counted, 0.0, 1)
    assert claimed_tokens(make_plan(), 10**12, 1) == 10**12
