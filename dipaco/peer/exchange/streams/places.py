"""How many streams, and how many uploads, other peers have here at a time (design 4.10, wire).

Anybody who can make keys can have many identities, so peers that are not admitted share few
places, and count by their address prefix. When all places are taken, one of these peers gives way:
one that takes bytes too slowly, one that has at least two places more than the asker, or one that
has a lower standing, down to a quarter of all places. Among strangers, one that has had a place for
a while and has used more lately gives way too. A slow but honest peer loses nothing: it continues
later where it was interrupted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dipaco.protocol.allowances import STRANGER, Asker, Bounds


@dataclass(eq=False)
class Place:
    """One place that is taken."""

    asker: Asker
    began_s: float
    stop: Callable[[], None]
    """Breaks off what the place is for, even while that waits for the other side."""
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

    def __init__(
        self,
        bounds: Bounds,
        used: Callable[[Asker], float] = lambda asker: 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`used` returns how much somebody has used lately."""
        self._bounds, self._used, self._monotonic = bounds, used, monotonic
        self._taken: list[Place] = []

    def take(self, asker: Asker, stop: Callable[[], None]) -> Place | None:
        """Return a place, if need be that of another; None when there is none."""
        bounds, standing = self._bounds, asker.standing
        if sum(place.asker == asker for place in self._taken) >= bounds.each[standing]:
            return None
        equals = [place for place in self._taken if place.asker.standing is standing]
        crowd = None
        if len(equals) >= bounds.together.get(standing, bounds.total):
            crowd = equals
        elif len(self._taken) >= bounds.total:
            crowd = self._taken
        if crowd is not None and not self._make_room(asker, crowd):
            return None
        place = Place(asker, self._monotonic(), stop)
        self._taken.append(place)
        return place

    def give_back(self, place: Place) -> None:
        """Free a place; nothing when it was taken away."""
        if place in self._taken:
            self._taken.remove(place)

    def _make_room(self, asker: Asker, crowd: list[Place]) -> bool:
        """Free the place that serves its holder least, among those who have to give way."""
        now_s, bounds, standing = self._monotonic(), self._bounds, asker.standing
        counts = Counter(place.asker for place in self._taken)
        lower = [place for place in crowd if place.asker.standing < standing]
        has_claim = len(lower) > bounds.total // 4
        used = self._used(asker)

        def gives_way(place: Place) -> bool:
            return (
                place.is_slow(now_s, bounds.grace_s, bounds.wanted_rate_bytes_s)
                or counts[place.asker] >= counts[asker] + 2
                or (has_claim and place.asker.standing < standing)
                or (is_greedy(place) and now_s - place.began_s > bounds.grace_s)
            )

        def is_greedy(place: Place) -> bool:
            both = (standing, place.asker.standing)
            return both == (STRANGER, STRANGER) and self._used(place.asker) > used

        able = [place for place in crowd if gives_way(place)]
        if not able:
            return False
        victim = min(
            able,
            key=lambda place: (
                place.asker.standing,
                not place.is_slow(now_s, bounds.grace_s, bounds.wanted_rate_bytes_s),
                -counts[place.asker],
                place.moved_bytes / max(1e-9, now_s - place.began_s),
            ),
        )
        self.give_back(victim)
        victim.stop()
        return True
