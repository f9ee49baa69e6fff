"""A peer that reaches nobody it knew, or whose clock leapt, commits nothing that others share."""

from __future__ import annotations

import pytest
from dipaco.dht.records import refresh_period_s
from dipaco.peer.member import actions as a
from dipaco.peer.member.knowledge import GONE_PERIODS, ISOLATED_ROUNDS
from support.lone_member import claim, of, record, small_plan
from support.outer_rounds import MODULE, boundary_s, group

PERIOD_S = refresh_period_s(small_plan().rounds)


def test_a_peer_that_reaches_nobody_it_knew_commits_nothing_that_others_share() -> None:
    peer = group("Pa")
    peer.claims = []
    peer.look()
    actions = peer.at(boundary_s(3))
    assert of(a.Average, actions) == of(a.TakeOuterStep, actions) == []
    assert [c.reason.split(":")[0] for c in of(a.CarryOn, actions)] == ["isolated"]
    assert any("isolated" in warning.text for warning in peer.of(a.Warn))


def test_after_many_rounds_the_others_count_as_gone() -> None:
    peer = group("Pa")
    peer.claims = []
    for round_index in range(3, 6 + ISOLATED_ROUNDS):
        peer.now_s = peer.plan.start_s + boundary_s(round_index) - 1.0
        peer.look()
        peer.at(boundary_s(round_index))
        if peer.of(a.TakeOuterStep):
            break
    said = [c for c in peer.of(a.CarryOn) if c.module == MODULE]
    assert len(said) in (ISOLATED_ROUNDS, ISOLATED_ROUNDS + 1)
    assert peer.of(a.TakeOuterStep)


@pytest.mark.parametrize(("their_round", "steps"), [(None, True), (4, False)])
def test_a_clock_that_leaps_is_believed_when_the_others_say_so(
    their_round: int | None, steps: bool
) -> None:
    """After a sleep they say the same round; a clock that was put forward is ahead of them."""
    peer = group()
    peer.claims = [claim("Pz", 1)]
    peer.look()
    peer.now_s = peer.plan.start_s + boundary_s(60) - 1.0
    peer.turn()
    peer.their_round = their_round
    peer.look()
    actions = peer.at(boundary_s(60))
    assert (of(a.TakeOuterStep, actions) != []) == steps
    assert [c.reason for c in of(a.CarryOn, actions) if c.module == MODULE] == (
        []
        if steps
        else ["this machine slept or its clock was set, and the others say another round"]
    )


def test_a_clock_that_leapt_is_believed_in_the_end() -> None:
    peer = group()
    peer.claims, peer.their_round = [claim("Pz", 1)], 4
    peer.look()
    for round_index in range(60, 62 + ISOLATED_ROUNDS):
        peer.now_s = peer.plan.start_s + boundary_s(round_index) - 1.0
        peer.look()
        peer.at(boundary_s(round_index))
    assert [s.round_index for s in peer.of(a.TakeOuterStep)] == [60 + ISOLATED_ROUNDS]


def test_who_said_goodbye_leaves_nobody_isolated() -> None:
    peer = group("Pa")
    peer.claims, peer.serving = [], [record("Pa", "leaving")]
    peer.look()
    peer.serving = []
    peer.look()
    assert of(a.TakeOuterStep, peer.at(boundary_s(3))) != []


def test_who_crashed_long_before_the_last_one_said_goodbye_leaves_nobody_isolated() -> None:
    """A bootstrap node that is gone must not keep the last peer from committing."""
    for waits_s, commits in ((GONE_PERIODS * PERIOD_S, True), (0.0, False)):
        peer = group("Pa")
        peer.serving = [record("Pk", "serving")]
        peer.look()
        peer.serving, peer.now_s = [], peer.now_s + waits_s
        if waits_s:
            peer.look()
        peer.claims, peer.serving = [], [record("Pa", "leaving")]
        peer.look()
        peer.serving = []
        peer.look()
        assert (of(a.TakeOuterStep, peer.at(boundary_s(3))) != []) is commits
