"""Looks after this peer's neighbours: calls those that went missing, and compares clocks."""

from __future__ import annotations

import logging
from collections import deque

from dipaco.base.errors import ClockError, DipacoError
from dipaco.peer.background import Background
from dipaco.peer.exchange.contact.known_peers import peer_of
from dipaco.peer.node.node import Node
from dipaco.protocol.view import SwarmView

logger = logging.getLogger("dipaco.peer.presence.neighbours")

# Refresh periods between two looks at the neighbours' clocks.
_CLOCK_PERIODS = 10
# How many peers that were seen once are called again when they are missing: after a network split
# the two sides have forgotten each other, and nothing else would bring them together.
_REMEMBERED_PEERS = 256
_CALLED_AT_ONCE = 4
# After this node's DHT process was started again: how many are called, and how long it waits.
_CALLED_AGAIN, _CALL_PATIENCE_S = 64, 5.0


class Neighbours:
    """The peers that were seen, and their clocks. `look_after` is for one thread."""

    def __init__(self, node: Node, background: Background) -> None:
        self._node, self._background = node, background
        self._directory, self._clock = node.directory, node.clock
        self._clock_countdown = _CLOCK_PERIODS
        self._contributors = frozenset[str]()
        self._addresses: dict[str, tuple[str, ...]] = {}
        for address in node.initial_peers:
            peer = peer_of(address)
            self._addresses[peer] = (*self._addresses.get(peer, ()), address)
        self._known_peers: deque[str] = deque(self._addresses, maxlen=_REMEMBERED_PEERS)

    def look_after(self, view: SwarmView | None) -> None:
        """Call known peers that a view lacks, and every few times look at the clocks."""
        try:
            if view is not None:
                self._call_missing(view)
            self._clock_countdown -= 1
            if self._clock_countdown <= 0 or self._clock.has_jumped:
                self._clock_countdown = _CLOCK_PERIODS
                # Neighbours that do not answer take longer than a claim may wait to be renewed.
                self._background.thread("clock", self.measure_clock).start()
        except DipacoError as error:
            logger.debug("looking after neighbours: %s", error)

    def call_again(self, view: SwarmView | None) -> None:
        """Call the known peers, because this node has forgotten where they are: first those that
        contributed lately, then those that a view shows, then those that were given at first.
        Raises `NetworkError`.
        """
        seen = view.peers.items() if view is not None else ()
        places = self._node.contributors.all()
        for peer, addresses in (
            *((p, said.addresses) for p, said in seen),
            *self._addresses.items(),
        ):
            places[peer] = places.get(peer, ()) or addresses
        places.pop(self._node.me, None)
        called = dict(list(places.items())[:_CALLED_AGAIN])
        self._directory.call_peers(called, _CALL_PATIENCE_S)

    def note_contributors(self, view: SwarmView) -> None:
        """Remember the addresses of recent contributors, and have room for their records."""
        contributors = self._node.contributors
        contributors.note_addresses({peer: said.addresses for peer, said in view.peers.items()})
        peers = frozenset(contributors.all())
        if peers != self._contributors:
            self._directory.note_contributors(peers)
            self._contributors = peers

    def measure_clock(self) -> None:
        """Compare this clock with those of neighbours; one that was set wrongly ends the peer."""
        try:
            given = tuple(map(peer_of, self._node.initial_peers))
            self._clock.measure(self._node.exchange, given, self._node.check.is_in)
        except ClockError as error:
            if self._clock.has_jumped:
                # Hivemind goes by this machine's wrong time; nothing here can repair that.
                self._background.fail(error)
            logger.warning("%s", error)
        except DipacoError as error:
            logger.debug("measuring the clock: %s", error)

    def _call_missing(self, view: SwarmView) -> None:
        present = view.peers.keys() | view.from_elsewhere
        known = set(self._known_peers)
        self._known_peers.extend(sorted(present - known - {self._node.me}))
        missing = [peer for peer in self._known_peers if peer not in present]
        contributors = self._node.contributors.all()
        hidden = [peer for peer in contributors if peer not in present and peer not in known]
        called = missing[:_CALLED_AT_ONCE]
        places = {
            peer: self._addresses.get(peer, ()) or contributors.get(peer, ())
            for peer in (*called, *hidden[:_CALLED_AT_ONCE])
        }
        if places:
            self._directory.call_peers(places)
        # The peers that were called last are called first the next time.
        for peer in called:
            self._known_peers.remove(peer)
            self._known_peers.append(peer)
