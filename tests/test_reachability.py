"""How a peer is reached, told from addresses."""

from __future__ import annotations

import pytest
from dipaco.peer.exchange.reachability import classify

LOOPBACK = "/ip4/127.0.0.1/tcp/4001/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
HOME = "/ip4/192.168.1.20/tcp/4001"
PUBLIC = "/ip4/8.8.8.8/tcp/4001"
RELAY = "/ip4/8.8.8.8/tcp/4001/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC/p2p-circuit"


@pytest.mark.parametrize(
    ("own", "neighbours", "expected"),
    [
        ([LOOPBACK], [LOOPBACK], "direct"),
        ([HOME, PUBLIC], [PUBLIC], "direct"),
        ([HOME], ["/ip4/192.168.1.9/tcp/1"], "direct"),
        ([HOME], [PUBLIC], "unknown"),
        ([HOME, RELAY], [PUBLIC], "relayed"),
        ([HOME], ["/dns4/example.org/tcp/1"], "unknown"),
        ([], [PUBLIC], "unknown"),
    ],
)
def test_classify(own: list[str], neighbours: list[str], expected: str) -> None:
    assert classify(own, neighbours) == expected
