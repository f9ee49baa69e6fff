"""The view of the swarm: what a run cannot have is left out, no matter who signed it."""

import pytest

from dipaco.protocol.chain.steps import Head, Row
from dipaco.protocol.config import RoundsConfig
from dipaco.protocol.grid import Grid
from dipaco.protocol.records import Claim, HeldState, Holding, ModuleRecord, PeerRecord, ProgressEntry, ProgressRecord
from dipaco.protocol.view import (
    build_view,
    claimed_tokens,
    is_plausible_head,
    is_plausible_row,
    max_contribution_tokens,
    present_round,
    view_of_records,
)
from support.runs.make_plan import make_plan

PEERS = tuple("Qm" + "1" * 43 + letter for letter in "ABC")


@pytest.fixture(scope="module")
def plan():
    return make_plan(duration_s=100.0)


@pytest.fixture(scope="module")
def grid(plan):
    return Grid(plan.model, plan.grid)


def claim(peer, path, **fields):
    values = {"peer_id": peer, "path": path, "state": "training", "since_s": 1.0, "round": 0}
    return Claim.model_validate({**values, **fields})


def head(**fields):
    given = {
        "module": "L0.E0",
        "step": "b" * 64,
        "version": 3,
        "weight": 5,
        "round_index": 3,
        "digest": "a" * 64,
        "bytes": 10,
    }
    return Head(**{**given, **fields})


def holding(peer=PEERS[0], **fields):
    return Holding(peer, head(**fields))


def progress(peer, path, last_round, tokens=100):
    entry = ProgressEntry(
        path=path, last_round=last_round, tokens=tokens, validation_nll=20.0, validation_tokens=10, train_loss=2.0
    )
    return ProgressRecord(peer_id=peer, entries=(entry,))


def view_at(plan, grid, round_index, **records):
    given = {"claims": (), "peers": (), "holdings": {}, "progress": (), **records}
    now_s = plan.start_s + (round_index + 0.5) * plan.rounds.duration_s
    return build_view(now_s=now_s, plan=plan, grid=grid, **given)


def peer_said(peer, path, state="training", **said):
    """Return a peer record of a peer that does something."""
    given = {"since_s": 1.0, "round": 0, "reachable": "direct", **said}
    return PeerRecord.model_construct(peer_id=peer, path=path, state=state, **given)


def module_said(peer, module, path, state="training", **said):
    """Return what a peer says under the key of a module."""
    given = {"since_s": 1.0, "round": 0, "reachable": "direct", "held": None, **said}
    return ModuleRecord.model_construct(peer_id=peer, module=module, path=path, state=state, **given)


def test_of_all_that_a_peer_says_the_newest_counts(plan, grid):
    held = HeldState.of(head(version=1, weight=1, round_index=0))

    def seen(peers, *modules):
        by_module = {}
        for said in modules:
            by_module.setdefault(said.module, []).append(said)
        return view_of_records(
            now_s=plan.start_s + 150.0, plan=plan, grid=grid, peers=peers, modules=by_module, progress=()
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


def test_the_round_follows_the_clock(plan):
    assert [plan.rounds.round_at(s) for s in (-0.1, 0.0, 99.9, 100.0)] == [-1, 0, 0, 1]


def test_claims_on_paths_that_do_not_exist_are_left_out(plan, grid):
    view = view_at(plan, grid, 0, claims=(claim(PEERS[0], 3), claim(PEERS[1], 4)))
    assert set(view.claims) == {PEERS[0]}


def test_claimants_are_ordered_by_age_and_leaving_ones_are_none(plan, grid):
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
        ({"version": 0, "weight": 0, "round_index": -1}, True),
        ({"version": 0, "weight": 7, "round_index": -1}, False),
        ({"version": 9}, False),
        ({"round_index": 50}, False),
        ({"weight": 2}, False),
        ({"weight": 64 * 3 + 1}, False),
    ],
)
def test_states_that_the_time_does_not_allow_are_not_believed(plan, grid, fields, plausible):
    said = holding(**fields)
    now_s = plan.start_s + 5 * plan.rounds.duration_s
    assert is_plausible_head(said.head, plan, now_s) is plausible
    view = view_at(plan, grid, 5, holdings={"L0.E0": (said,), "L9.E9": (said,)})
    assert view.holdings == {"L0.E0": (said,) if plausible else ()}


def test_of_the_states_after_one_step_the_one_that_most_hold_counts(plan, grid):
    held = (holding(PEERS[0]), holding(PEERS[1]), holding(PEERS[2], digest="0" * 64))
    light = holding(PEERS[2], step="0" * 64, weight=4)
    view = view_at(plan, grid, 5, holdings={"L0.E0": (*held, light)})
    assert view.agreed_head("L0.E0", "b" * 64) == head()
    assert view.heaviest("L0.E0") == head()
    assert view.holders("L0.E0", "b" * 64) == PEERS
    assert view.agreed_head("L0.E0", "c" * 64) is None


def test_a_row_says_no_more_than_can_have_been_trained(plan):
    now_s = plan.start_s + 5 * plan.rounds.duration_s

    def believed(round_index, tokens):
        row = Row("L0.E0", round_index, "a" * 64, "5" * 64, 0, PEERS[0], tokens, "b" * 64, 10)
        return is_plausible_row(row, plan, now_s)

    assert believed(4, 10**6)
    assert not believed(4, 2**52)
    assert not believed(50, 10**6)


def row_at(round_index, tokens):
    return Row("L0.E0", round_index, "a" * 64, "5" * 64, 0, PEERS[0], tokens, "b" * 64, 10)


def test_a_row_is_of_no_round_later_than_the_next_one_and_of_no_more_tokens_than_five_million_a_second(plan):
    """Five rounds of 100 s have passed, so the sixth, which has the index 5, is under way."""
    now_s = plan.start_s + 500.0
    assert is_plausible_row(row_at(6, 1), plan, now_s)
    assert not is_plausible_row(row_at(7, 1), plan, now_s)
    assert is_plausible_row(row_at(4, 7 * 500_000_000), plan, now_s)
    assert not is_plausible_row(row_at(4, 7 * 500_000_000 + 1), plan, now_s)


def test_with_fixed_steps_a_row_says_the_tokens_of_one_round_more_than_there_were_at_most():
    plan = make_plan(rounds=RoundsConfig(duration_s=100.0, inner_steps=2))
    a_round = 2 * 2 * 16  # steps, sequences, tokens of a sequence
    now_s = plan.start_s + 500.0
    assert is_plausible_row(row_at(4, 6 * a_round), plan, now_s)
    assert not is_plausible_row(row_at(4, 6 * a_round + 1), plan, now_s)


def test_a_claim_is_from_no_later_than_fifteen_seconds_in_the_future(plan, grid):
    now_s = plan.start_s + 50.0
    claims = (claim(PEERS[0], 1, since_s=now_s + 15.0), claim(PEERS[1], 1, since_s=now_s + 15.1))
    assert set(view_at(plan, grid, 0, claims=claims).claims) == {PEERS[0]}


def test_with_fixed_steps_rounds_are_what_the_trainers_say(grid):
    plan = make_plan(rounds=RoundsConfig(duration_s=100.0, inner_steps=2))
    now_s = plan.start_s + 5.0

    def view(*rounds):
        claims = [claim(peer, 0, round=r) for peer, r in zip(PEERS, rounds, strict=False)]
        return build_view(now_s=now_s, plan=plan, grid=grid, claims=claims, peers=(), holdings={}, progress=())

    assert present_round(plan, view()) == -1
    assert present_round(plan, view(7, 8, 8)) == 8
    # One that cannot have come is no claim, and a possible one does not move the middle.
    assert set(view(7, 8, 10**6).claims) == set(PEERS[:2])
    assert present_round(plan, view(7, 8, 300)) == 8
    assert view(7, 8, 300).trained_in_sight(grid, 0) == (1, 4)


def test_one_peer_cannot_say_that_all_paths_are_served(plan, grid):
    honest = [progress(PEERS[0], 0, 6), progress(PEERS[0], 1, 2), progress(PEERS[1], 2, 3)]
    lies = [progress(PEERS[2], path, 6, tokens=10**6) for path in range(4)]
    view = view_at(plan, grid, 6, progress=[*honest, *lies])
    assert [view.last_round(path) for path in range(4)] == [6, 2, 3, -1]


def test_what_is_seen_to_wait_was_not_trained_meanwhile(plan, grid):
    before = {}
    lasts = []
    for now, path in ((4, 0), (5, 0), (6, 1), (7, 0)):
        lies = [progress(PEERS[2], p, now - p) for p in range(3)]
        view = view_at(plan, grid, now, claims=[claim(PEERS[0], path)], progress=lies)
        before = (view := view.watched(plan, grid, before)).waiting
        lasts.append([view.last_round(p) for p in range(4)])
    assert lasts == [[4, 3, 2, -1], [5, 4, 3, -1], [6, 5, 4, -1], [7, 6, 4, -1]]


def test_the_newest_progress_of_a_path_counts(plan, grid):
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


def test_with_fixed_steps_nobody_comes_with_more_tokens_than_others_can_believe():
    """Rounds that came to nothing for one peer may have taken the others no round."""
    counted = make_plan(rounds=RoundsConfig(inner_steps=4))
    a_round = max_contribution_tokens(counted, 0.0, 1) - max_contribution_tokens(counted, 0.0, 0)
    assert claimed_tokens(counted, a_round, 0) == a_round
    assert claimed_tokens(counted, 9 * a_round, 1) == max_contribution_tokens(counted, 0.0, 1)
    assert claimed_tokens(make_plan(), 10**12, 1) == 10**12
