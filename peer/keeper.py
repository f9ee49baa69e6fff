"""Keeps copies of the best parameters and blobs that rendezvous hashing assigns to this peer.

One background thread, in peers and in bootstrap nodes. Copies of states are the member's business
(`dipaco.peer.member.keeping`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dipaco.dht.announced_bests import entry_of_kept
from dipaco.dht.directory import Directory
from dipaco.dht.keeping import is_best_keeper, keepers
from dipaco.dht.records import BlobRecord
from dipaco.dht.repetition import RecentFailures
from dipaco.dht.view import SwarmView
from dipaco.modules.best_parameters import BestReference
from dipaco.modules.errors import DipacoError
from dipaco.modules.plan import RunPlan

from .background import Background
from .interfaces import Fetcher, Swarm
from .node import Node
from .publisher import PeerStatus
from .reporting.events import EventLog

logger = logging.getLogger("dipaco.peer.keeper")

# What could not be fetched is not asked for again for so long.
RETRY_AFTER_S = 20.0
# Between two looks whether others hold enough copies of what this peer need not keep.
DROP_EVERY_S = 60.0


class BestParametersCopies:
    """Copies of foreign best states, on the keeper's thread; records, on the publisher's."""

    def __init__(
        self, node: Node, status: PeerStatus, announce: Callable[[], None], events: EventLog
    ) -> None:
        self._node = node
        self._status = status
        self._announce = announce
        self._events = events
        self._failed = RecentFailures[str](RETRY_AFTER_S)
        self._looked_at = time.monotonic()

    def load_from_disk(self) -> None:
        """Use what an earlier process left here; called before anything is published."""
        for held in self._node.bests.load_from_disk():
            self._name(held)

    def keep(self, view: SwarmView) -> None:
        """Fetch the best states that this peer is to hold a copy of; drop those of others."""
        copies = self._node.plan.rounds.copies
        for path, bests in view.bests.items():
            if self._is_in_training(path) or not is_best_keeper(view, self._node.me, path, copies):
                continue
            for best in bests:
                if self._may_yet_be_newest(view, path, best) or self._is_copied(path, best):
                    break
        self._drop_unneeded(view)

    def _may_yet_be_newest(self, view: SwarmView, path: int, best: BestReference) -> bool:
        """Tell whether training has hardly gone on since: while a path gets better and better, its
        best states are its newest, of which there are copies anyway, and new ones come soon."""
        every = self._node.plan.rounds.replication_every_rounds
        return view.lead(path) is not None and view.last_round(path) < best.round_index + every

    def _is_copied(self, path: int, best: BestReference) -> bool:
        """Hold a copy if it can be fetched; one that is hardly older is good enough."""
        held = self._node.bests.get(path)
        if held is not None and held.sha256 == best.sha256:
            return True
        every = self._node.plan.rounds.replication_every_rounds
        if held is not None and held.round_index <= best.round_index < held.round_index + every:
            return True
        if best.sha256 in self._failed:
            return False
        try:
            held = self._node.bests.hold(self._node.fetcher.best_path(path, best.sha256))
        except DipacoError as error:
            self._failed.add(best.sha256)
            logger.info("could not copy the best states of path %d: %s", path, error)
            return False
        self._name(held)
        self._announce()
        self._events.emit("kept_best", path=path, round=held.round_index, sha256=held.sha256)
        return True

    def _name(self, held: BestReference) -> None:
        """Name the best states in a progress entry, so that they are found when all who trained
        the path are gone. The entry of a path in training is its trainer's business."""
        if not self._is_in_training(held.path):
            known = self._status.progress.get(held.path)
            self._status.progress[held.path] = entry_of_kept(held, known)

    def _drop_unneeded(self, view: SwarmView) -> None:
        """Now and then, drop one path's best states that are not this peer's to keep."""
        if time.monotonic() - self._looked_at < DROP_EVERY_S:
            return
        self._looked_at = time.monotonic()
        copies = self._node.plan.rounds.copies
        for held in self._node.bests.all():
            bests = view.bests.get(held.path)
            if self._is_in_training(held.path) or not bests:
                continue
            if is_best_keeper(view, self._node.me, held.path, copies):
                continue
            holders = set(self._node.fetcher.blob_holders(bests[0].sha256))
            if len(holders.intersection(view.present)) >= copies:
                logger.info("others keep the best states of path %d: dropped here", held.path)
                self._node.bests.drop(held.path)
                return

    def _is_in_training(self, path: int) -> bool:
        return self._status.claim.training_path == path

    # -- records

    def publish(self, directory: Directory, life_s: float) -> None:
        """Say which best states this process serves."""
        for held in self._node.bests.all():
            size_bytes = self._node.bests.size_bytes(held.path)
            record = BlobRecord(peer_id=self._node.me, sha256=held.sha256, bytes=size_bytes)
            directory.publish_blob(record, life_s)

    def read(self, directory: Directory) -> None:
        """Nothing: what others hold is looked up when it is needed."""

    def withdraw(self, directory: Directory) -> None:
        """Nothing: the records expire within seconds."""


class Keeper:
    """The background thread that copies best parameters and blobs."""

    def __init__(
        self,
        plan: RunPlan,
        swarm: Swarm,
        fetcher: Fetcher,
        *,
        me: str,
        background: Background,
        best_copies: BestParametersCopies | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._swarm = swarm
        self._fetcher = fetcher
        self._me = me
        self._best_copies = best_copies
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
        """Fetch what is assigned to this peer. Called by the thread."""
        try:
            view = self._swarm.view
            if self._best_copies is not None:
                self._best_copies.keep(view)
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
