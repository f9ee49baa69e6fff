"""Addresses by which a peer comes back when all that it was given are gone."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dipaco.base.errors import AddressError, DipacoError
from dipaco.base.files import atomic_write
from dipaco.dht.addresses import check_peer_address, is_loopback
from dipaco.protocol.view import SwarmView

# Of the peers that are remembered on disk: of a run, of these taken from one view, runs, and how
# many are tried at once. A view is looked at again after a while.
MAX_KNOWN, _MAX_NEW, MAX_RUNS, MAX_TRIED = 64, 32, 8, 16
_MAX_FILE_BYTES = 2**20
_REMEMBER_EVERY_S = 60.0


class KnownPeers:
    """Addresses of peers by run, the newest first, in a file of the cache folder.

    With them a peer comes back when all addresses that it was given are gone, and knows in which
    run it met them. They count only if one of the addresses given is among them, so a person who
    gives the address of another swarm joins that one. A file that cannot be read or written counts
    as empty.
    """

    def __init__(self, cache_folder: Path) -> None:
        self._path = cache_folder / "known_peers.json"
        self._written_s = -math.inf

    def beside(self, given: Sequence[str]) -> tuple[str, ...]:
        """Return addresses of other peers in the runs of those that are given."""
        runs = self.runs_with(given).values()
        found = [address for addresses in runs for address in addresses if address not in given]
        return tuple(found[:MAX_TRIED])

    def runs_with(self, given: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the addresses by run, of the runs of those that are given."""
        ids = {peer_of(address) for address in given}
        return {
            run: addresses
            for run, addresses in self._read().items()
            if ids & {peer_of(address) for address in addresses}
        }

    def note(
        self,
        run_id: str,
        given: Sequence[str],
        view: SwarmView,
        me: str,
        contributors: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        """Remember the addresses of those who contributed lately, then of those in a view whom
        others can call.

        This writes seldom more often than once a minute.
        """
        if time.monotonic() < self._written_s + _REMEMBER_EVERY_S:
            return
        places = {
            peer: record.addresses
            for peer, record in sorted(view.peers.items())
            if record.reachable == "direct"
        }
        direct = [
            address
            for peer, addresses in {**contributors, **places}.items()
            if peer != me
            for address in addresses
            if peer_of(address) == peer and "/p2p-circuit" not in address
        ]
        # Loopback addresses are worth something where there are no others.
        direct = [a for a in direct if not is_loopback(a)] or direct
        known = self._read()
        if not direct and run_id in known:
            return
        self._written_s = time.monotonic() if direct else -math.inf
        newest = dict.fromkeys((*direct[:_MAX_NEW], *given, *known.pop(run_id, ())))
        runs = {run_id: list(newest)[:MAX_KNOWN], **known}
        text = json.dumps(dict(list(runs.items())[:MAX_RUNS]), indent=0)
        with contextlib.suppress(DipacoError, OSError):
            atomic_write(self._path, [text.encode()])

    def _read(self) -> dict[str, tuple[str, ...]]:
        """Return the addresses by run, those that can be used."""
        try:
            said = json.loads(self._path.read_bytes()[:_MAX_FILE_BYTES])
            return {
                str(run): tuple(address for address in addresses if _is_usable(address))
                for run, addresses in said.items()
            }
        except (OSError, ValueError, AttributeError, TypeError):
            return {}


def peer_of(address: str) -> str:
    """Return the peer id at the end of an address."""
    return address.rpartition("/p2p/")[2]


def _is_usable(address: object) -> bool:
    try:
        return isinstance(address, str) and bool(check_peer_address(address))
    except AddressError:
        return False
