"""How many streams a peer may have at a time, and how many bytes in which time (design 4.10, wire).

Anybody who can make keys can have many identities. So those who are not admitted share few places,
and where an open run lets everybody in, those who contributed lately take places from those who did
not, down to a quarter. Nobody holds one for nothing: when all are taken, somebody who has several
gives one to somebody who has fewer, and who takes bytes too slowly gives its place to anybody. That
is no loss to a slow but honest peer: it goes on later where it was broken off.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Standing(IntEnum):
    """What is known of a peer."""

    STRANGER = 0
    ADMITTED = 1
    CONTRIBUTOR = 2


@dataclass(eq=False)
class Slot:
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


@dataclass(frozen=True)
class Bounds:
    """How many places there are, and how long one may be held."""

    max_total: int
    max_per_peer: int
    max_strangers: int
    """Of all who are not admitted, together."""
    max_per_stranger: int
    grace_s: float
    """Everybody has this long, and the time for what it has moved at a rate."""
    wanted_rate_bytes_s: float = 2.0**16
    """That of a place that others want."""


class Slots:
    """Places, bounded in all, for each peer, and for strangers. Used on one event loop."""

    def __init__(self, bounds: Bounds, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._bounds, self._monotonic = bounds, monotonic
        self._taken: list[Slot] = []

    def take(self, peer: str, standing: Standing, stop: Callable[[], None]) -> Slot | None:
        """Return a place, if need be that of another; None when there is none."""
        bounds, is_stranger = self._bounds, standing is Standing.STRANGER
        own = sum(slot.peer == peer for slot in self._taken)
        if own >= (bounds.max_per_stranger if is_stranger else bounds.max_per_peer):
            return None
        strangers = [slot for slot in self._taken if slot.standing is Standing.STRANGER]
        if is_stranger and len(strangers) >= bounds.max_strangers:
            if not self._make_room(strangers, own):
                return None
        elif len(self._taken) >= bounds.max_total and not self._make_room_for(
            standing, strangers, own
        ):
            return None
        slot = Slot(peer, standing, self._monotonic(), stop)
        self._taken.append(slot)
        return slot

    def _make_room_for(self, standing: Standing, strangers: list[Slot], own: int) -> bool:
        # Strangers come last: an admitted peer has a claim on their places.
        if self._make_room(strangers, own):
            return True
        if standing is Standing.STRANGER:
            return False
        if self._make_room(self._taken, own):
            return True
        others = [slot for slot in self._taken if slot.standing is not Standing.CONTRIBUTOR]
        if standing is not Standing.CONTRIBUTOR or len(others) <= self._bounds.max_total // 4:
            return False
        self._take_from(others)
        return True

    def give_back(self, slot: Slot) -> None:
        """Free a place; nothing when it was taken away."""
        if slot in self._taken:
            self._taken.remove(slot)

    def _make_room(self, among: list[Slot], own: int) -> bool:
        """Take a place from somebody who has two more than the asker, or is slow."""
        if not among:
            return False
        now_s, bounds = self._monotonic(), self._bounds
        peer, most = Counter(slot.peer for slot in among).most_common(1)[0]
        crowd = [slot for slot in among if slot.peer == peer] if most >= own + 2 else []
        slow = [s for s in among if s.is_slow(now_s, bounds.grace_s, bounds.wanted_rate_bytes_s)]
        if not slow and not crowd:
            return False
        self._take_from(slow or crowd)
        return True

    def _take_from(self, slots: list[Slot]) -> None:
        """Take the place of whom it serves least."""
        now_s = self._monotonic()
        victim = min(slots, key=lambda s: s.moved_bytes / max(1e-9, now_s - s.began_s))
        self.give_back(victim)
        victim.stop()
