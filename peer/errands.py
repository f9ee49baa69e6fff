"""What a member wants done that concerns other peers: look, fetch, ask, call, offer.

Everything that can take long runs on threads of its own and reports its outcome as an event. Used
by training peers and bootstrap nodes alike; neither models nor averaging are needed here.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from dipaco.dht.certificates import Certificate
from dipaco.dht.records import Reachability
from dipaco.dht.view import SwarmView
from dipaco.modules.errors import (
    ConfigurationError,
    CorpusError,
    DipacoError,
    ProtocolVersionError,
    StorageError,
)
from dipaco.modules.state import ModuleState, StateReference

from .interfaces import StateFetcher, StateHolder, Swarm
from .member import actions as a
from .member import events as e
from .publisher import Activity, PeerStatus
from .reporting.events import EventLog

logger = logging.getLogger("dipaco.peer.errands")

CALL_TIMEOUT_S = 5.0
POLL_S = 0.2
# Peers that are called or asked at the same time.
AT_ONCE = 16
# Copies for others that are fetched at the same time, on threads of their own: however slowly
# they come, nothing else waits for them.
COPIES_AT_ONCE = 4
# Copies for others that were fetched and are not kept yet.
MOST_COPIES = 12
# What a peer has to send of a copy before it counts as one.
SAMPLE_BYTES = 1024
# What does not get better by trying again: a peer that cannot begin for it ends.
PERMANENT = (StorageError, CorpusError, ConfigurationError)


class OtherPeers(Protocol):
    """Short calls to other peers: the exchange."""

    def holdings(self, peer: str, module: str) -> StateReference | None:
        """Ask what a peer holds of a module. Raises a `DipacoError` without an answer."""
        ...

    def offer(self, peer: str, held: StateReference, timeout_s: float) -> bool:
        """Ask a peer to fetch a state from here."""
        ...

    def sample(self, peer: str, sha256: str, offset: int, count: int) -> bytes | None:
        """Fetch some bytes of a content; None when the peer is busy. Raises a `DipacoError`."""
        ...

    def hello(self, peer: str) -> object:
        """Say hello. Raises a `DipacoError` without an answer."""
        ...


class Chains(Protocol):
    """The certificates that this peer knows and gets: the certifier."""

    def chain(self, module: str, digest: str) -> tuple[Certificate, ...]:
        """Return the certificates of a state and of those before it that are here."""
        ...

    def fetch_chain(
        self, reference: StateReference, holders: tuple[str, ...]
    ) -> tuple[Certificate, ...]:
        """Return the checked certificates of a state's chain, empty if nobody gives any."""
        ...


@dataclass
class _Turn:
    """Of those who want one state, one fetches it at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0


class Errands:
    """Carries out the actions of a member that every node has.

    `genesis` gives a module's first state; a bootstrap node needs none. `fail` hears of what keeps
    a path from being begun for good, such as a full disk. `before_adopting` is given each state
    that is to be put under a path in training, before the member hears of it.
    """

    def __init__(
        self,
        swarm: Swarm,
        fetcher: StateFetcher,
        others: OtherPeers,
        chains: Chains,
        held: StateHolder,
        status: PeerStatus,
        events: EventLog,
        report: Callable[[e.Event], None],
        *,
        genesis: Callable[[str], ModuleState] | None = None,
        fail: Callable[[DipacoError], None] | None = None,
        before_adopting: Callable[[ModuleState], None] | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._swarm = swarm
        self._fetcher = fetcher
        self._others = others
        self._chains = chains
        self._held = held
        self._status = status
        self._events = events
        self._report = report
        self._genesis = genesis
        self._fail = fail
        self._before_adopting = before_adopting
        self._executor = executor or ThreadPoolExecutor(AT_ONCE, thread_name_prefix="errand")
        self._copiers = executor or ThreadPoolExecutor(COPIES_AT_ONCE, thread_name_prefix="copy")
        # Who takes an offer may be long about it; the member waits for other errands meanwhile.
        self._offerers = executor or ThreadPoolExecutor(AT_ONCE, thread_name_prefix="offer")
        self._lock = threading.Lock()
        # By purpose and module: a member trains from one state of it, and what comes in the end
        # of one that it wanted before is let go. Copies by digest: it keeps what comes first.
        self._wanted: dict[tuple[a.Purpose, str], str] = {}
        self._fetched: dict[tuple[a.Purpose, str], ModuleState] = {}
        self._turns: dict[tuple[str, str], _Turn] = {}
        """By module and digest, of states that are being fetched."""
        self._reachable: Reachability = "unknown"
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Begin nothing more and end waits; what is under way is reported to nobody."""
        self._stopping.set()
        for threads in (self._executor, self._copiers, self._offerers):
            threads.shutdown(wait=False, cancel_futures=True)

    def see(self, view: SwarmView) -> None:
        """Report that the swarm was read, and before it whether others can call this peer."""
        if self._status.reachable != self._reachable:
            self._reachable = self._status.reachable
            self._report(e.Probed(self._reachable))
        self._report(e.Viewed(view))

    def carry_out(self, action: a.Action) -> bool:
        """Do an action, or begin to; returns whether it is one of these."""
        match action:
            case a.Say():
                self._say(action)
            case a.Warn():
                logger.warning("%s", action.text)
            case a.Watch():
                self._swarm.watch(action.scope)
            case a.Look():
                self._submit(self._look, action)
            case a.FetchState():
                self._want(action)
                self._submit(self._fetch_state, action)
            case a.FetchChain():
                self._submit(self._fetch_chain, action)
            case a.Ask():
                self._submit(self._ask, action)
            case a.Call():
                self._submit(self._call, action)
            case a.Offer():
                self._submit(self._offer, action)
            case a.Keep():
                self._submit(self._keep, action)
            case a.Drop():
                logger.info("others keep copies of %s: dropped here", action.module)
                self._submit(self._drop, action)
            case a.SaveAll():
                self._held.save_all()
            case _:
                return False
        return True

    def take(self, state: StateReference, purpose: a.Purpose) -> ModuleState:
        """Hand out a state that was fetched for this; called once for each. Raises `KeyError`."""
        key = _key(purpose, state)
        with self._lock:
            if key not in self._fetched or self._fetched[key].digest != state.digest:
                raise KeyError(state.digest)
            self._wanted.pop(key, None)
            taken = self._fetched.pop(key)
            if purpose == "keep":
                # Older ones that are on their way to the disk must not come after it.
                for other in [k for k in self._fetched if k[0] == "keep"]:
                    if _is_older(self._fetched[other], taken):
                        del self._fetched[other]
                        self._wanted.pop(other, None)
            return taken

    def forget(self, *purposes: a.Purpose) -> None:
        """Let go what was fetched for some purposes, and what is on its way for them."""
        with self._lock:
            for key in [key for key in self._wanted if key[0] in purposes]:
                del self._wanted[key]
                self._fetched.pop(key, None)

    def look_up(self, digest: str) -> ModuleState | None:
        """Return a fetched state without taking it."""
        with self._lock:
            return next((s for s in self._fetched.values() if s.digest == digest), None)

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Do other work on the same threads; it reports its outcome itself."""
        return self._executor.submit(work)

    def _submit(self, work: Callable[[Any], None], action: a.Action) -> None:
        def run() -> None:
            try:
                work(action)
            except Exception as error:
                # Nothing that another peer sends ends this one, and the member must not wait.
                logger.exception("an errand failed: %s", type(action).__name__)
                failure = _failure(action, f"{type(error).__name__}: {error}")
                if failure is not None:
                    self._report(failure)

        self._threads_of(action).submit(run)

    def _threads_of(self, action: a.Action) -> Executor:
        match action:
            case a.FetchState(purpose="keep"):
                return self._copiers
            case a.Offer():
                return self._offerers
        return self._executor

    def _say(self, action: a.Say) -> None:
        self._status.claim = Activity(
            action.state,
            action.path,
            since_s=action.since_s,
            reason=action.reason,
            pinned=action.pinned,
        )
        self._swarm.announce()

    def _look(self, action: a.Look) -> None:
        try:
            view = self._swarm.refresh(action.further)
        except DipacoError as error:
            self._report(e.LookFailed(str(error)))
            return
        self._report(e.Viewed(view, is_answer=True))

    # -- states

    def _want(self, action: a.FetchState) -> None:
        key = _key(action.purpose, action.reference)
        with self._lock:
            # What was wanted before and is wanted again is not sent for twice.
            if key in self._fetched and self._fetched[key].digest != action.reference.digest:
                del self._fetched[key]
            self._wanted[key] = action.reference.digest

    def _store(self, action: a.FetchState, state: ModuleState) -> None:
        """Keep a state until it is taken; copies never push out what is trained from."""
        key = _key(action.purpose, action.reference)
        with self._lock:
            if self._wanted.get(key) == action.reference.digest:
                self._fetched[key] = state
            copies = [key for key in self._fetched if key[0] == "keep"]
            for key in copies[:-MOST_COPIES]:
                del self._fetched[key]
                self._wanted.pop(key, None)

    def _fetch_state(self, action: a.FetchState) -> None:
        wanted, purpose = action.reference, action.purpose
        try:
            with self._turn(wanted):
                state = self._state(action)
                if purpose == "adopt" and self._before_adopting is not None:
                    self._before_adopting(state)
                self._store(action, state)
        except DipacoError as error:
            if self._stopping.is_set():
                logger.debug("state of %s: %s", wanted.module, error)
            elif purpose == "begin" and self._fail and isinstance(error, PERMANENT):
                self._fail(error)
            elif purpose == "keep":
                logger.info("could not copy %s: %s", wanted.module, error)
            else:
                logger.warning(
                    "state %s of %s: %s", wanted.digest[:12] or "0", wanted.module, error
                )
            if purpose == "keep":
                with self._lock:
                    self._wanted.pop(_key(purpose, wanted), None)
            self._report(e.FetchFailed(wanted.module, wanted.digest, str(error), purpose))
            return
        reference = state.reference
        chain = self._chains.chain(wanted.module, reference.digest)
        self._report(e.StateFetched(reference, dict(state.progress), chain, purpose))

    @contextlib.contextmanager
    def _turn(self, wanted: StateReference) -> Iterator[None]:
        """Wait while the same state is being fetched for something else: then it is here."""
        key = wanted.module, wanted.digest
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
            turn.users += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.users -= 1
                if not turn.users:
                    del self._turns[key]

    def _state(self, action: a.FetchState) -> ModuleState:
        wanted = action.reference
        here = self.look_up(wanted.digest) if wanted.digest else None
        if here is not None:
            return here
        held = self._held.get(wanted.module)
        if held is not None and held.digest == wanted.digest:
            state = self._held.load(wanted.module)
            if state is not None and state.digest == wanted.digest:
                return state
        if wanted.version == 0 and self._genesis is not None:
            return self._genesis(wanted.module)
        return self._fetcher.state(wanted, action.holders, is_copy=action.purpose == "keep")

    def _fetch_chain(self, action: a.FetchChain) -> None:
        chain: tuple[Certificate, ...] = ()
        try:
            chain = self._chains.fetch_chain(action.reference, action.holders)
        except DipacoError as error:
            logger.debug("certificates of %s: %s", action.reference.module, error)
        self._report(e.ChainFetched(action.reference, chain))

    def _keep(self, action: a.Keep) -> None:
        try:
            state = self.take(action.reference, "keep")
        except KeyError:
            what = "%s: a copy is not kept, a newer one or too many came at once"
            logger.info(what, action.reference.module)
            return
        self._held.hold(state)
        self._held.save(state)
        self._swarm.announce()
        self._events.emit("kept", module=state.module, version=state.version)

    def _drop(self, action: a.Drop) -> None:
        self._held.drop(action.module)
        self._swarm.announce()

    # -- other peers

    def _ask(self, action: a.Ask) -> None:
        held: dict[str, StateReference | None] = {}

        def ask(peer: str) -> None:
            try:
                held[peer] = self._others.holdings(peer, action.module)
            except DipacoError as error:
                logger.debug("%s does not answer: %s", peer, error)

        _all_at_once(ask, action.peers)
        self._report(e.Answered(action.module, action.round_index, dict(sorted(held.items()))))

    def _call(self, action: a.Call) -> None:
        answered: list[str] = []

        def call(peer: str) -> None:
            try:
                self._others.hello(peer)
            except ProtocolVersionError:
                pass
            except DipacoError as error:
                logger.debug("%s does not answer: %s", peer, error)
                return
            answered.append(peer)

        _all_at_once(call, action.peers)
        self._report(e.CallAnswered(action.peers, tuple(sorted(answered))))

    def _offer(self, action: a.Offer) -> None:
        """Offer a state, and wait until the other peer has shown that it holds it.

        It has when it sends a random piece of it that is right: to say so costs nothing.
        """
        state, peer = action.reference, action.peer
        deadline = time.monotonic() + action.limit_s
        count = min(SAMPLE_BYTES, state.bytes)
        offset = secrets.randbelow(state.bytes - count + 1)
        # Read now: by the time that the other peer has it, a newer state may be here.
        expected = self._held.read(state.digest, offset, count)
        is_kept = False
        try:
            timeout_s = max(0.1, min(CALL_TIMEOUT_S, action.limit_s))
            waits = expected is not None and self._others.offer(peer, state, timeout_s)
            while waits and time.monotonic() < deadline:
                held = self._others.holdings(peer, state.module)
                if held is not None and held.digest == state.digest:
                    sample = self._others.sample(peer, state.digest, offset, count)
                    is_kept = sample == expected
                    waits = sample is None
                if not waits or self._stopping.wait(POLL_S):
                    break
        except DipacoError as error:
            logger.debug("%s did not take %s: %s", peer, state.module, error)
        self._report(e.OfferAnswered(state.module, state.digest, peer, is_kept))


def _key(purpose: a.Purpose, state: StateReference) -> tuple[a.Purpose, str]:
    """Return under what a state is remembered that was fetched for a purpose."""
    return purpose, state.digest if purpose == "keep" else state.module


def _is_older(state: ModuleState, other: ModuleState) -> bool:
    return state.module == other.module and state.version <= other.version


def _all_at_once(work: Callable[[str], None], peers: tuple[str, ...]) -> None:
    if peers:
        with ThreadPoolExecutor(max_workers=min(len(peers), AT_ONCE)) as pool:
            list(pool.map(work, peers))


def _failure(action: a.Action, reason: str) -> e.Event | None:
    """Return what an errand has come to that nobody foresaw could fail."""
    match action:
        case a.Look():
            return e.LookFailed(reason)
        case a.FetchState(reference=state):
            return e.FetchFailed(state.module, state.digest, reason, action.purpose)
        case a.FetchChain(reference=state):
            return e.ChainFetched(state, ())
        case a.Ask():
            return e.Answered(action.module, action.round_index, {})
        case a.Call():
            return e.CallAnswered(action.peers, ())
        case a.Offer(reference=state):
            return e.OfferAnswered(state.module, state.digest, action.peer, is_kept=False)
    return None
