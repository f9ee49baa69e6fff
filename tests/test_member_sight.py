"""Who trained a module lately and is missing from the newest view alone is called all the same."""

from __future__ import annotations

import pytest
from dipaco.dht.records import refresh_period_s
from dipaco.peer.member import actions as a
from dipaco.peer.member.gathering import SIGHT_PERIODS
from support.lone_member import ME, LoneMember, claim, of, record
from support.outer_rounds import MODULE, answers, boundary_s, fail, group


def unseen(peer: LoneMember) -> None:
    """Let the newest view lack the others: the nodes that store their records are slow."""
    peer.claims, peer.serving = [], ["Pz"]
    peer.look()


def test_who_is_missing_from_one_view_is_called_all_the_same() -> None:
    peer = group("Pa")
    unseen(peer)
    (meeting,) = of(a.Average, peer.at(boundary_s(3)))
    assert set(meeting.candidates) == {"Pa", ME}
    assert of(a.TakeOuterStep, peer.averaged(MODULE, ["Pa", ME])) != []


def test_who_is_missing_from_one_view_and_answers_counts() -> None:
    peer = group("Pa")
    unseen(peer)
    peer.at(boundary_s(3))
    for attempt in range(2):
        fail(peer, attempt)
        answers(peer, "Pa")
    assert peer.of(a.TakeOuterStep) == []
    assert len(peer.of(a.CarryOn)) == 1


def test_who_is_missing_from_one_view_and_does_not_answer_holds_nobody_up() -> None:
    peer = group("Pa")
    unseen(peer)
    peer.at(boundary_s(3))
    fail(peer)
    answers(peer)
    assert peer.of(a.TakeOuterStep) == [a.TakeOuterStep(MODULE, 3, alone=True)]


def test_who_was_in_no_view_for_a_while_is_not_called() -> None:
    peer = group("Pa")
    peer.now_s += SIGHT_PERIODS * refresh_period_s(peer.plan.rounds)
    unseen(peer)
    peer.at(boundary_s(4) - 1.0)
    peer.done.clear()
    assert of(a.TakeOuterStep, peer.at(boundary_s(4))) == [a.TakeOuterStep(MODULE, 4, alone=True)]


@pytest.mark.parametrize("goodbye", ["left", "moved"])
def test_who_has_said_goodbye_is_not_called(goodbye: str) -> None:
    peer = group("Pa")
    peer.serving = ["Pz"]
    if goodbye == "left":
        peer.serving.append(record("Pa", "leaving"))
    peer.claims = [claim("Pa", path=99)] if goodbye == "moved" else []
    peer.look()
    assert of(a.TakeOuterStep, peer.at(boundary_s(3))) == [a.TakeOuterStep(MODULE, 3, alone=True)]
