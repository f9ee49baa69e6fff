"""Whether it is worth asking a peer for the next page of a chain.

A chain comes in pages, and each says whether there are more. A peer that always says so would be
asked for ever. So only a full page can have a next one, and a page that continues another one has
to reach a later round: rounds follow the clock, so there is an end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dipaco.base.waits import BriefLock
from dipaco.protocol.chain.steps import MAX_ROWS, Step

from .chain_store import ANSWERED_STEP_ROWS, ANSWERED_STEPS

REMEMBERED_PAGES = 1024


class Pages:
    """The last page that each peer gave of each module. Thread-safe."""

    def __init__(self) -> None:
        self._lock = BriefLock()
        self._last: OrderedDict[tuple[str, str], Step] = OrderedDict()

    def is_worth_more(
        self, peer: str, module: str, locator: Sequence[str], steps: Sequence[Step]
    ) -> bool:
        """Tell whether a peer that says that it has more is to be asked again.

        :param locator: what it was asked with
        :param steps: what it gave, all of them good
        """
        with self._lock:
            before = self._last.pop((peer, module), None)
            if not _is_full(steps):
                return False
            goes_on = before is not None and tuple(locator[:1]) == (before.name,)
            if before is not None and goes_on and steps[-1].round_index <= before.round_index:
                return False
            self._last[peer, module] = steps[-1]
            while len(self._last) > REMEMBERED_PAGES:
                self._last.popitem(last=False)
            return True


def _is_full(steps: Sequence[Step]) -> bool:
    """Tell whether one step more could have been too much for a page."""
    rows = sum(len(step.rows) for step in steps)
    return len(steps) >= ANSWERED_STEPS or rows > ANSWERED_STEP_ROWS - MAX_ROWS
