"""What was said or tried lately, and is not said or tried again so soon."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar


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


KeyT = TypeVar("KeyT", bound=Hashable)


class RecentFailures(Generic[KeyT]):
    """What failed less than `wait_s` ago and is left alone until then.

    One thread adds; others may look at the same time.
    """

    def __init__(self, wait_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wait_s = wait_s
        self._monotonic = monotonic
        self._failed_at: dict[KeyT, float] = {}

    def add(self, key: KeyT) -> None:
        """Note that `key` failed; older failures are forgotten."""
        now, failed_at = self._monotonic(), self._failed_at
        lately = {other: at for other, at in failed_at.items() if now - at < self._wait_s}
        self._failed_at = {**lately, key: now}

    def keys(self) -> frozenset[KeyT]:
        """Return everything that failed lately."""
        now = self._monotonic()
        failed_at = self._failed_at
        return frozenset(key for key, at in failed_at.items() if now - at < self._wait_s)

    def __contains__(self, key: KeyT) -> bool:
        at = self._failed_at.get(key)
        return at is not None and self._monotonic() - at < self._wait_s
