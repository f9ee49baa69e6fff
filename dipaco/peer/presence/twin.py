"""Another machine with this peer's identity: a copied cache folder, a cloned disk.

A peer looks for such a machine when it starts (`diagnosis.check_identity_is_free`). This module
finds the others: two machines that start together, and those that cannot be called. Their signed
records name addresses that this peer never announced.
"""

from __future__ import annotations

from collections.abc import Callable

from dipaco.protocol.view import SwarmView


class TwinWatch:
    """Reports once that somebody else speaks for this peer."""

    def __init__(self, me: str, since_s: float, tell: Callable[[tuple[str, ...]], None]) -> None:
        """`since_s` is when this peer began, in swarm time; `tell` gets where the other is."""
        self._me, self._since_s, self._tell = me, since_s, tell
        self._own: set[str] = set()
        self._has_told = False

    def said(self, addresses: tuple[str, ...]) -> None:
        """Note where this peer says that it is called."""
        self._own.update(addresses)

    def on_view(self, view: SwarmView) -> None:
        """Look at what the swarm knows about this peer. Records of an earlier process are not a
        twin's."""
        record = view.peers.get(self._me)
        if record is None or self._has_told or record.since_s <= self._since_s:
            return
        if foreign := tuple(a for a in record.addresses if a not in self._own):
            self._has_told = True
            self._tell(foreign)
