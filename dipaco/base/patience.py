"""How long somebody waits who may be suspended meanwhile: looks are counted, not seconds; and what
is due at a time is due after a sleep too."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

LOOK_S = 0.5


def looks(limit_s: float) -> Iterator[float]:
    """Yield the seconds of one look after the other, `limit_s` in all.

    A machine that slept, or a process that was stopped, has not looked meanwhile, so what it waits
    for has its time after that too.
    """
    count = max(1, math.ceil(limit_s / LOOK_S))
    for _ in range(count):
        yield limit_s / count


def since_start_s() -> float:
    """Return the seconds since this machine has started; where that is known, also asleep."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
