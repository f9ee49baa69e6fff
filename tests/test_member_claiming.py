"""Claiming a path: the least served one, and giving way to who came at the same moment."""

from __future__ import annotations

from typing import Any

import pytest
from dipaco.dht.certificates import CertificateBook
from dipaco.dht.policy import Decision, rendezvous
from dipaco.dht.records import Claim
from dipaco.modules.config import RoundsConfig
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.beginning import (
    LIMIT_S,
    LONG_S,
    LONGEST_S,
    MOVE_LIMIT_S,
    MOVE_SHARE,
    RETRY_S,
    UNAVAILABLE_S,
    WITH_OTHERS_LIMIT_S,
    Beginning,
)
from dipaco.peer.member.chains import Chains
from dipaco.peer.member.claiming import LONGEST_WAIT_S, MAX_LOOKS, SHORTEST_WAIT_S, Claiming
from dipaco.peer.member.horizon import Horizon
from dipaco.peer.member.knowledge import Knowledge, MemberSettings
from dipaco.peer.member.member import LEAVE_BUDGET_S, Member
from support.family import Family, genesis
from support.lone_member import ME, claim, grid_of, knowledge, of, taken, view_of
from support.make_plan import make_plan

PLAN = make_plan(rounds=RoundsConfig(duration_s=20.0))
START_S = 2000.0


class Claimer:
    """The claiming of a member whose claim is in the view after every look."""

    def __init__(self, *others: Claim, pinned: int | None = None) -> None:
        settings = MemberSettings(ME, pinned=pinned)
        self.known = Knowledge(settings, PLAN, grid_of(PLAN), CertificateBook())
        self.known.now_s = START_S
        self.others = list(others)
        self.claiming = Claiming(self.known, Horizon(self.known))
        self.said: list[a.Say] = []
        self.looks = 0

    def others_then(self, said: a.Say | None) -> list[Claim]:
        return self.others

    def claim(self, decision: Decision | None = None) -> Decision:
        """Go through all of it."""
        self.claiming.begin(decision)
        for _ in range(200):
            actions = taken(self.known)
            self.said += of(a.Say, actions)
            for _ in of(a.Look, actions):
                self.looks += 1
                self.known.learn(self.view())
                self.claiming.on_view()
            if not actions:
                self.known.now_s += 0.1
                self.claiming.on_turn()
            if not self.claiming.is_under_way:
                break
        assert self.claiming.decision is not None
        return self.claiming.decision

    def view(self) -> Any:
        said = self.said[-1] if self.said else None
        mine = []
        if said is not None and said.path is not None:
            mine = [claim(ME, said.path, said.state, since_s=said.since_s)]
        return view_of(self.known.now_s, [*self.others_then(said), *mine])


def before_me(path: int) -> str:
    """Return a peer that rendezvous hashing puts before this one on `path`."""
    return next(f"P{n}" for n in range(99) if rendezvous(f"P{n}", path) < rendezvous(ME, path))


def test_a_claim_of_a_clock_that_was_ahead_is_made_anew_when_it_is_put_back() -> None:
    claimer = Claimer()
    path = claimer.claim().path
    claimer.claiming.train()
    assert of(a.Say, taken(claimer.known))[-1].since_s > START_S - 900.0
    claimer.known.now_s = START_S - 900.0
    claimer.claiming.clock_went_back()
    (said,) = of(a.Say, taken(claimer.known))
    assert (said.state, said.path, said.since_s) == ("training", path, START_S - 900.0)
    claimer.claiming.clock_went_back()
    assert taken(claimer.known) == []


def test_a_claim_settles_in_time_though_the_clock_is_put_back() -> None:
    claimer = Claimer()
    claimer.known.note_time(START_S + 3600.0)
    claimer.claiming.begin()
    for _ in range(2):
        claimer.said += of(a.Say, taken(claimer.known))
        claimer.known.learn(claimer.view())
        claimer.claiming.on_view()
    claimer.known.note_time(START_S)
    claimer.claiming.clock_went_back()
    taken(claimer.known)
    claimer.known.note_time(START_S + LONGEST_WAIT_S)
    claimer.claiming.on_turn()
    assert len(of(a.Look, taken(claimer.known))) == 1


def test_it_claims_the_path_that_nobody_trains() -> None:
    peer = Claimer(*(claim(f"P{path}", path) for path in (0, 1, 3)))
    assert peer.claim().path == 2
    (said,) = peer.said
    assert (said.state, said.path, said.since_s, said.pinned) == ("joining", 2, START_S, False)
    assert "nobody trains it" in said.reason


def test_it_looks_again_after_a_short_wait_that_differs_from_others() -> None:
    peer = Claimer()
    peer.claim()
    waited_s = peer.known.now_s - START_S
    assert SHORTEST_WAIT_S <= waited_s <= LONGEST_WAIT_S + 0.2
    assert peer.looks == 3


def test_it_gives_way_to_a_newcomer_that_hashing_puts_first() -> None:
    peer = Claimer(claim(before_me(0), 0, "joining", since_s=START_S))
    decision = peer.claim(Decision(0, "looks free"))
    assert decision.path != 0
    assert [said.path for said in peer.said] == [0, decision.path]


def test_a_pinned_peer_gives_way_to_nobody() -> None:
    peer = Claimer(claim(before_me(1), 1, "joining", since_s=START_S), pinned=1)
    assert peer.claim().path == 1
    assert [said.pinned for said in peer.said] == [True]


def test_it_gives_way_a_few_times_only() -> None:
    """Wherever it goes, somebody before it goes too."""

    class Followed(Claimer):
        def others_then(self, said: a.Say | None) -> list[Claim]:
            if said is None or said.path is None:
                return []
            return [claim(before_me(said.path), said.path, "joining", since_s=START_S)]

    peer = Followed()
    assert peer.claim().path in range(4)
    assert 2 <= len(peer.said) <= MAX_LOOKS


def test_a_dht_that_does_not_answer_is_asked_again() -> None:
    peer = Claimer()
    peer.claiming.begin()
    assert taken(peer.known) == [a.Look()]
    peer.claiming.on_look_failed()
    assert taken(peer.known) == [a.Look()]


def test_a_move_that_failed_is_taken_back() -> None:
    peer = Claimer()
    peer.claim(Decision(1, "better"))
    peer.claiming.take_back(3)
    peer.claiming.leave()
    back, leaving = of(a.Say, taken(peer.known))
    assert (back.state, back.path) == ("training", 3)
    assert (leaving.state, leaving.path) == ("leaving", 3)


# -- what comes before and after, by a whole member


class Newcomer:
    """A member that has just been started."""

    def __init__(self, **settings: Any) -> None:
        self.member = Member(MemberSettings(ME, **settings), PLAN, grid_of(PLAN))
        self.now_s = START_S

    def happen(self, event: e.Event) -> list[a.Action]:
        return self.member.handle(event, self.now_s)

    def turn(self, after_s: float = 0.25) -> list[a.Action]:
        self.now_s += after_s
        return self.happen(e.Turn())

    def claim(self) -> list[a.Action]:
        """Claim path 0 with nobody else there; returns what the first turn after it wants."""
        self.turn()
        self.happen(e.Viewed(view_of(self.now_s), is_answer=True))
        mine = view_of(self.now_s, [claim(ME, 0, "joining", since_s=self.now_s)])
        self.happen(e.Viewed(mine, is_answer=True))
        self.turn(LONGEST_WAIT_S)
        self.happen(e.Viewed(mine, is_answer=True))
        return self.turn(0.0)


def test_a_dht_that_never_answers_ends_the_attempt_with_a_line_that_says_what_to_do() -> None:
    peer = Newcomer()
    actions = peer.turn()
    while not of(a.Left, actions):
        assert peer.now_s < START_S + LIMIT_S + 10.0
        for wait in of(a.Wait, actions):
            assert wait.limit_s <= LIMIT_S
        peer.happen(e.LookFailed("no answer"))
        actions = peer.turn(10.0)
    (left,) = of(a.Left, actions)
    assert left.error == "the DHT did not answer for 300 s; check the network and start again"


def test_a_shard_that_cannot_be_had_at_first_is_tried_again() -> None:
    peer = Newcomer(pinned=0)
    assert of(a.FetchPath, peer.claim()) == [a.FetchPath(0)]
    peer.happen(e.PathFailed(0, "nobody serves the shard of path 0"))
    assert of(a.FetchPath, peer.turn()) == []
    actions = peer.turn(RETRY_S)
    assert of(a.FetchPath, actions) == [a.FetchPath(0)]
    (wait,) = of(a.Wait, actions)
    assert wait.what == "the shard of path 0 (nobody serves the shard of path 0)"
    assert 0 < wait.limit_s < LIMIT_S


@pytest.mark.parametrize(
    ("path", "has_others", "limit_s"),
    [(None, False, LIMIT_S), (None, True, WITH_OTHERS_LIMIT_S), (1, False, MOVE_LIMIT_S)],
)
def test_a_peer_that_has_a_path_does_not_stand_idle_for_another(
    path: int | None, has_others: bool, limit_s: float
) -> None:
    """And who may take another one tries that sooner."""
    known = knowledge(PLAN)
    known.now_s = START_S
    known.path = path
    known.learn(view_of(START_S))
    beginning = Beginning(known, Chains(known))
    beginning.begin(0, has_others=has_others)
    attempt_s = 10.0
    while not beginning.has_failed:
        known.now_s += attempt_s
        beginning.on_path(e.PathFailed(0, "nobody serves the shard of path 0"))
        assert beginning.left_s == pytest.approx(max(0.0, START_S + limit_s - known.now_s))
        known.now_s += RETRY_S
        beginning.on_turn()
    assert limit_s < known.now_s - START_S < limit_s + attempt_s + RETRY_S


def test_a_beginning_is_tried_again_and_ends_though_the_clock_is_put_back() -> None:
    known = knowledge(PLAN)
    known.note_time(START_S + 3600.0)
    known.learn(view_of(START_S))
    beginning = Beginning(known, Chains(known))
    beginning.begin(0)
    taken(known)
    beginning.on_path(e.PathFailed(0, "nobody serves the shard of path 0"))
    known.note_time(START_S)
    assert beginning.left_s == LIMIT_S
    known.note_time(START_S + RETRY_S)
    beginning.on_turn()
    assert len(of(a.FetchPath, taken(known))) == 1
    beginning.on_path(e.PathFailed(0, "nobody serves the shard of path 0"))
    known.note_time(START_S + LIMIT_S + 1.0)
    assert beginning.has_failed


def test_what_comes_slowly_is_waited_for() -> None:
    """An attempt to fetch a large state ends after a while; what came is kept for the next."""
    known = knowledge(PLAN)
    known.now_s = START_S
    known.learn(view_of(START_S))
    beginning = Beginning(known, Chains(known))
    beginning.begin(0, has_others=True)
    beginning.on_path(e.PathReady(0))
    wanted = [want.reference for want in of(a.FetchState, taken(known))]
    assert beginning.left_s == LONGEST_S
    for _ in range(4):
        known.now_s += LIMIT_S
        assert not beginning.has_failed
        for state in wanted:
            beginning.on_state(e.FetchFailed(state.module, state.digest, "not all", "begin"))
        known.now_s += UNAVAILABLE_S
        assert not beginning.has_failed
        beginning.on_turn()
        assert [want.reference for want in of(a.FetchState, taken(known))] == wanted
        known.now_s += LONG_S
    known.now_s = START_S + LONGEST_S + 0.1
    assert beginning.has_failed


def test_a_peer_that_moves_waits_longer_for_what_is_on_its_way() -> None:
    """Or one on a slow line would give up each time, and never move."""
    known = knowledge(plan := make_plan(rounds=RoundsConfig(duration_s=120.0)))
    known.path = 1
    known.learn(view_of(START_S, duration_s=120.0))
    beginning = Beginning(known, Chains(known))
    beginning.begin(0)
    assert beginning.left_s == MOVE_SHARE * plan.rounds.duration_s
    known.now_s += MOVE_LIMIT_S + 0.1
    assert not beginning.has_failed
    beginning.on_path(e.PathFailed(0, "nobody serves the shard of path 0"))
    assert beginning.has_failed


@pytest.mark.parametrize("moves", [True, False])
def test_who_moves_keeps_its_state_of_a_module_that_stays_in_training(moves: bool) -> None:
    """A state that wins may be an invented one: it is compared with the own one, in training."""
    family, module = Family(), "L0.E0"
    own = family.commits(genesis(module), range(2), [ME, "Pa"])
    other = family.commit(own, 2, ["Pa", "Pb"])
    known = knowledge(PLAN)
    known.recall(family.chain(other))
    known.doubts.prove(["Pa", "Pb"], START_S)
    known.serve(own)
    if moves:
        known.path, known.anchors = 1, {module: own}
    known.learn(view_of(START_S, serving=["Pa"], held={"Pa": [other]}))
    Beginning(known, Chains(known)).begin(0)
    wanted = [w.reference for w in of(a.FetchState, taken(known)) if w.reference.module == module]
    assert wanted == [own if moves else other]


def test_what_never_comes_ends_the_wait_with_its_reason() -> None:
    peer = Newcomer(pinned=0)
    peer.claim()
    peer.happen(e.PathFailed(0, "nobody serves the shard of path 0"))
    (left,) = of(a.Left, peer.turn(LIMIT_S + 1.0))
    assert left.error == "nobody serves the shard of path 0; start again later"
    assert peer.member.is_gone
    assert peer.turn() == []


def test_who_cannot_begin_hands_over_its_copies_before_it_ends() -> None:
    family = Family()
    copy = family.commits(genesis("L0.E0"), range(2), "AB")
    peer = Newcomer(pinned=0)
    peer.member.known.recall(family.chain(copy))
    peer.member.known.serve(copy)
    peer.claim()
    peer.happen(e.PathFailed(0, "nobody serves the shard of path 0"))
    peer.happen(e.Viewed(view_of(peer.now_s, serving=["Pz"])))
    actions = peer.turn(LIMIT_S + 1.0)
    assert [(offer.reference, offer.peer) for offer in of(a.Offer, actions)] == [(copy, "Pz")]
    assert of(a.Left, actions) == []
    peer.happen(e.OfferAnswered("L0.E0", copy.digest, "Pz", True))
    (left,) = of(a.Left, peer.turn(LEAVE_BUDGET_S))
    assert left.handed_over == ("L0.E0",)
    assert left.error == "nobody serves the shard of path 0; start again later"


@pytest.mark.parametrize("version", [0, 2])
def test_a_genesis_state_is_taken_only_where_nobody_holds_a_certified_one(version: int) -> None:
    family = Family()
    module = "L0.E0"
    state = family.commits(genesis(module), range(version), "AB")
    peer = Newcomer(pinned=0)
    held = {"A": [state]} if version else {}
    peer.turn()
    mine = view_of(peer.now_s, [claim(ME, 0, "joining", since_s=peer.now_s)], held=held)
    for _ in range(2):
        peer.happen(e.Viewed(mine, is_answer=True))
    peer.turn(LONGEST_WAIT_S)
    peer.happen(e.Viewed(mine, is_answer=True))
    actions = peer.turn(0.0)
    wanted = [s for s in of(a.FetchState, actions) if s.reference.module == module]
    if version:
        assert wanted == []
        assert of(a.FetchChain, actions) == [a.FetchChain(state, ("A",))]
        # Those who signed it are called before it counts.
        peer.happen(e.ChainFetched(state, family.chain(state)))
        actions = peer.turn()
        assert of(a.Call, actions) == [a.Call(("A", "B"))]
        assert of(a.FetchState, actions) == []
        peer.happen(e.CallAnswered(("A", "B"), ("B",)))
        wanted = of(a.FetchState, peer.turn())
    assert [(s.reference.version, s.purpose) for s in wanted] == [(version, "begin")]
