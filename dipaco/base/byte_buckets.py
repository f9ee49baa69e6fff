"""How many bytes somebody may have in which time: so many at once, and so many a second."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

REMEMBERED_PEERS = 4096


class ByteBuckets:
    """For each peer so many bytes at once and so many a second. Used on one event loop."""

    def __init__(
        self,
        burst_bytes: float,
        rate_bytes_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.burst_bytes = burst_bytes
        self._rate = rate_bytes_s
        self._monotonic = monotonic
        self._empty_at: OrderedDict[str, float] = OrderedDict()
        """When each bucket would be full again, if nothing more were taken; the latest last."""

    def wait_s(self, peer: str, count: int) -> float:
        """Return after how many seconds a peer's bucket would have so many bytes."""
        now_s = self._monotonic()
        full_s = max(now_s, self._empty_at.get(peer, now_s)) + count / self._rate
        return max(0.0, full_s - now_s - self.burst_bytes / self._rate)

    def take(self, peer: str, count: int) -> float:
        """Take bytes out of a peer's bucket; return after how many seconds they are there."""
        wait_s, now_s = self.wait_s(peer, count), self._monotonic()
        full_s = max(now_s, self._empty_at.pop(peer, now_s)) + count / self._rate
        self._empty_at[peer] = full_s
        while len(self._empty_at) > REMEMBERED_PEERS:
            self._empty_at.popitem(last=False)
        return wait_s

    async def pay(self, peer: str, count: int, longest_s: float) -> None:
        """Wait for the bytes. Raises `TimeoutError` at once, and takes none, when that takes too
        long: who asks on would else put off for ever when there are some again."""
        if self.wait_s(peer, count) > longest_s:
            raise TimeoutError("it asks for too much")
        wait_s = self.take(peer, count)
        if wait_s > 0:
            await asyncio.sleep(wait_s)
