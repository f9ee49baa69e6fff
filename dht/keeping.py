"""Who keeps copies of what: rendezvous hashing over the peers (design 4.6). Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from dipaco.modules.grid import Grid
from dipaco.modules.state import StateReference, heaviest

from .agreement import expected_group
from .view import SwarmView


def keepers(name: str, peers: Iterable[str], copies: int) -> tuple[str, ...]:
    """Return the `copies` peers that keep `name`, a module or a blob's hash.

    When a peer comes or goes, only what it keeps itself changes hands.
    """
    ordered = sorted(
        set(peers), key=lambda peer: hashlib.sha256(f"{name}/{peer}".encode()).digest()
    )
    return tuple(ordered[:copies])


def modules_to_keep(
    view: SwarmView,
    grid: Grid,
    me: str,
    copies: int,
    *,
    unavailable: Collection[str] = (),
) -> tuple[StateReference, ...]:
    """Return the states that this peer should hold a copy of, though it does not train them.

    A module is held by its trainers anyway; the rest of the `copies` goes to the peers that
    rendezvous hashing names among the others, bootstrap nodes included. `unavailable` are digests
    that could not be fetched lately: announcing a state that nobody can fetch must not keep the
    true one from being copied.
    """
    wanted = []
    for module in grid.modules():
        best = heaviest(s for s in view.states(module) if s.digest not in unavailable)
        if best is None or best.version == 0:
            continue
        trainers = expected_group(view, grid, module)
        others = [
            peer
            for peer, record in view.peers.items()
            if peer not in trainers and record.state != "leaving"
        ]
        missing = copies - len(trainers)
        if missing > 0 and me in keepers(module, others, missing):
            wanted.append(best)
    return tuple(wanted)


def is_best_keeper(view: SwarmView, me: str, path: int, copies: int) -> bool:
    """Tell whether this peer is to hold a copy of the best states of a path it does not lead.

    The path's lead trainer has one anyway; the rest of the `copies` goes to the peers that
    rendezvous hashing names among the others, bootstrap nodes included.
    """
    lead = view.lead(path)
    others = [p for p, record in view.peers.items() if p != lead and record.state != "leaving"]
    return me in keepers(f"best/{path}", others, copies - (lead is not None))
