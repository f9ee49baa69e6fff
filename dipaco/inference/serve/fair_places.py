"""Places for answers: clients share them, and nobody waits behind one client.

A client is an address, so that many connections of one have no more than one of each.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dipaco.base.turns import Turns, Waiting

from .api_error import ApiError


class FairPlaces(Turns[str]):
    """Places for answers. Used in one event loop.

    A free place goes to the client that has the fewest. One client alone takes all but one, so
    another one's first answer waits for nobody. When more wait than the `queue` holds, the client
    with the most of them loses its last request.
    """

    def __init__(self, places: int, queue: int) -> None:
        self.most = max(1, places - 1)
        """How many places one client can have."""
        super().__init__(places, self.most, lambda client: self._taken[client], max_waiting=queue)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return self._taken.total()

    @asynccontextmanager
    async def take(self, client: str, weight: int = 1) -> AsyncIterator[None]:
        """Wait for so many places, at most `most`, and have them. Raises ApiError when too many
        wait."""
        assert weight <= self.most
        try:
            await self.acquire(client, weight)
        except TimeoutError:
            raise ApiError(
                503,
                f"{self.waiting} requests are waiting, and this service takes no more (--queue); "
                f"try again in a moment",
                code="overloaded",
                retry_after_s=1,
            ) from None
        try:
            yield
        finally:
            self.release(client, weight)

    def _last(self) -> Waiting[str]:
        counts = Counter(one.owner for one in self._waiting)
        return max(reversed(self._waiting), key=lambda one: counts[one.owner])


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
