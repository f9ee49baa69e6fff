"""Keeps copies of what rendezvous hashing assigns to this peer: states, best paths, blobs.

One background thread, in peers and in bootstrap nodes. What it fetches is used only when its
digest matches, and replaces what is held only when there are more tokens behind it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dipaco.dht.policy import keepers, modules_to_keep
from dipaco.dht.records import HoldingRecord
from dipaco.dht.view import SwarmView
from dipaco.modules.errors import DipacoError
from dipaco.modules.grid import Grid
from dipaco.routing.plan import RunPlan

from .best_copies import BestCopies
from .fetching import ContentFetcher
from .publisher import Publisher
from .schedule import RoundSchedule
from .states import HeldStates

logger = logging.getLogger("dipaco.peer.keeper")

# A state that could not be fetched is not asked for again for so long.
RETRY_AFTER_S = 20.0


class Keeper:
    """The replication thread."""

    def __init__(
        self,
        plan: RunPlan,
        grid: Grid,
        schedule: RoundSchedule,
        publisher: Publisher,
        fetcher: ContentFetcher,
        held: HeldStates,
        *,
        me: str,
        own_modules: Callable[[], tuple[str, ...]],
        on_kept: Callable[[str, int], None] = lambda module, version: None,
        best_copies: BestCopies | None = None,
    ) -> None:
        self._plan = plan
        self._grid = grid
        self._schedule = schedule
        self._publisher = publisher
        self._fetcher = fetcher
        self._held = held
        self._me = me
        self._own_modules = own_modules
        self._on_kept = on_kept
        self._best_copies = best_copies
        self._offers: list[HoldingRecord] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._failed_at: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a transfer under way is left (it can resume later)."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(0.5)

    def accept_offer(self, offer: HoldingRecord) -> bool:
        """Take note that a leaving peer hands over a state; fetch it at once.

        Called on the exchange's thread. Returns whether the offer is wanted.
        """
        if offer.module not in self._grid.modules():
            return False
        held = self._held.get(offer.module)
        if held is not None and held.tokens >= offer.tokens:
            return held.digest == offer.digest
        with self._lock:
            if len(self._offers) >= 256:
                return False
            self._offers.append(offer)
        self._wake.set()
        return True

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._publisher.period_s)
            self._wake.clear()
            if self._stopping.is_set():
                return
            try:
                self._keep_offered()
                view = self._publisher.view
                self._keep_states(view)
                if self._best_copies is not None:
                    self._best_copies.keep(view)
                self._keep_blobs(view)
            except DipacoError as error:
                logger.debug("keeper: %s", error)

    def _keep_offered(self) -> None:
        with self._lock:
            offers, self._offers = self._offers, []
        for offer in offers:
            self._fetch_state(offer, (offer.peer_id,))

    def _keep_states(self, view: SwarmView) -> None:
        now = time.monotonic()
        failed = {key for key, at in self._failed_at.items() if now - at < RETRY_AFTER_S}
        copies = self._plan.rounds.copies
        wanted = modules_to_keep(view, self._grid, self._me, copies, unavailable=failed)
        own = set(self._own_modules())
        for holding in wanted:
            if self._stopping.is_set():
                return
            if holding.module in own or not self._due(holding):
                continue
            holders = tuple(
                other.peer_id
                for other in view.holdings.get(holding.module, ())
                if other.digest == holding.digest
            )
            self._fetch_state(holding, holders)

    def _due(self, holding: HoldingRecord) -> bool:
        """Fetch a new state of a module only every few rounds, and not right after a failure."""
        held = self._held.get(holding.module)
        if held is not None:
            if held.tokens >= holding.tokens:
                return False
            if holding.round < held.last_round + self._plan.rounds.replication_every_rounds:
                return False
        return time.monotonic() - self._failed_at.get(holding.digest, -1e9) > RETRY_AFTER_S

    def _fetch_state(self, holding: HoldingRecord, holders: tuple[str, ...]) -> None:
        held = self._held.get(holding.module)
        if held is not None and held.tokens >= holding.tokens:
            return
        try:
            state = self._fetcher.state(holding.module, holding.digest, holders)
        except DipacoError as error:
            self._failed_at[holding.digest] = time.monotonic()
            logger.info("could not copy %s: %s", holding.module, error)
            return
        self._held.hold(state, save=True)
        self._publisher.announce()
        self._on_kept(holding.module, holding.version)

    def _keep_blobs(self, view: SwarmView) -> None:
        """Fetch the blobs of the run that are assigned to this peer, one a turn."""
        peers = tuple(sorted(view.peers))
        for sha256 in self._fetcher.all_blobs():
            if self._fetcher.has_blob(sha256):
                continue
            if self._me not in keepers(sha256, peers, self._plan.rounds.copies):
                continue
            if time.monotonic() - self._failed_at.get(sha256, -1e9) < RETRY_AFTER_S:
                continue
            try:
                self._fetcher.blob(sha256)
            except DipacoError as error:
                self._failed_at[sha256] = time.monotonic()
                logger.info("could not copy a blob: %s", error)
                continue
            self._publisher.announce_blobs()
            return
