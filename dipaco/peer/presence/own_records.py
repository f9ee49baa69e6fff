"""Writes into the DHT what this peer publishes about itself, its run's manifest, and its blobs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from dipaco.base.errors import DipacoError
from dipaco.dht.directory import Entry
from dipaco.peer.exchange.contact.hello import SOFTWARE
from dipaco.peer.node.node import Node
from dipaco.protocol.published_records import Publication, PublishedRecords
from dipaco.protocol.records import BlobRecord, PeerRecord, clean_text

from .own_status import PeerStatus

logger = logging.getLogger("dipaco.peer.presence.own_records")

_MANIFEST_LIFE_S = 3600.0
_BLOB_PERIODS = 8


class OwnRecords:
    """The records of one peer. `publish` and `say_goodbye` are for one thread.

    :param life_s: how long a record counts that is not renewed
    """

    def __init__(self, node: Node, status: PeerStatus, life_s: float) -> None:
        self._node, self._status, self._directory = node, status, node.directory
        self._life_s = life_s
        self._records = PublishedRecords(node.grid, life_s)
        self._blob_countdown = 0

    def announce_blobs(self) -> None:
        """Publish the blobs held here the next time. From any thread."""
        self._blob_countdown = 0

    def publish(self) -> None:
        """Publish everything; the directory leaves out records that stand there unchanged."""
        held, progress = self._node.held.all(), self._status.progress.values()
        said = self._records.publish(self._peer_record(), held, progress)
        self._directory.store([*self._entries(said), *self._blobs()])

    def say_goodbye(self) -> None:
        """Say in every record that this peer leaves; a failure is only logged."""
        try:
            self._directory.store(self._entries(self._records.goodbyes()))
        except DipacoError as error:
            logger.info("could not say goodbye: %s", error)

    def _entries(self, said: Iterable[Publication]) -> Iterator[Entry | None]:
        return (self._directory.entry(p.kind, p.item, p.record, p.life_s) for p in said)

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
            own_texts_loss=status.own_texts_loss,
        )

    def _blobs(self) -> Iterator[Entry | None]:
        """Blobs don't change: announce them rarely, with a longer life."""
        self._blob_countdown -= 1
        if self._blob_countdown > 0:
            return
        self._blob_countdown = _BLOB_PERIODS
        node, life_s = self._node, self._life_s * _BLOB_PERIODS
        manifest_life_s = max(_MANIFEST_LIFE_S, life_s)
        # Through the manifests of earlier runs a peer that was away finds the newest run, and a
        # tool finds the one that it names.
        for m in (node.manifest, *node.earlier_manifests()):
            yield self._directory.manifest_entry(m.envelope, manifest_life_s)
        for sha256 in node.fetcher.all_blobs():
            if node.blobs.has(sha256):
                size = node.blobs.path(sha256).stat().st_size
                record = BlobRecord(peer_id=node.me, sha256=sha256, bytes=size)
                yield self._directory.entry("blobs", sha256, record, life_s)
