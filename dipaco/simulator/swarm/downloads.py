"""How many files a machine fetches at once: the others wait, as in a real peer's exchange."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

# Begins a download from a source.
Begin = Callable[[str], None]


class Downloads:
    """Of one machine: at most so many at once, and of these so many from one source."""

    def __init__(self, at_once: int, from_one: int) -> None:
        self._at_once, self._from_one = at_once, from_one
        self._running: Counter[str] = Counter()
        self._waiting: deque[tuple[str, Begin]] = deque()

    def begin(self, source: str, what: Begin) -> None:
        """Begin a download, now or when others have ended."""
        self._waiting.append((source, what))
        self._go_on()

    def end(self, source: str) -> None:
        """Note that one has ended, well or not."""
        self._running[source] -= 1
        self._go_on()

    def has_room(self, source: str) -> bool:
        """Tell whether a download from a source would begin at once."""
        is_room = self._running.total() < self._at_once
        return is_room and self._running[source] < self._from_one

    def _go_on(self) -> None:
        while (found := next((w for w in self._waiting if self.has_room(w[0])), None)) is not None:
            self._waiting.remove(found)
            self._running[found[0]] += 1
            found[1](found[0])
