"""The sources that sent something else in place of the content that was asked for.

A peer that needs some content asks for it again and again. A source with a wrong copy would send
all of it each time, for nothing. So that source is not asked for the same content for ten minutes.
By then the owner of a damaged disk may have repaired it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

FOR_S = 600.0
_REMEMBERED = 4096


class RefusedSources:
    """Pairs of a source and a content that it is not asked for. Used on one event loop."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._until_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        """The one that was noted last is at the end."""

    def note(self, source: str, sha256: str) -> None:
        """Note that this source sent something that cannot be the content of this hash."""
        self._until_s[source, sha256] = self._monotonic() + FOR_S
        self._until_s.move_to_end((source, sha256))
        while len(self._until_s) > _REMEMBERED:
            self._until_s.popitem(last=False)

    def has(self, source: str, sha256: str) -> bool:
        """Tell whether this source is not to be asked for this content."""
        return self._until_s.get((source, sha256), 0.0) > self._monotonic()
