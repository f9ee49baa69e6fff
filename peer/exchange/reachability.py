"""How others reach this peer, told from its addresses and those of its neighbours. Pure.

An address with `p2p-circuit` goes through a relay. A global address is one that libp2p saw others
use, or that the volunteer announced. Private and loopback addresses reach only neighbours of the
same kind. A hole in a firewall cannot be seen from inside, so this says what to expect, not what
was tried.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Literal

from multiaddr import Multiaddr

Reachability = Literal["direct", "relayed", "unknown"]


def classify(own: Iterable[str], neighbours: Iterable[str]) -> Reachability:
    """Return how a peer with the addresses `own` is reached by peers at `neighbours`."""
    own = list(own)
    direct = [address for address in own if "p2p-circuit" not in address]
    hosts = [host for address in direct if (host := _host(address)) is not None]
    if any(host.is_global for host in hosts):
        return "direct"
    near = [_host(address) for address in neighbours]
    if hosts and all(host is not None and not host.is_global for host in near):
        return "direct"
    return "relayed" if len(direct) < len(own) else "unknown"


def _host(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = Multiaddr(address)
        for name in ("ip4", "ip6"):
            if any(protocol.name == name for protocol in parsed.protocols()):
                return ipaddress.ip_address(str(parsed.value_for_protocol(name)))
    except Exception:
        return None
    return None
