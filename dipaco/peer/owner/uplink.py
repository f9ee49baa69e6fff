"""What this peer sends and receives, and its owner's limit (`--max-upload-mbps`).

p2pd has no limiter, so streams wait before they hand bytes to it. The DHT's traffic is small and
not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dipaco.base.token_bucket import Line, Rate

_BITS_IN_MBIT = 1e6
# A piece takes about so long, so that no stream holds the line up for the others.
_PIECE_S = 0.25
_LEAST_PIECE_BYTES = 4096


class Uplink:
    """One line for everything that is sent. Used on the exchange's loop; any thread may read the
    figures.

    Bytes of a lower rank go first. Otherwise strangers could ask for so much that what this peer
    tells the others comes too late.
    """

    def __init__(
        self, max_mbit_per_s: float | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_mbit_per_s` None: no limit."""
        self._monotonic = monotonic
        self._line: Line[int] | None = None
        self._piece_bytes = 0
        if max_mbit_per_s is not None:
            bytes_s = max_mbit_per_s * _BITS_IN_MBIT / 8
            self._piece_bytes = max(_LEAST_PIECE_BYTES, int(_PIECE_S * bytes_s))
            self._line = Line(Rate(self._piece_bytes, bytes_s), lambda rank: rank, monotonic)
        self.sent_bytes = 0
        """Since the start."""
        self.counted_bytes = 0
        """Bytes that were sent and count in an upload budget."""
        self.received_bytes = 0
        """Since the start."""
        self.serves = True
        """Whether content is sent at all, which an upload budget decides."""

    def piece_bytes(self, most: int) -> int:
        """Return how much may be sent in one go, at most `most`."""
        return most if self._line is None else min(most, self._piece_bytes)

    async def send(self, count: int, rank: int = 0) -> float:
        """Wait until so many bytes may go; return for how long, in seconds. Bytes of a lower rank
        go before them, and so do those of the same rank that have waited for longer."""
        self.sent_bytes += count
        began_s = self._monotonic()
        if self._line is not None:
            await self._line.pay(rank, count)
        return self._monotonic() - began_s
