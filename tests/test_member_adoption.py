"""Taking over a state that others made: which one, when, and whether it is believed."""

from __future__ import annotations

import itertools

import pytest
from dipaco.dht.certificates import LONGEST_CHAIN
from dipaco.dht.records import refresh_period_s
from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.adoption import (
    GREATEST_STEP,
    MAX_LOSS_INCREASE,
    MOST_STEPS,
    RETRY_PERIODS,
    Adoption,
)
from dipaco.peer.member.chains import RETRY_PERIODS as CHAIN_RETRY_PERIODS
from dipaco.peer.member.chains import Chains
from support.adopter import MODULE, ROUND_S
from support.adopter import Adopter as Peer
from support.lone_member import ME, of

# -- which one


def test_a_state_is_fetched_once_its_certificates_say_that_it_wins() -> None:
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    actions = peer.announce(state, "Pa", "Pc")
    assert of(a.FetchChain, actions) == [a.FetchChain(state, ("Pa", "Pc"))]
    assert of(a.FetchState, actions) == []
    actions = peer.tell(state)
    assert of(a.FetchState, actions) == [a.FetchState(state, ("Pa", "Pc"), "adopt")]
    assert of(a.FetchState, peer.look()) == []


def test_a_state_is_fetched_as_soon_as_the_last_certificates_are_here() -> None:
    peer = Peer("Pa")
    one = peer.family.commit(peer.anchor, 3, ["Pa"])
    two = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.held = {"Pa": [one], "Pc": [two]}
    peer.look()
    assert of(a.FetchState, peer.happen(e.ChainFetched(one, peer.family.chain(one)))) == []
    actions = peer.happen(e.ChainFetched(two, peer.family.chain(two)))
    assert of(a.FetchState, actions) == [a.FetchState(two, ("Pc",), "adopt")]


def test_what_is_being_scored_is_taken_before_a_boundary_that_comes_meanwhile() -> None:
    """A slow peer is in a round nearly always, and would never take it."""
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.announce(state, "Pa", "Pc")
    peer.tell(state)
    peer.happen(e.StateFetched(state, {}, peer.family.chain(state), "adopt"))
    actions = peer.at(3.5 * ROUND_S)
    assert (len(of(a.CheckState, actions)), of(a.TakeSnapshot, actions)) == (1, [])
    adopted = of(a.Adopt, peer.happen(e.Checked(MODULE, state.digest, 1.0, 1.0)))
    assert [adopt.reference for adopt in adopted] == [state]
    assert [taken.module for taken in of(a.TakeSnapshot, peer.turn())] == [MODULE]


def test_certificates_that_come_while_a_level_averages_start_nothing() -> None:
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.announce(state, "Pc")
    assert of(a.Average, peer.at(3.5 * ROUND_S)) != []
    assert of(a.FetchState, peer.happen(e.ChainFetched(state, peer.family.chain(state)))) == []


@pytest.mark.parametrize(("begins", "last_round"), [(1, 2), (1, 4), (0, 4)])
def test_what_a_round_under_way_cannot_come_to_is_fetched_meanwhile(
    begins: int, last_round: int
) -> None:
    """A slow peer steps alone on its fork round after round, and hardly ever is in none."""
    peer = Peer("Pa")
    fork = peer.family.chain(peer.anchor)[begins].reference
    assert of(a.Average, peer.at(3.5 * ROUND_S)) != []
    peer.now_s += 2 * ROUND_S
    rounds = range(fork.last_round + 1, last_round + 1)
    state = peer.family.commits(fork, rounds, ["Pc", "Pd", "Pe"])
    assert of(a.FetchChain, peer.announce(state, "Pc")) == [a.FetchChain(state, ("Pc",))]
    assert of(a.FetchState, peer.tell(state)) == [a.FetchState(state, ("Pc",), "adopt")]
    assert of(a.CheckState, peer.bring(state)) == []
    peer.averaged(MODULE, ["Pa", ME])
    peer.stepped(MODULE, ["Pa", ME], 3)
    actions = peer.turn()
    for check in of(a.CheckState, actions):
        actions += peer.happen(e.Checked(check.module, check.digest, 1.0, 1.0))
    assert [adopted.reference for adopted in of(a.Adopt, actions)] == [state]


def test_counts_that_nobody_signed_move_nothing() -> None:
    peer = Peer("Pa")
    invented = StateReference(MODULE, 99, "f" * 64, 2**53, 98, 1)
    peer.announce(invented, "V", "W", "X", "Y", "Z")
    peer.happen(e.ChainFetched(invented, ()))
    peer.look()
    assert peer.of(a.FetchState) == []
    # It is asked for again, but not at every look.
    assert len(peer.of(a.FetchChain)) == 1
    peer.now_s += CHAIN_RETRY_PERIODS * refresh_period_s(peer.plan.rounds) + 0.1
    peer.look()
    assert len(peer.of(a.FetchChain)) == 2


def test_one_fast_machine_that_was_alone_does_not_outweigh_two() -> None:
    peer = Peer("Pa")
    fork = peer.family.chain(peer.anchor)[1].reference
    fast = peer.family.commits(fork, range(2, 40), ["Pz"], tokens=10**9)
    peer.announce(fast, "Pz")
    peer.tell(fast)
    assert peer.of(a.FetchState) == []


def test_more_contributors_since_the_fork_win_over_more_tokens() -> None:
    peer = Peer("Pa")
    fork = peer.family.chain(peer.anchor)[1].reference
    many = peer.family.commit(fork, 2, ["Pc", "Pd", "Pe"], tokens=1)
    peer.adopts(many, "Pc")


def test_of_several_the_best_is_fetched() -> None:
    peer = Peer("Pa")
    states = [peer.family.commit(peer.anchor, 3, ["Pa", *more]) for more in ("c", "cd", "")]
    peer.held = {f"H{n}": [state] for n, state in enumerate(states)}
    peer.look()
    for state in states:
        peer.happen(e.ChainFetched(state, peer.family.chain(state)))
    peer.look()
    assert [wanted.reference for wanted in peer.of(a.FetchState)] == [states[1]]


# -- when it is put under the work


def test_it_waits_while_its_level_averages() -> None:
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.announce(state, "Pa")
    peer.tell(state)
    peer.now_s = peer.plan.start_s + 3.5 * ROUND_S
    assert of(a.Average, peer.turn()) != []
    assert of(a.CheckState, peer.bring(state)) == []
    for attempt in (0, 1):
        peer.average_failed(MODULE, attempt)
        peer.answered(MODULE, {})
    actions = peer.turn()
    for check in of(a.CheckState, actions):
        actions += peer.happen(e.Checked(check.module, check.digest, 1.0, 1.0))
    assert [adopted.reference for adopted in of(a.Adopt, actions)] == [state]


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_wins_no_more_when_it_comes_is_left(goes_on: bool) -> None:
    """Also where more is said to have been made of it since: that may be invented."""
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.announce(state, "Pa")
    peer.tell(state)
    peer.now_s = peer.plan.start_s + 3.5 * ROUND_S
    peer.turn()
    peer.averaged(MODULE, ["Pa", ME, "Pd"])
    own = peer.stepped(MODULE, ["Pa", ME, "Pd"], 3)
    if goes_on:
        liars = ("liar", "other")
        peer.happen(e.CallAnswered(liars, liars))
        invented = peer.family.commit(state, 4, [*liars, "nobody"])
        peer.held["liar"] = [invented]
        peer.look()
        peer.tell(invented)
        assert peer.member.known.descent.wins(state, own, [invented])
    assert of(a.Adopt, peer.bring(state)) == []
    assert peer.anchor == own


def test_what_is_said_to_go_on_from_a_state_and_is_not_served_keeps_nobody_from_taking_it() -> None:
    """Three chains in a circle: the best of those that are served loses to the own one alone."""
    peer = Peer("Pa", "Pd", "Pf")
    known, base, commit = peer.member.known, peer.anchor, peer.family.commit
    peer.tokens = 1_000_000
    peer.now_s = peer.plan.start_s + 3.5 * ROUND_S
    peer.turn()
    peer.averaged(MODULE, ["Pa", ME, "Pd"])
    own = peer.stepped(MODULE, ["Pa"], 3)
    side = commit(base, 3, ["Pd"], tokens=1)
    two, three = commit(side, 3, ["Pf"], tokens=1), commit(side, 3, ["Pd"], tokens=2)
    peer.happen(e.CallAnswered(("liar",), ("liar",)))
    first, second = (commit(three, 4, ["liar", "Pd"], tokens=n) for n in (3, 4))
    for invented, wanted in ((first, first), (second, three)):
        for state in (two, three, invented):
            known.take_certificates(peer.family.chain(state))
        peer.held = {"Pf": [two], "Pd": [three], "liar": [invented]}
        (fetch,) = of(a.FetchState, peer.look())
        assert fetch.reference == wanted
        if wanted == first:
            peer.happen(e.FetchFailed(MODULE, first.digest, "nobody has it", "adopt"))
    assert not known.descent.wins(three, own)
    assert [adopted.reference for adopted in of(a.Adopt, peer.bring(three))] == [three]


def test_an_adopted_state_is_served_and_saved_when_it_is_due() -> None:
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    assert peer.adopts(state, "Pa").save
    assert peer.member.known.held[MODULE] == state


# -- whether it is believed


def test_one_that_wrecks_the_held_out_loss_is_refused_for_good() -> None:
    peer = Peer("Pa")
    before = peer.anchor
    state = peer.family.commit(before, 3, ["Py", "Pz"])
    peer.announce(state, "Pz")
    peer.tell(state)
    actions = peer.bring(state, after=1.0 + MAX_LOSS_INCREASE + 0.1)
    (warning,) = of(a.Warn, actions)
    assert "refused state" in warning.text
    assert peer.anchor == before
    peer.now_s += 1000.0
    peer.look()
    assert len(peer.of(a.FetchState)) == 1


@pytest.mark.parametrize("rounds", [1, MOST_STEPS, MOST_STEPS + 20])
def test_one_that_honest_steps_can_lead_to_is_believed_and_what_lies_further_away_is_not(
    rounds: int,
) -> None:
    """Who trained the module alone has pulled it away from this peer's path."""
    reach = GREATEST_STEP * min(rounds, MOST_STEPS)
    for steps_apart, is_believed in ((reach, True), (reach + 0.1, False), (None, False)):
        peer = Peer("Pa")
        peer.now_s += (rounds - 1) * ROUND_S
        state = peer.family.commits(peer.anchor, range(3, 3 + rounds), ["Pz"])
        peer.announce(state, "Pz")
        peer.tell(state)
        actions = peer.bring(state, after=9.0, steps_apart=steps_apart)
        assert bool(of(a.Adopt, actions)) is is_believed


def test_a_fork_is_as_long_as_both_of_its_sides() -> None:
    peer = Peer("Pa")
    fork = peer.family.chain(peer.anchor)[1].reference
    state = peer.family.commit(fork, 2, ["Px", "Py", "Pz"])
    peer.announce(state, "Pz")
    peer.tell(state)
    assert of(a.Adopt, peer.bring(state, after=9.0, steps_apart=2 * GREATEST_STEP)) != []


def test_a_state_whose_momentum_wrecks_the_next_step_is_refused() -> None:
    """Its parameters are those of the anchor."""
    for coasting_after, is_believed in ((1.1 + MAX_LOSS_INCREASE, True), (60.0, False)):
        peer = Peer("Pa")
        state = peer.family.commit(peer.anchor, 3, ["Py", "Pz"])
        peer.announce(state, "Pz")
        peer.tell(state)
        peer.happen(e.StateFetched(state, {}, (), "adopt"))
        assert len(of(a.CheckState, peer.turn())) == 1
        checked = e.Checked(
            *(MODULE, state.digest, 1.0, 1.0, 5000.0),
            coasting_before=1.1,
            coasting_after=coasting_after,
        )
        actions = peer.happen(checked)
        assert bool(of(a.Adopt, actions)) is is_believed
        assert is_believed or "one step on from 1.100 to 60.000" in of(a.Warn, actions)[0].text


def test_what_is_no_number_has_not_drifted() -> None:
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Pz"])
    peer.announce(state, "Pz")
    peer.tell(state)
    assert of(a.Adopt, peer.bring(state, after=float("nan"), steps_apart=0.1)) == []


def test_what_goes_on_from_a_refused_state_is_refused_until_others_stand_on_it() -> None:
    peer = Peer("Pa", "Pc")
    before = peer.anchor
    state = peer.family.commit(before, 3, ["Pa"])
    peer.announce(state, "Pa")
    peer.tell(state)
    peer.bring(state, after=99.0)
    peer.now_s += 2 * ROUND_S
    alone = peer.family.commit(state, 4, ["Pa"])
    peer.announce(alone, "Pa")
    peer.tell(alone)
    assert [fetch.reference for fetch in peer.of(a.FetchState)] == [state]
    others = peer.family.commit(alone, 5, ["Pa", "Pd"])
    peer.announce(others, "Pa", "Pd")
    peer.tell(others)
    assert [fetch.reference for fetch in peer.of(a.FetchState)] == [state, others]
    assert peer.anchor == before


def test_what_goes_on_from_a_refused_state_is_tried_again_after_twice_as_long_each_time() -> None:
    """Whoever refused it once may have been wrong, and would stay apart for ever."""
    peer = Peer("Pa", "Pc")
    state = peer.family.commit(peer.anchor, 3, ["Pa"])
    tried = []
    for round_index in range(3, 30):
        peer.announce(state, "Pa")
        peer.tell(state)
        if any(fetch.reference == state for fetch in peer.of(a.FetchState)):
            peer.bring(state, after=99.0)
            tried.append(round_index)
        peer.now_s += ROUND_S
        state = peer.family.commit(state, round_index + 1, ["Pa"])
    assert [later - first for first, later in itertools.pairwise(tried)] == [4, 8]


def test_a_loss_that_is_no_number_is_refused() -> None:
    peer = Peer("Pa")
    before = peer.anchor
    state = peer.family.commit(before, 3, ["Py", "Pz"])
    peer.announce(state, "Pz")
    peer.tell(state)
    peer.bring(state, after=float("nan"))
    assert peer.anchor == before


@pytest.mark.parametrize("losses", [(1.0, 1.0 + MAX_LOSS_INCREASE), (None, None)])
def test_a_little_worse_is_believed_and_so_is_what_cannot_be_scored(
    losses: tuple[float | None, float | None],
) -> None:
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Py", "Pz"])
    peer.announce(state, "Pz")
    peer.tell(state)
    peer.happen(e.StateFetched(state, {}, (), "adopt"))
    assert len(of(a.CheckState, peer.turn())) == 1
    assert of(a.Adopt, peer.happen(e.Checked(MODULE, state.digest, *losses))) != []


def test_a_state_that_another_path_has_to_judge_is_fetched_again_for_it() -> None:
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Py", "Pz"])
    peer.announce(state, "Pz")
    peer.tell(state)
    peer.happen(e.StateFetched(state, {}, (), "adopt"))
    assert of(a.CheckState, peer.turn()) == [a.CheckState(MODULE, state.digest)]
    undecided = e.Checked(MODULE, state.digest, None, None, is_undecided=True)
    assert of(a.FetchState, peer.happen(undecided)) == [a.FetchState(state, ("Pz",), "adopt")]
    assert of(a.CheckState, peer.turn()) == []
    assert of(a.Adopt, peer.bring(state)) != []


def test_what_most_of_those_it_trained_with_stand_on_is_settled() -> None:
    peer = Peer("Pa", "Pc", "Pd")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.announce(state, "Pa")
    peer.tell(state)
    actions = peer.bring(state, after=99.0)
    assert of(a.CheckState, actions) == []
    assert [adopted.reference for adopted in of(a.Adopt, actions)] == [state]


@pytest.mark.parametrize("rounds", [60, LONGEST_CHAIN - 8])
def test_what_most_of_those_stand_on_who_made_the_last_common_state_is_settled(rounds: int) -> None:
    """After a long split the other side fits badly to what was trained on this one, and is far."""
    peer = Peer("Pa", "Pc", "Pd")
    common, apart = peer.anchor, range(3, 3 + rounds)
    peer.begin(peer.family.commits(common, apart, ["Pd", ME]))
    peer.now_s += rounds * ROUND_S
    state = peer.family.commits(common, apart, ["Pa", "Pc"], tokens=20)
    peer.announce(state, "Pa", "Pc")
    peer.tell(state)
    actions = peer.bring(state, after=99.0, steps_apart=40.0)
    assert of(a.CheckState, actions) == []
    assert [adopted.reference for adopted in of(a.Adopt, actions)] == [state]


def test_strangers_settle_nothing_however_many() -> None:
    peer = Peer("Pa", "Pc", "Pd")
    before = peer.anchor
    state = peer.family.commit(before, 3, ["Pa", "V", "W", "X", "Y", "Z"])
    peer.announce(state, "V")
    peer.tell(state)
    assert of(a.CheckState, peer.bring(state, after=99.0)) != []
    assert peer.anchor == before


def test_a_state_that_nobody_serves_is_left_alone_for_a_while() -> None:
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.announce(state, "Pa")
    peer.tell(state)
    peer.happen(e.FetchFailed(MODULE, state.digest, "none of 1 holders answers", "adopt"))
    peer.look()
    assert len(peer.of(a.FetchState)) == 1
    peer.now_s += RETRY_PERIODS * refresh_period_s(peer.plan.rounds)
    peer.look()
    assert len(peer.of(a.FetchState)) == 2


def test_what_is_left_alone_is_tried_again_in_time_though_the_clock_is_put_back() -> None:
    peer = Peer("Pa")
    state = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.now_s += 3600.0
    peer.announce(state, "Pa")
    peer.tell(state)
    peer.happen(e.FetchFailed(MODULE, state.digest, "none of 1 holders answers", "adopt"))
    peer.now_s -= 3600.0
    peer.look()
    assert len(peer.of(a.FetchState)) == 1
    peer.now_s += RETRY_PERIODS * refresh_period_s(peer.plan.rounds)
    peer.look()
    assert len(peer.of(a.FetchState)) == 2


def test_another_state_that_wins_is_tried_when_the_best_cannot_be_had() -> None:
    peer = Peer("Pa")
    best, second = (peer.family.commit(peer.anchor, 3, ["Pa", *more]) for more in ("cd", "c"))
    peer.held = {"H1": [best], "H2": [second]}
    peer.look()
    for state in (best, second):
        peer.happen(e.ChainFetched(state, peer.family.chain(state)))
    peer.look()
    peer.happen(e.FetchFailed(MODULE, best.digest, "none of 1 holders answers", "adopt"))
    peer.look()
    assert [wanted.reference for wanted in peer.of(a.FetchState)] == [best, second]


def test_what_its_holders_do_not_serve_is_looked_into_beside_the_rounds_and_less_and_less() -> None:
    """Who has another such state each time would end every counted round without a commit."""
    peer = Peer("Pa")
    known, family = peer.member.known, peer.family
    adoption = Adoption(known, Chains(known))
    retry_s = RETRY_PERIODS * refresh_period_s(peer.plan.rounds)
    for number, failed_s in enumerate((0.0, retry_s, 2 * retry_s)):
        peer.now_s += failed_s - 1.0
        state = family.commit(peer.anchor, 3, ["Pa", "Pc"], tokens=number + 1)
        known.book.add_all(family.chain(state))
        peer.announce(state, "Pa")
        assert adoption.catch_up(MODULE, None) == (number == 0)
        peer.now_s += 2.0
        peer.look()
        assert adoption.catch_up(MODULE, None)
        adoption.on_state(e.FetchFailed(MODULE, state.digest, "it could not serve it", "adopt"))
    state = family.commit(peer.anchor, 3, ["Pa", "Pc"], tokens=9)
    known.book.add_all(family.chain(state))
    peer.announce(state, "Pa")
    assert not adoption.catch_up(MODULE, None)
    assert adoption.start(MODULE)
