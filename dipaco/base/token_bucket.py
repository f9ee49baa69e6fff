"""So much at once, and so much a second: the one limiter of rates.

`TokenBuckets` has a bucket for each of many owners. `Line` is one bucket that many share, in which
those of a lower rank go first. `Budget` has both for several classes of peers; its numbers are in
`protocol/allowances.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from .turns import OwnerT, Turns

REMEMBERED_OWNERS = 4096
_LONGEST_TURN_S = 0.5
_ClassT = TypeVar("_ClassT")


@dataclass(frozen=True)
class Rate:
    """What a bucket gives: so much at once, and so much a second after that."""

    burst: float
    per_s: float


class TokenBuckets:
    """A bucket for each owner. Used on one event loop."""

    def __init__(self, rate: Rate, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._monotonic = monotonic
        self._full_at_s: OrderedDict[str, float] = OrderedDict()
        """When each bucket will be full again if nothing more is taken; touched last at the end."""

    def wait_s(self, owner: str, count: float = 0.0) -> float:
        """Return after how many seconds an owner's bucket would have so much."""
        debt_s = self.debt_s(owner) + count / self.rate.per_s
        return max(0.0, debt_s - self.rate.burst / self.rate.per_s)

    def take(self, owner: str, count: float) -> float:
        """Take from an owner's bucket; return after how many seconds it has what was taken."""
        wait_s = self.wait_s(owner, count)
        full_at_s = self._monotonic() + self.debt_s(owner) + count / self.rate.per_s
        self._full_at_s[owner] = full_at_s
        self._full_at_s.move_to_end(owner)
        while len(self._full_at_s) > REMEMBERED_OWNERS:
            self._full_at_s.popitem(last=False)
        return wait_s

    def debt_s(self, owner: str) -> float:
        """Return after how many seconds an owner's bucket will be full."""
        now_s = self._monotonic()
        return max(now_s, self._full_at_s.get(owner, now_s)) - now_s


class Line(Generic[OwnerT]):
    """One bucket for all, whose users wait one behind the other. Used on one event loop.

    :param rank: of a user; those of a lower rank go first
    """

    def __init__(
        self,
        rate: Rate,
        rank: Callable[[OwnerT], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = TokenBuckets(rate, monotonic)
        self._turns = Turns[OwnerT](1, 1, rank)

    async def pay(self, owner: OwnerT, count: float) -> None:
        """Wait for so much, and take it."""
        async with self._turns.turn(owner):
            await asyncio.sleep(self._bucket.wait_s("", count))
            self.take(count)

    def may_wait_for(self, count: float) -> bool:
        """Tell whether so much holds up others for a moment at most, or is there."""
        is_short = count <= _LONGEST_TURN_S * self._bucket.rate.per_s
        return is_short or self._bucket.wait_s("", count) == 0.0

    def take(self, count: float) -> None:
        """Take so much, also if it is not there: those who wait then wait longer."""
        self._bucket.take("", count)


@dataclass(frozen=True)
class Rates(Generic[_ClassT]):
    """What peers of several classes may use of one thing."""

    each: Mapping[_ClassT, Rate]
    """The rate of one peer."""
    together: Mapping[_ClassT, Rate]
    """The rate of all users of a class together; a class that is missing has no such limit."""


class Budget(Generic[_ClassT]):
    """What peers may still use of one thing: each from its own bucket, and some classes together
    besides, where those go first that have used least lately. Used on one event loop.

    A user is a class and a name.
    """

    def __init__(
        self, rates: Rates[_ClassT], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._each = {one: TokenBuckets(rate, monotonic) for one, rate in rates.each.items()}
        self._together = {
            one: Line[str](rate, self._each[one].debt_s, monotonic)
            for one, rate in rates.together.items()
        }

    async def pay(self, user: tuple[_ClassT, str], count: float, longest_s: float) -> None:
        """Wait until a user may use so much.

        Raises `TimeoutError` when that takes longer than `longest_s`. What is
        refused is not taken: an owner that goes on asking would put off for ever when there is some
        again, and would be served after those that it waits behind.
        """
        one, name = user
        own, line = self._each[one], self._together.get(one)
        if own.wait_s(name, count) > longest_s or (line and not line.may_wait_for(count)):
            raise TimeoutError("it asks for too much")
        wait_s = own.take(name, count)
        try:
            async with asyncio.timeout(longest_s):
                await asyncio.sleep(wait_s)
                if line is not None:
                    await line.pay(name, count)
        except TimeoutError:
            own.take(name, -count)
            raise

    def take(self, user: tuple[_ClassT, str], count: float) -> None:
        """Note that a user has used so much, also if it is more than there was."""
        one, name = user
        self._each[one].take(name, count)
        if one in self._together:
            self._together[one].take(count)

    def debt_s(self, user: tuple[_ClassT, str]) -> float:
        """Return for how long a user would have to use nothing until its bucket is full."""
        one, name = user
        return self._each[one].debt_s(name)
