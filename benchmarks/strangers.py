"""Strangers without a key flood two nodes: does everybody who comes meanwhile get in?

    python benchmarks/strangers.py [--json] [--newcomers 20] [--floods 1] [--out DIR]

Two bootstrap nodes serve an open run on loopback. Each flood is a process with an address of its
own (127.0.20.1, 127.0.21.1, ...; a /24 is one owner of a budget). To each node it sends, without
waiting for answers,

* 70 kB/s of requests to the DHT, for the manifests 256 times or for 255 other keys besides;
* 130 kB/s of requests to the exchange, hellos and long tells;
* a request to store 4 MB of records, ten times a minute.

In the first ten seconds they send ten times as much, to use up whatever can be used up at once.
Then newcomers come one after the other from 127.0.200.1, 127.0.201.1, ...: each
joins, is admitted, and fetches all blobs of the run; every fourth only reads. Each has a minute.
Printed are how many got in, how long they took, and the processor seconds of the nodes in a second.
With `--floods 0` nothing is flooded. Exit code 1 when somebody did not get in.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from parts.common import Report, build_parser, cpu_seconds, scratch_folder
from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import Swarm

from dipaco.peer.node.entrance import Listening
from dipaco.peer.node.join_run import join_run
from dipaco.protocol.record_keys import MANIFESTS_KEY
from dipaco.routing.run_folder import RunFolder

LIMIT_S = 60.0
WARM_UP_S = 10.0
DHT_BYTES_S, EXCHANGE_BYTES_S, STORE_BYTES, STORE_EVERY_S = 70_000, 130_000, 2**22 - 2**17, 6.0
KEYS_AT_ONCE = 256
WARM_UP_TIMES = 10


# -- the floods


_began_s = time.monotonic()


async def _pause(seconds: float) -> None:
    """Sleep, a tenth as long while the flood begins."""
    is_warm = time.monotonic() > _began_s + WARM_UP_S
    await asyncio.sleep(seconds if is_warm else seconds / WARM_UP_TIMES)


async def _find(p2p: P2P, node: PeerID) -> None:
    manifests = DHTID.generate(source=MANIFESTS_KEY).to_bytes()
    for number in itertools.count():
        others = [os.urandom(20) for _ in range(KEYS_AT_ONCE - 1)]
        keys = [manifests, *others] if number % 2 else [manifests] * KEYS_AT_ONCE
        request = dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo())
        name = "DHTProtocol.rpc_find"
        _begin(p2p.call_protobuf_handler(node, name, request, dht_pb2.FindResponse))
        await _pause(request.ByteSize() / DHT_BYTES_S)


async def _store(p2p: P2P, node: PeerID) -> None:
    items = [[b"%8d" % number, b"", 2e9] for number in range(STORE_BYTES // 24)]
    packed = msgpack.packb([None, 2e9, items], use_bin_type=True)
    request = dht_pb2.StoreRequest(
        keys=[DHTID.generate().to_bytes()],
        subkeys=[b""],
        values=[msgpack.packb(msgpack.ExtType(0x50, packed))],
        expiration_time=[2e9],
        in_cache=[False],
        peer=dht_pb2.NodeInfo(),
    )
    while True:
        name = "DHTProtocol.rpc_store"
        _begin(p2p.call_protobuf_handler(node, name, request, dht_pb2.StoreResponse))
        await asyncio.sleep(STORE_EVERY_S)


async def _stream(p2p: P2P, node: PeerID, body: bytes) -> None:
    _, reader, writer = await p2p.call_binary_stream_handler(node, "/dipaco/exchange")
    try:
        writer.write(len(body).to_bytes(4, "big") + body)
        await asyncio.wait_for(reader.read(100), 20.0)
    finally:
        writer.close()


async def _exchange(p2p: P2P, node: PeerID) -> None:
    hello = msgpack.packb({"kind": "hello", "protocol": 8, "software": "flood", "admission": None})
    tell = {
        "kind": "tell",
        "run": "0" * 16,
        "module": "L0.E0",
        "rows": [bytes(60_000)],
        "steps": [],
    }
    tell = msgpack.packb({**tell, "keep": False, "admissions": {}}, use_bin_type=True)
    while True:
        for body in (hello, hello, tell):
            _begin(_stream(p2p, node, body))
            await _pause((len(body) + 512) / EXCHANGE_BYTES_S)


_running = set[asyncio.Task[Any]]()


def _begin(coroutine: Any) -> None:
    """Begin a task whose failure is nobody's business."""
    task = asyncio.ensure_future(coroutine)
    _running.add(task)

    def end(done: asyncio.Task[Any]) -> None:
        _running.discard(done)
        done.cancelled() or done.exception()

    task.add_done_callback(end)


async def _flood(number: int, addresses: list[str]) -> None:
    """Flood until the process is ended."""
    global _began_s
    host = f"/ip4/127.0.{20 + number}.1/tcp/0"
    p2p = await P2P.create(
        initial_peers=addresses, host_maddrs=[host], tls=False, dht_mode="client",
        auto_nat=False, nat_port_map=False, startup_timeout=120, use_relay=False,
    )  # fmt: skip
    _began_s = time.monotonic()
    for address in addresses:
        node = PeerID.from_base58(address.rpartition("/p2p/")[2])
        for attack in (_find, _store, _exchange):
            _begin(attack(p2p, node))
    while True:
        await asyncio.sleep(1.0)


def flood(number: int, addresses: list[str]) -> None:
    """What a process does that floods."""
    asyncio.run(_flood(number, addresses))


# -- the newcomers


def come(number: int, addresses: list[str], folder: Path, reads: bool, found: Any) -> None:
    """What a newcomer does; it tells how long it took, or why it did not get in."""
    began_s = time.monotonic()
    listening = Listening(
        host_maddrs=(f"/ip4/127.0.{200 + number % 50}.1/tcp/0",), client_mode=reads
    )
    try:
        node = join_run(
            initial_peers=tuple(addresses), run=None, cache_folder=folder, listening=listening
        )
        if not reads:
            node.admit()
        node.load_shard_index()
        for sha256 in node.fetcher.all_blobs():
            node.fetcher.needed_blob(sha256, "a blob")
        found.put((time.monotonic() - began_s, ""))
        node.close()
    except Exception as error:
        found.put((time.monotonic() - began_s, f"{type(error).__name__}: {error}"[:200]))
    os._exit(0)


def main() -> int:
    """Flood, let newcomers come, and print what became of them."""
    parser = build_parser(__doc__)
    parser.add_argument("--newcomers", type=int, default=20, help="how many come (20)")
    parser.add_argument("--floods", type=int, default=1, help="processes that flood (1)")
    parser.add_argument("--out", type=Path, help="keep what the nodes print in this folder")
    chosen = parser.parse_args()
    context = multiprocessing.get_context("fork")
    report = Report(
        "newcomers while strangers flood two nodes",
        floods=chosen.floods,
        newcomers=chosen.newcomers,
    )
    took: list[float] = []
    broken: list[str] = []
    with scratch_folder() as scratch:
        folder = chosen.out or scratch
        folder.mkdir(parents=True, exist_ok=True)
        run = make_tiny_run(folder / "run", inner_steps=0, duration_s=600.0)
        copy = shutil.copytree(run.path, folder / "copy")
        with Swarm(folder, run) as swarm:
            first = swarm.start_bootstrap(name="first")
            swarm.run = RunFolder(copy)
            second = swarm.start_bootstrap("--initial-peers", first.address(), name="second")
            addresses = [first.address(), second.address()]
            floods = [
                context.Process(target=flood, args=(number, addresses), daemon=False)
                for number in range(chosen.floods)
            ]
            try:
                for one in floods:
                    one.start()
                time.sleep(2 * WARM_UP_S)  # p2pd has to start first
                began_s = time.monotonic()
                before = [cpu_seconds(node.popen.pid) for node in (first, second)]
                for number in range(chosen.newcomers):
                    found = context.Queue()
                    where = folder / f"newcomer-{number}"
                    reads = number % 4 == 3
                    child = context.Process(
                        target=come, args=(number, addresses, where, reads, found)
                    )
                    child.start()
                    try:
                        seconds, reason = found.get(timeout=LIMIT_S)
                    except Exception:
                        seconds, reason = LIMIT_S, "it took longer than a minute"
                    child.join(10.0)
                    if child.is_alive():
                        child.kill()
                    if reason:
                        broken.append(f"newcomer {number}{' (reads)' * reads}: {reason}")
                    else:
                        took.append(seconds)
                    print(f"newcomer {number}: {seconds:.1f} s {reason}", file=sys.stderr)
                lasted_s = time.monotonic() - began_s
                after = [cpu_seconds(node.popen.pid) for node in (first, second)]
            finally:
                for one in floods:
                    one.terminate()
                for one in floods:
                    one.join(10.0)
    cpu = [(b - a) / lasted_s for a, b in zip(before, after, strict=True)]
    report.add(
        "newcomers",
        {
            "got in": len(took),
            "s, median": round(statistics.median(took), 1) if took else None,
            "s, most": round(max(took), 1) if took else None,
        },
    )
    report.add("nodes", {"processor seconds of each in a second": round(max(cpu), 2)})
    return report.conclude(chosen, broken)


if __name__ == "__main__":
    sys.exit(main())
