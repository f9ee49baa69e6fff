"""Which source may send to this peer next: downloads share few slots, and none holds many.

An attacker can make honest files come too late with sources that send little, for long. So a slot
that others wait for is taken from a source that is slow (see `transfer`), and the next one goes
first to sources that delivered lately, then to those of which nothing is known, and last to those
that were slow. Sources that have not delivered yet never have all of the slots.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass

REMEMBERED_SOURCES = 4096
# Of the slots, for sources that have not delivered anything lately.
UNPROVEN_SHARE = 3 / 4
_DELIVERED, _UNKNOWN = -1, 0


@dataclass(eq=False)
class _Waiting:
    source: str
    turn: asyncio.Future[None]


class DownloadSlots:
    """So many downloads at once, and so many from one source. Used on one event loop."""

    def __init__(self, max_total: int, max_per_source: int) -> None:
        self._max_total, self._max_per_source = max_total, max_per_source
        self._max_unproven = max(1, int(UNPROVEN_SHARE * max_total))
        self._taken: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []
        self._rank: OrderedDict[str, int] = OrderedDict()
        """How often a source was slow since it delivered last; those heard of last at the end."""

    async def acquire(self, source: str) -> None:
        """Wait for a slot for this source."""
        waiting = _Waiting(source, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._hand_out()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self.release(source)
            raise

    def release(self, source: str) -> None:
        """Give a slot back."""
        self._taken[source] -= 1
        self._taken += Counter()  # drops those that have none
        self._hand_out()

    def has_room(self, source: str) -> bool:
        """Tell whether this source could have a slot at once."""
        if self._taken.total() >= self._max_total or self._taken[source] >= self._max_per_source:
            return False
        unproven = sum(n for other, n in self._taken.items() if not self._is_proven(other))
        return self._is_proven(source) or unproven < self._max_unproven

    def is_wanted(self, source: str) -> bool:
        """Tell whether somebody waits for whom the slot of this source would do."""
        return any(
            other.source == source or self._taken[other.source] < self._max_per_source
            for other in self._waiting
        )

    def delivered(self, source: str) -> None:
        """Note that a source has sent all of what it was asked for."""
        self._note(source, _DELIVERED)

    def was_slow(self, source: str) -> None:
        """Note that a source lost its slot because it was slow."""
        self._note(source, max(_UNKNOWN, self._rank.get(source, _UNKNOWN)) + 1)

    def _note(self, source: str, rank: int) -> None:
        self._rank[source] = rank
        self._rank.move_to_end(source)
        while len(self._rank) > REMEMBERED_SOURCES:
            self._rank.popitem(last=False)

    def _is_proven(self, source: str) -> bool:
        return self._rank.get(source, _UNKNOWN) == _DELIVERED

    def _hand_out(self) -> None:
        while True:
            able = [waiting for waiting in self._waiting if self.has_room(waiting.source)]
            if not able:
                return
            first = min(able, key=lambda waiting: self._rank.get(waiting.source, _UNKNOWN))
            self._waiting.remove(first)
            if not first.turn.cancelled():
                self._taken[first.source] += 1
                first.turn.set_result(None)
