"""A recent contributor that no view shows counts until a call to it fails."""

from dipaco.protocol.member.contributors import Contributors
from dipaco.protocol.member.knowledge import Knowledge, MemberSettings
from support.runs.trainer import GRID, MODULE, PLAN, view_of

RECENT = frozenset("ABC")


def looked(known, contributors, peers):
    """Return who is to be called after a view of these peers."""
    known.view = view_of(peers)
    return contributors.look(RECENT)


def test_who_is_out_of_sight_counts_until_a_call_fails_and_anew_when_it_was_seen():
    known = Knowledge(MemberSettings("A"), PLAN, GRID)
    contributors = Contributors(known, MODULE)
    assert looked(known, contributors, "AB") == ["C"]
    assert "C" in known.trainers(MODULE)
    contributors.is_gone("C")
    assert "C" not in known.trainers(MODULE)
    assert looked(known, contributors, "AB") == []
    assert looked(known, contributors, "ABC") == []
    assert looked(known, contributors, "AB") == ["C"]
    contributors.is_gone("C")
    contributors.heard("C")
    assert "C" in known.trainers(MODULE)


def test_a_call_that_failed_while_a_peer_was_in_sight_says_nothing_of_later():
    known = Knowledge(MemberSettings("A"), PLAN, GRID)
    contributors = Contributors(known, MODULE)
    assert looked(known, contributors, "ABC") == []
    contributors.is_gone("C")
    assert looked(known, contributors, "AB") == ["C"]
