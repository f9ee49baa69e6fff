"""Bare node ids next to a key: does a peer that is in still find the others, and a newcomer them?

    python benchmarks/dht_liars.py [--json] [--peers 4] [--liars 20]

Real DHT nodes on loopback. The liars have keys, made until their node ids are next to the key of
one module, and no admission. They take every record and keep none, and name each other alone.
Afterwards every peer says once more what it does; printed is how many peers each of them, and a
newcomer that was given one address, sees under that key. All should see all.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import get_dht_time
from parts.common import Report, build_parser
from support.runs.make_plan import make_plan

from dipaco.dht.dht_node import join_dht
from dipaco.dht.directory import Directory
from dipaco.protocol.admission import Gate
from dipaco.protocol.config import GridConfig
from dipaco.protocol.coverage import scope_of
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import (
    PEER_ID_PREFIX,
    Identity,
    load_or_create_identity,
    raw_public_key,
)
from dipaco.protocol.invitations import Terms, make_invitation
from dipaco.protocol.record_keys import record_key
from dipaco.protocol.records import ModuleRecord

RUN, MODULE = "0123456789abcdef", "L0.E1"
PLAN = make_plan(grid=GridConfig(modules_per_level=(2, 2)))
GRID = Grid(PLAN.model, PLAN.grid)
SCOPE = scope_of((MODULE,), (), GRID)
OPERATOR = Ed25519PrivateKey.generate()
INVITATION = make_invitation(Terms(RUN, 100, 0), OPERATOR)
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TRIES_PER_LIAR = 2000


class Peer:
    """A node that is in, or is to be."""

    def __init__(self, folder: Path, *given: str) -> None:
        self.identity: Identity = load_or_create_identity(folder / "identity.key")
        self.dht = join_dht(given, identity=self.identity, host_maddrs=(LOOPBACK,))
        gate = Gate(RUN, raw_public_key(OPERATOR))
        self.directory = Directory(self.dht, self.identity, RUN, gate)
        given_ids = {address.rpartition("/p2p/")[2]: () for address in given}
        self.directory.known_directly = lambda modules: given_ids
        self.directory.serve(GRID)
        self.directory.be_admitted(INVITATION.admit(self.identity.public_key, time.time()))

    def say(self, round_index: int) -> None:
        """Say, as a peer does every few seconds, what it trains."""
        record = ModuleRecord(
            peer_id=self.identity.peer_id,
            module=MODULE,
            state="training",
            path=GRID.paths_of_module(MODULE)[0],
            since_s=1.0,
            round=round_index,
            reachable="direct",
            held=None,
        )
        self.directory.publish_module(record, 600.0)

    def sees(self) -> int:
        """Return how many peers it finds under the key, itself included."""
        view = self.directory.read_view(PLAN, GRID, time.time(), SCOPE)
        return len(view.claims.keys() | {self.identity.peer_id})

    def close(self) -> None:
        self.dht.shutdown()
        self.identity.release()


def grind(
    count: int, run_id: str = RUN, module: str = MODULE, tries: int = TRIES_PER_LIAR
) -> list[Ed25519PrivateKey]:
    """Return keys whose node ids are the nearest to the module's key of many."""
    wanted = DHTID.generate(source=record_key("modules", run_id, module))
    made = []
    for _ in range(count * tries):
        key = Ed25519PrivateKey.generate()
        peer = PeerID(PEER_ID_PREFIX + raw_public_key(key))
        made.append((wanted.xor_distance(DHTID.generate(source=peer.to_bytes())), key))
    made.sort(key=lambda entry: entry[0])
    return [key for _, key in made[:count]]


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
        ids = [_own_id(name).to_bytes() for name in self.names]
        result = dht_pb2.FindResult(
            type=dht_pb2.NOT_FOUND,
            nearest_node_ids=ids,
            nearest_peer_ids=[name.to_bytes() for name in self.names],
        )
        return dht_pb2.FindResponse(results=[result] * len(request.keys), peer=self.node_info)


def _own_id(peer: PeerID) -> DHTID:
    return DHTID.generate(source=peer.to_bytes())


async def _lie(keys: list[bytes], given: list[str], folder: Path, ready: Any) -> None:
    read = DHTID.from_bytes
    # Others say more of themselves than Hivemind expects.
    DHTID.from_bytes = lambda data, **words: read(data[:20], **words)
    for name in ("rpc_ping", "rpc_store", "rpc_find"):
        setattr(DHTProtocol, name, getattr(Liar, name))
    DHTProtocol.names = tuple(
        PeerID(PEER_ID_PREFIX + raw_public_key(Ed25519PrivateKey.from_private_bytes(seed)))
        for seed in keys
    )
    nodes = []
    for number, seed in enumerate(keys):
        public = raw_public_key(Ed25519PrivateKey.from_private_bytes(seed))
        file = folder / f"liar-{number}.key"
        file.write_bytes(bytes((8, 1, 18, 64)) + seed + public)
        p2p = await P2P.create(
            initial_peers=given,
            identity_path=str(file),
            check_if_identity_free=False,
            host_maddrs=[LOOPBACK],
            auto_nat=False,
            nat_port_map=False,
            tls=False,
        )
        nodes.append(
            await DHTNode.create(
                p2p=p2p,
                node_id=_own_id(p2p.peer_id),
                initial_peers=given,
                ensure_bootstrap_success=False,
                strict=False,
            )
        )
        for address in given:
            await nodes[-1].protocol.call_ping(PeerID.from_base58(address.rpartition("/p2p/")[2]))
    ready.set()
    while True:
        await asyncio.sleep(1)


def lie(keys: list[bytes], given: list[str], folder: Path, ready: Any) -> None:
    """Run nodes that lie, until the process is ended; `ready` is set when they are there."""
    asyncio.run(_lie(keys, given, folder, ready))


def main() -> None:
    """Run the trial once and print what each sees."""
    parser = build_parser(__doc__)
    parser.add_argument("--peers", type=int, default=4, help="peers that are in (4)")
    parser.add_argument("--liars", type=int, default=20, help="nodes that are not (20)")
    chosen = parser.parse_args()
    began_s = time.monotonic()
    keys = [key.private_bytes_raw() for key in grind(chosen.liars)]
    ground_s = time.monotonic() - began_s
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    with tempfile.TemporaryDirectory() as name:
        folder, peers = Path(name), []
        liars = None
        try:
            for number in range(chosen.peers):
                (folder / str(number)).mkdir()
                given = [str(peers[0].dht.get_visible_maddrs()[0])] if peers else []
                peers.append(Peer(folder / str(number), *given))
            addresses = [str(peer.dht.get_visible_maddrs()[0]) for peer in peers]
            for peer in peers:
                peer.say(0)
            before = [peer.sees() for peer in peers]
            if keys:
                liars = context.Process(
                    target=lie, args=(keys, addresses, folder, ready), daemon=False
                )
                liars.start()
                assert ready.wait(400), "the liars did not start"
            for peer in peers:
                peer.say(1)
            after = [peer.sees() for peer in peers]
            began_s = time.monotonic()
            (folder / "newcomer").mkdir()
            newcomer = Peer(folder / "newcomer", addresses[0])
            joined_s = time.monotonic() - began_s
            peers.append(newcomer)
            report = Report("bare node ids next to a key", ("who looks", "peers that it sees"))
            report.row("peers before the liars", min(before))
            report.row("peers among the liars", min(after))
            report.row("a newcomer", newcomer.sees() - 1)
            report.figures = {
                "peers": chosen.peers,
                "liars": chosen.liars,
                "grinding_s": round(ground_s, 1),
                "joining_s": round(joined_s, 1),
            }
            report.print(chosen.json)
        finally:
            if liars is not None:
                liars.terminate()
                liars.join(5)
                if liars.is_alive():
                    liars.kill()
            for peer in peers:
                peer.close()


if __name__ == "__main__":
    main()
