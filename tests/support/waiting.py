"""Time in tests: a clock that a test sets, and waiting for what happens beside a test, with a bound."""

import time


class HandClock:
    """A clock that a test sets. Called, it tells `s`."""

    def __init__(self, s=100.0):
        self.s = s

    def __call__(self):
        return self.s


def wait_until(condition, limit_s=60.0, told=lambda: ""):
    """Wait for a condition and return what it found. The bound is no measure; past it, say what is `told` and fail."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"it did not come true in time {told()}"
        time.sleep(0.02)
    return found
