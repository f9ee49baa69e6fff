"""The line that a newcomer pastes to join through this node."""

from __future__ import annotations

from collections.abc import Sequence

from dipaco.dht.addresses import OPERATOR_MARK
from dipaco.peer.exchange.contact.reachability import hosts_of
from dipaco.protocol.manifest import SignedManifest


def line_for_others(addresses: Sequence[str], manifest: SignedManifest) -> str:
    """Return what others type to join through one of these addresses: that which most can call."""
    known_to_most = [
        address for address in addresses if any(h.is_global for h in hosts_of([address]))
    ]
    pinned = f"{(known_to_most or addresses)[0]}{OPERATOR_MARK}{manifest.operator_fingerprint}"
    return f"dipaco-peer {pinned}" + " --invitation TEXT" * (manifest.plan.admission is None)
