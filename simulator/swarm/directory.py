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

from collections.abc import Iterable, Mapping
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

# Sizes of signed records on the wire.
MODULE_BYTES, HELD_BYTES = 296, 116
PEER_BYTES = 580
PROGRESS_BYTES, ENTRY_BYTES = 211, 229
# What a visited node answers beside a value: its neighbours.
VISIT_BYTES = 1800
NODES_VISITED, NODES_STORED = 20, 5
KEPT_VERSIONS = 3


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
        self._keys: dict[str, dict[str, list[_Version]]] = {}
        """The versions of each owner's record, the owners in order."""
        self._sizes: dict[str, int] = {}
        """Bytes of the newest versions under each key."""

    def write(self, owner: str, key: str, record: Any, life_s: float) -> None:
        """Store a record under the owner's name; None withdraws it."""
        engine, network = self._engine, self._network
        link, size = network.links.get(owner), record_bytes(record)
        if link is not None:
            self._visit(link, key, NODES_STORED * size)
        if engine.chance(self.lost):
            return
        now_s = engine.now_s
        owners = self._keys.setdefault(key, {})
        if owner not in owners:
            owners[owner] = []
            self._keys[key] = owners = dict(sorted(owners.items()))
        versions = owners[owner]
        before = versions[-1].size if versions else 0
        self._sizes[key] = self._sizes.get(key, 0) + size - before
        versions.append(
            _Version(
                record,
                size,
                now_s + engine.between(*self.write_s),
                now_s + life_s,
                network.split,
                link.side if link is not None else 0,
            )
        )
        if len(versions) > KEPT_VERSIONS:
            del versions[0]

    def _visit(self, link: Link, key: str, further: int = 0) -> None:
        """Count what it costs to find the nodes of a key; all that they have comes with it."""
        nodes = min(NODES_VISITED, len(self._network.links) - 1)
        stores = min(NODES_STORED, nodes) if further else 0
        link.traffic.view_requests += nodes + stores
        link.traffic.view_bytes += nodes * (VISIT_BYTES + self._sizes.get(key, 0)) + further

    def read(self, reader: str, believed_s: float, scope: Scope | None = None) -> SwarmView:
        """Return what a peer sees of a scope, or of everything; it believes it is `believed_s`."""
        link = self._network.links[reader]
        wanted = scope or self._whole
        keys = [f"peers/{bucket}" for bucket in wanted.buckets]
        keys += [f"progress/{bucket}" for bucket in wanted.buckets]
        keys += [f"modules/{module}" for module in wanted.modules]
        found = self._counted({key: self._read(reader, link, key) for key in keys})
        return view_of_records(
            now_s=believed_s,
            plan=self._plan,
            grid=self._grid,
            peers=[r for bucket in wanted.buckets for r in found[f"peers/{bucket}"]],
            modules={m: found[f"modules/{m}"] for m in wanted.modules},
            progress=[r for bucket in wanted.buckets for r in found[f"progress/{bucket}"]],
            scope=scope,
        )

    def is_in(self, peer: str) -> bool:
        """Tell whether a peer is in; in an open run all are."""
        if self.guests is None:
            return True
        return peer in self.guests and self.guests[peer].invitation not in self.revoked

    def _counted(self, found: dict[str, Iterable[Any]]) -> dict[str, Iterable[Any]]:
        """Leave out the records of those who are not in, as every reader does."""
        guests = self.guests
        if guests is None:
            return found
        seen = {record.peer_id for records in found.values() for record in records}
        counting = counted((peer, guests[peer]) for peer in seen if self.is_in(peer))
        return {
            key: [record for record in records if record.peer_id in counting]
            for key, records in found.items()
        }

    def _read(self, reader: str, link: Link, key: str) -> Iterable[Any]:
        """Return the records of a key that a peer sees."""
        self._visit(link, key)
        owners = self._keys.get(key)
        if owners is None:
            return ()
        now_s, missed, chance = self._engine.now_s, self.missed, self._engine.chance
        found, gone = [], []
        for owner, versions in owners.items():
            newest = versions[-1]
            if newest.expires_s < now_s:
                gone.append(owner)
                continue
            record = newest.record
            if newest.visible_s > now_s or newest.split:
                record = self._newest(versions, link.side)
            if record is None or (missed and owner != reader and chance(missed)):
                continue
            found.append(record)
        for owner in gone:
            self._sizes[key] -= owners.pop(owner)[-1].size
        return found

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
