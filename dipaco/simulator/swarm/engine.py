"""Virtual time: what happens next, in an order that depends on the seed alone.

There are no threads, nothing reads the machine's clock, and nothing depends on the order of a set.
So two runs of one seed are the same, event by event, on any machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any


class Engine:
    """The queue of what is to happen. Its times are true; what a member believes may differ."""

    def __init__(self, seed: int, start_s: float) -> None:
        self.random = Random(seed)
        self.now_s = start_s
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time_s: float, what: Callable[..., object], *arguments: Any) -> None:
        """Let something happen at a time. What is late already happens next."""
        self._number += 1
        heapq.heappush(self._queue, (max(time_s, self.now_s), self._number, what, arguments))

    def after(self, delay_s: float, what: Callable[..., object], *arguments: Any) -> None:
        """Let something happen so many seconds from now."""
        self.at(self.now_s + delay_s, what, *arguments)

    def run(self, until_s: float) -> None:
        """Let everything happen up to a time."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now_s, _, what, arguments = heapq.heappop(queue)
            what(*arguments)
        self.now_s = max(self.now_s, until_s)

    def chance(self, probability: float) -> bool:
        """Draw whether something happens."""
        return probability > 0 and self.random.random() < probability

    def between(self, least: float, most: float) -> float:
        """Draw a number from an interval."""
        return least + (most - least) * self.random.random()
