"""Outer rounds of fixed steps: a group waits for its members, and not for those that are gone."""

from __future__ import annotations

from dipaco.dht.records import refresh_period_s
from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.gathering import longest_wait_s
from dipaco.peer.member.outer import AGAIN_AFTER_S
from support.family import genesis
from support.lone_member import ME, LoneMember, claim, of, small_plan
from support.outer_rounds import LAST, MODULE, answers, fail


def counted(*peers: str, steps: int = 4, round_index: int = 0) -> LoneMember:
    """Return a member of a run of fixed steps that has done those before L0's boundary of the
    round that the others are in."""
    made = LoneMember(small_plan(inner_steps=steps, duration_s=60.0))
    made.claims = [claim(peer, round=round_index) for peer in peers]
    made.begin()
    made.look()
    for _ in range(steps // 2):
        made.happen(e.Stepped(10))
    made.done.clear()
    return made


def test_a_group_waits_for_all_that_train_the_module() -> None:
    peer = counted("Pa")
    (meeting,) = of(a.Average, peer.turn())
    assert meeting.awaited == {"Pa", ME}
    assert meeting.close_s > peer.now_s + 30.0
    assert of(a.TakeStep, peer.turn()) == []


def test_without_a_group_the_same_attempt_begins_anew() -> None:
    """The others may be there already: another attempt would part the peer from them."""
    peer = counted("Pa")
    peer.turn()
    assert of(a.Ask, fail(peer)) == []
    peer.now_s += AGAIN_AFTER_S
    (again,) = of(a.Average, peer.turn())
    assert again.attempt == 0


def test_what_is_waited_for_is_not_put_off_when_the_clock_is_put_back() -> None:
    """The clock was an hour ahead: the pause and the meeting would last that long."""
    peer = counted("Pa")
    peer.now_s += 3600.0
    peer.turn()
    fail(peer)
    peer.now_s -= 3600.0
    assert of(a.Average, peer.turn()) == []
    peer.now_s += AGAIN_AFTER_S
    (again,) = of(a.Average, peer.turn())
    assert (again.attempt, again.awaited) == (0, {"Pa", ME})
    assert again.close_s < peer.now_s + longest_wait_s(peer.plan.rounds)


def test_survivors_of_a_broken_group_wait_for_the_living_alone() -> None:
    peer = counted("Pa", "Pc")
    peer.turn()
    fail(peer, 0, ("Pa", ME, "Pc"), ("Pc",))
    (again,) = of(a.Average, answers(peer, "Pa"))
    assert (again.attempt, again.awaited) == (1, {"Pa", ME})


def test_a_group_of_which_a_member_knows_nothing_meets_again_with_that_member() -> None:
    peer = counted("Pa")
    peer.turn()
    fail(peer, 0, (), ("Pa",))
    peer.now_s += AGAIN_AFTER_S
    (again,) = of(a.Average, peer.turn())
    assert (again.attempt, again.awaited, again.excluded) == (0, {"Pa", ME}, ())


def test_a_list_that_is_refused_is_not_met_again_with_who_admitted_it() -> None:
    peer = counted("Pa", "Pc", "Pd")
    peer.turn()
    # The members of the list are known: its leader, and whose row nobody could take.
    fail(peer, 0, ("Pa", ME, "Pc", "Pd"), ("Pa", "Pc"))
    (again,) = of(a.Average, answers(peer, "Pa", "Pc", "Pd"))
    assert (again.awaited, again.excluded) == ({"Pd", ME}, ("Pa", "Pc"))


def test_a_claim_that_expires_is_waited_for_no_more() -> None:
    peer = counted("Pa", "Pc")
    peer.turn()
    peer.claims = [claim("Pa")]
    assert of(a.Await, peer.look()) == [a.Await(MODULE, frozenset({"Pa", ME}))]
    assert of(a.Await, peer.look()) == []
    peer.claims, peer.serving = [], ["Pz"]
    assert of(a.Await, peer.look()) == [a.Await(MODULE, None)]
    fail(peer)
    answers(peer)
    assert [step.alone for step in peer.of(a.TakeOuterStep)] == [True]


def test_who_is_in_a_later_round_is_not_waited_for() -> None:
    peer = counted("Pa", "Pc")
    peer.claims = [claim("Pa"), claim("Pc", round=1)]
    peer.look()
    (meeting,) = of(a.Average, peer.turn())
    assert meeting.awaited == {"Pa", ME}


def test_who_is_overtaken_takes_the_others_state() -> None:
    peer = counted("Pa", "Pc")
    state = peer.family.commit(peer.member.anchors[MODULE], 0, ["Pa", "Pc"])
    peer.held = {"Pa": [state], "Pc": [state]}
    peer.look()
    assert of(a.Average, actions := peer.turn()) == []
    assert of(a.Ask, actions) == [a.Ask(MODULE, 0, ("Pa", "Pc"))]
    answers(peer, Pa=state, Pc=state)
    assert [wanted.reference for wanted in peer.of(a.FetchChain)][-1] == state
    peer.happen(e.ChainFetched(state, peer.family.chain(state)))
    assert a.FetchState(state, ("Pa", "Pc"), "adopt") in peer.done
    assert "committed without" in peer.of(a.CarryOn)[0].reason
    peer.happen(e.StateFetched(state, {}, peer.family.chain(state), "adopt"))
    peer.turn()
    peer.happen(e.Checked(MODULE, state.digest, 1.0, 1.0))
    assert peer.member.anchors[MODULE] == state
    # Its step has been taken by others: the next steps may be taken.
    assert of(a.TakeStep, peer.turn()) != []


def after_a_fork() -> tuple[LoneMember, StateReference]:
    """Return a member with one other on its side, and the state of a third with more tokens."""
    made = LoneMember(small_plan(inner_steps=4, duration_s=60.0))
    common = made.family.commits(genesis(MODULE), range(2), ["Pa", ME, "Pc"])
    own = made.family.commit(common, 2, ["Pa", ME])
    alone = made.family.commit(common, 2, ["Pc"], tokens=50)
    made.claims = [claim(peer, round=3) for peer in ("Pa", "Pc")]
    made.begin(own)
    made.held = {"Pa": [own], "Pc": [alone]}
    made.look()
    for _ in range(2):
        made.happen(e.Stepped(10))
    made.done.clear()
    return made, alone


def test_whose_chain_wins_waits_for_those_who_have_more_tokens() -> None:
    peer, alone = after_a_fork()
    peer.happen(e.ChainFetched(alone, peer.family.chain(alone)))
    (meeting,) = of(a.Average, peer.turn())
    assert meeting.awaited == {"Pa", ME, "Pc"}


def test_a_chain_that_shows_itself_as_weaker_ends_no_round_in_vain() -> None:
    """Rounds without a commit would follow each other in no time, and then a commit alone."""
    peer, alone = after_a_fork()
    assert of(a.Average, actions := peer.turn()) == []
    assert of(a.Ask, actions) == [a.Ask(MODULE, 3, ("Pa", "Pc"))]
    answers(peer, "Pa", Pc=alone)
    peer.happen(e.ChainFetched(alone, peer.family.chain(alone)))
    assert peer.of(a.CarryOn) == []
    peer.now_s += refresh_period_s(peer.plan.rounds)
    (meeting,) = of(a.Average, peer.turn())
    assert (meeting.attempt, meeting.awaited) == (0, {"Pa", ME, "Pc"})


def test_of_a_newer_anchor_of_an_earlier_round_the_boundary_comes_again() -> None:
    """The others wait for this peer at the same boundary, and it stands on their anchor now."""
    peer = counted("Pa", "Pc", round_index=1)
    peer.turn()
    fail(peer, 0, ("Pa", ME, "Pc"))
    other = peer.family.commit(peer.member.anchors[MODULE], 0, ["Pa", "Pc"])
    answers(peer, Pa=other, Pc=other)
    peer.happen(e.ChainFetched(other, peer.family.chain(other)))
    peer.happen(e.StateFetched(other, {}, peer.family.chain(other), "adopt"))
    peer.turn()
    peer.happen(e.Checked(MODULE, other.digest, 1.0, 1.0))
    peer.turn()
    meetings = peer.of(a.Average)
    assert [m.anchor == other.digest for m in meetings] == [False, True]
    assert meetings[-1].round_index == 1


def test_after_the_limit_the_rules_are_those_of_the_clock() -> None:
    """The others live and did not come: a third of the module's peers commits nothing."""
    peer = counted("Pa", "Pc")
    (meeting,) = of(a.Average, peer.turn())
    peer.now_s = meeting.close_s
    fail(peer)
    answers(peer, "Pa", "Pc")
    assert peer.of(a.TakeOuterStep) == []
    assert len(peer.of(a.CarryOn)) == 1


def test_what_is_waited_for_is_said() -> None:
    peer = counted("Pa", "Pc")
    peer.turn()
    peer.now_s += 2.0
    peer.turn()
    peer.now_s += 2.0
    (wait,) = of(a.Wait, peer.happen(e.Turn(0.0, {"L0": 2})))
    assert wait.what == "the outer step of L0: have 2 of 3 peers"
    assert wait.limit_s > 0


def round_of_all(peer: LoneMember, round_index: int, present: list[str]) -> frozenset[str]:
    """Have a member take both outer steps of a round; return whom the first waited for."""
    others = ("Pa", "Pc", "Pd")
    peer.claims = [claim(other, round=round_index) for other in others]
    peer.look()
    waited_for = []
    for module in (MODULE, LAST):
        peer.turn()
        meeting = peer.of(a.Average)[-1]
        assert (meeting.module, meeting.round_index) == (module, round_index)
        waited_for.append(meeting.awaited or frozenset())
        peer.averaged(module, present)
        peer.stepped(module, present, round_index)
        peer.turn()
        for _ in range(2):
            peer.happen(e.Stepped(10))
    return waited_for[0]


def test_who_does_not_come_in_two_rounds_is_waited_for_again_after_some() -> None:
    """A claim that nobody stands behind would make every round last to its limit."""
    peer = counted("Pa", "Pc", "Pd")
    present = ["Pa", ME, "Pc"]
    waited = [n for n in range(20) if "Pd" in round_of_all(peer, n, present)]
    assert waited == [0, 1, 6, 15]
    # It came, without being waited for.
    round_of_all(peer, 20, [*present, "Pd"])
    assert all("Pd" in round_of_all(peer, n, present) for n in (21, 22))


def test_who_would_be_left_alone_waits_for_those_who_did_not_come() -> None:
    peer = counted("Pa", "Pc", "Pd")
    for round_index in range(2):
        round_of_all(peer, round_index, [ME, "Pd"])
    assert round_of_all(peer, 2, [ME, "Pd"]) == {ME, "Pd"}
    peer.claims = [claim("Pa", round=3)]
    peer.look()
    peer.turn()
    assert peer.of(a.Average)[-1].awaited == {"Pa", ME}


def test_who_does_not_come_to_rounds_that_come_to_nothing_is_waited_for_no_more() -> None:
    peer = counted("Pa", "Pd")
    for round_index in range(2):
        # Somebody is ahead, and the round waits for who is left.
        peer.claims = [claim("Pa", round=round_index + 1), claim("Pd", round=round_index)]
        peer.look()
        for module in (MODULE, LAST):
            peer.turn()
            meeting = peer.of(a.Average)[-1]
            assert (meeting.module, meeting.awaited) == (module, {"Pd", ME})
            peer.now_s = meeting.close_s
            peer.average_failed(module)
            peer.answered(module, {"Pa": None})
            peer.turn()
            for _ in range(2):
                peer.happen(e.Stepped(10))
    peer.claims = [claim("Pa", round=2), claim("Pd", round=2)]
    peer.look()
    peer.turn()
    assert peer.of(a.Average)[-1].awaited == {"Pa", ME}


def test_who_is_behind_does_not_wait_for_those_who_never_come() -> None:
    """The others wait for it in the next round: it would come late to that one too."""
    peer = counted("Pa", "Pc", "Pd")
    for round_index in range(2):
        round_of_all(peer, round_index, ["Pa", ME, "Pc"])
    peer.claims = [claim("Pa", round=3), claim("Pc", round=3), claim("Pd", round=2)]
    peer.look()
    assert of(a.Average, actions := peer.turn()) == []
    assert of(a.Ask, actions) == [a.Ask(MODULE, 2, ("Pa", "Pc", "Pd"))]
