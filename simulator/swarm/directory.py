"""The DHT: records that arrive late, get lost, or are seen by some readers only, and expire.

What is simplified: one store stands for all nodes. A record is visible some seconds after it was
written; a write can be lost, and then the one before it stays until it expires; a reader misses
each record with some probability. In a split each part sees what it has written and what was there
before; afterwards everybody sees everything that has not expired. Signatures hold, so a record is
its owner's.

What reading and writing costs is counted as Hivemind does it: both visit `NODES_VISITED` nodes,
each of which returns the whole key, and a record is then stored on `NODES_STORED` of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dipaco.dht.admission import Admission, counted
from dipaco.dht.coverage import Scope, whole_scope
from dipaco.dht.records import ModuleRecord, PeerRecord, ProgressRecord
from dipaco.dht.view import SwarmView, view_of_records
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan

from .engine import Engine
from .network import Link, Network
from .reading import Contents, joined_view

# Sizes of signed records on the wire.
MODULE_BYTES, HELD_BYTES = 296, 116
PEER_BYTES = 580
PROGRESS_BYTES, ENTRY_BYTES = 211, 229
# What a visited node answers beside a value: its neighbours.
VISIT_BYTES = 1800
NODES_VISITED, NODES_STORED = 20, 5
KEPT_VERSIONS = 3
NOTHING = Contents(())


def record_bytes(record: Any) -> int:
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
    size: int
    visible_s: float
    expires_s: float
    split: int
    side: int


class _Key:
    """What stands under one key. A read takes what has changed since the last one."""

    def __init__(self) -> None:
        self.owners: dict[str, list[_Version]] = {}
        """The versions of each owner's record, the owners in order."""
        self.size = 0
        """Bytes of the newest versions."""
        self._settled: dict[str, Any] = {}
        """The record of each owner that all readers see alike, the owners in order."""
        self._unsettled: dict[str, None] = {}
        """Whose newest version is not visible yet, or was written in a split."""
        self._earliest_s = math.inf
        """When the first of the newest versions expires, or earlier."""
        self._contents: Contents | None = None

    def write(self, owner: str, version: _Version) -> None:
        """Store a version."""
        versions = self.owners.get(owner)
        if versions is None:
            versions = self.owners[owner] = []
            self.owners = dict(sorted(self.owners.items()))
            self._settled = {peer: self._settled.get(peer) for peer in self.owners}
        self.size += version.size - (versions[-1].size if versions else 0)
        versions.append(version)
        if len(versions) > KEPT_VERSIONS:
            del versions[0]
        self._unsettled[owner] = None
        self._earliest_s = min(self._earliest_s, version.expires_s)

    def settle(self, now_s: float) -> Iterable[str]:
        """Take what all see alike by now; returns whose records have to be looked at."""
        if self._earliest_s < now_s:
            self._forget_expired(now_s)
        for owner in list(self._unsettled):
            newest = self.owners[owner][-1]
            if newest.visible_s <= now_s and not newest.split:
                del self._unsettled[owner]
                self._settled[owner] = newest.record
                contents = self._contents
                if contents is not None and not contents.renew(owner, newest.record):
                    self._contents = None
        return self._unsettled

    def seen(self, others: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the record of each owner: of `others` these, and else what all see."""
        return {**self._settled, **others} if others else self._settled

    def contents(self, others: Mapping[str, Any]) -> Contents:
        """Return what stands here, with these records of `others`."""
        if any(self._settled[owner] is not record for owner, record in others.items()):
            return Contents([r for r in self.seen(others).values() if r is not None])
        if self._contents is None:
            self._contents = Contents([r for r in self._settled.values() if r is not None])
        return self._contents

    def _forget_expired(self, now_s: float) -> None:
        gone = [peer for peer, known in self.owners.items() if known[-1].expires_s < now_s]
        if gone:
            self._contents = None
        for owner in gone:
            self.size -= self.owners.pop(owner)[-1].size
            del self._settled[owner]
            self._unsettled.pop(owner, None)
        ends = (versions[-1].expires_s for versions in self.owners.values())
        self._earliest_s = min(ends, default=math.inf)


class SimulatedDirectory:
    """What peers publish and read, by key: `modules/L0.E3`, `peers/5` and `progress/5`."""

    def __init__(self, engine: Engine, network: Network, plan: RunPlan, grid: Grid) -> None:
        self._engine = engine
        self._network = network
        self._plan = plan
        self._grid = grid
        self._whole = whole_scope(grid)
        self.write_s = (0.05, 0.5)
        """How long it takes until a record can be read."""
        self.lost = 0.0
        """Share of the writes that get lost."""
        self.missed = 0.0
        """Share of the records that a reader does not see."""
        self.guests: Mapping[str, Admission] | None = None
        """In a run by invitation: who is in. Admissions hold, like signatures."""
        self.revoked: frozenset[str] = frozenset()
        """Invitations that the operator has ended."""
        self._keys: dict[str, _Key] = {}

    def write(self, owner: str, key: str, record: Any, life_s: float) -> None:
        """Store a record under the owner's name; None withdraws it."""
        engine, network = self._engine, self._network
        link, size = network.links.get(owner), record_bytes(record)
        if link is not None:
            self._visit(link, key, NODES_STORED * size)
        if engine.chance(self.lost):
            return
        now_s = engine.now_s
        visible_s = now_s + engine.between(*self.write_s)
        side = link.side if link is not None else 0
        version = _Version(record, size, visible_s, now_s + life_s, network.split, side)
        self._keys.setdefault(key, _Key()).write(owner, version)

    def _visit(self, link: Link, key: str, further: int = 0) -> None:
        """Count what it costs to find the nodes of a key; all that they have comes with it."""
        nodes = min(NODES_VISITED, len(self._network.links) - 1)
        stores = min(NODES_STORED, nodes) if further else 0
        size = self._keys[key].size if key in self._keys else 0
        link.traffic.view_requests += nodes + stores
        link.traffic.view_bytes += nodes * (VISIT_BYTES + size) + further

    def read(self, reader: str, believed_s: float, scope: Scope | None = None) -> SwarmView:
        """Return what a peer sees of a scope, or of everything; it believes it is `believed_s`."""
        link = self._network.links[reader]
        wanted = scope or self._whole
        buckets = wanted.buckets
        peers = [self._read(reader, link, f"peers/{bucket}") for bucket in buckets]
        progress = [self._read(reader, link, f"progress/{bucket}") for bucket in buckets]
        modules = {m: self._read(reader, link, f"modules/{m}") for m in wanted.modules}
        plan, grid, view = self._plan, self._grid, None
        if self.guests is None:
            view = joined_view(believed_s, plan, grid, scope, peers, modules, progress)
        if view is not None:
            return view
        counting = self._counting([*peers, *progress, *modules.values()])

        def of(contents: Contents) -> list[Any]:
            return [r for r in contents.records if counting is None or r.peer_id in counting]

        return view_of_records(
            now_s=believed_s,
            plan=plan,
            grid=grid,
            peers=[record for contents in peers for record in of(contents)],
            modules={module: of(contents) for module, contents in modules.items()},
            progress=[record for contents in progress for record in of(contents)],
            scope=scope,
        )

    def is_in(self, peer: str) -> bool:
        """Tell whether a peer is in; in an open run all are."""
        if self.guests is None:
            return True
        return peer in self.guests and self.guests[peer].invitation not in self.revoked

    def _counting(self, read: Sequence[Contents]) -> Collection[str] | None:
        """Return whose records count, as every reader works it out; None for everybody's."""
        guests = self.guests
        if guests is None:
            return None
        seen = {record.peer_id for contents in read for record in contents.records}
        return counted((peer, guests[peer]) for peer in seen if self.is_in(peer))

    def _read(self, reader: str, link: Link, key: str) -> Contents:
        """Return what a peer sees of a key."""
        self._visit(link, key)
        stored = self._keys.get(key)
        if stored is None:
            return NOTHING
        unsettled = stored.settle(self._engine.now_s)
        others = {peer: self._newest(stored.owners[peer], link.side) for peer in unsettled}
        if not self.missed:
            return stored.contents(others)
        missed, chance = self.missed, self._engine.chance
        return Contents(
            [
                record
                for owner, record in stored.seen(others).items()
                if record is not None and (owner == reader or not chance(missed))
            ]
        )

    def _newest(self, versions: list[_Version], side: int) -> Any:
        now_s, split = self._engine.now_s, self._network.split
        for version in reversed(versions):
            if version.visible_s > now_s:
                continue
            if split and version.split == split and version.side != side:
                continue
            # An expired version hides nothing: what it replaced is older still.
            return version.record if version.expires_s >= now_s else None
        return None
