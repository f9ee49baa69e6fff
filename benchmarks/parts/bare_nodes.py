"""Nodes of the DHT that were never admitted, with ids next to a module's key.

They take every record and keep none, and name each other alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import get_dht_time

from dipaco.protocol.identity import PEER_ID_PREFIX, raw_public_key
from dipaco.protocol.record_keys import record_key

TRIES_A_NODE = 400
START_S = 240.0


def peer_id_of(key: Ed25519PrivateKey) -> PeerID:
    return PeerID(PEER_ID_PREFIX + raw_public_key(key))


def node_id_of(peer: PeerID) -> DHTID:
    return DHTID.generate(source=peer.to_bytes())


def grind(count: int, run_id: str, module: str) -> list[Ed25519PrivateKey]:
    """Return keys whose node ids are the nearest to the module's key of many."""
    wanted = DHTID.generate(source=record_key("modules", run_id, module))
    keys = [Ed25519PrivateKey.generate() for _ in range(count * TRIES_A_NODE)]
    keys.sort(key=lambda key: wanted.xor_distance(node_id_of(peer_id_of(key))))
    return keys[:count]


class Liar(DHTProtocol):
    """Takes everything, keeps nothing, and names liars alone."""

    names: tuple[PeerID, ...] = ()

    async def rpc_ping(
        self, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:
        return dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time(), available=True)

    async def rpc_store(
        self, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.node_info)

    async def rpc_find(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        result = dht_pb2.FindResult(
            type=dht_pb2.NOT_FOUND,
            nearest_node_ids=[node_id_of(name).to_bytes() for name in self.names],
            nearest_peer_ids=[name.to_bytes() for name in self.names],
        )
        return dht_pb2.FindResponse(results=[result] * len(request.keys), peer=self.node_info)


async def _lie(seeds: list[bytes], given: list[str], folder: Path, ready: Any) -> None:
    read = DHTID.from_bytes
    # Others say more of themselves than Hivemind expects.
    DHTID.from_bytes = lambda data, **words: read(data[:20], **words)
    for name in ("rpc_ping", "rpc_store", "rpc_find"):
        setattr(DHTProtocol, name, getattr(Liar, name))
    keys = [Ed25519PrivateKey.from_private_bytes(seed) for seed in seeds]
    DHTProtocol.names = tuple(map(peer_id_of, keys))
    for number, key in enumerate(keys):
        file = folder / f"bare-node-{number}.key"
        file.write_bytes(bytes((8, 1, 18, 64)) + key.private_bytes_raw() + raw_public_key(key))
        p2p = await P2P.create(
            initial_peers=given,
            identity_path=str(file),
            check_if_identity_free=False,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            auto_nat=False,
            nat_port_map=False,
            tls=False,
        )
        node = await DHTNode.create(
            p2p=p2p,
            node_id=node_id_of(p2p.peer_id),
            initial_peers=given,
            ensure_bootstrap_success=False,
            strict=False,
        )
        for address in given:
            await node.protocol.call_ping(PeerID.from_base58(address.rpartition("/p2p/")[2]))
    ready.set()
    await asyncio.Event().wait()


def _run(*given: Any) -> None:
    asyncio.run(_lie(*given))


@contextmanager
def bare_nodes(count: int, run_id: str, module: str, entry: str, folder: Path) -> Iterator[None]:
    """Run so many in a process of their own, until the block ends."""
    seeds = [key.private_bytes_raw() for key in grind(count, run_id, module)]
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_run, args=(seeds, [entry], folder, ready), daemon=False)
    process.start()
    try:
        assert ready.wait(START_S), "the bare nodes did not start"
        yield
    finally:
        process.terminate()
        process.join(10)
        if process.is_alive():
            process.kill()
