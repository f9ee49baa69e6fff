"""Places for owners that take turns: so many at once, few of each, the others by their rank."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT", bound=Hashable)
_MAX_WAITING = 256


@dataclass(eq=False)
class Waiting(Generic[OwnerT]):
    """A request for places."""

    owner: OwnerT
    count: int
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
        max_waiting: int = _MAX_WAITING,
    ) -> None:
        self._max_total, self._max_each, self._rank = max_total, max_each, rank
        self._max_unproven = max_total if max_unproven is None else max_unproven
        self._max_waiting = max_waiting
        self._taken: Counter[OwnerT] = Counter()
        self._waiting: list[Waiting[OwnerT]] = []

    async def acquire(self, owner: OwnerT, count: int = 1) -> None:
        """Wait for so many places, at most `max_each`, all at once.

        Raises `TimeoutError` when too many wait who go first.
        """
        waiting = Waiting(owner, count, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._hand_out()
        if len(self._waiting) > self._max_waiting:
            last = self._last()
            self._waiting.remove(last)
            if not last.turn.done():
                last.turn.set_exception(TimeoutError("too many requests are waiting"))
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._hand_out()  # it may have held up others
            elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self.release(owner, count)  # it was handed out in the same moment
            raise

    def release(self, owner: OwnerT, count: int = 1) -> None:
        """Give places back."""
        self._taken[owner] -= count
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
        return self._taken.total() < self._max_total and self._may_have(owner, 1)

    def _may_have(self, owner: OwnerT, count: int) -> bool:
        if self._taken[owner] + count > self._max_each:
            return False
        unproven = sum(n for other, n in self._taken.items() if self._rank(other) >= 0)
        return self._rank(owner) < 0 or unproven < self._max_unproven

    def is_wanted(self, owner: OwnerT) -> bool:
        """Tell whether somebody waits for whom a place of this owner would do."""
        return any(
            other.owner == owner or self._taken[other.owner] < self._max_each
            for other in self._waiting
        )

    def _last(self) -> Waiting[OwnerT]:
        """Return who has to go when too many wait."""
        return max(reversed(self._waiting), key=lambda one: self._rank(one.owner))

    def _hand_out(self) -> None:
        """Give free places to those who are next. A request for several is not overtaken."""
        while able := [one for one in self._waiting if self._may_have(one.owner, one.count)]:
            first = min(able, key=lambda waiting: self._rank(waiting.owner))
            if self._taken.total() + first.count > self._max_total:
                return
            self._waiting.remove(first)
            if not first.turn.cancelled():
                self._taken[first.owner] += first.count
                first.turn.set_result(None)
