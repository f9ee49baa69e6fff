"""What a peer sends: within one limit, reduces first, and how much its line carries.

p2pd has no limiter, so those wait who hand bytes to it: averagers after each message of a reduce,
the exchange before each piece of content. They share one clock of when the line is free. A reduce
takes its turn at once. Content is sent when the line is free, no reduce has sent for a moment, and,
on a line whose rate is known, none has anything left to send.
What the DHT says is small and not counted. Made before the averagers are forked.

*The line is measured by what reduces send anyway.* A write that has to wait found all buffers on
the way full, up to the line. As long as one such write follows another they stay full, so what they
take is what the line carries. Nothing is sent to find out, and a line that is never full is not
measured. Too little is measured where a reducer reads slowly because it waits for slower members.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable

BITS_IN_MBIT = 1e6
# After a reduce has sent something, content waits this long for its next message.
REDUCE_PAUSE_S = 0.3
# On a line without a limit it waits for about as long as the last message took, and no longer.
LONGEST_NEXT_S = 5.0
# A piece of content takes about so long, so that a reduce waits no longer for it.
PIECE_S = 0.25
LEAST_PIECE_BYTES = 4096
# Content goes on after this all the same: a reader gives a sender up that is silent.
LONGEST_WAIT_S = 15.0
LOOK_S = 0.05
# Whoever has the lock needs it for microseconds.
LOCK_LIMIT_S = 2.0
# A write that takes so long found the line full, and the next one does if it begins so soon.
FULL_AFTER_S = 0.05
FULL_GAP_S = 0.1
# A line that was full for less says little of it.
LEAST_FULL_S = 1.0
# The line's rate is the median of so many times that it was full, and none of these is older: what
# looked like a full line once, and never again, is forgotten.
RATES = 5
RATE_LIFE_S = 6 * 3600.0


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
        # Of the last times that the line was full, in bytes a second, and how often it was.
        self._rates = multiprocessing.RawArray("d", RATES)
        self._rates_seen_s = multiprocessing.RawArray("d", RATES)
        self._measured = multiprocessing.RawValue("L", 0)
        # What reduces under way still have to send, and until when that counts at most.
        self._owed_bytes = multiprocessing.RawValue("d", 0.0)
        self._owed_until_s = multiprocessing.RawValue("d", 0.0)
        # Of this process: its part of these bytes; when a full line was noticed, and what had been
        # sent by then; when it was full last; and which rate that is.
        self._own_owed_bytes = 0.0
        self._full_since = (0.0, 0.0)
        self._full_until_s = float("-inf")
        self._rate_number: int | None = None
        self._lock = multiprocessing.Lock()
        self._is_lock_lost = False
        self.serves = True
        """Whether content is sent at all; for the process that serves it."""

    @property
    def stated_mbit_per_s(self) -> int | None:
        """What rows of groups say of it, which gives shares of the reduce; None: as usual."""
        known = self.known_mbit_per_s
        return None if known is None else max(1, round(known))

    @property
    def measured_mbit_per_s(self) -> float | None:
        """What the line carried when it was full; None when that has not been seen yet."""
        count, since_s = min(int(self._measured.value), RATES), self._monotonic() - RATE_LIFE_S
        seen = zip(self._rates[:count], self._rates_seen_s[:count], strict=True)
        rates = [rate for rate, seen_s in seen if seen_s >= since_s]
        return statistics.median(rates) * 8 / BITS_IN_MBIT if rates else None

    @property
    def known_mbit_per_s(self) -> float | None:
        """What this peer can send, by its limit and by measure; None when neither says anything."""
        known = (self.max_mbit_per_s, self.measured_mbit_per_s)
        return min((value for value in known if value is not None), default=None)

    @property
    def sent_bytes(self) -> int:
        """What all processes have sent since the start, of reduces and content."""
        return int(self._sent_bytes.value)

    @property
    def piece_bytes(self) -> int | None:
        """How much content may be sent in one go; None for as much as there is."""
        known = self.known_mbit_per_s
        if known is None:
            return None
        return max(LEAST_PIECE_BYTES, int(PIECE_S * known * BITS_IN_MBIT / 8))

    def begin_reduce(self, count: int, limit_s: float) -> None:
        """Note that a reduce of this process has `count` bytes to send, within so many seconds.

        It ends the one before; 0 bytes begin none.
        """
        has_lock = self._take_lock()
        self._owed_bytes.value += count - self._own_owed_bytes
        self._owed_until_s.value = max(self._owed_until_s.value, self._monotonic() + limit_s)
        self._own_owed_bytes = count
        if has_lock:
            self._lock.release()

    async def reduce(self, count: int, waited_s: float = 0.0) -> None:
        """Note that a reduce sends `count` bytes, and wait until they have gone.

        `waited_s` is how long they took to be handed over.
        """
        wait_s = self.reserve(count, is_reduce=True)
        if waited_s >= FULL_AFTER_S:
            self._note_full(self._monotonic(), waited_s)
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
        now_s = self._monotonic()
        is_owed = self._owed_bytes.value > 0 and now_s < self._owed_until_s.value
        if is_owed and self.known_mbit_per_s is not None:
            return True
        return now_s < self._free_s.value or now_s < self._reduced_s.value + REDUCE_PAUSE_S

    def reserve(self, count: int, *, is_reduce: bool) -> float:
        """Take the line for `count` bytes after all that was promised; return when it is free, in
        seconds from now."""
        has_lock = self._take_lock()
        try:
            self._sent_bytes.value += count
            if is_reduce:
                paid_bytes = min(count, self._own_owed_bytes)
                self._own_owed_bytes -= paid_bytes
                self._owed_bytes.value -= paid_bytes
            now_s = self._monotonic()
            if self._bytes_per_s is None:
                # Content keeps a line that can be full free for what a reduce sends next.
                known = self.measured_mbit_per_s
                if is_reduce and known:
                    next_s = 8 * count / (known * BITS_IN_MBIT)
                    self._reduced_s.value = now_s + min(next_s, LONGEST_NEXT_S)
                return 0.0
            free_s = max(now_s, self._free_s.value) + count / self._bytes_per_s
            self._free_s.value = free_s
            if is_reduce:
                self._reduced_s.value = free_s
            return free_s - now_s
        finally:
            if has_lock:
                self._lock.release()

    def _note_full(self, now_s: float, waited_s: float) -> None:
        """Note that the line has been full for `waited_s`; in the process that waited."""
        is_new = now_s - waited_s > self._full_until_s + FULL_GAP_S
        self._full_until_s = now_s
        if is_new:
            self._full_since = (now_s, self._sent_bytes.value)
            self._rate_number = None
            return
        since_s, sent_bytes = self._full_since
        if now_s - since_s < LEAST_FULL_S:
            return
        number = self._rate_number
        if number is None:
            number = self._rate_number = int(self._measured.value)
        self._rates[number % RATES] = (self._sent_bytes.value - sent_bytes) / (now_s - since_s)
        self._rates_seen_s[number % RATES] = now_s
        self._measured.value = max(self._measured.value, number + 1)

    def _take_lock(self) -> bool:
        """Take the lock, unless a process was killed that had it: then figures may be a little
        wrong, and nobody waits."""
        if self._is_lock_lost:
            return False
        self._is_lock_lost = not self._lock.acquire(timeout=LOCK_LIMIT_S)
        return not self._is_lock_lost
