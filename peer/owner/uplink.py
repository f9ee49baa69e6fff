"""What a peer sends: within one limit, reduces first, and how much its line carries.

p2pd has no limiter, so those wait who hand bytes to it: averagers after each message of a reduce,
the exchange before each piece of content. They share one clock of when the line is free. A reduce
takes its turn at once. Content is sent when the line is free, no reduce has sent for a moment, and,
on a line whose rate is known, none has anything left to send or is about to begin. It never takes
more than a share of what is known, so that meetings and checks get through beside it.
What the DHT says is small and not counted. Made before the averagers are forked.

*The line is measured by what is sent anyway.* A write that has to wait found all buffers on the way
full, up to the line. What a stream takes from the end of one such write to the end of the next has
left this machine in that time; and of streams that never wait, such as answers of a reducer, what
was written before a pause. The sum over all streams of all processes, in the three seconds in which
it was greatest while one of them was full, is what the line carries at least; whatever else held a
stream up, a slow reader or a busy machine, makes other seconds smaller and not these. A line that
is never full is not measured. Too little is measured while nobody reads fast: so content is now and
then sent as fast as it goes for a moment, and rows of groups say nothing of a line that reduces
have not seen full.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
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
FULL_GAP_S = 0.2
# What was written before a longer pause says nothing.
LONGEST_PAUSE_S = 2.0
# What left is added up in slots of this length, of which so many are remembered.
SLOT_S = 0.25
SLOTS = 64
# The greatest sum of so many slots in a row is what the line carries. In three seconds what buffers
# hold more at the end than at the beginning is little.
WINDOW_SLOTS = 12
# That is kept by spans of time, and forgotten after all of them: lines change.
SPAN_S = 600.0
SPANS = 6
# Of a line that is known content takes so much, also when nothing else is sent.
CONTENT_SHARE = 0.75
# So often, and for so long, content goes as fast as it can, to find out what the line carries.
PROBE_EVERY_S = 120.0
PROBE_S = 5.0
# Content waits from so long before a group closes until so long after it.
NEAR_S = 1.0


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
        # Bytes that left in each of the last slots of time, and which slots these are.
        self._slot_bytes = multiprocessing.RawArray("d", SLOTS)
        self._slot_numbers = multiprocessing.RawArray("q", SLOTS)
        # The highest rate of each of the last spans of time, in bytes a second, and which they are.
        self._span_rates = multiprocessing.RawArray("d", SPANS)
        self._span_numbers = multiprocessing.RawArray("q", SPANS)
        # Since when some stream was full at any time, and until when.
        self._full_since_s = multiprocessing.RawValue("d", 0.0)
        self._full_until_s = multiprocessing.RawValue("d", float("-inf"))
        # When a reduce found the line full for long enough.
        self._reduce_full_s = multiprocessing.RawValue("d", float("-inf"))
        # When the next group closes, as far as that is known.
        self._closes_s = multiprocessing.RawValue("d", float("-inf"))
        # What reduces under way still have to send, and until when that counts at most.
        self._owed_bytes = multiprocessing.RawValue("d", 0.0)
        self._owed_until_s = multiprocessing.RawValue("d", 0.0)
        # Of this process: its part of these bytes.
        self._own_owed_bytes = 0.0
        # Of the one that sends content: when its share is free, and when it looks for more.
        self._content_free_s = 0.0
        self._probe_s: float | None = None
        self._probe_until_s = float("-inf")
        self._lock = multiprocessing.Lock()
        self._is_lock_lost = False
        self.serves = True
        """Whether content is sent at all; for the process that serves it."""

    @property
    def stated_mbit_per_s(self) -> int | None:
        """What rows of groups say of it, which gives shares of the reduce; None: as usual.

        That one reader of content was slow says too little of a line for this.
        """
        is_seen = self._monotonic() < self._reduce_full_s.value + SPANS * SPAN_S
        known = self.known_mbit_per_s if is_seen else self.max_mbit_per_s
        return None if known is None else max(1, round(known))

    @property
    def measured_mbit_per_s(self) -> float | None:
        """What the line carried when it was full; None when that has not been seen yet."""
        since = int(self._monotonic() / SPAN_S) - SPANS + 1
        seen = zip(self._span_rates, self._span_numbers, strict=True)
        rate = max((rate for rate, number in seen if number >= since), default=0.0)
        return rate * 8 / BITS_IN_MBIT if rate else None

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
        if known is None or (self.max_mbit_per_s is None and self._is_probing()):
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

    def expect_reduce(self, in_s: float) -> None:
        """Note that a group closes so many seconds from now, and its reduce begins."""
        self._closes_s.value = self._monotonic() + in_s

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
        wait_s = max(self.reserve(count, is_reduce=False), self._reserve_share(count))
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def _reserve_share(self, count: int) -> float:
        """Take content's share of a measured line for `count` bytes; return when it is free."""
        measured, now_s = self.measured_mbit_per_s, self._monotonic()
        if measured is None:
            self._probe_s = None
            return 0.0
        if self._probe_s is None:
            self._probe_s = now_s + PROBE_EVERY_S
        elif now_s >= self._probe_s:
            self._probe_s, self._probe_until_s = now_s + PROBE_EVERY_S, now_s + PROBE_S
        if self._is_probing():
            return 0.0
        share_s = 8 * count / (CONTENT_SHARE * measured * BITS_IN_MBIT)
        self._content_free_s = max(now_s, self._content_free_s) + share_s
        return self._content_free_s - now_s

    def is_busy(self) -> bool:
        """Tell whether content has to wait."""
        now_s = self._monotonic()
        if self.known_mbit_per_s is not None:
            if self._owed_bytes.value > 0 and now_s < self._owed_until_s.value:
                return True
            if abs(now_s - self._closes_s.value) < NEAR_S:
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

    def note_left(
        self,
        since_s: float,
        now_s: float,
        count: int,
        *,
        waiting_since_s: float = math.inf,
        is_reduce: bool = False,
    ) -> None:
        """Note that `count` bytes of one stream have left between two times; that it was full from
        `waiting_since_s` on until the second of these, unless that is infinite."""
        begin_s = max(since_s, now_s - (SLOTS - 1) * SLOT_S)
        rate = count / max(now_s - since_s, 1e-6)
        has_lock = self._take_lock()
        try:
            for number in range(int(begin_s / SLOT_S), int(now_s / SLOT_S) + 1):
                at = number % SLOTS
                if self._slot_numbers[at] != number:
                    self._slot_numbers[at], self._slot_bytes[at] = number, 0.0
                part_s = min(now_s, (number + 1) * SLOT_S) - max(begin_s, number * SLOT_S)
                self._slot_bytes[at] += rate * max(0.0, part_s)
            found = 0.0
            if waiting_since_s < math.inf:
                if waiting_since_s > self._full_until_s.value + FULL_GAP_S:
                    self._full_since_s.value = now_s
                self._full_until_s.value = max(self._full_until_s.value, now_s)
                found = self._highest_rate(self._full_since_s.value, now_s)
            if found > 0:
                number = int(now_s / SPAN_S)
                at = number % SPANS
                if self._span_numbers[at] != number:
                    self._span_numbers[at], self._span_rates[at] = number, 0.0
                self._span_rates[at] = max(self._span_rates[at], found)
                if is_reduce:
                    self._reduce_full_s.value = now_s
        finally:
            if has_lock:
                self._lock.release()

    def _highest_rate(self, since_s: float, now_s: float) -> float:
        """Return the most bytes a second that left in a window between two times; 0 if none fits
        between them."""
        last = int(now_s / SLOT_S) - 1
        first = max(math.ceil(since_s / SLOT_S), last - SLOTS + 2)
        left = [
            self._slot_bytes[n % SLOTS] if self._slot_numbers[n % SLOTS] == n else 0.0
            for n in range(first, last + 1)
        ]
        sums = (sum(left[at : at + WINDOW_SLOTS]) for at in range(len(left) - WINDOW_SLOTS + 1))
        return max(sums, default=0.0) / (WINDOW_SLOTS * SLOT_S)

    def _is_probing(self) -> bool:
        return self._monotonic() < self._probe_until_s

    def _take_lock(self) -> bool:
        """Take the lock, unless a process was killed that had it: then figures may be a little
        wrong, and nobody waits."""
        if self._is_lock_lost:
            return False
        self._is_lock_lost = not self._lock.acquire(timeout=LOCK_LIMIT_S)
        return not self._is_lock_lost


class StreamMeter:
    """What one stream takes while all buffers on its way are full; for whoever writes to it."""

    def __init__(self, uplink: Uplink, *, is_reduce: bool) -> None:
        self._uplink, self._is_reduce = uplink, is_reduce
        # Whether it is full without a pause; when it was written to last; what was written since.
        self._is_full = False
        self._last_s = self._since_s = -math.inf
        self._bytes = 0

    def wrote(self, count: int, began_s: float, ended_s: float) -> None:
        """Note that `count` bytes were handed over; times are those of the uplink's clock."""
        pause_s = began_s - self._last_s
        if pause_s > FULL_GAP_S:
            # It is not full any more; what came before has left in the meantime.
            if self._bytes and pause_s < LONGEST_PAUSE_S:
                self._uplink.note_left(self._since_s, began_s, self._bytes)
            self._is_full, self._bytes, self._since_s = False, 0, began_s
        self._bytes += count
        self._last_s = ended_s
        if ended_s - began_s < FULL_AFTER_S:
            return
        # What was taken before the first wait has filled buffers.
        left = self._bytes if self._is_full else 0
        self._uplink.note_left(
            self._since_s, ended_s, left, waiting_since_s=began_s, is_reduce=self._is_reduce
        )
        self._is_full, self._since_s, self._bytes = True, ended_s, 0
