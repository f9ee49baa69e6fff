"""The DHT: records that arrive late, get lost, or are seen by some readers only, and expire.

What is simplified: one store stands for all nodes. A record is visible some seconds after it was
written; a write can be lost, and then the one before it stays until it expires; a reader misses
each record with some probability. In a split each part sees what it has written and what was there
before; afterwards everybody sees everything that has not expired. Signatures hold, so a record is
its owner's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dipaco.dht.records import Claim, Holding, PeerRecord, ProgressRecord
from dipaco.dht.view import SwarmView, build_view
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan

from .engine import Engine
from .network import Network

# Sizes of signed records on the wire, for the counters.
RECORD_BYTES: dict[Any, int] = {
    Claim: 420,
    PeerRecord: 780,
    Holding: 560,
    ProgressRecord: 520,
}
KEPT_VERSIONS = 3


@dataclass(slots=True)
class _Version:
    """A record as it was written once; None withdraws it."""

    record: Any
    visible_s: float
    expires_s: float
    split: int
    side: int


class SimulatedDirectory:
    """What peers publish and read."""

    def __init__(self, engine: Engine, network: Network, plan: RunPlan, grid: Grid) -> None:
        self._engine = engine
        self._network = network
        self._plan = plan
        self._grid = grid
        self.write_s = (0.05, 0.5)
        """How long it takes until a record can be read."""
        self.lost = 0.0
        """Share of the writes that get lost."""
        self.missed = 0.0
        """Share of the records that a reader does not see."""
        self._records: dict[tuple[str, str], list[_Version]] = {}

    def write(self, owner: str, item: str, record: Any, life_s: float) -> None:
        """Store a record under the owner's name; None withdraws it."""
        engine, network = self._engine, self._network
        link = network.links.get(owner)
        if record is not None and link is not None:
            link.traffic.view_bytes += RECORD_BYTES[type(record)]
        if engine.chance(self.lost):
            return
        now_s = engine.now_s
        versions = self._records.setdefault((owner, item), [])
        versions.append(
            _Version(
                record,
                now_s + engine.between(*self.write_s),
                now_s + life_s,
                network.split,
                link.side if link is not None else 0,
            )
        )
        if len(versions) > KEPT_VERSIONS:
            del versions[0]

    def read(self, reader: str, believed_s: float) -> SwarmView:
        """Return what a peer sees, which believes that it is `believed_s`."""
        claims: list[Claim] = []
        peers: list[PeerRecord] = []
        holdings: dict[str, list[Holding]] = {}
        progress: list[ProgressRecord] = []
        size = 0
        link = self._network.links[reader]
        missed, chance = self.missed, self._engine.chance
        gone = []
        for key, versions in self._records.items():
            if versions[-1].expires_s < self._engine.now_s:
                gone.append(key)
                continue
            record = self._newest(versions, link.side)
            if record is None or (missed and key[0] != reader and chance(missed)):
                continue
            kind = type(record)
            size += RECORD_BYTES[kind]
            if kind is Claim:
                claims.append(record)
            elif kind is PeerRecord:
                peers.append(record)
            elif kind is Holding:
                holdings.setdefault(record.module, []).append(record)
            else:
                progress.append(record)
        for key in gone:
            del self._records[key]
        link.traffic.view_bytes += size
        by_module: Mapping[str, list[Holding]] = {
            module: sorted(held, key=lambda h: h.peer_id)
            for module, held in sorted(holdings.items())
        }
        return build_view(
            now_s=believed_s,
            plan=self._plan,
            grid=self._grid,
            claims=sorted(claims, key=lambda c: c.peer_id),
            peers=sorted(peers, key=lambda p: p.peer_id),
            holdings=by_module,
            progress=progress,
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
