"""Copies of states: enough peers have shown that they hold one, and none is kept in vain."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from dipaco.dht.keeping import keepers
from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.keeping import (
    ANNOUNCED_PERIODS,
    DROP_EVERY_S,
    GREATEST_OFFERS,
    GREATEST_PLACE,
    MOST_MORE_OFFERS,
    OFFER_LIMIT_S,
    OFFERS_PER_ROUND,
    PASSED_OVER_PERIODS,
    SLOW_FETCH_S,
)
from dipaco.peer.member.knowledge import MemberSettings
from dipaco.peer.member.member import Member
from dipaco.peer.member.recording import start_member
from support.family import Family, genesis
from support.lone_member import ME, claim, grid_of, of, record, small_plan, view_of
from support.lone_trainer import COPIES, LAST, MODULE, ORDER, PERIOD_S, ROUND_S, SERVING, Trainer

# -- giving


def test_copies_are_offered_in_rendezvous_order_until_there_are_enough() -> None:
    peer = Trainer(serving=SERVING)
    assert peer.offered() == list(ORDER[: COPIES - 1])
    assert peer.offered() == []
    for keeper in ORDER[: COPIES - 1]:
        assert peer.offered(peer.answer(keeper, is_kept=True)) == []
    assert peer.member._keeping.acknowledged(MODULE) == tuple(sorted(ORDER[: COPIES - 1]))
    assert peer.offered() == []


def test_who_has_acknowledged_a_copy_has_shown_itself() -> None:
    peer = Trainer()
    peer.answer("Ps", is_kept=True)
    peer.answer("Pt", is_kept=False)
    shown = peer.member.known.doubts.has_shown_itself
    assert (shown("Ps"), shown("Pt")) == (True, False)


def test_copies_lie_where_others_can_fetch_them() -> None:
    """Who cannot be called keeps nothing for others, and its own copy does not count."""
    closed = [record(peer, "serving", "outgoing") for peer in ORDER[:2]]
    peer = Trainer(serving=ORDER[2:])
    peer.serving += [*closed]
    peer.happen(e.Probed("outgoing"))
    assert peer.offered() == list(ORDER[2 : 2 + COPIES])


def test_who_only_calls_is_asked_for_a_state_when_nobody_else_has_it() -> None:
    peer = Trainer(serving=("Ps",))
    peer.serving.append(record("Pc", "serving", "outgoing"))
    state = peer.family.commit(peer.state, 3, ["V", "W"])
    known = peer.member.known
    peer.held = {"Pc": [state]}
    peer.look()
    assert known.holders(state) == ("Pc",)
    peer.held = {"Pc": [state], "Ps": [state]}
    peer.look()
    assert known.holders(state) == ("Ps",)
    known.hear(state, "Pc")
    assert set(known.holders(state)) == {"Ps", "Pc"}


def test_an_offer_names_the_state_and_its_limit() -> None:
    peer = Trainer(serving=SERVING)
    offer = of(a.Offer, peer.look())[0]
    assert offer.limit_s == OFFER_LIMIT_S
    assert offer.reference == peer.member.anchors[offer.reference.module]


def test_those_that_do_not_take_a_copy_are_passed_over_at_once() -> None:
    peer = Trainer(serving=SERVING)
    first, second, third, *_ = ORDER
    peer.offered()
    assert peer.offered(peer.answer(first, is_kept=False)) == [third]
    peer.answer(second, is_kept=True)
    peer.answer(third, is_kept=True)
    assert peer.offered() == []


def test_an_announcement_alone_is_no_copy() -> None:
    peer = Trainer(serving=SERVING)
    peer.held = {liar: [peer.state] for liar in SERVING}
    assert len(peer.offered()) == COPIES - 1


def test_who_was_passed_over_is_asked_again_after_a_while() -> None:
    peer = Trainer(serving=("Ps",))
    assert peer.offered() == ["Ps"]
    peer.answer("Ps", is_kept=False)
    for periods in (1, 2, 4, 8, PASSED_OVER_PERIODS):
        assert peer.offered() == []
        peer.now_s += periods * PERIOD_S
        assert peer.offered() == ["Ps"], "it may only have been busy"
        peer.answer("Ps", is_kept=False)


def test_who_was_passed_over_is_asked_again_in_time_though_the_clock_is_put_back() -> None:
    peer = Trainer(serving=("Ps",))
    peer.now_s += 3600.0
    assert peer.offered() == ["Ps"]
    peer.answer("Ps", is_kept=False)
    peer.now_s -= 3600.0
    assert peer.offered() == []
    peer.now_s += PERIOD_S
    assert peer.offered() == ["Ps"]


def test_all_that_take_offers_are_asked_before_the_silent_are_asked_again() -> None:
    """An offer to who is too slow to answer takes longer than the time it is passed over for."""
    crowd, near = tuple(f"P{number}" for number in range(60)), GREATEST_PLACE * COPIES
    peer = Trainer()
    peer.happen(e.CallAnswered(crowd, crowd))
    peer.serving = list(crowd)
    asked, answered, at_once = peer.offered(), 0, 0
    while len(asked) <= near:
        peer.now_s += OFFER_LIMIT_S - 1.0
        for silent in asked[answered:]:
            answered += 1
            asked += peer.offered(peer.answer(silent, is_kept=False))
            at_once = max(at_once, len(asked) - answered)
    assert COPIES - 1 < at_once <= COPIES - 1 + MOST_MORE_OFFERS, "many refuse: more are asked"
    order = keepers(MODULE, crowd, near)
    assert asked == [*order, *order[: len(asked) - near]], "the far ones would not take it"


def test_offers_in_a_round_are_bounded_and_modules_take_turns() -> None:
    """Names that only refuse, and do so at once."""
    peer = Trainer(serving=tuple(f"P{number}" for number in range(OFFERS_PER_ROUND)))
    asked = []
    for _ in range(3):
        offers = waiting = of(a.Offer, peer.look())
        while waiting:
            answers = [
                e.OfferAnswered(o.reference.module, o.reference.digest, o.peer, False)
                for o in waiting
            ]
            waiting = [o for answer in answers for o in of(a.Offer, peer.happen(answer))]
            offers += waiting
        asked.append(Counter(offer.reference.module for offer in offers))
        assert asked[-1].total() == OFFERS_PER_ROUND * PERIOD_S / ROUND_S
        peer.now_s += PERIOD_S
    assert all(counts[MODULE] and counts[LAST] for counts in asked), asked


def test_an_offer_that_nobody_answers_for_is_made_again() -> None:
    peer = Trainer(serving=("Ps",))
    assert peer.offered() == ["Ps"]
    peer.now_s += OFFER_LIMIT_S
    assert peer.offered() == ["Ps"]


def test_a_new_state_is_offered_again_and_an_acknowledgement_of_old_counts_no_more() -> None:
    peer = Trainer(serving=("Ps",))
    peer.offered()
    peer.answer("Ps", is_kept=True)
    peer.now_s = peer.plan.start_s + 3.5 * ROUND_S
    peer.turn()
    peer.done.clear()
    new = peer.stepped(MODULE, [ME], 3)
    assert [offer.reference for offer in peer.of(a.Offer)] == [new]


def test_a_keeper_that_has_gone_is_replaced() -> None:
    peer = Trainer(serving=SERVING)
    for keeper in peer.offered():
        peer.answer(keeper, is_kept=True)
    peer.serving = [p for p in SERVING if p != ORDER[0]]
    assert peer.offered() == [ORDER[2]]


def test_who_acknowledged_a_copy_and_announces_none_is_asked_again() -> None:
    """It crashed, lost its disk, and came back."""
    peer = Trainer(serving=SERVING)
    first, second, *_ = peer.offered()
    for keeper in (first, second):
        peer.answer(keeper, is_kept=True)
    peer.held = {first: [peer.state]}
    for _ in range(ANNOUNCED_PERIODS):
        assert peer.offered() == [], "an announcement takes its time"
        peer.now_s += PERIOD_S
    peer.now_s += 0.1
    assert peer.offered() == [second]


def test_other_trainers_are_copies_and_a_leaving_peer_is_asked_nothing() -> None:
    peer = Trainer("Pa", serving=SERVING)
    assert peer.offered() == [ORDER[0]]
    peer = Trainer("Pa", "Pc", serving=SERVING)
    assert peer.offered() == []
    peer = Trainer()
    peer.serving = [record("Ps", "leaving"), "Pt"]
    assert peer.offered() == ["Pt"]


def test_the_longest_in_training_alone_looks_after_the_copies() -> None:
    peer = Trainer("Pa", serving=SERVING)
    peer.claims = [claim("Pa", since_s=1.0)]
    assert peer.offered() == []


# -- taking


class Keeper:
    """A bootstrap node: it trains nothing."""

    def __init__(self, *others: str, trainer: str = "Pa") -> None:
        self.plan = small_plan()
        self.family = Family()
        self.trainer = trainer
        self.others = others
        self.claims = [claim(trainer)]
        self.holders: dict[str, list[StateReference]] = {}
        self.now_s = self.plan.start_s + 3 * ROUND_S
        self.member = Member(MemberSettings(ME, trains=False), self.plan, grid_of(self.plan))
        self.happen(e.Turn())
        self.look()

    def happen(self, event: e.Event) -> list[a.Action]:
        return self.member.handle(event, self.now_s)

    def look(self) -> list[a.Action]:
        there = [ME, *self.others]
        view = view_of(self.now_s, self.claims, there, self.holders, duration_s=ROUND_S)
        return self.happen(e.Viewed(view))

    def state(self, rounds: int = 3, module: str = MODULE) -> StateReference:
        return self.family.commits(genesis(module), range(rounds), [self.trainer])

    def offer(self, state: StateReference) -> list[a.Action]:
        return self.happen(e.Offered(self.trainer, state))

    def keeps(self, state: StateReference) -> list[a.Action]:
        """Take a copy all the way."""
        self.offer(state)
        self.happen(e.ChainFetched(state, self.family.chain(state)))
        return self.happen(e.StateFetched(state, {}, self.family.chain(state), "keep"))


def test_a_state_that_comes_to_begin_a_path_is_no_copy() -> None:
    """One that joins can want the same state for both; each is fetched, and taken, for itself."""
    keeper = Keeper()
    state = keeper.state()
    keeper.offer(state)
    keeper.happen(e.ChainFetched(state, keeper.family.chain(state)))
    assert of(a.Keep, keeper.happen(e.StateFetched(state, {}, (), "begin"))) == []
    assert of(a.Keep, keeper.happen(e.StateFetched(state, {}, (), "keep"))) == [a.Keep(state)]


def test_a_certified_state_is_fetched_from_who_offers_it_and_kept() -> None:
    keeper = Keeper()
    state = keeper.state()
    assert of(a.FetchChain, keeper.offer(state)) == [a.FetchChain(state, ("Pa",))]
    actions = keeper.happen(e.ChainFetched(state, keeper.family.chain(state)))
    assert of(a.FetchState, actions) == [a.FetchState(state, ("Pa",), "keep")]
    assert of(a.Keep, keeper.happen(e.StateFetched(state, {}, (), "keep"))) == [a.Keep(state)]
    assert keeper.member.known.held == {MODULE: state}
    assert keeper.offer(state) == []


def test_what_nobody_signed_is_not_fetched() -> None:
    keeper = Keeper()
    invented = StateReference(MODULE, 9, "f" * 64, 2**53, 8, 1)
    keeper.offer(invented)
    assert of(a.FetchState, keeper.happen(e.ChainFetched(invented, ()))) == []
    assert keeper.member.known.held == {}


def test_a_worse_state_than_the_copy_is_refused_and_a_better_one_replaces_it() -> None:
    keeper = Keeper()
    old, new = keeper.state(2), keeper.state(3)
    keeper.keeps(new)
    assert of(a.FetchState, keeper.offer(old)) == []
    newest = keeper.state(4)
    assert of(a.Keep, keeper.keeps(newest)) == [a.Keep(newest)]


def test_a_restart_forgets_nothing_of_a_copy() -> None:
    """What says who made it lies beside it: a longer chain of fewer peers does not replace it."""
    keeper = Keeper("Pa", "Pc", "Liar")
    copy = keeper.family.commits(genesis(), range(2), ["Pa", "Pc"])
    chain = keeper.family.chain(copy)
    settings = MemberSettings(ME, trains=False)
    keeper.member = start_member(settings, keeper.plan, (copy,), chain)
    keeper.happen(e.Turn())
    keeper.look()
    assert keeper.member.known.book.chain(MODULE, copy.digest) == chain
    invented = keeper.family.commits(genesis(), range(4), ["Liar"])
    keeper.happen(e.Offered("Liar", invented))
    calls = of(a.Call, keeper.happen(e.ChainFetched(invented, keeper.family.chain(invented))))
    assert calls == [a.Call(("Pa", "Pc"))], "nobody has shown itself yet"
    answered = keeper.happen(e.CallAnswered(("Pa", "Pc"), ("Pa", "Pc")))
    assert of(a.FetchState, answered) == []
    assert keeper.member.known.held == {MODULE: copy}


def test_unknown_modules_and_genesis_states_are_refused() -> None:
    keeper = Keeper()
    assert keeper.offer(StateReference("L7.E7", 1, "a" * 64, 1, 0, 1)) == []
    assert keeper.offer(genesis()) == []


def test_a_state_of_a_module_in_training_is_refused() -> None:
    peer = Trainer(serving=SERVING)
    state = peer.family.commit(peer.state, 3, ["V", "W"])
    peer.look()
    peer.done.clear()
    assert peer.happen(e.Offered("V", state)) == []


def crowd(*, is_near: bool) -> tuple[str, ...]:
    """Return peers among which this one is a keeper of the module, or is none."""
    peers = tuple(f"P{number}" for number in range(5 if is_near else 60))
    assert (ME in keepers(MODULE, [ME, *peers], GREATEST_PLACE * COPIES)) is is_near
    return peers


@pytest.mark.parametrize("is_near", [True, False])
def test_an_offer_to_who_is_far_down_the_order_is_refused(is_near: bool) -> None:
    others = crowd(is_near=is_near)
    keeper = Keeper(*others)
    keeper.happen(e.CallAnswered(others, others))
    assert bool(keeper.offer(keeper.state())) is is_near


def test_names_that_never_answered_take_no_keepers_place() -> None:
    keeper = Keeper(*crowd(is_near=False))
    assert keeper.offer(keeper.state()) != []


def test_a_copy_is_not_replaced_on_the_word_of_names_that_never_answer() -> None:
    keeper = Keeper()
    state = keeper.state(2)
    keeper.keeps(state)
    invented = keeper.family.commit(state, 2, [f"bare{number}" for number in range(12)])
    keeper.happen(e.Offered("Pz", invented))
    actions = keeper.happen(e.ChainFetched(invented, keeper.family.chain(invented)))
    (call,) = of(a.Call, actions)
    assert set(call.peers) == {f"bare{number}" for number in range(12)}
    assert of(a.FetchState, keeper.happen(e.CallAnswered(call.peers, ()))) == []
    assert of(a.FetchState, keeper.look()) == []


def test_beside_a_slow_state_another_is_fetched_and_each_is_kept_when_it_comes() -> None:
    keeper = Keeper()
    slow, other = keeper.state(2), keeper.state(3)
    keeper.offer(slow)
    keeper.happen(e.ChainFetched(slow, keeper.family.chain(slow)))
    keeper.now_s += SLOW_FETCH_S + 1.0
    keeper.offer(other)
    actions = keeper.happen(e.ChainFetched(other, keeper.family.chain(other)))
    assert [wanted.reference for wanted in of(a.FetchState, actions)] == [other]
    for state in (slow, other):
        fetched = e.StateFetched(state, {}, (), "keep")
        assert of(a.Keep, keeper.happen(fetched)) == [a.Keep(state)]
        assert of(a.Keep, keeper.happen(fetched)) == []


def test_what_was_fetched_and_cannot_be_is_not_kept() -> None:
    keeper = Keeper()
    state = keeper.state()
    keeper.offer(state)
    keeper.happen(e.ChainFetched(state, keeper.family.chain(state)))
    fetched = replace(state, version=2**20)
    assert of(a.Keep, keeper.happen(e.StateFetched(fetched, {}, (), "keep"))) == []


def test_a_copy_that_cannot_be_had_can_be_offered_again() -> None:
    keeper = Keeper()
    state = keeper.state()
    keeper.offer(state)
    keeper.happen(e.ChainFetched(state, keeper.family.chain(state)))
    keeper.happen(e.FetchFailed(MODULE, state.digest, "none of 1 holders answers", "keep"))
    assert of(a.FetchState, keeper.offer(state)) == [a.FetchState(state, ("Pa",), "keep")]


def test_offers_that_wait_for_certificates_are_few() -> None:
    keeper = Keeper()
    for number in range(GREATEST_OFFERS + 50):
        keeper.offer(StateReference(MODULE, 3, f"{number:064x}", 1, 2, 1))
    assert len(keeper.member._keeping._offers) == GREATEST_OFFERS


def test_an_honest_offer_waits_for_its_turn_behind_invented_ones() -> None:
    keeper = Keeper()
    invented = [StateReference(MODULE, 3, f"{number:064x}", 1, 2, 1) for number in range(20)]
    for state in invented:
        keeper.offer(state)
    honest = keeper.state()
    keeper.offer(honest)
    asked: list[a.FetchChain] = []
    for state in invented:
        asked += of(a.FetchChain, keeper.happen(e.ChainFetched(state, ())))
    assert honest in [chain.reference for chain in asked]


def test_an_orphan_is_looked_after_by_a_holder() -> None:
    keeper = Keeper("Ps", "Pt", "Pu")
    state = keeper.state()
    keeper.keeps(state)
    keeper.claims = [claim("Pliar")]
    keeper.holders = {"Pliar": [state]}
    assert of(a.Offer, keeper.look()) == []
    keeper.holders = {"Pliar": [replace(state, digest="00" * 32, version=99)]}
    assert len(of(a.Offer, keeper.look())) == COPIES - 1, "it only claims to train"


# -- dropping


def dropping(others_hold: int) -> Keeper:
    """Return a keeper of a copy that is not its to keep any more."""
    keeper = Keeper()
    state = keeper.state()
    keeper.keeps(state)
    keeper.others = crowd(is_near=False)
    keeper.holders = {peer: [state] for peer in keeper.others[:others_hold]}
    keeper.now_s += DROP_EVERY_S
    keeper.member.known.doubts.prove(keeper.others, keeper.now_s)
    return keeper


def test_a_copy_that_others_keep_is_dropped() -> None:
    keeper = dropping(others_hold=COPIES)
    assert of(a.Drop, keeper.look()) == [a.Drop(MODULE)]
    assert keeper.member.known.held == {}


def test_what_peers_say_that_never_answered_is_no_copy() -> None:
    keeper = dropping(others_hold=COPIES)
    keeper.member.known.doubts._proven.clear()
    assert of(a.Drop, keeper.look()) == []


def test_a_copy_that_too_few_others_have_is_not_dropped() -> None:
    assert of(a.Drop, dropping(others_hold=COPIES - 1).look()) == []


def test_a_module_in_training_is_not_dropped() -> None:
    peer = Trainer(serving=SERVING)
    peer.held = {keeper: [peer.state] for keeper in SERVING}
    peer.now_s += 10 * DROP_EVERY_S
    assert of(a.Drop, peer.look()) == []
