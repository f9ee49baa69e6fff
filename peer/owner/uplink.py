"""What this peer sends and receives, and the limit that its owner has set (`--max-upload-mbps`).

p2pd has no limiter, so streams wait before they hand bytes to it. What the DHT says is small and
not counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BITS_IN_MBIT = 1e6
# A piece takes about so long, so that no stream holds the line up for the others.
PIECE_S = 0.25
LEAST_PIECE_BYTES = 4096


class Uplink:
    """One line for all that is sent. Used on the exchange's loop; the figures from any thread."""

    def __init__(
        self, max_mbit_per_s: float | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_mbit_per_s` None: no limit."""
        self.max_mbit_per_s = max_mbit_per_s
        self._bytes_per_s = max_mbit_per_s * BITS_IN_MBIT / 8 if max_mbit_per_s else None
        self._monotonic = monotonic
        self._free_s = 0.0
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

    async def send(self, count: int) -> float:
        """Wait until all that was promised before, and these bytes, have gone; return for how
        long, in seconds."""
        self.sent_bytes += count
        if self._bytes_per_s is None:
            return 0.0
        now_s = self._monotonic()
        self._free_s = max(now_s, self._free_s) + count / self._bytes_per_s
        wait_s = self._free_s - now_s
        await asyncio.sleep(wait_s)
        return wait_s
