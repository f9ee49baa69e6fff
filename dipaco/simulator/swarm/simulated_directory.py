"""The DHT: records that arrive late, get lost, or are seen by some readers only, and expire.

One store stands for all nodes. A record can be read some seconds after it was written. A write can
be lost; then the record before it stays until it expires. A reader misses each record with some
probability. In a split each part sees what it has written and what was there before; afterwards
everybody sees everything that has not expired. There are only records of admitted peers.

Costs are counted as in `dipaco.dht`: a reader or writer visits `NODES_VISITED` nodes, and
`NODES_STORED` of them store the key and return all of it to a reader.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dipaco.protocol.coverage import Scope
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.records import ModuleRecord, PeerRecord, ProgressRecord
from dipaco.protocol.view import SwarmView, view_of_records
from dipaco.protocol.wire_sizes import (
    ENTRY_BYTES,
    HELD_BYTES,
    MODULE_BYTES,
    NODES_STORED,
    NODES_VISITED,
    PEER_BYTES,
    PROGRESS_BYTES,
    VISIT_BYTES,
)

from .engine import Engine
from .network import Link, Network

_KEPT_VERSIONS = 3


def _record_bytes(record: Any) -> int:
    """Return how long a signed record is on the wire."""
    if isinstance(record, ModuleRecord):
        return MODULE_BYTES + (HELD_BYTES if record.held is not None else 0)
    if isinstance(record, PeerRecord):
        return PEER_BYTES
    if isinstance(record, ProgressRecord):
        return PROGRESS_BYTES + ENTRY_BYTES * len(record.entries)
    return MODULE_BYTES // 2


@dataclass(slots=True)
class _Version:
    """A record as it was written once; None withdraws it."""

    record: Any
    size_bytes: int
    visible_s: float
    expires_s: float
    split: int
    side: int


class _Key:
    """What stands under one key."""

    def __init__(self) -> None:
        self.owners: dict[str, list[_Version]] = {}
        """The versions of each owner's record, the oldest first."""
        self.size_bytes = 0
        """Bytes of the newest versions."""
        self._seen: tuple[Any, ...] = ()
        self._until_s = -1.0
        """Until when all readers see `_seen`, unless somebody writes."""

    def write(self, owner: str, version: _Version) -> None:
        """Store a version."""
        versions = self.owners.setdefault(owner, [])
        self.size_bytes += version.size_bytes - (versions[-1].size_bytes if versions else 0)
        versions.append(version)
        del versions[:-_KEPT_VERSIONS]
        self._until_s = -1.0

    def seen(self, now_s: float, split: int, side: int) -> tuple[Any, ...]:
        """Return the records that readers in a part of the network see."""
        if now_s <= self._until_s:
            return self._seen
        found: list[Any] = []
        until_s, gone = now_s + 1e9, []
        for owner, versions in self.owners.items():
            newest = versions[-1]
            if newest.expires_s < now_s:
                gone.append(owner)
            elif not newest.split and newest.visible_s <= now_s:
                # This is the usual case: everybody sees the newest version.
                if newest.record is not None:
                    found.append(newest.record)
                    if newest.expires_s < until_s:
                        until_s = newest.expires_s
                continue
            for version in reversed(versions):
                if version.visible_s > now_s:
                    until_s = min(until_s, version.visible_s)
                elif not version.split or version.split != split or version.side == side:
                    # An expired version hides the older ones, which have expired too.
                    if version.expires_s >= now_s and version.record is not None:
                        found.append(version.record)
                        until_s = min(until_s, version.expires_s)
                    break
        for owner in gone:
            self.size_bytes -= self.owners.pop(owner)[-1].size_bytes
        self._seen = tuple(found)
        # Until something changes everybody sees the same, except in a split.
        self._until_s = -1.0 if split else until_s - 1e-6
        return self._seen


class SimulatedDirectory:
    """What peers publish and read, by key: `modules/L0.E3`, `peers/5` and `progress/5`."""

    def __init__(self, engine: Engine, network: Network, plan: RunPlan, grid: Grid) -> None:
        self._engine, self._network = engine, network
        self._plan, self._grid = plan, grid
        self._keys: dict[str, _Key] = {}
        self.shows: dict[str, Collection[str]] = {}
        """Readers to whom lying nodes show the records of a few owners only."""

    def write(self, owner: str, key: str, record: Any, life_s: float) -> None:
        """Store a record under the owner's name; None withdraws it."""
        engine, network, conditions = self._engine, self._network, self._network.conditions
        link, size_bytes = network.links[owner], _record_bytes(record)
        self._visit(link, key, NODES_STORED * size_bytes)
        link.traffic.records["written"] += 1
        if engine.chance(conditions.writes_lost):
            return
        now_s = engine.now_s
        visible_s = now_s + engine.between(*conditions.write_s)
        version = _Version(record, size_bytes, visible_s, now_s + life_s, network.split, link.side)
        self._keys.setdefault(key, _Key()).write(owner, version)

    def _visit(self, link: Link, key: str, stored_bytes: int = 0) -> None:
        """Count what it costs to find the nodes of a key, and to read or write there."""
        nodes = min(NODES_VISITED, len(self._network.links) - 1)
        storing = min(NODES_STORED, nodes)
        size_bytes = self._keys[key].size_bytes if key in self._keys else 0
        link.traffic.requests["views"] += nodes + (storing if stored_bytes else 0)
        link.traffic.received["views"] += nodes * VISIT_BYTES
        link.traffic.received["views"] += 0 if stored_bytes else storing * size_bytes
        link.traffic.sent["views"] += stored_bytes

    def read(self, reader: str, believed_s: float, scope: Scope) -> SwarmView:
        """Return what a peer sees of a scope, by whose clock it is `believed_s`."""
        link = self._network.links[reader]

        def all_under(kind: str) -> list[Any]:
            keys = (f"{kind}/{bucket}" for bucket in scope.buckets)
            return [record for key in keys for record in self._read(reader, link, key)]

        return view_of_records(
            now_s=believed_s,
            plan=self._plan,
            grid=self._grid,
            peers=all_under("peers"),
            modules={m: self._read(reader, link, f"modules/{m}") for m in scope.modules},
            progress=all_under("progress"),
            scope=scope,
        )

    def _read(self, reader: str, link: Link, key: str) -> tuple[Any, ...]:
        self._visit(link, key)
        stored = self._keys.get(key)
        if stored is None:
            return ()
        found = stored.seen(self._engine.now_s, self._network.split, link.side)
        if reader in self.shows:
            found = tuple(one for one in found if one.peer_id in self.shows[reader])
        link.traffic.records["read"] += len(found)
        chance, missed = self._engine.chance, self._network.conditions.records_missed
        if not missed:
            return found
        return tuple(one for one in found if one.peer_id == reader or not chance(missed))
