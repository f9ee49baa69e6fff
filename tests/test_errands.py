"""What concerns other peers: every errand reports exactly one outcome, failures too."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from dipaco.dht.view import SwarmView
from dipaco.modules.errors import (
    IntegrityError,
    NetworkError,
    ProtocolVersionError,
    StorageError,
)
from dipaco.modules.state import StateReference
from dipaco.peer import errands as errands_file
from dipaco.peer.errands import MOST_COPIES, Errands
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.publisher import PeerStatus
from support.fake_swarm import (
    AtOnce,
    FakeCertifier,
    FakeEvents,
    FakeFetcher,
    FakeSwarm,
    Impatient,
    held_state,
)
from support.family import Family, genesis

MODULE = "L0.E0"
LIMIT_S = 60.0


class Held:
    """What is served here."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self.saved: list[str] = []
        self.all_saved = 0

    def get(self, module: str) -> StateReference | None:
        state = self.states.get(module)
        return state.reference if state is not None else None

    def load(self, module: str) -> Any:
        return self.states.get(module)

    def hold(self, state: Any) -> None:
        self.states[state.module] = state

    def save(self, state: Any) -> None:
        self.saved.append(state.digest)

    def save_all(self) -> None:
        self.all_saved += 1

    def drop(self, module: str) -> None:
        del self.states[module]

    def read(self, sha256: str, offset: int, count: int) -> bytes | None:
        return content(sha256)[offset : offset + count]


def content(sha256: str) -> bytes:
    """Return what stands for the content of a state."""
    return (sha256 * 100).encode()


class Others:
    """The other peers: what each holds; who is not named does not answer."""

    def __init__(self) -> None:
        self.held: dict[str, list[StateReference | None]] = {}
        """What a peer says that it holds, one answer after the other, the last for ever."""
        self.takes = True
        self.versions: set[str] = set()
        self.offers: list[tuple[str, float]] = []
        self.samples: list[tuple[int, int]] = []
        self.sends: list[bytes | None] = []
        """What is sent as a sample, before the right bytes."""

    def holdings(self, peer: str, module: str) -> StateReference | None:
        if peer not in self.held:
            raise NetworkError(f"{peer} does not answer")
        answers = self.held[peer]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def offer(self, peer: str, held: StateReference, timeout_s: float) -> bool:
        self.offers.append((peer, timeout_s))
        if peer not in self.held:
            raise NetworkError(f"{peer} does not answer")
        return self.takes

    def sample(self, peer: str, sha256: str, offset: int, count: int) -> bytes | None:
        self.samples.append((offset, count))
        return self.sends.pop(0) if self.sends else content(sha256)[offset : offset + count]

    def hello(self, peer: str) -> object:
        if peer in self.versions:
            raise ProtocolVersionError("another protocol")
        if peer not in self.held:
            raise NetworkError(f"{peer} does not answer")
        return None


class Rig:
    """Errands that are done at once, or on threads of their own if something else hears of it."""

    def __init__(
        self, report: Callable[[e.Event], None] | None = None, *, has_genesis: bool = True
    ) -> None:
        self.swarm, self.fetcher, self.others = FakeSwarm(), FakeFetcher(), Others()
        self.certifier, self.held, self.status = FakeCertifier(), Held(), PeerStatus()
        self.events = FakeEvents()
        self.reports: list[e.Event] = []
        log: Any = self.events
        self.errands = Errands(
            self.swarm,
            self.fetcher,
            self.others,
            self.certifier,
            self.held,
            self.status,
            log,
            report or self.reports.append,
            genesis=(lambda module: stored(genesis(module))) if has_genesis else None,
            executor=None if report else AtOnce(),
        )
        self.errands._stopping = Impatient()

    def outcome(self, action: a.Action) -> e.Event:
        """Carry an action out; it has exactly one outcome."""
        self.reports.clear()
        assert self.errands.carry_out(action)
        (event,) = self.reports
        return event


def stored(reference: StateReference) -> Any:
    """Return what stands for a state with this reference."""
    return SimpleNamespace(
        module=reference.module,
        version=reference.version,
        digest=reference.digest,
        reference=reference,
        progress={},
    )


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(errands_file, "ThreadPoolExecutor", lambda *_, **__: AtOnce())
    return Rig()


def fetch(state: StateReference, purpose: a.Purpose = "adopt") -> a.FetchState:
    return a.FetchState(state, ("A", "B"), purpose)


@pytest.mark.parametrize("kind", ["copies", "offers"])
def test_others_that_are_slow_keep_nothing_else_waiting(kind: str) -> None:
    """Hundreds of states that come for ever, or of peers that take offers and never fetch."""
    never, looked = threading.Event(), threading.Event()
    rig = Rig(lambda event: looked.set() if isinstance(event, e.Viewed) else None)

    def hang(*arguments: Any, **options: Any) -> Any:
        never.wait(LIMIT_S)
        raise NetworkError("it came too slowly")

    rig.fetcher.state = hang  # type: ignore[method-assign]
    rig.others.offer = hang  # type: ignore[method-assign]
    try:
        for n in range(256):
            state = StateReference(f"L0.E{n}", 1, f"{n:064x}", 9, 1, 9)
            slow = a.Offer(state, "A", 1.0) if kind == "offers" else fetch(state, "keep")
            rig.errands.carry_out(slow)
        rig.errands.carry_out(a.Look())
        assert looked.wait(LIMIT_S / 2)
    finally:
        rig.errands.stop()
        never.set()


def test_a_state_that_is_on_its_way_is_not_sent_for_twice() -> None:
    reports = queue.SimpleQueue[e.Event]()
    rig, begun, go_on = Rig(reports.put), threading.Event(), threading.Event()
    state, serve = held_state(MODULE), rig.fetcher.state
    rig.fetcher.states[state.digest] = stored(state)

    def come_slowly(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(LIMIT_S)
        return serve(*arguments, **options)

    rig.fetcher.state = come_slowly  # type: ignore[method-assign]
    try:
        rig.errands.carry_out(fetch(state, "keep"))
        assert begun.wait(LIMIT_S)
        rig.errands.carry_out(fetch(state, "begin"))
        go_on.set()
        found = [reports.get(timeout=LIMIT_S) for _ in range(2)]
    finally:
        rig.errands.stop()
    assert all(isinstance(event, e.StateFetched) for event in found)
    assert rig.fetcher.asked == [state.digest]
    assert (
        rig.errands.take(state, "begin").reference
        == rig.errands.take(state, "keep").reference
        == state
    )


# -- the swarm


def test_a_look_brings_a_view_or_says_why_not(rig: Rig) -> None:
    assert rig.outcome(a.Look()) == e.Viewed(rig.swarm.view, is_answer=True)

    def fail(_: Any = ()) -> SwarmView:
        raise NetworkError("the DHT did not answer for 30 s")

    rig.swarm.refresh = fail  # type: ignore[method-assign]
    assert rig.outcome(a.Look()) == e.LookFailed("the DHT did not answer for 30 s")


def test_a_claim_is_published(rig: Rig) -> None:
    rig.errands.carry_out(a.Say("training", 2, 9.0, "nobody trains it", True))
    claim = rig.status.claim
    assert (claim.state, claim.path, claim.since_s, claim.pinned) == ("training", 2, 9.0, True)
    assert rig.swarm.announced == 1
    assert rig.reports == []


def test_who_answers_is_there_also_with_another_protocol(rig: Rig) -> None:
    rig.others.held, rig.others.versions = {"B": [None]}, {"C"}
    called = ("C", "B", "A")
    assert rig.outcome(a.Call(called)) == e.CallAnswered(called, ("B", "C"))
    assert rig.outcome(a.Call(())) == e.CallAnswered((), ())


def test_what_others_hold_is_what_those_say_that_answer(rig: Rig) -> None:
    state = held_state(MODULE)
    rig.others.held = {"B": [state], "A": [None]}
    assert rig.outcome(a.Ask(MODULE, 3, ("A", "B", "C"))) == e.Answered(
        MODULE, 3, {"A": None, "B": state}
    )
    assert rig.outcome(a.Ask(MODULE, 4, ())) == e.Answered(MODULE, 4, {})


# -- states


def test_a_state_is_fetched_with_its_chain_and_handed_out_once(rig: Rig) -> None:
    family = Family()
    state = family.commits(genesis(), range(2), "AB")
    rig.certifier.book = family.book
    rig.fetcher.states[state.digest] = stored(state)
    assert rig.outcome(fetch(state)) == e.StateFetched(state, {}, family.chain(state), "adopt")
    assert rig.errands.look_up(state.digest) is not None
    assert rig.errands.take(state, "adopt").reference == state
    assert rig.errands.look_up(state.digest) is None


def test_a_path_can_begin_with_the_state_of_which_a_copy_is_kept(rig: Rig) -> None:
    state = held_state(MODULE, version=3)
    rig.fetcher.states[state.digest] = stored(state)
    for purpose in ("begin", "keep"):
        rig.outcome(fetch(state, purpose))
    rig.errands.carry_out(a.Keep(state))
    assert rig.errands.take(state, "begin").reference == state
    assert rig.errands.look_up(state.digest) is None


@pytest.mark.parametrize("failure", [NetworkError("nobody answers"), IntegrityError("not it")])
@pytest.mark.parametrize("purpose", ["begin", "adopt", "keep"])
def test_a_state_that_cannot_be_had_is_said(
    rig: Rig, failure: Exception, purpose: a.Purpose
) -> None:
    rig.fetcher.failure = failure
    state = held_state(MODULE)
    assert rig.outcome(fetch(state, purpose)) == e.FetchFailed(
        MODULE, state.digest, str(failure), purpose
    )


@pytest.mark.parametrize("purpose", ["begin", "adopt"])
def test_copies_push_out_nothing_that_is_trained_from(rig: Rig, purpose: a.Purpose) -> None:
    own = [held_state(f"L0.E{n}", digest=f"own {n}") for n in range(2 * MOST_COPIES)]
    copies = [held_state(f"L1.E{n}", digest=f"copy {n}") for n in range(2 * MOST_COPIES)]
    rig.fetcher.states = {state.digest: stored(state) for state in (*own, *copies)}
    for state in own:
        rig.outcome(fetch(state, purpose))
    for state in copies:
        rig.outcome(fetch(state, "keep"))
    assert [rig.errands.take(state, purpose).reference for state in own] == own
    assert sum(rig.errands.look_up(state.digest) is not None for state in copies) == MOST_COPIES
    rig.errands.carry_out(a.Keep(copies[0]))
    assert rig.held.get("L1.E0") is None


def test_what_was_not_wanted_in_the_end_is_let_go(rig: Rig) -> None:
    one, two = held_state(MODULE, digest="e"), held_state(MODULE, digest="f")
    rig.fetcher.states = {state.digest: stored(state) for state in (one, two)}
    rig.outcome(fetch(one))
    rig.outcome(fetch(two))
    assert rig.errands.look_up(one.digest) is None
    rig.outcome(fetch(one, "begin"))
    rig.errands.forget("adopt")
    assert rig.errands.look_up(two.digest) is None
    assert rig.errands.take(one, "begin").reference == one


def test_a_copy_that_comes_late_is_kept_unless_a_newer_one_is(rig: Rig) -> None:
    old, new, failed = (held_state(MODULE, version=n, digest=f"d{n}") for n in (2, 3, 4))
    rig.fetcher.states = {state.digest: stored(state) for state in (old, new)}
    for state in (old, new, failed):
        rig.errands._want(fetch(state, "keep"))
    for state in (old, new, failed):
        rig.errands._fetch_state(fetch(state, "keep"))
    rig.errands.carry_out(a.Keep(old))
    assert rig.held.get(MODULE) == old
    rig.errands._want(fetch(old, "keep"))
    rig.errands._fetch_state(fetch(old, "keep"))
    rig.errands.carry_out(a.Keep(new))
    rig.errands.carry_out(a.Keep(old))
    assert rig.held.get(MODULE) == new
    assert rig.errands._wanted == rig.errands._fetched == {}


def test_what_keeps_a_path_from_being_begun_for_good_ends_the_peer(rig: Rig) -> None:
    failed: list[Exception] = []
    rig.errands._fail = failed.append
    rig.fetcher.failure = StorageError("disk full")
    state = held_state(MODULE)
    rig.outcome(fetch(state, "keep"))
    rig.outcome(fetch(state, "adopt"))
    assert failed == []
    rig.outcome(fetch(state, "begin"))
    assert failed == [rig.fetcher.failure]


def test_what_lies_here_is_not_fetched(rig: Rig) -> None:
    state = held_state(MODULE)
    rig.held.states[MODULE] = stored(state)
    event = rig.outcome(fetch(state, "begin"))
    assert isinstance(event, e.StateFetched)
    assert rig.fetcher.asked == []


def test_what_was_fetched_and_is_wanted_again_is_not_sent_twice(rig: Rig) -> None:
    state = held_state(MODULE)
    rig.fetcher.states[state.digest] = stored(state)
    assert rig.outcome(fetch(state)) == rig.outcome(fetch(state))
    assert rig.fetcher.asked == [state.digest]
    assert rig.errands.take(state, "adopt").reference == state


def test_what_should_lie_here_and_does_not_is_fetched(rig: Rig) -> None:
    """The file is damaged: an older one was read in its place."""
    state, older = held_state(MODULE, version=2, digest="b"), held_state(MODULE)
    rig.held.states[MODULE] = stored(state)
    rig.held.load = lambda module: stored(older)  # type: ignore[method-assign]
    rig.fetcher.states[state.digest] = stored(state)
    event = rig.outcome(fetch(state))
    assert isinstance(event, e.StateFetched)
    assert rig.fetcher.asked == [state.digest]


def test_a_first_state_comes_from_the_run(rig: Rig) -> None:
    event = rig.outcome(fetch(StateReference.untrained(MODULE), "begin"))
    assert event == e.StateFetched(genesis(), {}, (), "begin")


def test_a_chain_that_nobody_gives_is_empty(rig: Rig) -> None:
    family = Family()
    state = family.commit(genesis(), 0, "AB")
    rig.certifier.served = family.chain(state)
    wanted = a.FetchChain(state, ("A",))
    assert rig.outcome(wanted) == e.ChainFetched(state, family.chain(state))
    rig.certifier.failure = NetworkError("nobody answers")
    assert rig.outcome(wanted) == e.ChainFetched(state, ())
    assert rig.certifier.asked == [("A",), ("A",)]


def test_a_copy_is_served_saved_and_announced(rig: Rig) -> None:
    state = held_state(MODULE, version=3)
    rig.fetcher.states[state.digest] = stored(state)
    rig.outcome(fetch(state, "keep"))
    rig.errands.carry_out(a.Keep(state))
    assert rig.held.get(MODULE) == state
    assert rig.held.saved == [state.digest]
    assert rig.swarm.announced == 1
    assert rig.events.of("kept") == [{"module": MODULE, "version": 3}]
    rig.errands.carry_out(a.Drop(MODULE))
    assert rig.held.get(MODULE) is None
    assert rig.swarm.announced == 2


def test_before_leaving_all_is_saved(rig: Rig) -> None:
    rig.errands.carry_out(a.SaveAll())
    assert rig.held.all_saved == 1


# -- offers


def offer(limit_s: float = 30.0) -> a.Offer:
    return a.Offer(held_state(MODULE), "A", limit_s)


def answered(is_kept: bool) -> e.OfferAnswered:
    return e.OfferAnswered(MODULE, held_state(MODULE).digest, "A", is_kept)


def test_an_offer_is_taken_once_the_peer_holds_the_state(rig: Rig) -> None:
    rig.others.held["A"] = [None, held_state(MODULE, digest="e"), held_state(MODULE)]
    assert rig.outcome(offer()) == answered(is_kept=True)


def test_a_peer_that_says_it_holds_a_state_has_to_send_a_piece_of_it(rig: Rig) -> None:
    rig.others.held["A"] = [held_state(MODULE)]
    rig.others.sends = [b"something else"]
    assert rig.outcome(offer()) == answered(is_kept=False)


def test_a_peer_that_is_busy_is_asked_for_a_piece_again(rig: Rig) -> None:
    rig.others.held["A"] = [held_state(MODULE)]
    rig.others.sends = [None, None]
    assert rig.outcome(offer()) == answered(is_kept=True)
    assert len(rig.others.samples) == 3


def test_what_is_not_here_itself_is_not_offered(rig: Rig) -> None:
    rig.others.held["A"] = [held_state(MODULE)]
    rig.held.read = lambda *piece: None  # type: ignore[method-assign]
    assert rig.outcome(offer()) == answered(is_kept=False)
    assert rig.others.offers == []


def test_an_offer_that_is_not_noted_is_not_waited_for(rig: Rig) -> None:
    rig.others.held["A"] = [held_state(MODULE)]
    rig.others.takes = False
    assert rig.outcome(offer()) == answered(is_kept=False)


def test_an_offer_to_who_does_not_answer_is_not_taken(rig: Rig) -> None:
    assert rig.outcome(offer()) == answered(is_kept=False)


def test_an_offer_has_its_limit(rig: Rig) -> None:
    rig.others.held["A"] = [None]
    assert rig.outcome(offer(limit_s=0.0)) == answered(is_kept=False)
    ((_, timeout_s),) = rig.others.offers
    assert 0 < timeout_s <= 0.1


def test_stopping_ends_the_wait_for_an_offer(rig: Rig) -> None:
    rig.others.held["A"] = [None]
    rig.errands.stop()
    assert rig.outcome(offer(limit_s=1e9)) == answered(is_kept=False)


# -- whatever happens


def everything() -> Sequence[a.Action]:
    state = held_state(MODULE)
    return (
        a.Look(),
        fetch(state, "begin"),
        fetch(state, "keep"),
        a.FetchChain(state, ("A",)),
        a.Ask(MODULE, 3, ("A", "B")),
        a.Call(("A", "B")),
        offer(),
    )


@pytest.mark.parametrize("action", everything(), ids=lambda action: action.kind)
def test_also_what_nobody_foresaw_has_an_outcome(rig: Rig, action: a.Action) -> None:
    """A member that is never answered would wait for ever."""

    def break_down(*_: object, **__: object) -> Any:
        raise KeyError("x")

    for part in (rig.swarm, rig.fetcher, rig.others, rig.certifier):
        for name in ("refresh", "state", "holdings", "offer", "hello", "fetch_chain"):
            if hasattr(part, name):
                setattr(part, name, break_down)
    event = rig.outcome(action)
    assert event.kind in (
        "look_failed",
        "fetch_failed",
        "chain_fetched",
        "answered",
        "call_answered",
        "offer_answered",
    )


def test_what_concerns_the_model_is_not_an_errand(rig: Rig) -> None:
    assert not rig.errands.carry_out(a.TakeSnapshot(MODULE, 1, 0.0))
    assert not rig.errands.carry_out(a.FetchPath(1))
