"""What becomes of the last work of a peer that leaves, or moves: merged, where there is time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dipaco.dht.view import PathService, SwarmView
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.knowledge import MemberSettings
from dipaco.peer.member.member import LEAVE_BUDGET_S, MERGE_BUDGET_S, Member
from dipaco.peer.member.parting import LEAST_SHARE
from support.family import Family, genesis
from support.lone_member import ME, LoneMember, claim, grid_of, of, record, small_plan

MODULE, LAST = "L0.E0", "L1.E0"
ROUND_S = 20.0


def boundary_s(round_index: int) -> float:
    return (round_index + 0.5) * ROUND_S


def trainer(*others: str, **settings: Any) -> LoneMember:
    """Return a member that has just committed `MODULE` in round 3 with others, at once."""
    family = Family()
    members = (*others, ME)
    anchors = [family.commits(genesis(m), range(3), members) for m in (MODULE, LAST)]
    made = LoneMember(family=family, **settings)
    made.claims = [claim(peer) for peer in others]
    made.now_s += 3 * ROUND_S
    made.begin(*anchors)
    made.now_s = made.plan.start_s + boundary_s(3)
    made.look()
    made.turn()
    if others:
        made.averaged(MODULE, members)
    made.stepped(MODULE, members, 3)
    made.done.clear()
    return made


def wants_to_leave(peer: LoneMember, seconds: float) -> list[a.Action]:
    """Press Ctrl+C so many seconds after the start of the run, and take a turn."""
    peer.now_s = peer.plan.start_s + seconds
    return peer.happen(e.LeaveWanted()) + peer.turn()


def test_a_boundary_that_comes_soon_is_taken_before_leaving() -> None:
    peer = trainer("Pa")
    actions = wants_to_leave(peer, boundary_s(4) - 0.9 * MERGE_BUDGET_S)
    (wait,) = of(a.Wait, actions)
    assert "last work" in wait.what
    assert wait.limit_s <= MERGE_BUDGET_S
    # Others still count on it.
    assert of(a.Say, actions) == []
    (meeting,) = of(a.Average, peer.at(boundary_s(4)))
    assert (meeting.module, meeting.round_index) == (MODULE, 4)
    peer.averaged(MODULE, ["Pa", ME])
    state = peer.stepped(MODULE, ["Pa", ME], 4)
    assert [commit.reference for commit in peer.of(a.Commit)] == [state]
    assert [said.state for said in of(a.Say, peer.turn())] == ["leaving"]
    assert peer.of(a.TakeStep) == []


def test_nobody_waits_for_a_boundary_that_is_far_away() -> None:
    peer = trainer("Pa")
    actions = wants_to_leave(peer, boundary_s(4) - MERGE_BUDGET_S - 0.1)
    assert [said.state for said in of(a.Say, actions)] == ["leaving"]
    assert of(a.TakeSnapshot, actions) == []


def test_a_round_that_would_not_end_in_time_is_not_begun() -> None:
    """Who goes away in the middle of a reduce breaks it for the others."""
    peer = trainer("Pa")
    peer.at(boundary_s(4))
    peer.now_s += 3.0
    peer.averaged(MODULE, ["Pa", ME])
    peer.stepped(MODULE, ["Pa", ME], 4)
    actions = wants_to_leave(peer, boundary_s(5) - MERGE_BUDGET_S + 2.0)
    assert [said.state for said in of(a.Say, actions)] == ["leaving"]


def test_a_round_under_way_is_waited_for() -> None:
    peer = trainer("Pa")
    peer.at(boundary_s(4))
    actions = wants_to_leave(peer, boundary_s(4) + 0.5)
    assert of(a.Say, actions) == []
    peer.averaged(MODULE, ["Pa", ME])
    peer.stepped(MODULE, ["Pa", ME], 4)
    assert [said.state for said in of(a.Say, peer.turn())] == ["leaving"]
    assert len(peer.of(a.Commit)) == 1


def test_what_hangs_keeps_nobody_longer_than_promised() -> None:
    peer = trainer("Pa", "Pc")
    peer.at(boundary_s(4))
    actions = wants_to_leave(peer, boundary_s(4) + 0.5)
    begin_s = peer.now_s
    while not of(a.Left, actions):
        assert peer.now_s < begin_s + LEAVE_BUDGET_S + 0.5
        peer.now_s += 0.25
        actions = peer.turn()
    assert [said.state for said in peer.of(a.Say)] == ["leaving"]
    assert LEAVE_BUDGET_S < 9.0


def test_who_is_alone_commits_before_it_leaves() -> None:
    peer = trainer()
    before = peer.member.anchors
    actions = wants_to_leave(peer, boundary_s(4) - 0.4 * ROUND_S)
    assert of(a.TakeOuterStep, actions) == [
        a.TakeOuterStep(MODULE, 4, alone=True),
        a.TakeOuterStep(LAST, 3, alone=True),
    ]
    for module, round_index in ((MODULE, 4), (LAST, 3)):
        assert peer.stepped(module, [ME], round_index).version == before[module].version + 1
    assert [said.state for said in of(a.Say, peer.turn())] == ["leaving"]
    assert len(peer.of(a.TakeSnapshot)) == 2


def test_who_comes_back_in_the_same_round_does_not_take_the_step_twice() -> None:
    peer = trainer()
    wants_to_leave(peer, boundary_s(4) - 0.4 * ROUND_S)
    states = [peer.stepped(module, [ME], r) for module, r in ((MODULE, 4), (LAST, 3))]
    back = LoneMember(family=peer.family)
    back.now_s = peer.now_s
    back.begin(*states)
    back.look()
    assert of(a.TakeSnapshot, back.at(boundary_s(4))) == []
    assert [said.round_index for said in back.of(a.CarryOn) if said.module == MODULE] == [4]
    assert len(of(a.TakeSnapshot, back.at(boundary_s(5)))) == 1


def test_one_step_a_round_is_taken_before_its_time() -> None:
    """A state of more versions than two a round is not believed by anybody."""
    first = trainer()
    wants_to_leave(first, boundary_s(4) - 0.4 * ROUND_S)
    states = [first.stepped(module, [ME], r) for module, r in ((MODULE, 4), (LAST, 3))]
    second = LoneMember(family=first.family)
    second.now_s = first.now_s
    second.begin(*states)
    second.look()
    actions = wants_to_leave(second, boundary_s(4) - 0.2 * ROUND_S)
    assert [copied.module for copied in of(a.TakeSnapshot, actions)] == [LAST]


def test_who_takes_the_path_over_in_the_same_round_takes_the_step() -> None:
    peer = trainer()
    wants_to_leave(peer, boundary_s(4) - 0.4 * ROUND_S)
    left = peer.stepped(MODULE, [ME], 4)
    after = peer.family.commit(left, 4, ["Pn"])
    # The work of both is in it, by name.
    for who in (ME, "Pn"):
        assert peer.family.book.contains(MODULE, after.digest, who, 4)


class OnTrainedPath(LoneMember):
    """It sees that path 0 was trained in the last round, and path 1 never."""

    def view(self) -> SwarmView:
        return replace(super().view(), progress={0: PathService(3, 1, 1.0, 1, 1.0)})


@pytest.mark.parametrize("shares", [False, True])
def test_who_moves_commits_what_is_its_alone_first(shares: bool) -> None:
    """Path 1 is left by its trainers; whoever trains `MODULE` too has its own boundary."""
    plan = small_plan((1, 2), dwell_rounds=1)
    family = Family()
    other = ("Pc",) if shares else ()
    peer = OnTrainedPath(plan, family, pinned=None)
    on_path_1 = [claim(name, path=1) for name in ("Px", "Py")]
    peer.claims = [*on_path_1, *(claim(name, since_s=0.5) for name in other)]
    members = {MODULE: (*other, "Px", "Py", ME), LAST: (*other, ME)}
    anchors = [family.commits(genesis(m), range(3), who) for m, who in members.items()]
    peer.now_s += 3 * ROUND_S
    peer.begin(*anchors)
    assert peer.member.path == 0
    peer.claims = [claim(name, since_s=0.5) for name in other]
    peer.serving = ["Ps", *(record(name, "leaving") for name in ("Px", "Py"))]
    for module, offset in ((MODULE, 3.5), (LAST, 4.0)):
        peer.now_s = plan.start_s + offset * ROUND_S
        peer.look()
        peer.turn()
        group = (*other, ME)
        if shares:
            peer.averaged(module, group)
        peer.stepped(module, group, 3)
    peer.done.clear()
    peer.now_s += 0.5 * LEAST_SHARE * ROUND_S
    peer.look()
    peer.turn()
    peer.turn()
    if not shares:
        assert peer.of(a.Move) == []
        # Its round on the last level has just begun: that is not worth a step.
        assert peer.of(a.TakeOuterStep) == [a.TakeOuterStep(MODULE, 4, alone=True)]
        peer.stepped(MODULE, [ME], 4)
        peer.turn()
    assert [(move.from_path, move.to_path) for move in peer.of(a.Move)] == [(0, 1)]


# -- pausing


def wants_to_pause(peer: LoneMember, seconds: float) -> list[a.Action]:
    """Say so many seconds after the start of the run that the machine is needed."""
    peer.now_s = peer.plan.start_s + seconds
    return peer.happen(e.PauseWanted("its owner plays")) + peer.turn()


def test_a_pause_merges_last_work_and_gives_the_path_up() -> None:
    peer = trainer("Pa")
    actions = wants_to_pause(peer, boundary_s(4) - 0.9 * MERGE_BUDGET_S)
    assert of(a.Say, actions) == []
    peer.at(boundary_s(4))
    peer.averaged(MODULE, ["Pa", ME])
    peer.stepped(MODULE, ["Pa", ME], 4)
    actions = peer.turn()
    (pause,) = of(a.Pause, actions)
    assert (pause.path, pause.reason) == (0, "its owner plays")
    assert len(of(a.SaveAll, actions)) == 1
    assert [(said.state, said.path) for said in of(a.Say, actions)] == [("paused", None)]
    assert peer.member.path is None
    assert peer.member.anchors == {}
    for _ in range(3):
        peer.now_s += ROUND_S
        peer.look()
        assert {type(action) for action in peer.turn()} == {a.Wait}


def test_a_paused_member_claims_again_when_it_may() -> None:
    peer = trainer("Pa")
    wants_to_pause(peer, boundary_s(4) - MERGE_BUDGET_S - 0.1)
    peer.now_s += 10 * ROUND_S
    peer.happen(e.ResumeWanted())
    peer.done.clear()
    peer.turn()
    peer.look()
    assert [said.state for said in peer.of(a.Say)] == ["joining"]


def test_who_may_train_again_while_it_parts_pauses_only_for_a_moment() -> None:
    peer = trainer("Pa")
    wants_to_pause(peer, boundary_s(4) - 0.9 * MERGE_BUDGET_S)
    peer.happen(e.ResumeWanted())
    peer.now_s += MERGE_BUDGET_S
    first = peer.turn()
    assert len(of(a.Pause, first)) == 1
    peer.done.clear()
    peer.turn()
    assert peer.of(a.Look)
    assert peer.of(a.Left) == []


def test_nothing_is_claimed_when_the_pause_comes_first() -> None:
    plan = small_plan()
    member = Member(MemberSettings(ME), plan, grid_of(plan))
    member.handle(e.PauseWanted("outside of its hours"), plan.start_s)
    actions = member.handle(e.Turn(), plan.start_s)
    assert [said.state for said in of(a.Say, actions)] == ["paused"]
    assert of(a.Look, actions) == []
    member.handle(e.ResumeWanted(), plan.start_s + 1.0)
    assert len(of(a.Look, member.handle(e.Turn(), plan.start_s + 1.0))) == 1


def test_ctrl_c_ends_a_pause_and_goes_before_one() -> None:
    peer = trainer("Pa")
    wants_to_pause(peer, boundary_s(4) - MERGE_BUDGET_S - 0.1)
    actions = wants_to_leave(peer, boundary_s(4))
    assert [said.state for said in of(a.Say, actions)] == ["leaving"]
    other = trainer("Pa")
    wants_to_pause(other, boundary_s(4) - 0.9 * MERGE_BUDGET_S)
    actions = wants_to_leave(other, boundary_s(4) - MERGE_BUDGET_S + 3.0)
    other.now_s += MERGE_BUDGET_S
    actions += other.turn()
    assert of(a.Pause, actions) == []
    assert [said.state for said in of(a.Say, actions)] == ["leaving"]


def test_a_paused_member_follows_to_a_successor() -> None:
    peer = trainer("Pa")
    wants_to_pause(peer, boundary_s(4) - MERGE_BUDGET_S - 0.1)
    peer.happen(e.SuccessorReady("f" * 16))
    (left,) = of(a.Left, peer.turn())
    assert left.to_successor


def test_answers_that_come_in_a_pause_change_nothing() -> None:
    peer = trainer("Pa")
    peer.at(boundary_s(4))
    peer.happen(e.PauseWanted("its owner plays"))
    peer.now_s += MERGE_BUDGET_S + 1.0
    assert len(of(a.Pause, peer.turn())) == 1
    assert peer.average_failed(MODULE) == []
    peer.averaged(MODULE, ["Pa", ME])
    assert peer.of(a.Commit) == []
