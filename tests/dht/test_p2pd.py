"""What p2pd is started with: strangers reach as little of it as can be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hivemind import DHT
from support.wire.dht_pair import LOOPBACK, TestNode, start_node

from dipaco.base.errors import AddressError
from dipaco.dht.addresses import check_listen_address, check_peer_address

pytestmark = pytest.mark.p2pd


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    started = start_node(tmp_path_factory.mktemp("node"), run_id=None)
    with contextlib.closing(started):
        yield started


async def _process_id(node: Any) -> int:
    return int(node.p2p._child.pid)


def words_of_p2pd(node: TestNode) -> list[bytes]:
    """Return what p2pd was started with; words that it doesn't know would have ended it."""
    return Path(f"/proc/{node.dht.call(_process_id)}/cmdline").read_bytes().split(b"\0")


def test_a_relayed_connection_has_small_buffers(node: TestNode) -> None:
    [size] = [word for word in words_of_p2pd(node) if word.startswith(b"-relayBufferSize=")]
    assert int(size.partition(b"=")[2]) <= 2**20


def test_connections_are_by_noise_over_tcp_alone(node: TestNode) -> None:
    assert b"-tls=0" in words_of_p2pd(node)
    assert all("/tcp/" in str(address) for address in node.dht.get_visible_maddrs())


@pytest.mark.parametrize("tls", [True, False])
def test_one_that_speaks_tls_too_still_connects(node: TestNode, tls: bool) -> None:
    other = DHT(initial_peers=[node.address], start=True, host_maddrs=[LOOPBACK], tls=tls)
    other.shutdown()


@pytest.mark.parametrize("address", ["/ip4/0.0.0.0/udp/31337/quic", "/ip4/0.0.0.0/udp/31337"])
def test_nobody_listens_or_calls_by_udp(address: str) -> None:
    with pytest.raises(AddressError, match="UDP"):
        check_listen_address(address, "--host-maddrs")
    with pytest.raises(AddressError, match="UDP"):
        check_peer_address(f"{address}/p2p/12D3KooWQ5VFdbLVyN12XP4wpm6SXPwVMKH8gjPVyBR1AFNkBzmJ")
