"""When an outer round commits, tries again, gives way to another's commit, or carries on."""

from __future__ import annotations

import pytest
from dipaco.dht.policy import rendezvous
from dipaco.modules.outer import Contribution
from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.gathering import takes_long
from dipaco.peer.member.member import MERGE_BUDGET_S
from dipaco.peer.member.outer import TRACING_S
from dipaco.peer.member.round_under_way import EXCLUDED_ROUNDS
from support.lone_member import ME, LoneMember, claim, of, record
from support.outer_rounds import LAST, MODULE, ROUND_S, answers, boundary_s, fail, group

# -- the calm case


def test_a_lone_peer_needs_nobody() -> None:
    peer = group()
    actions = peer.at(boundary_s(3))
    assert of(a.Average, actions) == []
    assert of(a.TakeOuterStep, actions) == [a.TakeOuterStep(MODULE, 3, alone=True)]
    state = peer.stepped(MODULE, [ME], 3)
    assert [c.reference for c in peer.of(a.Commit)] == [state]
    assert peer.member.anchors[MODULE] == state


def test_nothing_happens_before_the_boundary_and_each_comes_once() -> None:
    peer = group("Pa")
    assert of(a.TakeSnapshot, peer.at(boundary_s(3) - 0.1)) == []
    assert len(of(a.TakeSnapshot, peer.at(boundary_s(3)))) == 1
    assert of(a.TakeSnapshot, peer.at(boundary_s(3) + 0.1)) == []


def test_all_that_train_the_module_meet_and_commit() -> None:
    peer = group("Pa", "Pc")
    (meeting,) = of(a.Average, peer.at(boundary_s(3)))
    start_s, rounds = peer.plan.start_s, peer.plan.rounds
    assert set(meeting.candidates) == {"Pa", ME, "Pc"}
    assert meeting.anchor == peer.member.anchors[MODULE].digest
    assert meeting.begin_s == start_s + boundary_s(3)
    assert meeting.close_s == meeting.begin_s + rounds.matchmaking_s
    assert meeting.close_s < meeting.end_s <= meeting.begin_s + rounds.window_s
    assert of(a.TakeOuterStep, peer.averaged(MODULE, ["Pa", ME, "Pc"])) == [
        a.TakeOuterStep(MODULE, 3, alone=False)
    ]
    peer.stepped(MODULE, ["Pa", ME, "Pc"], 3)
    (commit,) = peer.of(a.Commit)
    assert (commit.round_index, commit.attempt, commit.expected) == (3, 0, 3)
    assert peer.of(a.CarryOn) == []


def test_a_first_attempt_may_take_the_whole_window_where_lines_are_slow() -> None:
    peer = group("Pa", "Pc")
    (meeting,) = of(a.Average, peer.at(boundary_s(3)))
    window_s = peer.plan.rounds.window_s
    assert meeting.end_s == meeting.begin_s + window_s / 2
    assert meeting.latest_s == meeting.begin_s + window_s
    time_s = meeting.end_s - meeting.close_s
    assert not takes_long(meeting.close_s, meeting.end_s, 0.4 * time_s)
    assert takes_long(meeting.close_s, meeting.end_s, 0.6 * time_s)
    peer.now_s = meeting.latest_s
    fail(peer, 0, ("Pa", ME, "Pc"))
    answers(peer, "Pa", Pc=peer.member.anchors[MODULE])
    assert peer.of(a.Average) == [meeting]
    assert len(peer.of(a.CarryOn)) == 1


def test_a_peer_that_comes_early_says_when_the_others_come() -> None:
    """With steps of many seconds the boundary is taken before its time."""
    peer = group("Pa")
    peer.now_s = peer.plan.start_s + boundary_s(3) - 3.0
    (meeting,) = of(a.Average, peer.turn(step_s=8.0))
    assert meeting.begin_s == peer.plan.start_s + boundary_s(3)


def test_who_can_be_called_leads_the_longest_in_training_first() -> None:
    peer = group("Pa", "Pc")
    peer.claims = [claim("Pa", since_s=50.0), claim("Pc", since_s=7.0), claim("Pd", since_s=1.0)]
    peer.serving = [record("Pd", reachable="relayed"), record("Pa", reachable="unknown")]
    peer.look()
    (meeting,) = of(a.Average, peer.at(boundary_s(3)))
    assert meeting.candidates == ("Pc", "Pa", ME, "Pd")
    assert meeting.undialable == ("Pd",)


def test_who_cannot_be_called_knows_it_from_the_next_round_on() -> None:
    peer = group("Pa")
    peer.happen(e.Probed("outgoing"))
    (meeting,) = of(a.Average, peer.at(boundary_s(3)))
    assert (meeting.candidates, meeting.undialable) == (("Pa", ME), (ME,))
    peer.averaged(MODULE, ["Pa", ME])
    peer.stepped(MODULE, ["Pa", ME], 3)
    peer.happen(e.Probed("direct"))
    (meeting,) = of(a.Average, peer.at(boundary_s(4)))
    assert meeting.undialable == ()


def test_where_nobody_can_be_called_one_steps_alone_in_each_round() -> None:
    peer = group("Pa", "Pc")
    peer.serving = [record("Pa", reachable="relayed"), record("Pc", reachable="outgoing")]
    peer.happen(e.Probed("outgoing"))
    peer.look()
    turns = []
    for round_index in range(3, 15):
        peer.done.clear()
        peer.at(boundary_s(round_index))
        turn = min((ME, "Pa", "Pc"), key=lambda who: rendezvous(who, round_index))
        assert peer.of(a.Average) == []
        assert len(peer.of(a.TakeOuterStep)) == (turn == ME)
        if turn == ME:
            peer.stepped(MODULE, [ME], round_index)
            assert len(peer.of(a.Commit)) == 1
        turns.append(turn)
    assert {*turns} == {ME, "Pa", "Pc"}


def test_who_never_answered_has_no_turn() -> None:
    peer = group("Pa")
    peer.silent = {"Px"}
    peer.claims.append(claim("Px"))
    peer.serving = [record(other, reachable="outgoing") for other in ("Pa", "Px")]
    peer.happen(e.Probed("outgoing"))
    peer.look()
    for round_index in range(3, 15):
        peer.done.clear()
        peer.at(boundary_s(round_index))
        is_mine = rendezvous(ME, round_index) < rendezvous("Pa", round_index)
        assert len(peer.of(a.TakeOuterStep)) == is_mine
        if is_mine:
            peer.stepped(MODULE, [ME], round_index)


def test_a_peer_that_is_about_to_join_is_met() -> None:
    """It may have begun since the view was read; two who step alone would fork the module."""
    peer = group()
    peer.claims = [claim("Pn", state="joining")]
    peer.look()
    (meeting,) = of(a.Average, peer.at(boundary_s(3)))
    assert set(meeting.candidates) == {ME, "Pn"}


def test_states_are_saved_when_due() -> None:
    peer = group("Pa")
    for round_index in (3, 4):
        peer.at(boundary_s(round_index))
        peer.averaged(MODULE, ["Pa", ME])
        peer.stepped(MODULE, ["Pa", ME], round_index)
    assert all(c.save for c in peer.of(a.Commit))


# -- who counts


def test_half_of_those_who_count_commit_nothing() -> None:
    peer = group("Pa", "Pc", "Pd")
    peer.at(boundary_s(3))
    actions = peer.averaged(MODULE, ["Pa", ME])
    assert of(a.TakeOuterStep, actions) == []
    (said,) = of(a.CarryOn, actions)
    assert said.reason == f"have 2 of 4 peers of {MODULE}, need 3"
    # Others may have more than this peer saw: its contribution may be in a state.
    assert of(a.ForgetSnapshot, actions) == [a.ForgetSnapshot(MODULE, 3, keeps_part=True)]


def test_invented_claims_stop_nobody() -> None:
    peer = group("Pa", others="VWXYZ")
    peer.at(boundary_s(3))
    assert of(a.TakeOuterStep, peer.averaged(MODULE, ["Pa", ME])) != []


def test_newcomers_that_come_count_at_once() -> None:
    """A newcomer and one of two old ones: the other old one may be anywhere."""
    peer = group("Pa")
    peer.at(boundary_s(3))
    assert of(a.TakeOuterStep, peer.averaged(MODULE, [ME, "Pn"])) != []


def test_before_the_first_commit_claims_are_believed_for_some_rounds() -> None:
    peer = group("Pa", "Pc", "Pd", rounds=0)
    for round_index in range(2):
        peer.at(boundary_s(round_index))
        peer.averaged(MODULE, ["Pa", ME])
    assert [c.round_index for c in peer.of(a.CarryOn) if c.module == MODULE] == [0, 1]
    peer.at(boundary_s(2))
    assert of(a.TakeOuterStep, peer.averaged(MODULE, ["Pa", ME])) != []


def test_one_alone_whose_others_only_claim_commits_in_the_end() -> None:
    peer = group(others="VW", rounds=3)
    for attempt in range(2):
        if attempt == 0:
            peer.at(boundary_s(3))
        fail(peer, attempt)
        answers(peer)
        if peer.of(a.TakeOuterStep):
            break
    assert peer.of(a.TakeOuterStep) == [a.TakeOuterStep(MODULE, 3, alone=True)]


# -- retry


def test_survivors_meet_again_under_another_attempt_without_the_culprits() -> None:
    peer = group("Pa", "Pc", "Pd")
    peer.at(boundary_s(3))
    actions = fail(peer, 0, (ME, "Pa", "Pc", "Pd"), ("Pd",))
    assert of(a.Ask, actions) == [a.Ask(MODULE, 3, ("Pa", "Pc", "Pd"))]
    (again,) = of(a.Average, answers(peer, "Pa", "Pc"))
    assert (again.attempt, again.excluded) == (1, ("Pd",))
    peer.averaged(MODULE, ["Pa", ME, "Pc"], attempt=1)
    peer.stepped(MODULE, ["Pa", ME, "Pc"], 3)
    assert [(c.attempt, c.expected) for c in peer.of(a.Commit)] == [(1, 4)]


def test_after_two_attempts_the_work_is_carried_on() -> None:
    peer = group("Pa", "Pc")
    peer.at(boundary_s(3))
    for attempt in range(2):
        fail(peer, attempt)
        answers(peer, "Pa", "Pc")
    assert [said.reason for said in peer.of(a.CarryOn)] == ["it broke"]
    assert peer.of(a.TakeOuterStep) == []
    assert peer.of(a.ForgetSnapshot) == [a.ForgetSnapshot(MODULE, 3, keeps_part=False)]
    assert len(of(a.TakeSnapshot, peer.at(boundary_s(4)))) == 1


def test_without_time_for_a_second_group_there_is_none() -> None:
    peer = group("Pa", "Pc")
    peer.at(boundary_s(3))
    peer.now_s += peer.plan.rounds.window_s
    fail(peer)
    assert of(a.Average, answers(peer, "Pa", "Pc")) == []
    assert len(peer.of(a.CarryOn)) == 1


def test_answers_of_an_earlier_attempt_change_nothing() -> None:
    peer = group("Pa", "Pc")
    peer.at(boundary_s(3))
    fail(peer)
    answers(peer, "Pa", "Pc")
    assert of(a.TakeOuterStep, peer.averaged(MODULE, ["Pa", ME, "Pc"], attempt=0)) == []
    assert fail(peer, 0) == []
    assert of(a.TakeOuterStep, peer.averaged(MODULE, ["Pa", ME, "Pc"], attempt=1)) != []


# -- asking before stepping


def others_went_on(peer: LoneMember, *peers: str) -> StateReference:
    return peer.family.commit(peer.member.anchors[MODULE], 3, peers)


def test_a_state_that_others_committed_is_taken_once_its_certificate_is_here() -> None:
    peer = group("Pa", "Pc")
    peer.at(boundary_s(3))
    fail(peer, 0, ("Pa", ME, "Pc"))
    state = others_went_on(peer, "Pa", ME, "Pc")
    asked = of(a.FetchChain, answers(peer, "Pc", Pa=state))
    assert asked == [a.FetchChain(state, ("Pa",))]
    assert peer.of(a.FetchState) == []
    actions = peer.happen(e.ChainFetched(state, peer.family.chain(state)))
    (wanted,) = of(a.FetchState, actions)
    assert (wanted.reference.digest, wanted.holders) == (state.digest, ("Pa",))
    assert wanted.purpose == "adopt"
    assert [c.reason for c in of(a.CarryOn, actions)] == ["the group committed without this peer"]
    # What of the own work is in it is told by name.
    assert of(a.ForgetSnapshot, peer.done) == [a.ForgetSnapshot(MODULE, 3, keeps_part=True)]


def test_a_state_without_a_certificate_does_not_keep_the_others_from_meeting() -> None:
    peer = group("Pa", "Pc")
    peer.at(boundary_s(3))
    fail(peer, 0, ("Pa", ME, "Pc"))
    invented = StateReference(MODULE, 4, "f" * 64, 2**53, 3, 1)
    answers(peer, "Pc", Pa=invented)
    (again,) = of(a.Average, peer.happen(e.ChainFetched(invented, ())))
    assert again.attempt == 1


def test_certificates_that_do_not_come_are_not_waited_for_long() -> None:
    peer = group("Pa", "Pc")
    peer.at(boundary_s(3))
    fail(peer, 0, ("Pa", ME, "Pc"))
    answers(peer, "Pc", Pa=StateReference(MODULE, 4, "f" * 64, 99, 3, 1))
    peer.now_s += TRACING_S - 0.1
    peer.turn()
    assert len(peer.of(a.Average)) == 1
    peer.now_s += 0.2
    peer.turn()
    assert len(peer.of(a.Average)) + len(peer.of(a.CarryOn)) == 2


def test_an_older_state_of_others_does_not_stop_a_second_attempt() -> None:
    peer = group("Pa", "Pc")
    peer.at(boundary_s(3))
    fail(peer)
    older = peer.family.chain(peer.member.anchors[MODULE])[1].reference
    (again,) = of(a.Average, answers(peer, "Pa", Pc=older))
    assert again.attempt == 1
    assert again.end_s == again.latest_s


# -- alone


def test_the_survivor_of_two_carries_on_while_the_other_counts() -> None:
    """It cannot know that the other is gone: that one may step alone, too."""
    peer = group("Pa")
    peer.at(boundary_s(3))
    fail(peer, 0, ("Pa", ME), ("Pa",))
    answers(peer)
    assert peer.of(a.TakeOuterStep) == []
    assert len(peer.of(a.CarryOn)) == 1


OLD_AND_NEW = [(1.0, True, False), (10**9, True, True), (1.0, False, True), (10**9, False, True)]


@pytest.mark.parametrize(("since_s", "is_new", "steps"), OLD_AND_NEW)
def test_of_two_that_do_not_meet_one_steps(since_s: float, is_new: bool, steps: bool) -> None:
    """The older one; but who has contributed lately is waited for by one that has not."""
    peer = group(is_new=is_new)
    peer.claims = [claim("Pa", since_s=since_s)]
    peer.look()
    peer.at(boundary_s(3))
    for attempt in range(2):
        fail(peer, attempt)
        answers(peer, "Pa")
    assert bool(peer.of(a.TakeOuterStep)) is steps


def test_nobody_waits_for_ever_for_an_older_peer_that_hangs() -> None:
    peer = group(others="V", is_new=True)
    for round_index in range(3, 6):
        peer.at(boundary_s(round_index))
        for attempt in range(2):
            fail(peer, attempt)
            answers(peer, "V")
    assert [step.round_index for step in peer.of(a.TakeOuterStep)] == [5]


def test_another_that_goes_on_from_a_refused_state_holds_nobody_up_for_ever() -> None:
    """Its states are no good here: who refuses them goes on from the own one after a while."""
    peer = group("Pa")
    state, anchor = peer.member.anchors[MODULE], peer.member.anchors[MODULE]
    for round_index in range(3, 8):
        peer.at(boundary_s(round_index))
        state = peer.family.commit(state, round_index, ["Pa"])
        for attempt in range(2):
            fail(peer, attempt)
            answers(peer, Pa=state)
            peer.happen(e.ChainFetched(state, peer.family.chain(state)))
        if wanted := of(a.FetchState, peer.done[-5:]):
            peer.happen(e.StateFetched(wanted[-1].reference, {}, peer.family.chain(state), "adopt"))
            peer.turn()
            peer.happen(e.Checked(MODULE, state.digest, 1.0, 99.0))
    assert len(peer.of(a.CheckState)) == 1
    assert peer.member.anchors[MODULE] == anchor
    assert [step.round_index for step in peer.of(a.TakeOuterStep)] == [6]


# -- own faults


def test_work_that_is_no_number_is_thrown_away() -> None:
    peer = group("Pa")
    peer.is_finite = False
    actions = peer.at(boundary_s(3))
    assert of(a.Discard, actions) == [a.Discard(MODULE)]
    assert [c.reason for c in of(a.CarryOn, actions)] == ["own outer gradient is not finite"]
    assert of(a.Average, actions) == []


def test_who_trained_nothing_does_not_come() -> None:
    peer = group("Pa")
    peer.tokens = 0
    actions = peer.at(boundary_s(3))
    assert of(a.Average, actions) == []
    assert of(a.ForgetSnapshot, actions) == [a.ForgetSnapshot(MODULE, 3, keeps_part=False)]


def test_an_average_that_no_state_can_be_made_of_changes_nothing() -> None:
    peer = group("Pa")
    before = peer.member.anchors
    peer.at(boundary_s(3))
    peer.averaged(MODULE, ["Pa", ME])
    actions = peer.happen(e.OuterStepFailed(MODULE, 3, "not finite"))
    assert [c.reason for c in of(a.CarryOn, actions)] == ["not finite"]
    assert peer.member.anchors == before
    # Others may make a state of it all the same, if a reducer lied and they did not notice.
    assert of(a.ForgetSnapshot, actions) == [a.ForgetSnapshot(MODULE, 3, keeps_part=True)]


def test_a_boundary_that_is_long_over_is_skipped_and_a_late_one_is_met() -> None:
    peer = group("Pa")
    assert of(a.Average, peer.at(boundary_s(3) + 2.5)) != []
    peer = group("Pa")
    actions = peer.at(boundary_s(3) + 9.0)
    assert of(a.TakeSnapshot, actions) == []
    assert [c.reason for c in of(a.CarryOn, actions)] == ["came 9.0 s after the boundary"]


def test_a_round_that_has_not_ended_keeps_the_next_from_starting() -> None:
    peer = group("Pa")
    peer.at(boundary_s(3))
    actions = [x for x in peer.at(boundary_s(4)) if getattr(x, "module", "") == MODULE]
    assert [c.reason for c in of(a.CarryOn, actions)] == ["the round before had not ended"]


def test_rounds_end_for_who_begins_another_outer_step_in_every_turn() -> None:
    """An inner step takes half of a round: the boundary of one level is always near."""
    peer, step_s = group(), 0.5 * ROUND_S
    ended: list[int] = []
    for half in range(8):
        actions = peer.turn(step_s)
        ended += [end.round_index for end in of(a.EndRound, actions)]
        module, round_index = (MODULE, LAST)[half % 2], 3 + half // 2
        assert of(a.TakeOuterStep, actions) == [a.TakeOuterStep(module, round_index, alone=True)]
        peer.now_s += step_s
        peer.stepped(module, [ME], round_index)
    assert ended == [3, 4, 5]


def test_a_leaving_peer_asks_nobody() -> None:
    peer = group("Pa", "Pc")
    peer.at(boundary_s(3))
    peer.happen(e.LeaveWanted())
    peer.now_s += MERGE_BUDGET_S
    peer.turn()
    assert of(a.Ask, fail(peer)) == []


def test_what_a_round_came_to_that_was_given_up_is_no_answer_to_another() -> None:
    """A clock that was ahead is put back: the meeting of a round far ahead ends later."""
    peer = group("Pa")
    peer.at(boundary_s(53) - 1.0)
    (ahead,) = of(a.Average, peer.at(boundary_s(53)))
    carried_on = of(a.CarryOn, peer.at(boundary_s(3) - 1.0))
    assert [carry_on.reason for carry_on in carried_on] == ["the clock was put back"]
    (meeting,) = of(a.Average, peer.at(boundary_s(3)))
    table = (Contribution(0, "Pa", 10), Contribution(0, ME, 10))
    assert peer.happen(e.AverageFailed(MODULE, 53, 0, "nobody came")) == []
    assert peer.happen(e.Averaged(MODULE, 53, 0, table)) == []
    assert peer.happen(e.OuterStepFailed(MODULE, 53, "not finite")) == []
    assert (ahead.round_index, meeting.round_index) == (53, 3)
    assert len(of(a.Ask, fail(peer))) == 1
    assert peer.happen(e.Answered(MODULE, 53, {"Pa": None})) == []
    assert [m.attempt for m in of(a.Average, answers(peer, "Pa"))] == [1]


# -- culprits


def test_who_makes_two_rounds_fail_is_left_out_of_the_next_ones() -> None:
    peer = group("Pa", "Pc", "Pd")
    for round_index in (3, 4):
        peer.at(boundary_s(round_index))
        fail(peer, 0, (ME, "Pa", "Pc", "Pd"), ("Pd",))
        answers(peer, "Pa", "Pc", "Pd")
        peer.averaged(MODULE, ["Pa", ME, "Pc"], attempt=1)
        peer.stepped(MODULE, ["Pa", ME, "Pc"], round_index)
    for round_index in range(5, 7 + EXCLUDED_ROUNDS):
        (meeting,) = of(a.Average, peer.at(boundary_s(round_index)))
        is_out = round_index <= 4 + EXCLUDED_ROUNDS
        assert meeting.excluded == (("Pd",) if is_out else ()), round_index
        peer.averaged(MODULE, ["Pa", ME, "Pc"])
        peer.stepped(MODULE, ["Pa", ME, "Pc"], round_index)


@pytest.mark.parametrize("accuses", [False, True])
def test_a_proven_liar_is_left_out_at_once_and_for_longer_each_time(accuses: bool) -> None:
    peer = group("Pa", "Pc", "Pd")
    lied_in, spells = 3, [8, 16, 32, 64, 64]
    for times, spell in enumerate(spells):
        peer.at(boundary_s(lied_in))
        if accuses:
            table = tuple(Contribution(0, p, 10) for p in (ME, "Pa", "Pc", "Pd"))
            peer.happen(e.Averaged(MODULE, lied_in, 0, table, culprits=("Pd",)))
        else:
            fail(peer, 0, (ME, "Pa", "Pc", "Pd"), ("Pd",), is_proven=True)
            answers(peer, "Pa", "Pc", "Pd")
            peer.averaged(MODULE, ["Pa", ME, "Pc"], attempt=1)
        peer.stepped(MODULE, ["Pa", ME, "Pc"], lied_in)
        for round_index in range(lied_in + 1, lied_in + spell + 2):
            (meeting,) = of(a.Average, peer.at(boundary_s(round_index)))
            is_out = round_index <= lied_in + spell
            assert meeting.excluded == (("Pd",) if is_out else ()), (times, round_index)
            if is_out:
                peer.averaged(MODULE, ["Pa", ME, "Pc"])
                peer.stepped(MODULE, ["Pa", ME, "Pc"], round_index)
        lied_in += spell + 1


def test_nobody_is_left_out_for_one_bad_round_and_never_oneself() -> None:
    peer = group("Pa", "Pc")
    peer.at(boundary_s(3))
    fail(peer, 0, (ME, "Pa", "Pc"), ("Pa", ME))
    answers(peer, "Pa", "Pc")
    peer.averaged(MODULE, ["Pa", ME, "Pc"], attempt=1)
    peer.stepped(MODULE, ["Pa", ME, "Pc"], 3)
    (meeting,) = of(a.Average, peer.at(boundary_s(4)))
    assert meeting.excluded == ()
