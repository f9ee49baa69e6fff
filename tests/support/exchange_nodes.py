"""Two DHT nodes on loopback and exchanges on them, for tests of what peers ask each other.

The fixture `nodes` (conftest.py) gives them; a test starts the exchanges that it needs.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.modules.blobs import BlobStore
from dipaco.modules.state import StateReference
from dipaco.peer.exchange.exchange import Exchange

RUN = "0123456789abcdef"
CONTENT = bytes(range(251)) * 20_000
SHA = hashlib.sha256(CONTENT).hexdigest()
NOBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
HELD = StateReference(
    module="L0.E1", version=3, digest=SHA, tokens=9, last_round=2, bytes=len(CONTENT)
)


class Held:
    """What a node holds, in memory."""

    def __init__(self, *contents: bytes | Path, states: tuple[StateReference, ...] = ()) -> None:
        self.contents: dict[str, bytes | Path] = {}
        for content in contents:
            data = content if isinstance(content, bytes) else content.read_bytes()
            self.contents[hashlib.sha256(data).hexdigest()] = content
        self.states = {state.module: state for state in states}
        self.lookups = 0

    def lookup(self, sha256: str) -> Path | bytes | None:
        self.lookups += 1
        return self.contents.get(sha256)

    def get(self, module: str) -> StateReference | None:
        return self.states.get(module)


class Nodes:
    """Two joined DHT nodes; exchanges on them are made by each test."""

    def __init__(self) -> None:
        self.server_dht = GuardedDHT(start=True, startup_timeout=60)
        self.addresses = [str(address) for address in self.server_dht.get_visible_maddrs()]
        self.client_dht = GuardedDHT(initial_peers=self.addresses, start=True, startup_timeout=60)
        self.started: list[Exchange] = []

    def exchange(self, dht: GuardedDHT, **options: Any) -> Exchange:
        exchange = Exchange(dht, **options)
        exchange.start()
        self.started.append(exchange)
        return exchange

    def serving(self, held: Held, **options: Any) -> Exchange:
        exchange = self.exchange(self.server_dht, **options)
        exchange.set_source(held, RUN)
        return exchange

    def asking(self, **options: Any) -> Exchange:
        exchange = self.exchange(self.client_dht, **options)
        exchange.set_source(Held(), RUN)
        return exchange

    def stop_exchanges(self) -> None:
        while self.started:
            self.started.pop().stop()


def fetch(exchange: Exchange, blobs: BlobStore, *holders: str, **options: Any) -> Path:
    options = {"max_bytes": 2**30, "timeout_s": 120.0, **options}
    return exchange.fetch(options.pop("sha", SHA), holders, blobs, **options)


def set_ahead(exchange: Exchange, seconds: float) -> None:
    """Let an exchange tell a time that much ahead of this machine's."""
    exchange._service._system_time = lambda: time.time() + seconds
