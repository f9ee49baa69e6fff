"""What this peer publishes of itself in the DHT, and under which keys.

Its own record stands in its bucket, another under each of its modules, how far its paths are in
their buckets; manifest and blobs under their hashes.
"""

from __future__ import annotations

import logging
from typing import Protocol

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import DipacoError
from dipaco.dht.directory import Directory
from dipaco.peer.exchange.contact.hello import SOFTWARE
from dipaco.peer.exchange.exchange import Exchange
from dipaco.peer.exchange.fetching import ContentFetcher
from dipaco.peer.node.states import States
from dipaco.protocol.coverage import bucket_count, home_bucket
from dipaco.protocol.manifest import SignedManifest
from dipaco.protocol.records import (
    MAX_ENTRIES,
    PROGRESS_LIFE_S,
    BlobRecord,
    HeldState,
    ModuleRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
    clean_text,
)

from .joined_run import JoinedRun
from .own_status import PeerStatus

logger = logging.getLogger("dipaco.peer.presence.own_records")

MANIFEST_LIFE_S = 3600.0
BLOB_PERIODS = 8


class RecordedNode(JoinedRun, Protocol):
    """What is told of a node: a `Node`, or what stands in for one."""

    directory: Directory
    exchange: Exchange
    held: States
    blobs: BlobStore
    fetcher: ContentFetcher
    manifest: SignedManifest

    def earlier_manifests(self) -> tuple[SignedManifest, ...]:
        """Return the manifests of the runs that this process came here through."""
        ...


class OwnRecords:
    """The records of one peer. `publish` and `say_goodbye` are for one thread.

    :param life_s: how long a record counts that is not renewed
    """

    def __init__(self, node: RecordedNode, status: PeerStatus, life_s: float) -> None:
        self._node, self._status, self._directory = node, status, node.directory
        self._life_s = life_s
        self._buckets = bucket_count(node.grid.path_count)
        # What stands in the DHT of this peer, by module and by bucket.
        self._said_of: dict[str, ModuleRecord] = {}
        self._said_in: dict[int, PeerRecord] = {}
        self._blob_countdown = 0

    def announce_blobs(self) -> None:
        """Publish the blobs held here the next time. From any thread."""
        self._blob_countdown = 0

    def publish(self) -> None:
        """Publish everything; the directory leaves out what stands there unchanged."""
        with self._directory.together():
            record = self._peer_record()
            self._publish_peer(record)
            self._publish_modules(record)
            self._publish_progress()
            self._publish_blobs()

    def say_goodbye(self) -> None:
        """Say in every record that this peer leaves; a failure is logged alone."""
        try:
            with self._directory.together():
                for bucket, record in self._said_in.items():
                    self._directory.publish_peer(record.goodbye(), bucket, self._life_s)
                for said in self._said_of.values():
                    self._directory.publish_module(said.goodbye(), self._life_s)
        except DipacoError as error:
            logger.info("could not say goodbye: %s", error)

    def _peer_record(self) -> PeerRecord:
        node, status = self._node, self._status
        claim, uplink = status.claim, node.exchange.uplink
        now_round = max(0, node.schedule.round_at(node.clock.now()))
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

    def _publish_peer(self, record: PeerRecord) -> None:
        home = home_bucket(self._node.me, record.path, self._buckets)
        self._directory.publish_peer(record, home, self._life_s)
        for bucket in self._said_in.keys() - {home}:
            # A reader learns from it that this peer did not crash; the record expires.
            goodbye = self._said_in.pop(bucket).model_copy(update={"state": "leaving"})
            self._directory.publish_peer(goodbye, bucket, self._life_s)
        self._said_in[home] = record

    def _publish_modules(self, record: PeerRecord) -> None:
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
            self._directory.publish_module(said, self._life_s)
            self._said_of[module] = said
        for module in sorted(self._said_of.keys() - modules):
            said = self._said_of.pop(module)
            if said.state in ("joining", "training"):
                goodbye = said.model_copy(update={"state": "leaving", "held": None})
                self._directory.publish_module(goodbye, self._life_s)
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

    def _publish_blobs(self) -> None:
        """Blobs don't change: announce them rarely, with a longer life."""
        self._blob_countdown -= 1
        if self._blob_countdown > 0:
            return
        self._blob_countdown = BLOB_PERIODS
        node, life_s = self._node, self._life_s * BLOB_PERIODS
        manifest_life_s = max(MANIFEST_LIFE_S, life_s)
        # By those of earlier runs a peer that was away finds the newest, and a tool the one that
        # it names.
        for m in (node.manifest, *node.earlier_manifests()):
            self._directory.publish_manifest(m.envelope, manifest_life_s)
        for sha256 in node.fetcher.all_blobs():
            if node.blobs.has(sha256):
                size = node.blobs.path(sha256).stat().st_size
                record = BlobRecord(peer_id=node.me, sha256=sha256, bytes=size)
                self._directory.publish_blob(record, life_s)
