"""What was said lately, and is not said again so soon."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable


class Complaints:
    """Keeps others from filling the log: the level at which to say a complaint about somebody.

    The first about a subject within `period_s` is a warning, and so are at most `limit` of
    different subjects; the rest are for debugging.
    """

    def __init__(self, period_s: float, limit: int) -> None:
        self._period_s = period_s
        self._limit = limit
        self._said_at: dict[Hashable, float] = {}

    def level(self, subject: Hashable) -> int:
        """Return `logging.WARNING` or `logging.DEBUG` for a complaint that is made now."""
        now = time.monotonic()
        self._said_at = {
            other: at for other, at in self._said_at.items() if now - at < self._period_s
        }
        if subject in self._said_at or len(self._said_at) >= self._limit:
            return logging.DEBUG
        self._said_at[subject] = now
        return logging.WARNING
