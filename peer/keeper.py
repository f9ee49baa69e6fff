"""Keeps copies of the blobs that rendezvous hashing assigns to this peer.

One background thread, in peers and in bootstrap nodes. Copies of states are the member's business
(`dipaco.peer.member`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dipaco.base.errors import DipacoError
from dipaco.dht.keeping import keepers
from dipaco.dht.repetition import RecentFailures
from dipaco.dht.view import SwarmView
from dipaco.modules.plan import RunPlan

from .background import Background
from .interfaces import Fetcher, Swarm

logger = logging.getLogger("dipaco.peer.keeper")

# What could not be fetched is not asked for again for so long.
RETRY_AFTER_S = 20.0


class Keeper:
    """The background thread that copies blobs."""

    def __init__(
        self,
        plan: RunPlan,
        swarm: Swarm,
        fetcher: Fetcher,
        *,
        me: str,
        background: Background,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._swarm = swarm
        self._fetcher = fetcher
        self._me = me
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._failed = RecentFailures[str](RETRY_AFTER_S, monotonic)
        self._thread = background.thread("keeper", self._run)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a transfer under way is left (it can resume later)."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(0.5)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._swarm.period_s)
            if not self._stopping.is_set():
                self.keep()

    def keep(self) -> None:
        """Fetch what is assigned to this peer."""
        try:
            view = self._swarm.view
            self._keep_blobs(view)
        except DipacoError as error:
            logger.debug("keeper: %s", error)

    def _keep_blobs(self, view: SwarmView) -> None:
        """Fetch the blobs of the run that are assigned to this peer, one a turn."""
        peers = tuple(view.present)
        for sha256 in self._fetcher.all_blobs():
            if sha256 in self._failed or self._fetcher.has_blob(sha256):
                continue
            if view.scope is not None and not view.scope.covers_peer(sha256, None):
                continue  # Blobs are dealt out to buckets as peers without a path are.
            if self._me not in keepers(sha256, peers, self._plan.rounds.copies):
                continue
            try:
                self._fetcher.blob(sha256)
            except DipacoError as error:
                self._failed.add(sha256)
                logger.info("could not copy a blob: %s", error)
                continue
            self._swarm.announce_blobs()
            return
