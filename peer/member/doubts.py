"""Whose records are not believed: peers that claim much and never answer (design 4.5).

A record costs nothing, so an inventor can have a thousand peers. A peer that was called several
times and never answered is left out of what a member decides from, until it answers, calls, or is
in a group with this one. A few calls a refresh are enough, because what matters is looked at first.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from dipaco.dht.view import SwarmView

from .quorum import Guests, weigh

# Calls without an answer after which a peer is doubted.
CALLS_IN_VAIN = 2
CALLS_AT_ONCE = 4
# Peers of which something is remembered.
REMEMBERED = 4096


class Doubts:
    """What a member thinks of the peers that it reads of."""

    def __init__(self, me: str, *, by_invitation: bool = False) -> None:
        self._me = me
        self.guests = Guests()
        self._guests_count = by_invitation
        self._in_vain: dict[str, int] = {}
        self._doubted: set[str] = set()
        self._proven: dict[str, float] = {}

    def prove(self, peers: Iterable[str], now_s: float) -> bool:
        """Note who has shown itself; returns whether any of them was doubted."""
        was_doubted = False
        for peer in peers:
            self._in_vain.pop(peer, None)
            if peer in self._doubted:
                was_doubted = True
                self._doubted.discard(peer)
            self._proven.pop(peer, None)
            self._proven[peer] = now_s
        while len(self._proven) > REMEMBERED:
            del self._proven[next(iter(self._proven))]
        return was_doubted

    def called_in_vain(self, peers: Iterable[str]) -> bool:
        """Note who was called and did not answer; returns whether any is doubted from now on."""
        is_new = False
        for peer in sorted(peers):
            # At the end, so that those called longest ago are in front.
            calls = self._in_vain[peer] = self._in_vain.pop(peer, 0) + 1
            if calls == CALLS_IN_VAIN:
                is_new = True
                self._doubted.add(peer)
        while len(self._in_vain) > REMEMBERED:
            forgotten = next(iter(self._in_vain))
            del self._in_vain[forgotten]
            self._doubted.discard(forgotten)
        return is_new

    def is_doubted(self, peer: str) -> bool:
        """Tell whether a peer is left out."""
        return peer in self._doubted

    def believed(self, view: SwarmView) -> SwarmView:
        """Return a view without those who are doubted."""
        doubted = {p for p in self._doubted if p in view.claims or p in view.peers} - {self._me}
        if not doubted:
            return view
        return view.without(doubted)

    def has_shown_itself(self, peer: str) -> bool:
        """Tell whether a peer has answered, called or averaged with this member since it began."""
        return peer in self._proven or peer == self._me

    def weigh(self, contributors: Collection[str]) -> int:
        """Return what contributors to a chain weigh together."""
        guests = self.guests if self._guests_count else None
        return weigh(contributors, self.has_shown_itself, guests)

    def to_call(self, view: SwarmView, first: Collection[str], since_s: float) -> tuple[str, ...]:
        """Return whom to call now: those in `first` before others, each again after a while.

        Who has shown itself since `since_s` need not be called. Those that are doubted have their
        turn after all others, whatever they claim, and one of them always has, first one that has
        shown itself before: who was called while the network was split may be there again, however
        many names are invented meanwhile.
        """
        waiting = [
            peer
            for peer in (view.claims.keys() | view.peers.keys() | view.from_elsewhere) - {self._me}
            if self._proven.get(peer, -1.0) < since_s
        ]

        def order(peer: str) -> tuple[bool, bool, int, str]:
            is_first = peer in first and peer not in self._doubted
            return peer in self._doubted, not is_first, self._in_vain.get(peer, 0), peer

        doubted = self._doubted.intersection(waiting)
        longest_ago = [peer for peer in self._in_vain if peer in doubted]
        again = sorted(longest_ago, key=lambda peer: peer not in self._proven)[:1]
        others = (peer for peer in waiting if peer not in again)
        return (*heapq.nsmallest(CALLS_AT_ONCE - len(again), others, key=order), *again)
