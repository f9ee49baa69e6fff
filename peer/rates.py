"""How fast this peer trains: tokens a second over a sliding window, and seconds a step."""

from __future__ import annotations

import time
from collections import deque

WINDOW_S = 30.0


class RateMeter:
    """Fed after every inner step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._steps: deque[tuple[float, int]] = deque()

    def step(self, seconds: float, tokens: int) -> None:
        """Count one inner step of `seconds` and `tokens`."""
        self.step_s = seconds if self.step_s == 0.0 else 0.9 * self.step_s + 0.1 * seconds
        now = time.monotonic()
        if not self._steps:
            self._steps.append((now - seconds, 0))
        self._steps.append((now, tokens))
        while len(self._steps) > 2 and now - self._steps[0][0] > WINDOW_S:
            self._steps.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of wall time, waiting included, over the last half minute."""
        if len(self._steps) < 2:
            return 0.0
        elapsed_s = max(time.monotonic() - self._steps[0][0], 1e-6)
        return sum(tokens for _, tokens in list(self._steps)[1:]) / elapsed_s
