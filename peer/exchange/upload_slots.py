"""Who may be sent content at the same time, and for how long.

A peer that reads slowly, or that says it does, would hold a slot for ever: half a chunk every 29 s
is enough for any limit on a single chunk. So an upload earns its time by what it has taken. Who
takes little gives its slot to whoever asks when none is free, and ends anyway below a floor. That
is no loss to a slow but honest peer: it goes on later where it was broken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

# Every upload has this long, and the time for what it has taken at a rate: that of a slot that
# others want, and that of any slot.
GRACE_S = 20.0
WANTED_RATE_BYTES_S = 2**16
LEAST_RATE_BYTES_S = 2**12


@dataclass(eq=False)
class Upload:
    """One slot that is taken."""

    peer: str
    began_s: float
    stop: Callable[[], None]
    """Breaks the upload off, also while it waits for the other side."""
    taken_bytes: int = 0

    def is_slow(self, now_s: float, rate_bytes_s: float) -> bool:
        """Tell whether it has lasted longer than what it took allows at this rate."""
        return now_s - self.began_s > GRACE_S + self.taken_bytes / rate_bytes_s


class UploadSlots:
    """Slots, bounded in all and for each peer. Used on one event loop."""

    def __init__(
        self, most: int, most_of_a_peer: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._most_of_a_peer = most, most_of_a_peer
        self._monotonic = monotonic
        self._uploads: list[Upload] = []

    def take(self, peer: str, stop: Callable[[], None]) -> Upload | None:
        """Return a slot, if need be that of the slowest upload; None when there is none."""
        if sum(upload.peer == peer for upload in self._uploads) >= self._most_of_a_peer:
            return None
        now_s = self._monotonic()
        if len(self._uploads) >= self._most:
            slow = [u for u in self._uploads if u.is_slow(now_s, WANTED_RATE_BYTES_S)]
            if not slow:
                return None
            slowest = min(slow, key=lambda u: u.taken_bytes / (now_s - u.began_s))
            self.give_back(slowest)
            slowest.stop()
        upload = Upload(peer, now_s, stop)
        self._uploads.append(upload)
        return upload

    def sent(self, upload: Upload, count: int) -> None:
        """Note what an upload has taken. Raises `TimeoutError` when that is far too little."""
        upload.taken_bytes += count
        if upload.is_slow(self._monotonic(), LEAST_RATE_BYTES_S):
            raise TimeoutError("it reads too slowly")

    def give_back(self, upload: Upload) -> None:
        """Free a slot; nothing when it was taken away."""
        if upload in self._uploads:
            self._uploads.remove(upload)
