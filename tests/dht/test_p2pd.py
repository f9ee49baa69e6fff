"""What p2pd is started with: strangers reach as little of it as can be."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hivemind import DHT
from hivemind.p2p import P2P, PeerID

from dipaco.base.errors import AddressError
from dipaco.dht.addresses import check_listen_address, check_peer_address
from dipaco.dht.directory import _connect
from support.wire.dht_pair import LOOPBACK, start_node

pytestmark = pytest.mark.p2pd


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    started = start_node(tmp_path_factory.mktemp("node"), run_id=None)
    with contextlib.closing(started):
        yield started


async def _process_id(node):
    return int(node.p2p._child.pid)


def words_of_p2pd(node):
    """Return what p2pd was started with; words that it doesn't know would have ended it."""
    return Path(f"/proc/{node.dht.call(_process_id)}/cmdline").read_bytes().split(b"\0")


def test_nobody_can_send_anything_through_a_node(node):
    """libp2p's relay would carry gigabytes for strangers, past all limits of the node's owner."""

    async def ask():
        stranger = await P2P.create(initial_peers=[node.address], tls=False)
        try:
            peer = PeerID.from_base58(node.address.rpartition("/p2p/")[2])
            protocol = "/libp2p/circuit/relay/0.2.0/hop"
            _, reader, writer = await stranger.call_binary_stream_handler(peer, protocol)
            writer.write(b"\x02\x08\x00")  # A place, please: two bytes, of kind 0.
            return await asyncio.wait_for(reader.read(400), 30.0)
        except ConnectionError:
            return b""  # The node has closed the stream before all was written.
        finally:
            await stranger.shutdown()

    assert asyncio.run(ask()) == b""


def test_connections_are_by_noise_over_tcp_alone(node):
    assert b"-tls=0" in words_of_p2pd(node)
    assert all("/tcp/" in str(address) for address in node.dht.get_visible_maddrs())


@pytest.mark.parametrize("tls", [True, False])
def test_one_that_speaks_tls_too_still_connects(node, tls):
    other = DHT(initial_peers=[node.address], start=True, host_maddrs=[LOOPBACK], tls=tls)
    other.shutdown()


@pytest.mark.parametrize("address", ["/ip4/0.0.0.0/udp/31337/quic", "/ip4/0.0.0.0/udp/31337"])
def test_nobody_listens_or_calls_by_udp(address):
    with pytest.raises(AddressError, match="UDP"):
        check_listen_address(address, "--host-maddrs")
    with pytest.raises(AddressError, match="UDP"):
        check_peer_address(f"{address}/p2p/12D3KooWQ5VFdbLVyN12XP4wpm6SXPwVMKH8gjPVyBR1AFNkBzmJ")


@pytest.mark.parametrize("end", ["udp/1/quic", "tcp/1/ws", "tcp/1/wss", "tcp/1/tls/ws", "tcp/1/https"])
def test_no_address_of_a_record_is_called_by_tls(end):
    called = []

    async def connect(peer, places):
        called.extend(map(str, places))

    node = SimpleNamespace(p2p=SimpleNamespace(_client=SimpleNamespace(connect=connect)))
    places = tuple(f"/ip4/203.0.113.5/{way}/p2p/12D3KooW" for way in (end, "tcp/1"))
    asyncio.run(_connect(node, None, places))
    assert called == ["/ip4/203.0.113.5/tcp/1"]
