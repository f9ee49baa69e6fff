"""Keeps this peer's records in the DHT fresh and its view of the swarm new.

One background thread: publish what this peer is and holds under the keys of its modules and of its
bucket, read what the member wants to see of the others (its scope), sleep for the refresh period.
What has changed is published at once. Everything that decides reads `view`, an immutable snapshot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

from dipaco.base.errors import AdmissionError, ClockError, DipacoError, NetworkError
from dipaco.dht.directory import Directory
from dipaco.peer.exchange.hello import SOFTWARE
from dipaco.peer.exchange.known_peers import peer_of
from dipaco.protocol.coverage import Scope, bucket_count, home_bucket, scope_of
from dipaco.protocol.records import (
    MAX_ENTRIES,
    PROGRESS_LIFE_S,
    BlobRecord,
    ClaimState,
    HeldState,
    ModuleRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
    Reachability,
    clean_text,
    record_life_s,
    refresh_period_s,
)
from dipaco.protocol.view import SwarmView

from .background import Background
from .node import Node

logger = logging.getLogger("dipaco.peer.publisher")

MANIFEST_LIFE_S = 3600.0
BLOB_PERIODS = 8
# Between two looks at the neighbours' clocks.
CLOCK_PERIODS = 10
# Peers seen once that are called again when they are missing: after a network split the two sides
# have forgotten each other, and nothing else would bring them together.
REMEMBERED_PEERS = 256
CALLED_AT_ONCE = 4
STOP_TIMEOUT_S = 3.0
# The oldest view that is good enough while a peer waits for others.
LOOK_OFTEN_S = 2.0


@dataclass(frozen=True)
class Activity:
    """What this peer does, and on which path. A value, replaced whole: the publisher signs it on
    its own thread, and a new path must never go out with the state or the time of the old one."""

    state: ClaimState = "joining"
    path: int | None = None
    since_s: float = 0.0
    reason: str = ""
    """Why this path, for the person at the machine."""
    pinned: bool = False
    """The path was asked for: this peer never moves."""


@dataclass
class PeerStatus:
    """What this peer says of itself. Written by the session, read by publisher and display."""

    claim: Activity = field(default_factory=Activity)
    device: str = "cpu"
    name: str = ""
    """What the owner calls this peer."""
    team: str = ""
    """Whom the owner trains for."""
    tokens_per_s: float = 0.0
    reachable: Reachability = "unknown"
    addresses: tuple[str, ...] = ()
    progress: dict[int, ProgressEntry] = field(default_factory=dict)
    round_index: int = 0
    """With fixed steps: the round that this peer is in."""
    waiting_for: str = ""
    validation_loss: float = float("nan")


class FurtherRecords(Protocol):
    """Records that another part of the peer reads and renews, on the publisher's thread."""

    def read(self, directory: Directory) -> None:
        """Read what others published, and publish what there is."""
        ...


class Publisher:
    """The background thread, see the module's docstring. Used by peers and bootstrap nodes."""

    def __init__(self, node: Node, status: PeerStatus, background: Background) -> None:
        self._node, self._status, self._background = node, status, background
        self._directory, self._clock = node.directory, node.clock
        self._further_records: list[FurtherRecords] = []
        self._listeners: list[Callable[[SwarmView], None]] = []
        self.period_s = refresh_period_s(node.plan.rounds)
        self._buckets = bucket_count(node.grid.path_count)
        self._scope = scope_of((), (home_bucket(node.me, None, self._buckets),), node.grid)
        self._further: set[int] = set()
        self._wide_view: SwarmView | None = None
        # What stands in the DHT of this peer, by module and by bucket.
        self._said_of: dict[str, ModuleRecord] = {}
        self._said_in: dict[int, PeerRecord] = {}
        self._changed = threading.Event()
        self._wants_to_read = True
        self._read_at = time.monotonic()
        self._stopping = threading.Event()
        self._refreshed = threading.Condition()
        self._refresh_count = 0
        self._refreshing = False
        self._blob_countdown = 0
        self._clock_countdown = CLOCK_PERIODS
        self._withdrawing = False
        self._addresses: dict[str, tuple[str, ...]] = {}
        for address in node.initial_peers:
            peer = peer_of(address)
            self._addresses[peer] = (*self._addresses.get(peer, ()), address)
        self._known_peers: deque[str] = deque(self._addresses, maxlen=REMEMBERED_PEERS)
        self._view: SwarmView | None = None
        self._thread = background.thread("publisher", self._run)
        background.on_failure(self._wake_waiting)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def refresh_too(self, records: FurtherRecords) -> None:
        """Read and renew these records as well, from the next refresh on."""
        self._further_records.append(records)

    def on_view(self, listener: Callable[[SwarmView], None]) -> None:
        """Call `listener` with every new view, on the publisher's thread."""
        self._listeners.append(listener)

    @property
    def view(self) -> SwarmView:
        """Return the newest view. `refresh` has to have succeeded once."""
        if self._view is None:
            raise NetworkError("the swarm has not been read yet")
        return replace(self._view, now_s=self._clock.now())

    def watch(self, scope: Scope) -> None:
        """Read this part of the swarm from the next time on."""
        self._scope = scope

    def announce(self) -> None:
        """Publish soon: something changed.

        With fixed steps a round may take a fraction of a second. The swarm is read again with
        every change: a view that is rounds old tells nobody whom to wait for.
        """
        if self._node.schedule.fixed_steps:
            with self._refreshed:
                self._wants_to_read = True
        self._changed.set()

    def look_often(self) -> None:
        """Read the swarm again if the view is not quite new: something in it is waited for."""
        if time.monotonic() - self._read_at > LOOK_OFTEN_S:
            with self._refreshed:
                self._want_to_read()

    def _want_to_read(self, further: Collection[int] = ()) -> None:
        self._further.update(further)
        self._wants_to_read = True
        self._changed.set()

    def refresh(self, further: Collection[int] = (), timeout_s: float = 30.0) -> SwarmView:
        """Publish and read now, and return a view that is newer than this call.

        It covers the buckets `further` too, which `view` does not. Raises `NetworkError` when the
        DHT does not answer for `timeout_s`, and what ended the publisher when it has ended.
        """
        with self._refreshed:
            # A refresh under way may have read before the caller's change: wait for the next.
            wanted = self._refresh_count + (2 if self._refreshing else 1)
            self._want_to_read(further)
            while self._refresh_count < wanted:
                self._background.check()
                if not self._refreshed.wait(timeout_s):
                    raise NetworkError(
                        f"the DHT did not answer for {timeout_s:.0f} s; check the network and "
                        "start again"
                    )
                if self._refresh_count < wanted and not self._refreshing:
                    self._want_to_read(further)
            wide = self._wide_view
        return self.view if wide is None else wide.at(self._clock.now())

    def announce_blobs(self) -> None:
        """Publish the blobs held here at the next refresh."""
        self._blob_countdown = 0
        self._changed.set()

    def stop(self, *, withdraw: bool) -> None:
        """End the thread and, when leaving cleanly, say goodbye in every record. Bounded."""
        self._withdrawing = withdraw
        self._stopping.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.info("the DHT did not take this peer's goodbye in time; its records expire")

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._refreshed:
                self._changed.clear()
                is_due = time.monotonic() - self._read_at >= self.period_s
                self._refreshing = is_due or self._wants_to_read
                self._wants_to_read = False
                further, self._further = self._further, set()
            try:
                self._publish()
                if self._refreshing:
                    self._read(further)
            except AdmissionError:
                raise
            except DipacoError as error:
                logger.warning("could not refresh the view of the swarm: %s", error)
                if (reason := self._directory.failure) is not None:
                    raise NetworkError(
                        f"{reason}; start again to rejoin from the cache folder"
                    ) from error
            if self._refreshing:
                with self._refreshed:
                    self._refreshing = False
                    self._refresh_count += 1
                    self._refreshed.notify_all()
                self._read_at = time.monotonic()
                self._look_around()
            self._changed.wait(max(0.0, self._read_at + self.period_s - time.monotonic()))
        if self._withdrawing:
            self._say_goodbye()

    def _wake_waiting(self) -> None:
        with self._refreshed:
            self._refreshed.notify_all()

    def _say_goodbye(self) -> None:
        life_s = record_life_s(self.period_s)
        try:
            with self._directory.together():
                for bucket, record in self._said_in.items():
                    self._directory.publish_peer(record.goodbye(), bucket, life_s)
                for said in self._said_of.values():
                    self._directory.publish_module(said.goodbye(), life_s)
        except DipacoError as error:
            logger.info("could not say goodbye: %s", error)

    def _look_around(self) -> None:
        """Call known peers that are missing, and every few periods look at the clocks."""
        if self._stopping.is_set():
            return
        try:
            self._call_missing_peers()
            self._clock_countdown -= 1
            if self._clock_countdown <= 0 or self._clock.has_jumped:
                self._clock_countdown = CLOCK_PERIODS
                # Neighbours that do not answer take longer than a claim may wait to be renewed.
                self._background.thread("clock", self._measure_clock).start()
        except DipacoError as error:
            logger.debug("looking around: %s", error)

    def _measure_clock(self) -> None:
        try:
            self._clock.measure(self._node.exchange)
        except ClockError as error:
            if self._clock.has_jumped:
                # Hivemind's part of this machine goes by the wrong time; nothing here can mend it.
                self._background.fail(error)
            logger.warning("%s", error)
        except DipacoError as error:
            logger.debug("measuring the clock: %s", error)

    def _call_missing_peers(self) -> None:
        view = self._view
        if view is None:
            return
        present = view.peers.keys() | view.from_elsewhere
        known = set(self._known_peers)
        self._known_peers.extend(sorted(present - known - {self._node.me}))
        missing = [peer for peer in self._known_peers if peer not in present]
        if not missing:
            return
        called = missing[:CALLED_AT_ONCE]
        self._directory.call_peers({peer: self._addresses.get(peer, ()) for peer in called})
        # Those called last are called first next time.
        for peer in called:
            self._known_peers.remove(peer)
            self._known_peers.append(peer)

    def _publish(self) -> None:
        """Publish everything; the directory leaves out what stands there unchanged."""
        life_s = record_life_s(self.period_s)
        with self._directory.together():
            record = self._peer_record()
            self._publish_peer(record, life_s)
            self._publish_modules(record, life_s)
            self._publish_progress()
            self._publish_blobs(life_s)

    def _peer_record(self) -> PeerRecord:
        node, status = self._node, self._status
        claim, uplink = status.claim, node.exchange.uplink
        now_round = max(0, node.schedule.round_at(self._clock.now()))
        if node.schedule.fixed_steps:
            now_round = status.round_index
        return PeerRecord(
            peer_id=node.me,
            protocol=node.plan.protocol_version,
            software=SOFTWARE,
            device=clean_text(status.device),
            name=status.name,
            team=status.team,
            state=claim.state,
            path=claim.path,
            since_s=claim.since_s,
            round=now_round,
            pinned=claim.pinned,
            tokens_per_s=round(status.tokens_per_s, 1),
            waits_for=clean_text(status.waiting_for),
            reachable=status.reachable,
            addresses=status.addresses[:4],
            bytes_up=uplink.sent_bytes,
            bytes_down=uplink.received_bytes,
        )

    def _publish_peer(self, record: PeerRecord, life_s: float) -> None:
        home = home_bucket(self._node.me, record.path, self._buckets)
        self._directory.publish_peer(record, home, life_s)
        for bucket in self._said_in.keys() - {home}:
            # A reader learns from it that this peer did not crash; the record expires.
            goodbye = self._said_in.pop(bucket).model_copy(update={"state": "leaving"})
            self._directory.publish_peer(goodbye, bucket, life_s)
        self._said_in[home] = record

    def _publish_modules(self, record: PeerRecord, life_s: float) -> None:
        """Say under the key of each module what this peer has to do with it."""
        held = {state.module: state for state in self._node.held.all()}
        modules = set(held)
        if record.path is not None and record.state in ("joining", "training"):
            modules.update(self._node.grid.modules_of_path(record.path))
        for module in sorted(modules):
            said = ModuleRecord(
                peer_id=self._node.me,
                module=module,
                state=record.state,
                path=record.path,
                since_s=record.since_s,
                round=record.round,
                pinned=record.pinned,
                reachable=record.reachable,
                held=HeldState.of(held[module]) if module in held else None,
            )
            self._directory.publish_module(said, life_s)
            self._said_of[module] = said
        for module in sorted(self._said_of.keys() - modules):
            said = self._said_of.pop(module)
            if said.state in ("joining", "training"):
                goodbye = said.model_copy(update={"state": "leaving", "held": None})
                self._directory.publish_module(goodbye, life_s)
            else:
                self._directory.withdraw_module(module)

    def _publish_progress(self) -> None:
        """Say how far the paths are that were trained here; it is renewed a few times a day."""
        entries = sorted(self._status.progress.values(), key=lambda e: -e.last_round)
        by_bucket: dict[int, list[ProgressEntry]] = {}
        for entry in entries[:MAX_ENTRIES]:
            bucket = home_bucket(self._node.me, entry.path, self._buckets)
            by_bucket.setdefault(bucket, []).append(entry)
        for bucket, found in sorted(by_bucket.items()):
            record = ProgressRecord(peer_id=self._node.me, entries=tuple(found))
            self._directory.publish_progress(record, bucket, PROGRESS_LIFE_S)

    def _publish_blobs(self, life_s: float) -> None:
        """Blobs don't change: announce them rarely, with a longer life."""
        self._blob_countdown -= 1
        if self._blob_countdown > 0:
            return
        self._blob_countdown = BLOB_PERIODS
        node, manifest_life_s = self._node, max(MANIFEST_LIFE_S, life_s * BLOB_PERIODS)
        # By those of earlier runs a peer that was away finds the newest, and a tool the one that
        # it names.
        for m in (node.manifest, *node.earlier_manifests()):
            self._directory.publish_manifest(m.envelope, manifest_life_s, m.plan.run_id)
        for sha256 in node.fetcher.all_blobs():
            if node.blobs.has(sha256):
                size = node.blobs.path(sha256).stat().st_size
                record = BlobRecord(peer_id=node.me, sha256=sha256, bytes=size)
                self._directory.publish_blob(record, life_s * BLOB_PERIODS)

    def _read(self, further: Collection[int]) -> None:
        directory, scope = self._directory, self._scope
        wide = directory.read_view(
            self._node.plan, self._node.grid, self._clock.now(), scope.with_buckets(further)
        )
        self._wide_view = wide if further else None
        self._view = wide.narrowed(scope, self._node.grid)
        for listener in self._listeners:
            listener(self._view)
        for records in self._further_records:
            records.read(directory)
