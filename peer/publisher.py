"""Keeps this peer's records in the DHT fresh and its view of the swarm new.

One background thread: publish claim, holdings, progress and peer record, read everybody's, sleep
for the refresh period or until something changed. Everything that decides reads `view`, an
immutable snapshot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from dipaco.dht.directory import Directory
from dipaco.dht.records import (
    BlobRecord,
    ClaimRecord,
    HoldingRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
    clean_text,
)
from dipaco.dht.view import SwarmView
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import ClockError, DipacoError, NetworkError
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan

from .background import Background
from .exchange.clock import Clock
from .exchange.exchange import Exchange
from .exchange.held_states import HeldStates
from .exchange.reachability import Reachability
from .member.chains import refresh_period_s
from .member.rounds import RoundSchedule

logger = logging.getLogger("dipaco.peer.publisher")

# A record lives for this many refresh periods: one or two lost refreshes don't drop a claim.
LIFE_PERIODS = 3.5
PROGRESS_LIFE_S = 24 * 3600.0
MANIFEST_LIFE_S = 3600.0
BLOB_PERIODS = 8
MAX_PROGRESS_ENTRIES = 64
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
class Claim:
    """What this peer does, and on which path. A value, replaced whole: the publisher signs it on
    its own thread, and a new path must never go out with the state or the time of the old one."""

    state: Literal["joining", "training", "leaving", "serving"] = "joining"
    path: int | None = None
    since_s: float = 0.0
    reason: str = ""
    """Why this path, for the person at the machine."""
    pinned: bool = False
    """The path was asked for: this peer never moves."""

    @property
    def training_path(self) -> int | None:
        """The path that is in training here, or is about to be; None when there is none."""
        return self.path if self.state in ("joining", "training") else None


@dataclass
class PeerStatus:
    """What this peer says of itself. Written by the session, read by publisher and display."""

    claim: Claim = field(default_factory=Claim)
    device: str = "cpu"
    tokens_per_s: float = 0.0
    reachable: Reachability = "unknown"
    addresses: tuple[str, ...] = ()
    bytes_up: int = 0
    bytes_down: int = 0
    progress: dict[int, ProgressEntry] = field(default_factory=dict)
    round_index: int = 0
    """With fixed steps: the round that this peer is in."""
    waiting_for: str = ""
    validation_loss: float = float("nan")
    last_commit: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Module to (round, peers in the group) of its last commit here."""


class Annex(Protocol):
    """Further records that are renewed and read with the others, on the publisher's thread."""

    def publish(self, directory: Directory, life_s: float) -> None:
        """Publish what there is; it lives for `life_s`."""
        ...

    def read(self, directory: Directory) -> None:
        """Read what others published."""
        ...

    def withdraw(self, directory: Directory) -> None:
        """Take back what was published: the peer leaves the run."""
        ...


class Publisher:
    """The background thread, see the module's docstring. Used by peers and bootstrap nodes."""

    def __init__(
        self,
        directory: Directory,
        plan: RunPlan,
        grid: Grid,
        schedule: RoundSchedule,
        clock: Clock,
        held: HeldStates,
        blobs: BlobStore,
        status: PeerStatus,
        *,
        me: str,
        software: str,
        manifest: bytes,
        exchange: Exchange,
        background: Background,
        earlier_manifests: Mapping[str, bytes] | None = None,
        initial_peers: Sequence[str] = (),
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._grid = grid
        self._schedule = schedule
        self._clock = clock
        self._held = held
        self._blobs = blobs
        self._status = status
        self._me = me
        self._software = software
        self._manifest = manifest
        self._earlier_manifests = dict(earlier_manifests or {})
        self._annexes: list[Annex] = []
        self._listeners: list[Callable[[SwarmView], None]] = []
        self._exchange = exchange
        self._background = background
        self.period_s = refresh_period_s(plan.rounds.duration_s)
        self._changed = threading.Event()
        self._read_at = time.monotonic()
        self._stopping = threading.Event()
        self._refreshed = threading.Condition()
        self._refresh_count = 0
        self._refreshing = False
        self._blob_countdown = 0
        self._clock_countdown = CLOCK_PERIODS
        self._claimed = False
        self._withdrawing = False
        ids = [address.rpartition("/p2p/")[2] for address in initial_peers]
        self._known_peers: deque[str] = deque(dict.fromkeys(ids), maxlen=REMEMBERED_PEERS)
        self._all_blobs: Callable[[], tuple[str, ...]] = tuple
        self._view: SwarmView | None = None
        self._thread = background.thread("publisher", self._run)
        background.on_failure(self._wake_waiting)

    def start(self, all_blobs: Callable[[], tuple[str, ...]]) -> None:
        """Begin; `all_blobs` gives the hashes that this run consists of."""
        self._all_blobs = all_blobs
        self._thread.start()

    def add_annex(self, annex: Annex) -> None:
        """Renew and read the records of `annex` from the next refresh on."""
        self._annexes.append(annex)

    def on_view(self, listener: Callable[[SwarmView], None]) -> None:
        """Call `listener` with every new view, on the publisher's thread."""
        self._listeners.append(listener)

    @property
    def view(self) -> SwarmView:
        """Return the newest view. `refresh` has to have succeeded once."""
        if self._view is None:
            raise NetworkError("the swarm has not been read yet")
        return replace(self._view, now_s=self._clock.now())

    def announce(self) -> None:
        """Publish soon: something changed."""
        self._changed.set()

    def look_often(self) -> None:
        """Read the swarm again if the view is not quite new: something in it is waited for."""
        if time.monotonic() - self._read_at > LOOK_OFTEN_S:
            self._changed.set()

    def refresh(self, timeout_s: float = 30.0) -> SwarmView:
        """Publish and read now, and return a view that is newer than this call.

        Raises `NetworkError` when the DHT does not answer for `timeout_s`, and what ended the
        publisher when it has ended.
        """
        with self._refreshed:
            # A refresh under way may have read before the caller's change: wait for the next.
            wanted = self._refresh_count + (2 if self._refreshing else 1)
            self._changed.set()
            while self._refresh_count < wanted:
                self._background.check()
                if not self._refreshed.wait(timeout_s):
                    raise NetworkError(
                        f"the DHT did not answer for {timeout_s:.0f} s; check the network and "
                        "start again"
                    )
                if self._refresh_count < wanted:
                    self._changed.set()
        return self.view

    def announce_blobs(self) -> None:
        """Publish the blobs held here at the next refresh."""
        self._blob_countdown = 0
        self._changed.set()

    def stop(self, *, withdraw: bool) -> None:
        """End the thread and, when leaving cleanly, withdraw every record. Bounded."""
        self._withdrawing = withdraw
        self._stopping.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.info("the DHT did not withdraw this peer's records in time; they expire")

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._refreshed:
                self._changed.clear()
                self._refreshing = True
            try:
                self._publish()
                self._read()
            except DipacoError as error:
                logger.warning("could not refresh the view of the swarm: %s", error)
                if (reason := self._directory.failure) is not None:
                    raise NetworkError(
                        f"{reason}; start again to rejoin from the cache folder"
                    ) from error
            with self._refreshed:
                self._refreshing = False
                self._refresh_count += 1
                self._refreshed.notify_all()
            self._read_at = time.monotonic()
            self._look_around()
            self._changed.wait(self.period_s)
        if self._withdrawing:
            self._withdraw()

    def _wake_waiting(self) -> None:
        with self._refreshed:
            self._refreshed.notify_all()

    def _withdraw(self) -> None:
        try:
            with self._directory.together():
                self._directory.withdraw_claim()
                self._directory.withdraw_peer()
                for held in self._held.all():
                    self._directory.withdraw_holding(held.module)
                for annex in self._annexes:
                    annex.withdraw(self._directory)
        except DipacoError as error:
            logger.info("could not withdraw: %s", error)

    def _look_around(self) -> None:
        """Call known peers that are missing, and every few periods look at the clocks."""
        if self._stopping.is_set():
            return
        try:
            self._call_missing_peers()
            self._clock_countdown -= 1
            if self._clock_countdown <= 0:
                self._clock_countdown = CLOCK_PERIODS
                # Neighbours that do not answer take longer than a claim may wait to be renewed.
                self._background.thread("clock", self._measure_clock).start()
        except DipacoError as error:
            logger.debug("looking around: %s", error)

    def _measure_clock(self) -> None:
        try:
            self._clock.measure(self._exchange)
        except ClockError as error:
            logger.warning("%s", error)
        except DipacoError as error:
            logger.debug("measuring the clock: %s", error)

    def _call_missing_peers(self) -> None:
        view = self._view
        if view is None:
            return
        present = set(view.peers)
        known = set(self._known_peers)
        self._known_peers.extend(sorted(present - known - {self._me}))
        missing = [peer for peer in self._known_peers if peer not in present]
        if not missing:
            return
        called = missing[:CALLED_AT_ONCE]
        self._directory.call_peers(tuple(called))
        # Those called last are called first next time.
        for peer in called:
            self._known_peers.remove(peer)
            self._known_peers.append(peer)

    def _life_s(self) -> float:
        return LIFE_PERIODS * self.period_s + 2.0

    def _publish(self) -> None:
        with self._directory.together():
            self._publish_all()

    def _publish_all(self) -> None:
        status, life_s = self._status, self._life_s()
        claim = status.claim
        now_round = max(0, self._schedule.round_at(self._clock.now()))
        if self._schedule.fixed_steps:
            now_round = status.round_index
        if claim.path is not None and (claim.state == "joining" or claim.state == "training"):
            record = ClaimRecord(
                peer_id=self._me,
                path=claim.path,
                state=claim.state,
                since_s=claim.since_s,
                round=now_round,
                pinned=claim.pinned,
            )
            self._directory.publish_claim(record, life_s)
            self._claimed = True
        elif self._claimed:
            self._directory.withdraw_claim()
            self._claimed = False
        self._publish_peer(claim, now_round, life_s)
        for held in self._held.all():
            self._directory.publish_holding(HoldingRecord.of(held, peer_id=self._me), life_s)
        entries = sorted(status.progress.values(), key=lambda e: -e.last_round)
        if entries:
            self._directory.publish_progress(
                ProgressRecord(peer_id=self._me, entries=tuple(entries[:MAX_PROGRESS_ENTRIES])),
                PROGRESS_LIFE_S,
            )
        for annex in self._annexes:
            annex.publish(self._directory, life_s)
        self._publish_blobs(life_s)

    def _publish_peer(self, claim: Claim, now_round: int, life_s: float) -> None:
        status = self._status
        status.bytes_up = self._exchange.bytes_up
        status.bytes_down = self._exchange.bytes_down
        self._directory.publish_peer(
            PeerRecord(
                peer_id=self._me,
                protocol=self._plan.protocol_version,
                software=self._software,
                device=clean_text(status.device),
                state=claim.state,
                path=claim.path,
                tokens_per_s=round(status.tokens_per_s, 1),
                round=now_round,
                reachable=status.reachable,
                addresses=status.addresses[:4],
                bytes_up=status.bytes_up,
                bytes_down=status.bytes_down,
            ),
            life_s,
        )

    def _publish_blobs(self, life_s: float) -> None:
        """Blobs don't change: announce them rarely, with a longer life."""
        self._blob_countdown -= 1
        if self._blob_countdown > 0:
            return
        self._blob_countdown = BLOB_PERIODS
        self._directory.publish_manifest(self._manifest, MANIFEST_LIFE_S)
        # A peer that was away finds the newest run by them, and a tool the one that it names.
        for run_id, envelope in self._earlier_manifests.items():
            self._directory.publish_manifest(envelope, MANIFEST_LIFE_S, run_id)
        for sha256 in self._all_blobs():
            if self._blobs.has(sha256):
                record = BlobRecord(
                    peer_id=self._me, sha256=sha256, bytes=self._blobs.path(sha256).stat().st_size
                )
                self._directory.publish_blob(record, life_s * BLOB_PERIODS)

    def _read(self) -> None:
        directory = self._directory
        self._view = directory.read_view(self._plan, self._grid, self._clock.now())
        for listener in self._listeners:
            listener(self._view)
        for annex in self._annexes:
            annex.read(directory)
