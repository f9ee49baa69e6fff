"""Who keeps copies of what: rendezvous hashing over the peers (design 4.6). Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from .view import SwarmView


def keepers(name: str, peers: Iterable[str], copies: int) -> tuple[str, ...]:
    """Return the `copies` peers that keep `name`, a module or a blob's hash.

    When a peer comes or goes, only what it keeps itself changes hands.
    """
    ordered = sorted(
        set(peers), key=lambda peer: hashlib.sha256(f"{name}/{peer}".encode()).digest()
    )
    return tuple(ordered[:copies])


def is_best_keeper(view: SwarmView, me: str, path: int, copies: int) -> bool:
    """Tell whether this peer is to hold a copy of the best states of a path it does not lead.

    The path's lead trainer has one anyway; the rest of the `copies` goes to the peers that
    rendezvous hashing names among the others, bootstrap nodes included.
    """
    lead = view.lead(path)
    others = [
        peer
        for peer, record in view.peers.items()
        if peer != lead and record.state != "leaving" and record.reachable != "outgoing"
    ]
    return me in keepers(f"best/{path}", others, copies - (lead is not None))
