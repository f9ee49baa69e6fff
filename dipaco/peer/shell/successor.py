"""Notices that the run has a successor, and prepares to move there (design 4.9, successor).

A peer moves only when the successor is ready: its folder is open and everything that all peers need
of it has been fetched. Until then it stays in its run, so a manifest without content moves nobody.
"""

from __future__ import annotations

import logging
import threading

from dipaco.base.errors import DipacoError
from dipaco.base.waits import BriefLock
from dipaco.dht.directory import Directory
from dipaco.peer.background import Background
from dipaco.peer.node.node import Node
from dipaco.peer.reporting.event_log import EventLog
from dipaco.protocol.manifest import SignedManifest, foreign_successor, newest_run

logger = logging.getLogger("dipaco.peer.shell.successor")

RETRY_AFTER_S = 5.0


class SuccessorWatch:
    """Reads the manifests at every refresh, and opens the newest run of the chain.

    With `follow` False a successor is only told, once.
    """

    def __init__(
        self, node: Node, events: EventLog, background: Background, *, follow: bool = True
    ) -> None:
        self._node = node
        self._events = events
        self._background = background
        self._follow = follow
        self._lock = BriefLock()
        self._stopping = threading.Event()
        self._found: SignedManifest | None = None
        self._thread: threading.Thread | None = None
        self._ready: Node | None = None
        self._told: set[str] = set()

    def read(self, directory: Directory) -> None:
        """Look for a successor of the run. On the refresher's thread."""
        newest = newest_run(self._node.manifest, directory.list_manifests())
        for envelope in directory.foreign_manifests:
            self._tell_of_upgrade(envelope)
        run_id = newest.plan.run_id
        known = self._found.plan.run_id if self._found is not None else self._node.run_id
        if run_id == known:
            return
        self._found = newest
        self._emit(newest, "found")
        if self._follow and self._thread is None:
            self._thread = self._background.thread("successor", self._get_ready)
            self._thread.start()

    def _tell_of_upgrade(self, envelope: bytes) -> None:
        """Say, once, that the run goes on in a protocol that this program does not speak."""
        try:
            found = foreign_successor(envelope, self._node.manifest)
        except DipacoError:
            return
        if found is not None and found[0] not in self._told:
            self._told.add(found[0])
            logger.warning("%s", found[1])
            self._events.emit("update", what=found[1])

    def stop(self) -> None:
        """Stop getting ready; what is ready stays."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(0.5)
        with self._lock:
            unused = self._ready
            self._ready = None
        if unused is not None:
            unused.release()

    @property
    def ready_run(self) -> str | None:
        """The id of the run that can be moved to, if one can."""
        with self._lock:
            return self._ready.run_id if self._ready is not None else None

    def take(self) -> Node | None:
        """Return the run that is ready, if any, to move to it: the caller closes it."""
        with self._lock:
            node, self._ready = self._ready, None
        if node is not None:
            self._stopping.set()
            self._emit(node.manifest, "moving")
        return node

    def _get_ready(self) -> None:
        """Open the newest run that was found; try again while its content cannot be fetched."""
        complained = ""
        while not self._stopping.is_set():
            found = self._found
            assert found is not None
            try:
                node = self._open(found)
            except Exception as error:  # nothing in what an operator signs may end this peer
                if str(error) != complained:
                    complained = str(error)
                    logger.warning(
                        "the successor '%s' (%s) is not ready yet, so this peer stays: %s",
                        found.plan.name,
                        found.plan.run_id,
                        error,
                    )
                self._stopping.wait(RETRY_AFTER_S)
                continue
            with self._lock:
                wanted = not self._stopping.is_set() and found is self._found
                if wanted:
                    self._ready = node
            if wanted:
                self._emit(found, "ready")
                return
            node.release()

    def _open(self, manifest: SignedManifest) -> Node:
        node = self._node.open_successor(manifest)
        try:
            node.admit()
            blobs = node.plan.blobs
            # One attempt for each: this watch tries again later, and says once what is missing.
            node.fetcher.blob(blobs.shards, "the shard index of the successor")
            if blobs.genesis is not None:
                node.fetcher.blob(blobs.genesis, "the genesis index of the successor")
            node.load_shard_index()
            node.fetcher.blob(blobs.base, "the base model of the successor")
        except BaseException:
            node.release()
            raise
        return node

    def _emit(self, manifest: SignedManifest, state: str) -> None:
        self._events.emit(
            "successor",
            run=manifest.plan.run_id,
            name=manifest.plan.name,
            state=state,
            start_s=manifest.plan.start_s,
        )
