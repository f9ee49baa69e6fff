"""Questions between two real nodes, malformed ones too, and the life of an exchange."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import ClockError, NetworkError, ProtocolVersionError
from dipaco.modules.plan import PROTOCOL_VERSION
from dipaco.modules.state import StateReference
from dipaco.peer.exchange import hello, service
from dipaco.peer.exchange.certifier import Certifier
from dipaco.peer.exchange.clock import measure_clock
from dipaco.peer.exchange.exchange import Exchange
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from support.certificates import MODULE, Line, certificate, grid, identity, reference
from support.exchange_nodes import CONTENT, HELD, NOBODY, RUN, Held, Nodes, fetch, set_ahead

pytestmark = pytest.mark.swarm

# Whoever waits longer waits for something that does not come.
LIMIT_S = 60.0


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_hello_tells_who_and_when(nodes: Nodes) -> None:
    server, client = nodes.serving(Held(), software="dipaco/9.9"), nodes.asking()
    hello = client.hello(server.peer_id)
    assert (hello.peer_id, hello.software, hello.run) == (server.peer_id, "dipaco/9.9", RUN)
    assert abs(hello.clock.offset_s) <= hello.clock.delay_s
    assert server.peer_id in client.connected_peers()
    with pytest.raises(NetworkError, match=NOBODY):
        client.hello(NOBODY, timeout_s=1.0)


def test_another_protocol_version_is_said_in_one_line(nodes: Nodes) -> None:
    server = nodes.serving(Held(), software="dipaco/9.9", protocol_version=PROTOCOL_VERSION + 1)
    client = nodes.asking()
    said = f"dipaco/9.9 with protocol {PROTOCOL_VERSION + 1}, this is .* {PROTOCOL_VERSION};"
    with pytest.raises(ProtocolVersionError, match=said):
        client.hello(server.peer_id)


def test_a_plain_hivemind_node_is_recognised(nodes: Nodes) -> None:
    client = nodes.asking()
    with pytest.raises(ProtocolVersionError, match="does not speak dipaco's protocol"):
        client.hello(str(nodes.server_dht.peer_id), timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([*["stream reset"] * 4, "protocols not supported"], ProtocolVersionError),
        (["stream reset", "connection refused"], NetworkError),
        (["connection refused"], NetworkError),
    ],
)
def test_a_stream_that_is_reset_is_opened_again(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], expected: type[Exception]
) -> None:
    """Which of the two a stranger says first depends on what libp2p knows of it by then."""

    class Stub:
        async def rpc_hello(self, request: object, timeout: float) -> None:
            raise RuntimeError(answers.pop(0))

    monkeypatch.setattr(hello.ExchangeService, "get_stub", lambda *_, **__: Stub())
    stranger = "12D3KooWNDVktXNXL3VHw1f4eXXwnvXC1BdcEPAUxipXmRtn4LKu"
    asking = hello.say_hello(object(), stranger, "test", 1, LIMIT_S)  # type: ignore[arg-type]
    with pytest.raises(expected):
        asyncio.run(asking)
    assert answers == []


def test_who_resets_every_stream_is_asked_on_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one says of its protocols can overtake what it said before, and is not said again."""
    now_s, disconnected_s = 0.0, []

    class Stub:
        async def rpc_hello(self, request: object, timeout: float) -> None:
            raise RuntimeError("protocols not supported" if disconnected_s else "stream reset")

    async def sleep(delay_s: float) -> None:
        nonlocal now_s
        now_s += delay_s

    async def disconnect(peer_id: object) -> None:
        disconnected_s.append(now_s)

    monkeypatch.setattr(hello.ExchangeService, "get_stub", lambda *_, **__: Stub())
    namespace = SimpleNamespace(sleep=sleep, wait_for=asyncio.wait_for)
    monkeypatch.setattr(hello, "asyncio", namespace)
    clock = SimpleNamespace(monotonic=lambda: now_s, time=time.time)
    monkeypatch.setattr(hello, "time", clock)
    p2p: Any = SimpleNamespace(_client=SimpleNamespace(disconnect=disconnect))
    stranger = "12D3KooWNDVktXNXL3VHw1f4eXXwnvXC1BdcEPAUxipXmRtn4LKu"
    with pytest.raises(ProtocolVersionError):
        asyncio.run(hello.say_hello(p2p, stranger, "test", 1, 60.0))
    assert len(disconnected_s) == 1
    assert 4.0 <= disconnected_s[0] < 5.0


def test_who_resets_every_stream_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        async def rpc_hello(self, request: object, timeout: float) -> None:
            raise RuntimeError("stream reset")

    monkeypatch.setattr(hello.ExchangeService, "get_stub", lambda *_, **__: Stub())
    stranger = "12D3KooWNDVktXNXL3VHw1f4eXXwnvXC1BdcEPAUxipXmRtn4LKu"
    asking = hello.say_hello(object(), stranger, "test", 1, 0.3)  # type: ignore[arg-type]
    with pytest.raises(NetworkError, match="broke off"):
        asyncio.run(asking)


def test_the_clock_follows_a_neighbour(nodes: Nodes) -> None:
    server, client = nodes.serving(Held()), nodes.asking()
    set_ahead(server, 2.0)
    assert measure_clock(client, nodes.addresses).offset_s == pytest.approx(1.0, abs=0.4)
    set_ahead(server, -60.0)
    with pytest.raises(ClockError, match=r"(59|60)\.\d s ahead of"):
        measure_clock(client, nodes.addresses)


def test_holdings_are_asked_directly(nodes: Nodes) -> None:
    server, client = nodes.serving(Held(states=(HELD,))), nodes.asking()
    assert client.holdings(server.peer_id, "L0.E1") == HELD
    assert client.holdings(server.peer_id, "P17") is None
    server.set_source(Held(states=(HELD,)), "f" * 16)
    assert client.holdings(server.peer_id, "L0.E1") is None, "another run's states are not ours"


def test_certificates_travel_between_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    chain = [certificate(version, range(32)) for version in range(1, 71)]
    knowing = Line().certifier(0, tmp_path)
    knowing._take(chain)
    server, client = nodes.exchange(nodes.server_dht), nodes.asking()
    server.set_source(Held(), RUN, knowing)
    newest = chain[-1].statement
    pages = [client.certificates(server.peer_id, MODULE, newest.digest, n) for n in (1, 4, 64)]
    # A reply is bounded in bytes too; who asks goes on behind its last.
    assert [len(page) for page in pages[:2]] == [1, 4]
    assert 4 < len(pages[2]) < 64
    assert client.certificates(server.peer_id, MODULE, "f" * 64, 64) == []
    asking = Certifier(RUN, grid(), identity(1), client, tmp_path / "asking")
    found = asking.fetch_chain(reference(chain[-1]), (server.peer_id,))
    assert found == knowing.chain(MODULE, newest.digest)
    assert len(found) == len(chain)
    server.set_source(Held(), "f" * 16, knowing)
    assert client.certificates(server.peer_id, MODULE, newest.digest, 64) == []


def test_an_offer_leads_to_a_fetch(nodes: Nodes, blobs: BlobStore) -> None:
    keeper, leaver = nodes.serving(Held()), nodes.exchange(nodes.client_dht)
    leaver.set_source(Held(CONTENT, states=(HELD,)), RUN)
    assert not leaver.offer(keeper.peer_id, HELD), "refused as long as nobody handles offers"
    offers: list[tuple[str, StateReference]] = []
    keeper.set_offer_handler(lambda peer, offered: bool(offers.append((peer, offered))) or True)
    assert leaver.offer(keeper.peer_id, HELD)
    assert offers == [(leaver.peer_id, HELD)]
    assert fetch(keeper, blobs, leaver.peer_id, sha=HELD.digest).read_bytes() == CONTENT


def test_a_node_is_called_back_where_it_announces_itself(nodes: Nodes) -> None:
    server, client = nodes.serving(Held()), nodes.asking()
    own = [str(address) for address in nodes.client_dht.get_visible_maddrs()]
    elsewhere = [address.replace("127.0.0.1", "127.0.0.9") for address in own]
    assert client.call_back(server.peer_id, elsewhere).result == "elsewhere"
    answer = client.call_back(server.peer_id, own)
    assert (answer.result, answer.near) == ("reached", True)
    assert client.call_back(server.peer_id, own).result == "untried", "not again at once"


def test_a_piece_of_a_content_can_be_asked_for(nodes: Nodes) -> None:
    server, client = nodes.serving(Held(CONTENT, states=(HELD,))), nodes.asking()
    assert client.sample(server.peer_id, HELD.digest, 7, 100) == CONTENT[7:107]
    assert client.sample(server.peer_id, HELD.digest, len(CONTENT) - 3, 4) is None
    with pytest.raises(NetworkError, match="does not give"):
        client.sample(server.peer_id, "f" * 64, 0, 1)


def test_a_failing_offer_handler_refuses(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    keeper, leaver = nodes.serving(Held()), nodes.asking()

    def fail(peer: str, offered: StateReference) -> bool:
        raise RuntimeError("no room")

    keeper.set_offer_handler(fail)
    assert not leaver.offer(keeper.peer_id, HELD)
    assert f"refused an offer from {leaver.peer_id}: no room" in caplog.text


def call_raw(client: Exchange, peer: str, method: str, metadata: bytes) -> bytes:
    async def call() -> bytes:
        stub = service.ExchangeService.get_stub(
            client._connection(), PeerID.from_base58(peer), namespace=service.NAMESPACE
        )
        request = runtime_pb2.ExpertRequest(metadata=metadata)
        return bytes((await getattr(stub, method)(request, timeout=60.0)).metadata)

    return client._thread.call(call(), 90.0)


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


def test_stop_is_quick_and_ends_waiting_calls(nodes: Nodes, blobs: BlobStore) -> None:
    held, asked, stopped = Held(CONTENT), threading.Event(), threading.Event()

    def hang(sha256: str) -> None:
        asked.set()
        stopped.wait(2 * LIMIT_S)

    held.lookup = hang  # type: ignore[method-assign]
    server, client = nodes.serving(held), nodes.asking()
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            fetch(client, blobs, server.peer_id, timeout_s=2 * LIMIT_S)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert asked.wait(LIMIT_S)
    for exchange in (client, server):
        began = time.monotonic()
        exchange.stop()
        assert time.monotonic() - began < LIMIT_S
        exchange.stop()
    thread.join(LIMIT_S)
    stopped.set()
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
    dht = GuardedDHT(start=True, startup_timeout=60)
    exchange = Exchange(dht)
    exchange.start()
    dht.kill()
    dht.join(LIMIT_S)
    began = time.monotonic()
    exchange.stop()
    assert time.monotonic() - began < LIMIT_S
    with pytest.raises(NetworkError):
        exchange.hello(NOBODY, timeout_s=0.5)
