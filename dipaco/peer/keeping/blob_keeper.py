"""Keeps copies of the blobs that rendezvous hashing assigns to this peer.

One background thread, in peers and in bootstrap nodes. Copies of states are the member's business
(`dipaco.protocol.member`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dipaco.base.errors import DipacoError
from dipaco.peer.background import Background
from dipaco.peer.node.node import Node
from dipaco.peer.presence.refresher import Refresher
from dipaco.protocol.keeping import keepers

logger = logging.getLogger("dipaco.peer.keeping.blob_keeper")

# A blob that could not be fetched is not asked for again for so long.
RETRY_AFTER_S = 20.0


class BlobKeeper:
    """The background thread that copies blobs."""

    def __init__(
        self,
        node: Node,
        refresher: Refresher,
        background: Background,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._refresher = node, refresher
        self._stopping = threading.Event()
        self._monotonic = monotonic
        self._retry_at: dict[str, float] = {}
        self._thread = background.thread("blob keeper", self._run)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a transfer under way is left (it can resume later)."""
        self._stopping.set()
        self._thread.join(0.5)

    def _run(self) -> None:
        while not self._stopping.wait(self._refresher.period_s):
            self.keep()

    def keep(self) -> None:
        """Fetch the blobs of the run that are assigned to this peer, one a turn."""
        node, fetcher = self._node, self._node.fetcher
        try:
            view = self._refresher.view
        except DipacoError as error:
            logger.debug("blob keeper: %s", error)
            return
        present = view.present
        for sha256 in fetcher.all_blobs():
            has_failed_lately = self._monotonic() < self._retry_at.get(sha256, 0.0)
            if has_failed_lately or node.blobs.has(sha256):
                continue
            if view.scope is not None and not view.scope.covers_peer(sha256):
                continue  # Blobs are dealt out to buckets as peers without a path are.
            if node.me not in keepers(sha256, present, node.plan.rounds.copies):
                continue
            try:
                fetcher.blob(sha256)
            except DipacoError as error:
                self._retry_at[sha256] = self._monotonic() + RETRY_AFTER_S
                logger.info("could not copy a blob: %s", error)
                continue
            self._refresher.announce_blobs()
            return
