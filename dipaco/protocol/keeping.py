"""Which peers keep which copies, by rendezvous hashing (design 4.6, copies). Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def keepers(name: str, peers: Iterable[str], copies: int) -> tuple[str, ...]:
    """Return the `copies` peers that keep `name`, a module or a blob's hash.

    When a peer comes or goes, only what it keeps itself changes hands.
    """
    ordered = sorted(
        set(peers), key=lambda peer: hashlib.sha256(f"{name}/{peer}".encode()).digest()
    )
    return tuple(ordered[:copies])
