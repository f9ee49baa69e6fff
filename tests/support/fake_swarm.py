"""The parts around a peer's glue, in memory: directory, view, clock. No network, no real time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from dipaco.dht.records import ClaimRecord, HoldingRecord, PeerRecord
from dipaco.dht.view import SwarmView
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference
from dipaco.peer.exchange.clock import Clock

ME = "Qm" + "a" * 44


def peer_id(number: int) -> str:
    """Return the id of another peer."""
    return f"Qm{number:044d}"


class FakeTime:
    """Swarm time that stands still until a test moves it; `on_look` is called at each look."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self.on_look: Callable[[], None] = lambda: None
        self.clock = Clock(system_time=self._look)

    def _look(self) -> float:
        self.on_look()
        return self.now_s


class FakeEvents:
    """Remembers what was emitted."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, **values: Any) -> None:
        self.events.append((kind, values))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [values for name, values in self.events if name == kind]


class FakeDirectory:
    """The DHT as one publisher uses it: what it published, and what others did.

    `failure` is raised by the next read, and by all that follow.
    """

    def __init__(self) -> None:
        self.others = SwarmView(now_s=0.0)
        self.claims: list[ClaimRecord | None] = []
        """Everything that was said of the claim, None for a withdrawal."""
        self.peers: list[PeerRecord | None] = []
        self.holdings: dict[str, HoldingRecord] = {}
        self.manifests: list[bytes] = []
        self.blobs: list[str] = []
        self.called: list[str] = []
        self.reads = 0
        self.failure: Exception | None = None
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        yield

    def read_view(self, plan: RunPlan, grid: Grid, now_s: float) -> SwarmView:
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        claims = dict(self.others.claims)
        if self.claims and self.claims[-1] is not None:
            claims[self.claims[-1].peer_id] = self.claims[-1]
        return SwarmView(
            now_s=now_s,
            claims=claims,
            peers=self.others.peers,
            holdings=self.others.holdings,
            progress=self.others.progress,
            duration_s=plan.rounds.duration_s,
        )

    def call_peers(self, peers: tuple[str, ...]) -> None:
        self.called += peers

    def publish_claim(self, record: ClaimRecord, life_s: float) -> None:
        self.claims.append(record)

    def withdraw_claim(self) -> None:
        self.claims.append(None)

    def publish_peer(self, record: PeerRecord, life_s: float) -> None:
        self.peers.append(record)

    def withdraw_peer(self) -> None:
        self.peers.append(None)

    def publish_holding(self, record: HoldingRecord, life_s: float) -> None:
        self.holdings[record.module] = record

    def withdraw_holding(self, module: str) -> None:
        self.holdings.pop(module, None)

    def publish_progress(self, record: Any, life_s: float) -> None: ...

    def publish_manifest(self, envelope: bytes, life_s: float, run_id: str | None = None) -> None:
        self.manifests.append(envelope)

    def publish_blob(self, record: Any, life_s: float) -> None:
        self.blobs.append(record.sha256)


class FakeExchange:
    """Counts no bytes and knows no neighbours."""

    bytes_up = 10
    bytes_down = 20

    def connected_peers(self) -> tuple[str, ...]:
        return ()

    def clock_samples(self, peers: Any, count: int, timeout_s: float) -> dict[str, Any]:
        return {}


def held_state(
    module: str, tokens: int = 64, version: int = 1, digest: str = "d"
) -> StateReference:
    return StateReference(
        module=module,
        version=version,
        digest=digest * 64 if len(digest) == 1 else digest,
        tokens=tokens,
        last_round=version - 1,
        bytes=1000,
    )
