"""Which source may send to this peer next: downloads share few slots, and no source holds many.

An attacker could make honest files come too late with sources that send little for a long time. So
a slot for which others wait is taken from a slow source (see `transfer`). The next slot goes first
to sources that delivered lately, then to unknown ones, and last to those that were slow. Sources
that have not delivered yet never have all of the slots.
"""

from __future__ import annotations

from collections import OrderedDict

from dipaco.base.turns import Turns

REMEMBERED_SOURCES = 4096
# The share of the slots for sources that have not delivered anything lately.
_UNPROVEN_SHARE = 3 / 4
_DELIVERED, _UNKNOWN = -1, 0


class DownloadSlots(Turns[str]):
    """So many downloads at once, and so many from one source. Used on one event loop."""

    def __init__(self, max_total: int, max_per_source: int) -> None:
        max_unproven = max(1, int(_UNPROVEN_SHARE * max_total))
        super().__init__(max_total, max_per_source, self._known_of, max_unproven)
        self._known: OrderedDict[str, int] = OrderedDict()
        """How often a source was slow since it delivered last; those heard of last at the end."""

    def delivered(self, source: str) -> None:
        """Note that a source has sent everything that it was asked for."""
        self._note(source, _DELIVERED)

    def was_slow(self, source: str) -> None:
        """Note that a source lost its slot because it was slow."""
        self._note(source, max(_UNKNOWN, self._known_of(source)) + 1)

    def times_slow(self, source: str) -> int:
        """Return how often a source was slow since it delivered last."""
        return max(0, self._known_of(source))

    def _known_of(self, source: str) -> int:
        return self._known.get(source, _UNKNOWN)

    def _note(self, source: str, known: int) -> None:
        self._known[source] = known
        self._known.move_to_end(source)
        while len(self._known) > REMEMBERED_SOURCES:
            self._known.popitem(last=False)
