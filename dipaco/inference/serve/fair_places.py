"""Places for answers: clients share them, and nobody waits behind one client.

A client is an address, so that many connections of one have no more than one of each.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from .api_error import ApiError


@dataclass(eq=False)
class _Waiting:
    client: str
    weight: int
    turn: asyncio.Future[None]


@dataclass(eq=False)
class _Client:
    taken: int = 0
    """Places that it has."""
    waiting: deque[_Waiting] = field(default_factory=deque)


class FairPlaces:
    """Places for answers, and a queue for each client. Used in one event loop.

    A free place goes to the client that has the fewest. One client alone takes all but one, so
    another one's first answer waits for nobody. When the queues are full, the client with the
    longest one loses its last request to a client with a shorter one.
    """

    def __init__(self, places: int, queue: int) -> None:
        self._places = places
        self._queue = queue
        self._taken = 0
        self._clients: dict[str, _Client] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(len(client.waiting) for client in self._clients.values())

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return self._taken

    @property
    def most(self) -> int:
        """How many places one client can have."""
        return max(1, self._places - 1)

    @asynccontextmanager
    async def take(self, client: str, weight: int = 1) -> AsyncIterator[None]:
        """Wait for so many places, at most `most`, and have them. Raises ApiError when too many
        wait."""
        assert weight <= self.most
        own = self._clients.setdefault(client, _Client())
        if self.waiting >= self._queue:
            self._displace(own)
        entry = _Waiting(client, weight, asyncio.get_running_loop().create_future())
        own.waiting.append(entry)
        self._give()
        try:
            await entry.turn
        except BaseException:
            if entry in own.waiting:
                own.waiting.remove(entry)
            elif entry.turn.done() and not entry.turn.cancelled() and not entry.turn.exception():
                self._give_back(own, weight)
            self._give()
            raise
        try:
            yield
        finally:
            self._give_back(own, weight)
            self._give()

    def _displace(self, own: _Client) -> None:
        longest = max(self._clients.values(), key=lambda one: len(one.waiting))
        error = ApiError(
            503,
            f"{self.waiting} requests are waiting, and this service takes no more (--queue); try "
            f"again in a moment",
            code="overloaded",
            retry_after_s=1,
        )
        if len(longest.waiting) <= len(own.waiting) + 1:
            raise error
        longest.waiting.pop().turn.set_exception(error)

    def _give(self) -> None:
        """Give free places to those who are next. A large request is not overtaken."""
        while True:
            self._clients = {n: c for n, c in self._clients.items() if c.taken or c.waiting}
            able = [c for c in self._clients.values() if c.waiting and c.taken < self.most]
            if not able:
                return
            # The sort is stable, and who waits is in the order of coming.
            client = min(able, key=lambda one: one.taken)
            entry = client.waiting[0]
            if client.taken + entry.weight > self.most or self._taken + entry.weight > self._places:
                return
            client.waiting.popleft()
            client.taken += entry.weight
            self._taken += entry.weight
            if entry.turn.cancelled():
                self._give_back(client, entry.weight)
            else:
                entry.turn.set_result(None)

    def _give_back(self, client: _Client, weight: int) -> None:
        client.taken -= weight
        self._taken -= weight


def client_of(address: str | None) -> str:
    """Return who somebody is by the address: of IPv6, the network of which one person has all."""
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return address or ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, 64), strict=False))
        found = found.ipv4_mapped
    return str(found)
