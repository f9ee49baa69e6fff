"""One limit on what all processes of a peer send: reduces first, then states and blobs.

p2pd has no limiter, so those wait who hand bytes to it: averagers after each message of a reduce,
the exchange before each piece of content. They share one clock of when the line is free. A reduce
takes its turn at once; content is sent when the line is free and no reduce has sent for a moment.
What the DHT says is small and not counted. Made before the averagers are forked.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable

BITS_IN_MBIT = 1e6
# After a reduce has sent something, content waits this long for its next message.
REDUCE_PAUSE_S = 0.3
# A piece of content takes about so long, so that a reduce waits no longer for it.
PIECE_S = 0.25
LEAST_PIECE_BYTES = 4096
# Content goes on after this all the same: a reader gives a sender up that is silent.
LONGEST_WAIT_S = 15.0
LOOK_S = 0.05
# Whoever has the lock needs it for microseconds.
LOCK_LIMIT_S = 2.0


class Uplink:
    """What this peer may send, shared by its processes; `monotonic` is one clock for all."""

    def __init__(
        self, max_mbit_per_s: float | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_mbit_per_s = max_mbit_per_s
        self._bytes_per_s = max_mbit_per_s * BITS_IN_MBIT / 8 if max_mbit_per_s else None
        self._monotonic = monotonic
        # When all that was promised so far has gone, and when a reduce has sent last.
        self._free_s = multiprocessing.RawValue("d", 0.0)
        self._reduced_s = multiprocessing.RawValue("d", float("-inf"))
        self._sent_bytes = multiprocessing.RawValue("d", 0.0)
        self._lock = multiprocessing.Lock()
        self._is_lock_lost = False
        self.serves = True
        """Whether content is sent at all; for the process that serves it."""

    @property
    def stated_mbit_per_s(self) -> int | None:
        """What rows of groups say of it, which gives shares of the reduce; None: as usual."""
        return None if self.max_mbit_per_s is None else max(1, int(self.max_mbit_per_s))

    @property
    def sent_bytes(self) -> int:
        """What all processes have sent since the start, of reduces and content."""
        return int(self._sent_bytes.value)

    @property
    def piece_bytes(self) -> int | None:
        """How much content may be sent in one go; None for as much as there is."""
        if self._bytes_per_s is None:
            return None
        return max(LEAST_PIECE_BYTES, int(PIECE_S * self._bytes_per_s))

    async def reduce(self, count: int) -> None:
        """Note that a reduce sends `count` bytes, and wait until they have gone."""
        wait_s = self.reserve(count, is_reduce=True)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def content(self, count: int) -> None:
        """Wait until `count` bytes of content may be sent, and until the line is free again."""
        until_s = self._monotonic() + LONGEST_WAIT_S
        while self.is_busy() and self._monotonic() < until_s:
            await asyncio.sleep(LOOK_S)
        wait_s = self.reserve(count, is_reduce=False)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def is_busy(self) -> bool:
        """Tell whether content has to wait."""
        if self._bytes_per_s is None:
            return False
        now_s = self._monotonic()
        return now_s < self._free_s.value or now_s < self._reduced_s.value + REDUCE_PAUSE_S

    def reserve(self, count: int, *, is_reduce: bool) -> float:
        """Take the line for `count` bytes after all that was promised; return when it is free, in
        seconds from now."""
        has_lock = self._take_lock()
        try:
            self._sent_bytes.value += count
            if self._bytes_per_s is None:
                return 0.0
            now_s = self._monotonic()
            free_s = max(now_s, self._free_s.value) + count / self._bytes_per_s
            self._free_s.value = free_s
            if is_reduce:
                self._reduced_s.value = free_s
            return free_s - now_s
        finally:
            if has_lock:
                self._lock.release()

    def _take_lock(self) -> bool:
        """Take the lock, unless a process was killed that had it: then figures may be a little
        wrong, and nobody waits."""
        if self._is_lock_lost:
            return False
        self._is_lock_lost = not self._lock.acquire(timeout=LOCK_LIMIT_S)
        return not self._is_lock_lost
