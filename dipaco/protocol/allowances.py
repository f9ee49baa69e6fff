"""What another peer may use of this node, by what is known of it: all limits in one table.

`docs/threat-model.md` says which attacks these numbers stop. What a node of the DHT stores is in
`dht/quotas.py`, what lies in a mailbox in `peer/exchange/files/contribution_files.py`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from dipaco.base.token_bucket import Rate, Rates

_KIB, _MIB = 2.0**10, 2.0**20


class Standing(IntEnum):
    """What is known of a peer. A higher one has room before a lower one."""

    STRANGER = 0
    """It has shown no admission. Anybody can be any number of these."""
    ADMITTED = 1
    CONTRIBUTOR = 2
    """It has rows in the last steps."""


class Asker(NamedTuple):
    """The payer of a request: a member pays for itself, a stranger for all at its address prefix.

    Keys cost nothing, addresses do, so ids of strangers count for nothing.
    """

    standing: Standing
    name: str
    """A peer's id, or of a stranger its `origin_of`."""


# The origin of a peer whose address is not known.
NOWHERE = "nowhere"
_PREFIX_BITS = {4: 24, 6: 48}


def origin_of(address: str) -> str:
    """Return the prefix of an address such as /ip4/203.0.113.5/tcp/31337: 203.0.113.0/24."""
    parts = address.split("/")
    try:
        host = ipaddress.ip_address(parts[2] if parts[1] in ("ip4", "ip6") else "")
    except (IndexError, ValueError):
        return NOWHERE
    host = getattr(host, "ipv4_mapped", None) or host
    return str(ipaddress.ip_network((host, _PREFIX_BITS[host.version]), strict=False))


@dataclass(frozen=True)
class Bounds:
    """How many places there are, and how long one may be held."""

    total: int
    each: Mapping[Standing, int]
    """The most places of one asker."""
    together: Mapping[Standing, int]
    """The most places of all peers of one standing."""
    grace_s: float
    """Everybody has this long, and the time for what it has moved at a rate."""
    wanted_rate_bytes_s: float = 2.0**16
    """The least rate that keeps a place while others want it."""


STRANGER, ADMITTED, CONTRIBUTOR = Standing.STRANGER, Standing.ADMITTED, Standing.CONTRIBUTOR

# The bytes of what a peer asks on streams; each request costs some more, also in the DHT.
REQUEST_COST_BYTES = 512
# An answer about a chain takes long to make, and also costs its bytes divided by this.
ANSWER_SHARE = 16
ASKED = Rates(
    each={
        CONTRIBUTOR: Rate(4 * _MIB, 64 * _KIB),
        ADMITTED: Rate(4 * _MIB, 64 * _KIB),
        STRANGER: Rate(1 * _MIB, 32 * _KIB),
    },
    together={ADMITTED: Rate(64 * _MIB, 1 * _MIB), STRANGER: Rate(4 * _MIB, 128 * _KIB)},
)
# The bytes that a peer is sent on streams. A state of 400 MB takes less than a minute.
SENT = Rates(
    each={
        CONTRIBUTOR: Rate(512 * _MIB, 16 * _MIB),
        ADMITTED: Rate(512 * _MIB, 16 * _MIB),
        STRANGER: Rate(512 * _MIB, 16 * _MIB),
    },
    together={ADMITTED: Rate(4096 * _MIB, 64 * _MIB), STRANGER: Rate(512 * _MIB, 16 * _MIB)},
)
# The bytes of what a node of the DHT is asked, and of answers up to 16 KiB. It is all that one has
# to ask before one is admitted.
DHT_SMALL = Rates(
    each={
        CONTRIBUTOR: Rate(32 * _MIB, 2 * _MIB),
        ADMITTED: Rate(32 * _MIB, 2 * _MIB),
        STRANGER: Rate(2 * _MIB, 64 * _KIB),
    },
    together={ADMITTED: Rate(64 * _MIB, 16 * _MIB), STRANGER: Rate(4 * _MIB, 128 * _KIB)},
)
# The bytes of longer answers, which are given only where there is enough for all of one: one
# stranger may use a quarter of what there is.
DHT_LARGE = Rates(
    each={
        CONTRIBUTOR: Rate(32 * _MIB, 2 * _MIB),
        ADMITTED: Rate(32 * _MIB, 2 * _MIB),
        STRANGER: Rate(4 * _MIB, 32 * _KIB),
    },
    together={ADMITTED: Rate(64 * _MIB, 16 * _MIB), STRANGER: Rate(4 * _MIB, 128 * _KIB)},
)
# Streams that others have open here, and files that they are sent, at once.
STREAMS = Bounds(
    total=256,
    each={CONTRIBUTOR: 16, ADMITTED: 16, STRANGER: 16},
    together={STRANGER: 64},
    grace_s=5.0,
)
UPLOADS = Bounds(
    total=16,
    each={CONTRIBUTOR: 4, ADMITTED: 4, STRANGER: 4},
    together={STRANGER: 6},
    grace_s=20.0,
)
