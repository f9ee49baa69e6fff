"""Places for owners that take turns: so many at once, few of each, the others by their rank."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT", bound=Hashable)
MAX_WAITING = 256


@dataclass(eq=False)
class _Waiting(Generic[OwnerT]):
    owner: OwnerT
    turn: asyncio.Future[None]


class Turns(Generic[OwnerT]):
    """Hands out places to owners that wait for them. Used on one event loop.

    :param rank: of an owner, looked at whenever a place is free; the lowest is next, and of equal
        ones the first to come
    :param max_unproven: of owners whose rank is not below 0, together; they leave room for others
    """

    def __init__(
        self,
        max_total: int,
        max_each: int,
        rank: Callable[[OwnerT], float],
        max_unproven: int | None = None,
    ) -> None:
        self._max_total, self._max_each, self._rank = max_total, max_each, rank
        self._max_unproven = max_total if max_unproven is None else max_unproven
        self._taken: Counter[OwnerT] = Counter()
        self._waiting: list[_Waiting[OwnerT]] = []

    async def acquire(self, owner: OwnerT) -> None:
        """Wait for a place. Raises `TimeoutError` when too many wait who go first."""
        waiting = _Waiting(owner, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._hand_out()
        if len(self._waiting) > MAX_WAITING:
            last = max(reversed(self._waiting), key=lambda one: self._rank(one.owner))
            self._waiting.remove(last)
            if not last.turn.done():
                last.turn.set_exception(TimeoutError("too many requests are waiting"))
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self.release(owner)  # it was handed out in the same moment
            raise

    def release(self, owner: OwnerT) -> None:
        """Give a place back."""
        self._taken[owner] -= 1
        self._taken += Counter()  # drops those that have none
        self._hand_out()

    @contextlib.asynccontextmanager
    async def turn(self, owner: OwnerT) -> AsyncIterator[None]:
        """Wait for a place and hold it for a while."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    def has_room(self, owner: OwnerT) -> bool:
        """Tell whether this owner could have a place at once."""
        if self._taken.total() >= self._max_total or self._taken[owner] >= self._max_each:
            return False
        unproven = sum(n for other, n in self._taken.items() if self._rank(other) >= 0)
        return self._rank(owner) < 0 or unproven < self._max_unproven

    def is_wanted(self, owner: OwnerT) -> bool:
        """Tell whether somebody waits for whom a place of this owner would do."""
        return any(
            other.owner == owner or self._taken[other.owner] < self._max_each
            for other in self._waiting
        )

    def _hand_out(self) -> None:
        while able := [waiting for waiting in self._waiting if self.has_room(waiting.owner)]:
            first = min(able, key=lambda waiting: self._rank(waiting.owner))
            self._waiting.remove(first)
            if not first.turn.cancelled():
                self._taken[first.owner] += 1
                first.turn.set_result(None)
