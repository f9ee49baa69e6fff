"""What is remembered over rounds of those who made them fail or did not come."""

from __future__ import annotations

import pytest
from dipaco.peer.member.round_under_way import REMEMBERED, Absentees, Culprits

MODULE = "L0.E0"


@pytest.mark.parametrize("is_proven", [False, True])
def test_what_was_noted_by_a_clock_that_was_ahead_leaves_nobody_out(is_proven: bool) -> None:
    culprits, absentees = Culprits(), Absentees()
    for round_index in (500, 501):
        culprits.blame({"Pd"}, round_index, is_proven=is_proven)
        absentees.note(MODULE, round_index, {"Pd"}, {"Pa"})
    assert culprits.excluded(502, ()) == ("Pd",)
    assert absentees.unawaited(MODULE, 502) == {"Pd"}
    assert culprits.excluded(3, ()) == ()
    assert absentees.unawaited(MODULE, 3) == set()


def test_a_crowd_of_culprits_does_not_make_a_liar_forgotten_that_goes_on() -> None:
    culprits = Culprits()
    for round_index in (3, 20):
        culprits.blame({"Pd"}, round_index, is_proven=True)
        culprits.blame([f"P{number}" for number in range(REMEMBERED - 1)], round_index)
    assert "Pd" in culprits.excluded(36, ())
