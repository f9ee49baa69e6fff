"""The exchange between two real nodes on loopback, each with a DHT process and its own p2pd."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from dipaco.dht.records import HoldingRecord
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import (
    ClockError,
    IntegrityError,
    NetworkError,
    ProtocolVersionError,
    UnreachableError,
)
from dipaco.peer import service
from dipaco.peer.clock import measure_clock
from dipaco.peer.diagnosis import diagnose, examine
from dipaco.peer.exchange import Exchange
from dipaco.peer.states import HeldState
from dipaco.routing.plan import PROTOCOL_VERSION
from hivemind import DHT
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2

pytestmark = pytest.mark.swarm

RUN = "0123456789abcdef"
CONTENT = bytes(range(251)) * 20_000
SHA = hashlib.sha256(CONTENT).hexdigest()
NOBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
HELD = HeldState(
    module="L0.E1", version=3, digest=SHA, tokens=9, last_round=2, size_bytes=len(CONTENT)
)


class Held:
    """What a node holds, in memory."""

    def __init__(self, *contents: bytes | Path, states: tuple[HeldState, ...] = ()) -> None:
        self.contents: dict[str, bytes | Path] = {}
        for content in contents:
            data = content if isinstance(content, bytes) else content.read_bytes()
            self.contents[hashlib.sha256(data).hexdigest()] = content
        self.states = {state.module: state for state in states}
        self.lookups = 0

    def lookup(self, sha256: str) -> Path | bytes | None:
        self.lookups += 1
        return self.contents.get(sha256)

    def get(self, module: str) -> HeldState | None:
        return self.states.get(module)


class Nodes:
    """Two joined DHT nodes; exchanges on them are made by each test."""

    def __init__(self) -> None:
        self.server_dht = DHT(start=True, startup_timeout=60)
        self.addresses = [str(address) for address in self.server_dht.get_visible_maddrs()]
        self.client_dht = DHT(initial_peers=self.addresses, start=True, startup_timeout=60)
        self.started: list[Exchange] = []

    def exchange(self, dht: DHT, **options: Any) -> Exchange:
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


@pytest.fixture(scope="module")
def both() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.client_dht.shutdown()
    nodes.server_dht.shutdown()


@pytest.fixture
def nodes(both: Nodes) -> Iterator[Nodes]:
    yield both
    both.stop_exchanges()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def fetch(exchange: Exchange, blobs: BlobStore, *holders: str, **options: Any) -> Path:
    options = {"max_bytes": 2**30, "timeout_s": 20.0, **options}
    return exchange.fetch(options.pop("sha", SHA), holders, blobs, **options)


# -- content ---------------------------------------------------------------------------------------


def test_bytes_and_files_arrive(nodes: Nodes, blobs: BlobStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(CONTENT[::-1])
    server, client = nodes.serving(Held(CONTENT, file, b"")), nodes.asking()
    for data in (CONTENT, CONTENT[::-1], b""):
        sha = hashlib.sha256(data).hexdigest()
        assert fetch(client, blobs, server.peer_id, sha=sha).read_bytes() == data
    assert client.bytes_down == server.bytes_up == 2 * len(CONTENT)


def test_a_fetch_resumes(nodes: Nodes, blobs: BlobStore) -> None:
    server, client = nodes.serving(Held(CONTENT)), nodes.asking()
    blobs.partial_path(SHA).write_bytes(CONTENT[:1_000_001])
    assert fetch(client, blobs, server.peer_id).read_bytes() == CONTENT
    assert client.bytes_down == len(CONTENT) - 1_000_001


def test_a_file_that_is_cut_off_while_served(
    nodes: Nodes, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    held = Held(file)
    monkeypatch.setattr(service, "READ_BYTES", service.CHUNK_BYTES)
    server, client = nodes.serving(held), nodes.asking()
    send = service.OpenContent.read

    async def cut_off(self: service.OpenContent, offset: int, count: int) -> bytes | memoryview:
        return b"" if offset else await send(self, offset, count)

    monkeypatch.setattr(service.OpenContent, "read", cut_off)
    with pytest.raises(NetworkError, match="broke off"):
        fetch(client, blobs, server.peer_id)
    arrived = blobs.partial_path(SHA).stat().st_size
    assert 0 < arrived <= 3 * service.CHUNK_BYTES
    monkeypatch.setattr(service.OpenContent, "read", send)
    assert fetch(client, blobs, server.peer_id).read_bytes() == CONTENT
    assert client.bytes_down == len(CONTENT)


def test_wrong_content_is_refused_and_its_holder_named(
    nodes: Nodes, blobs: BlobStore, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held()
    held.contents[SHA] = CONTENT[:-1] + b"?"
    server, client = nodes.serving(held), nodes.asking()
    with pytest.raises(IntegrityError):
        fetch(client, blobs, server.peer_id)
    assert not blobs.has(SHA)
    assert len([r for r in caplog.records if f"peer {server.peer_id}: refused" in r.message]) == 1


def test_oversized_content_is_refused(nodes: Nodes, blobs: BlobStore) -> None:
    server, client = nodes.serving(Held(CONTENT)), nodes.asking()
    with pytest.raises(IntegrityError, match="at most 1000"):
        fetch(client, blobs, server.peer_id, max_bytes=1000)
    assert client.bytes_down == 0


def test_absent_unreachable_and_nonsensical_holders(nodes: Nodes, blobs: BlobStore) -> None:
    server, client = nodes.serving(Held()), nodes.asking()
    with pytest.raises(NetworkError, match="it does not hold it"):
        fetch(client, blobs, server.peer_id, NOBODY, "not a peer id", timeout_s=8.0)


def test_more_uploads_than_slots_are_told_busy_and_come_back(
    nodes: Nodes, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_AFTER_S", 0.2)
    contents = [bytes([i]) * 600_000 for i in range(4)]
    held = Held(*contents)
    slow = threading.Event()
    found = held.lookup

    def slow_lookup(sha256: str) -> Path | bytes | None:
        slow.wait(1.0)
        return found(sha256)

    held.lookup = slow_lookup  # type: ignore[method-assign]
    server, client = nodes.serving(held, max_uploads=1), nodes.asking()
    paths = []

    def one(data: bytes) -> None:
        sha = hashlib.sha256(data).hexdigest()
        paths.append(fetch(client, blobs, server.peer_id, sha=sha))

    threads = [threading.Thread(target=one, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    slow.set()
    for thread in threads:
        thread.join(20)
    assert sorted(path.read_bytes() for path in paths) == contents


def test_uploads_of_one_content_open_it_once(
    nodes: Nodes, blobs: BlobStore, tmp_path: Path
) -> None:
    held = Held(CONTENT)
    found = held.lookup

    def slow_lookup(sha256: str) -> Path | bytes | None:
        time.sleep(0.5)
        return found(sha256)

    held.lookup = slow_lookup  # type: ignore[method-assign]
    server, client = nodes.serving(held), nodes.asking()
    stores = [blobs, BlobStore(tmp_path / "other")]
    threads = [threading.Thread(target=fetch, args=(client, s, server.peer_id)) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(store.verify(SHA) for store in stores)
    assert held.lookups == 1


def test_serving_goes_on_while_the_main_thread_computes(nodes: Nodes, blobs: BlobStore) -> None:
    server, client = nodes.serving(Held(CONTENT * 4)), nodes.asking()
    sha = hashlib.sha256(CONTENT * 4).hexdigest()
    thread = threading.Thread(
        target=fetch, args=(client, blobs, server.peer_id), kwargs={"sha": sha}
    )
    thread.start()
    deadline = time.monotonic() + 15.0
    while thread.is_alive() and time.monotonic() < deadline:
        sum(range(10_000))
    assert blobs.verify(sha)


# -- questions -------------------------------------------------------------------------------------


def test_hello_tells_who_and_when(nodes: Nodes) -> None:
    server, client = nodes.serving(Held(), software="dipaco/9.9"), nodes.asking()
    hello = client.hello(server.peer_id)
    assert (hello.peer_id, hello.software, hello.run) == (server.peer_id, "dipaco/9.9", RUN)
    assert abs(hello.clock.offset_s) <= hello.clock.delay_s < 1.0
    assert server.peer_id in client.connected_peers()
    with pytest.raises(NetworkError, match=NOBODY):
        client.hello(NOBODY, timeout_s=1.0)


def test_another_protocol_version_is_said_in_one_line(nodes: Nodes) -> None:
    server = nodes.serving(Held(), software="dipaco/9.9", protocol_version=PROTOCOL_VERSION + 1)
    client = nodes.asking()
    with pytest.raises(ProtocolVersionError, match=r"dipaco/9.9 with protocol 2, this is .* 1;"):
        client.hello(server.peer_id)


def test_a_plain_hivemind_node_is_recognised(nodes: Nodes) -> None:
    client = nodes.asking()
    with pytest.raises(ProtocolVersionError, match="does not speak dipaco's protocol"):
        client.hello(str(nodes.server_dht.peer_id))


def test_the_clock_follows_a_neighbour(nodes: Nodes) -> None:
    server, client = nodes.serving(Held()), nodes.asking()
    set_ahead(server, 2.0)
    assert measure_clock(client, nodes.addresses).offset_s == pytest.approx(1.0, abs=0.1)
    set_ahead(server, -60.0)
    with pytest.raises(ClockError, match=r"60\.\d s ahead of"):
        measure_clock(client, nodes.addresses)


def set_ahead(exchange: Exchange, seconds: float) -> None:
    exchange._service._system_time = lambda: time.time() + seconds


def test_holdings_are_asked_directly(nodes: Nodes) -> None:
    server, client = nodes.serving(Held(states=(HELD,))), nodes.asking()
    expected = HoldingRecord(
        peer_id=server.peer_id,
        module="L0.E1",
        version=3,
        digest=SHA,
        tokens=9,
        round=2,
        bytes=len(CONTENT),
    )
    assert client.holdings(server.peer_id, "L0.E1") == expected
    assert client.holdings(server.peer_id, "P17") is None
    server.set_source(Held(states=(HELD,)), "f" * 16)
    assert client.holdings(server.peer_id, "L0.E1") is None, "another run's states are not ours"


def test_an_offer_leads_to_a_fetch(nodes: Nodes, blobs: BlobStore) -> None:
    keeper, leaver = nodes.serving(Held()), nodes.exchange(nodes.client_dht)
    leaver.set_source(Held(CONTENT, states=(HELD,)), RUN)
    assert not leaver.offer(keeper.peer_id, HELD), "refused as long as nobody handles offers"
    offers: list[HoldingRecord] = []
    keeper.set_offer_handler(lambda offer: bool(offers.append(offer)) or True)
    assert leaver.offer(keeper.peer_id, HELD)
    assert offers[0].peer_id == leaver.peer_id
    assert fetch(keeper, blobs, offers[0].peer_id, sha=offers[0].digest).read_bytes() == CONTENT


def test_a_failing_offer_handler_refuses(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    keeper, leaver = nodes.serving(Held()), nodes.asking()

    def fail(offer: HoldingRecord) -> bool:
        raise RuntimeError("no room")

    keeper.set_offer_handler(fail)
    assert not leaver.offer(keeper.peer_id, HELD)
    assert f"refused an offer from {leaver.peer_id}: no room" in caplog.text


# -- hostile input ---------------------------------------------------------------------------------


def call_raw(client: Exchange, peer: str, method: str, metadata: bytes) -> bytes:
    async def call() -> bytes:
        stub = service.ExchangeService.get_stub(
            client._connection(), PeerID.from_base58(peer), namespace=service.NAMESPACE
        )
        request = runtime_pb2.ExpertRequest(metadata=metadata)
        return bytes((await getattr(stub, method)(request, timeout=5.0)).metadata)

    return client._thread.call(call(), 10.0)


@pytest.mark.parametrize(
    "metadata",
    [b"", b"\xc1", b"\x93\x01\x02\x03", msgpack.packb({"run": RUN}), b"\x00" * 5000],
    ids=["empty", "not msgpack", "a list", "a field missing", "too large"],
)
def test_malformed_questions_are_refused_with_one_line(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, metadata: bytes
) -> None:
    server, client = nodes.serving(Held()), nodes.asking()
    for _ in range(3):
        with pytest.raises(Exception, match="MessageError"):
            call_raw(client, server.peer_id, "rpc_holdings", metadata)
    complaints = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(complaints) == 1
    assert f"refused a HoldingsRequest from {client.peer_id}" in complaints[0].message
    assert client.hello(server.peer_id)


def test_a_malformed_fetch_gets_no_bytes(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    server, client = nodes.serving(Held(CONTENT)), nodes.asking()

    async def send(data: bytes) -> bytes:
        _, reader, writer = await client._connection().call_binary_stream_handler(
            PeerID.from_base58(server.peer_id), service.FETCH_HANDLE
        )
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        return answer

    for data in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"\x00\x00\x00\x01\x80"):
        assert client._thread.call(send(data), 10.0) == b""
    assert "refused a FetchRequest" in caplog.text
    assert server.bytes_up == 0


def test_a_reader_that_stops_gives_its_slot_back(
    nodes: Nodes, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CHUNK_TIMEOUT_S", 0.5)
    large = CONTENT * 10
    sha = hashlib.sha256(large).hexdigest()
    server, client = nodes.serving(Held(large), max_uploads=1), nodes.asking()

    async def stall() -> Any:
        return await client.open_stream(server.peer_id, sha, 0)

    stream = client._thread.call(stall(), 10.0)
    assert fetch(client, blobs, server.peer_id, sha=sha).read_bytes() == large
    client._thread.call(asyncio.sleep(0, stream.close()), 5.0)


# -- life ------------------------------------------------------------------------------------------


def test_stop_is_quick_and_ends_waiting_calls(nodes: Nodes, blobs: BlobStore) -> None:
    held = Held(CONTENT)
    held.lookup = lambda sha256: time.sleep(5.0)  # type: ignore[method-assign]
    server, client = nodes.serving(held), nodes.asking()
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            fetch(client, blobs, server.peer_id, timeout_s=60.0)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
    for exchange in (client, server):
        began = time.monotonic()
        exchange.stop()
        assert time.monotonic() - began < 2.0
        exchange.stop()
    thread.join(2.0)
    assert isinstance(outcome[0], NetworkError)
    with pytest.raises(NetworkError, match="not running"):
        client.hello(server_id(nodes))


def server_id(nodes: Nodes) -> str:
    return nodes.addresses[0].rpartition("/p2p/")[2]


def test_an_exchange_can_start_again_on_the_same_node(nodes: Nodes) -> None:
    nodes.serving(Held()).stop()
    server, client = nodes.serving(Held()), nodes.asking()
    assert client.hello(server.peer_id)


def test_stop_after_the_dht_process_died() -> None:
    dht = DHT(start=True, startup_timeout=60)
    exchange = Exchange(dht)
    exchange.start()
    dht.kill()
    dht.join(5.0)
    began = time.monotonic()
    exchange.stop()
    assert time.monotonic() - began < 2.0
    with pytest.raises(NetworkError):
        exchange.hello(NOBODY, timeout_s=0.5)


# -- diagnosis -------------------------------------------------------------------------------------


def test_a_sound_address_is_not_blamed(nodes: Nodes) -> None:
    server = nodes.serving(Held())
    findings = diagnose([*nodes.addresses, f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"])
    assert findings[0].hello is not None
    assert findings[0].hello.peer_id == server.peer_id
    assert isinstance(findings[-1].error, UnreachableError)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (lambda nodes: f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}", "connection refused"),
        (lambda nodes: nodes.addresses[0].rpartition("/")[0] + f"/{NOBODY}", "another peer"),
        (lambda nodes: "127.0.0.1:31337", "not a peer's address"),
        (lambda nodes: f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY[:-1]}", "mistyped or cut off"),
    ],
)
def test_unreachable_says_why(nodes: Nodes, address: Callable[[Nodes], str], reason: str) -> None:
    with pytest.raises(UnreachableError, match=reason) as caught:
        diagnose([address(nodes)])
    assert address(nodes) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_address_of_a_peer_has_its_own_reason() -> None:
    addresses = [
        f"/{where}/p2p/{NOBODY}" for where in ("ip4/127.0.0.1/tcp/1", "dns4/no.invalid/tcp/2")
    ]
    refused, unknown = examine([*addresses])
    assert str(refused.error) == "connection refused"
    assert "host name is unknown" in str(unknown.error)


def test_a_wrong_clock_is_told_before_all_else(nodes: Nodes) -> None:
    server = nodes.serving(Held(), protocol_version=PROTOCOL_VERSION + 1)
    set_ahead(server, 3600.0)
    with pytest.raises(ClockError, match=r"3600\.\d s behind that of .*timedatectl"):
        diagnose(nodes.addresses)
    set_ahead(server, 0.0)
    with pytest.raises(ProtocolVersionError, match="protocol 2"):
        diagnose(nodes.addresses)


def test_a_plain_hivemind_node_is_diagnosed(nodes: Nodes) -> None:
    with pytest.raises(ProtocolVersionError, match="plain hivemind node"):
        diagnose(nodes.addresses)


def test_a_hello_that_hangs_is_bounded(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*arguments: object, **options: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(service.ExchangeService, "rpc_hello", hang)
    nodes.serving(Held())
    findings = examine(nodes.addresses, timeout_s=0.5)
    assert "does not answer" in str(findings[0].error)
