"""How many streams, and how many uploads, other peers have here at a time (design 4.10, wire).

Anybody who can make keys can have many identities, so those who are not admitted share few places.
When all places are taken, somebody gives way: who takes bytes too slowly, who has at least two
places more than the asker, or who has a lower standing, down to a quarter of all places. That is no
loss to a slow but honest peer: it goes on later where it was broken off.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dipaco.protocol.allowances import Bounds, Standing


@dataclass(eq=False)
class Place:
    """One place that is taken."""

    peer: str
    standing: Standing
    began_s: float
    stop: Callable[[], None]
    """Breaks off what it is for, also while that waits for the other side."""
    moved_bytes: int = 0

    def moved(self, count: int) -> None:
        """Note that the other side has taken or sent so many bytes."""
        self.moved_bytes += count

    def excuse(self, seconds: float) -> None:
        """Note that this side was what held it up for so long."""
        self.began_s += seconds

    def is_slow(self, now_s: float, grace_s: float, rate_bytes_s: float) -> bool:
        """Tell whether it has lasted longer than what has moved allows at this rate."""
        return now_s - self.began_s > grace_s + self.moved_bytes / rate_bytes_s


class Places:
    """Places, bounded in all, for each peer, and for strangers. Used on one event loop."""

    def __init__(self, bounds: Bounds, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._bounds, self._monotonic = bounds, monotonic
        self._taken: list[Place] = []

    def take(self, peer: str, standing: Standing, stop: Callable[[], None]) -> Place | None:
        """Return a place, if need be that of another; None when there is none."""
        bounds = self._bounds
        if sum(place.peer == peer for place in self._taken) >= bounds.each[standing]:
            return None
        equals = [place for place in self._taken if place.standing is standing]
        crowd = None
        if len(equals) >= bounds.together.get(standing, bounds.total):
            crowd = equals
        elif len(self._taken) >= bounds.total:
            crowd = self._taken
        if crowd is not None and not self._make_room(peer, standing, crowd):
            return None
        place = Place(peer, standing, self._monotonic(), stop)
        self._taken.append(place)
        return place

    def give_back(self, place: Place) -> None:
        """Free a place; nothing when it was taken away."""
        if place in self._taken:
            self._taken.remove(place)

    def _make_room(self, peer: str, standing: Standing, crowd: list[Place]) -> bool:
        """Take the place of whom it serves least of those in a crowd who have to give way."""
        now_s, bounds = self._monotonic(), self._bounds
        counts = Counter(place.peer for place in self._taken)
        lower = [place for place in crowd if place.standing < standing]
        has_claim = len(lower) > bounds.total // 4

        def gives_way(place: Place) -> bool:
            return (
                place.is_slow(now_s, bounds.grace_s, bounds.wanted_rate_bytes_s)
                or counts[place.peer] >= counts[peer] + 2
                or (has_claim and place.standing < standing)
            )

        able = [place for place in crowd if gives_way(place)]
        if not able:
            return False
        victim = min(
            able,
            key=lambda place: (
                place.standing,
                not place.is_slow(now_s, bounds.grace_s, bounds.wanted_rate_bytes_s),
                -counts[place.peer],
                place.moved_bytes / max(1e-9, now_s - place.began_s),
            ),
        )
        self.give_back(victim)
        victim.stop()
        return True
