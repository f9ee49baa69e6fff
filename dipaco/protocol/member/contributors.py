"""Peers that contributed lately stay known, whatever the DHT says, until a call to them fails.

See design 4.8, address. The DHT finds peers; it does not decide who there is. A peer whose row is
in the last steps, and that the view does not show, is called. It counts as a trainer of the module
until that call fails or it answers that it trains the module no more, so a node that hides it from
the others gains nothing.
"""

from __future__ import annotations

from .knowledge import Knowledge


class Contributors:
    """The recent contributors of one module that the view does not show."""

    def __init__(self, known: Knowledge, module: str) -> None:
        self._known, self._module = known, module
        self._gone: set[str] = set()
        """Peers out of sight, to which a call has failed or was answered with no."""

    def look(self, recent: frozenset[str]) -> list[str]:
        """Compare those who contributed lately with a new view; returns those to be called."""
        known, view = self._known, self._known.view
        if not view.covers_module(self._module):
            return []
        unseen = {p for p in recent - {known.me} if p not in view.claims and p not in view.peers}
        self._gone &= unseen
        known.note_unseen(self._module, frozenset(unseen - self._gone))
        return sorted(unseen - self._gone)

    def is_gone(self, peer: str) -> None:
        """Note that a peer that was called has not answered, or no longer trains the module."""
        unseen = self._known.unseen(self._module)
        if peer in unseen:
            self._gone.add(peer)
            self._known.note_unseen(self._module, unseen - {peer})

    def heard(self, peer: str) -> None:
        """Note that a row of a peer has come, so the peer is there."""
        if peer in self._gone:
            self._gone.discard(peer)
            self._known.note_unseen(self._module, self._known.unseen(self._module) | {peer})
