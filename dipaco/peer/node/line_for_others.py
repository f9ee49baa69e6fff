"""The line that a newcomer pastes to join through this node; a peer keeps it for its owner."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from dipaco.base.errors import DipacoError
from dipaco.base.files import atomic_write, text_of
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


def keep_line(cache_folder: Path, line: str) -> None:
    """Keep the line for `dipaco-peer status`, or forget it if it is empty; a full disk does not
    matter."""
    with contextlib.suppress(DipacoError, OSError):
        if line:
            atomic_write(_file(cache_folder), f"{line}\n".encode())
        else:
            _file(cache_folder).unlink(missing_ok=True)


def kept_line(cache_folder: Path) -> str:
    """Return the line that was kept, "" if there is none."""
    return text_of(_file(cache_folder)).strip()


def _file(cache_folder: Path) -> Path:
    return cache_folder / "for_a_friend"
