"""What this peer sends and receives, and the limit that its owner has set (`--max-upload-mbps`).

p2pd has no limiter, so streams wait before they hand bytes to it. What the DHT says is small and
not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable

BITS_IN_MBIT = 1e6
# A piece takes about so long, so that no stream holds the line up for the others.
PIECE_S = 0.25
LEAST_PIECE_BYTES = 4096


class Uplink:
    """One line for all that is sent. Used on the exchange's loop; the figures from any thread.

    Bytes of a lower rank go first. Otherwise strangers could ask for so much that what this peer
    tells the others comes too late.
    """

    def __init__(
        self, max_mbit_per_s: float | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_mbit_per_s` None: no limit."""
        self.max_mbit_per_s = max_mbit_per_s
        self._bytes_per_s = max_mbit_per_s * BITS_IN_MBIT / 8 if max_mbit_per_s else None
        self._monotonic = monotonic
        self._free_s = 0.0
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap, by rank and then by the order of coming."""
        self._came = itertools.count()
        self.sent_bytes = 0
        """Since the start."""
        self.counted_bytes = 0
        """Those that were sent and are in an upload budget."""
        self.received_bytes = 0
        """Since the start."""
        self.serves = True
        """Whether content is sent at all."""

    def piece_bytes(self, most: int) -> int:
        """Return how much may be sent in one go, at most `most`."""
        if self._bytes_per_s is None:
            return most
        return min(most, max(LEAST_PIECE_BYTES, int(PIECE_S * self._bytes_per_s)))

    async def send(self, count: int, rank: int = 0) -> float:
        """Wait until these bytes have gone; return for how long, in seconds. Bytes of a lower rank
        go before them, and so do those of the same rank that have waited for longer."""
        self.sent_bytes += count
        if self._bytes_per_s is None:
            return 0.0
        began_s, was_taken = self._monotonic(), self._is_taken
        async with self._turn(rank):
            now_s = self._monotonic()
            # A timer that fires late must not slow down those who wait.
            begin_s = self._free_s if was_taken else max(now_s, self._free_s)
            self._free_s = begin_s + count / self._bytes_per_s
            await asyncio.sleep(max(0.0, self._free_s - now_s))
            return self._free_s - began_s

    @contextlib.asynccontextmanager
    async def _turn(self, rank: int) -> AsyncIterator[None]:
        """Hold the line alone for a while."""
        if self._is_taken:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (rank, next(self._came), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next one have the line."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
