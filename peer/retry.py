"""Waiting before the next try."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

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
