"""Peers that go on asking although they are refused: their connections cost more than they give."""

from __future__ import annotations

from collections import Counter

_MAX_REFUSALS, _REMEMBERED = 32, 4096


class Refusals:
    """Counts the refusals in a row of each peer. Used on one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def refused(self, peer: str) -> bool:
        """Note a refusal; returns whether the peer is to be disconnected."""
        if len(self._counts) >= _REMEMBERED and peer not in self._counts:
            self._counts.clear()
        self._counts[peer] += 1
        if self._counts[peer] <= _MAX_REFUSALS:
            return False
        del self._counts[peer]
        return True

    def answered(self, peer: str) -> None:
        """Note that a peer was answered."""
        self._counts.pop(peer, None)
