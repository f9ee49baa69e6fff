"""What others ask of a node of the DHT is paid for before it is parsed (design 4.8, DHT).

p2pd hands a request over as bytes with the id of who sent it, up to 4 MiB. Hivemind would make
objects of all of it first. Here its size is looked at and paid for before that: a member pays for
itself. A stranger pays from the budget of its address prefix, because it can make as many ids as it
likes, and its requests are short. p2pd says with a request who sent it and not from where, so
`Origins` asks for the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hivemind.p2p import P2P, P2PContext, PeerID

from dipaco.base.refusals import Refusals
from dipaco.base.token_bucket import Budget
from dipaco.protocol.allowances import (
    DHT_LARGE,
    DHT_SMALL,
    NOWHERE,
    REQUEST_COST_BYTES,
    Asker,
    Standing,
    origin_of,
)
from dipaco.protocol.invitations import ADMISSION_BYTES

from .company import Company

# A stranger stores at most a manifest and a list of revocations.
_MAX_STRANGER_REQUEST_BYTES = 2**17 + 2**12
# Answers up to this size cost what a request costs; longer ones are paid for apart.
_SMALL_ANSWER_BYTES = 2**14
# Who asks waits for three seconds.
_LONGEST_WAIT_S = 2.0
# p2pd is asked for its connections at most so often.
LISTING_PERIOD_S = 0.2
_LISTING_LIMIT_S = 5.0


_UNKNOWN = Asker(Standing.STRANGER, NOWHERE)


class Refused(Exception):
    """A request that is too long, or for which its sender has nothing left."""


@dataclass(frozen=True)
class Context(P2PContext):
    """What a handler knows of a request; `asker` pays for the answer."""

    asker: Asker = _UNKNOWN


class Origins:
    """The address prefixes of the peers that are connected. On the loop of the DHT process."""

    def __init__(self, connections: Callable[[], Awaitable[Mapping[str, str]]]) -> None:
        """`connections` returns an address of each peer that is connected."""
        self._connections = connections
        self._origins: dict[str, str] = {}
        self._listing: asyncio.Task[None] | None = None

    async def of(self, peer: str) -> str:
        """Return where a peer is. Those that ask at one time share one listing, which begins after
        all of them have asked: who has gone meanwhile is nowhere, and keeps nobody waiting."""
        if peer not in self._origins:
            if self._listing is None:
                self._listing = asyncio.create_task(self._list())
            await asyncio.shield(self._listing)
        return self._origins.get(peer, NOWHERE)

    async def _list(self) -> None:
        await asyncio.sleep(LISTING_PERIOD_S)
        self._listing = None
        with contextlib.suppress(Exception):
            found = await asyncio.wait_for(self._connections(), _LISTING_LIMIT_S)
            self._origins = {peer: origin_of(address) for peer, address in found.items()}


class Metering:
    """Stands between p2pd and the handlers of a node. On the loop of the DHT process."""

    def __init__(
        self, company: Company, origins: Origins, disconnect: Callable[[PeerID], Awaitable[None]]
    ) -> None:
        self._company, self._origins, self._disconnect = company, origins, disconnect
        self._small, self._large = Budget(DHT_SMALL), Budget(DHT_LARGE)
        self._refusals = Refusals()

    async def answer(
        self, data: bytes, peer: PeerID, handle: Callable[[Asker], Awaitable[bytes]]
    ) -> bytes:
        """Return the answer of a handler to a request, paid for. Raises `Refused`."""
        name = peer.to_base58()
        try:
            asker = await self._asker(peer, data)
            await self._pay(self._small, asker, len(data) + REQUEST_COST_BYTES)
        except Refused:
            if self._refusals.refused(name) and not self._company.knows(peer):
                await self._throw_out(peer)
            raise
        self._refusals.answered(name)
        answer = await handle(asker)
        self._small.take(asker, min(len(answer), _SMALL_ANSWER_BYTES))
        return answer

    async def pay_for_answer(self, asker: Asker, size_bytes: int) -> None:
        """Pay for an answer before it is put together, if it is long. Raises `Refused`."""
        if size_bytes > _SMALL_ANSWER_BYTES:
            await self._pay(self._large, asker, size_bytes)

    async def _asker(self, peer: PeerID, data: bytes) -> Asker:
        """Return who pays for a request. What its sender says of itself, with its admission, is at
        the end of what protobuf makes of a request."""
        company = self._company
        if not company.knows(peer) and not company.hears(peer, data[-ADMISSION_BYTES:]):
            if len(data) > _MAX_STRANGER_REQUEST_BYTES:
                await self._throw_out(peer)
                raise Refused(f"{len(data)} bytes are too many without an admission")
            return Asker(Standing.STRANGER, await self._origins.of(peer.to_base58()))
        name = peer.to_base58()
        return Asker(
            Standing.CONTRIBUTOR if name in company.contributors else Standing.ADMITTED, name
        )

    async def _pay(self, budget: Budget[Standing], asker: Asker, count: int) -> None:
        try:
            await budget.pay(asker, count, _LONGEST_WAIT_S)
        except TimeoutError:
            raise Refused("too many requests: ask again later") from None

    async def _throw_out(self, peer: PeerID) -> None:
        """Drop a connection: the next one costs its maker a handshake."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._disconnect(peer), _LISTING_LIMIT_S)


class MeteredHandlers:
    """Registers the handlers of a Hivemind protocol in place of `P2P`, behind a `Metering`."""

    def __init__(self, p2p: P2P, metering: Metering) -> None:
        self._p2p, self._metering = p2p, metering

    async def add_protobuf_handler(
        self, name: str, handler: Callable[..., Awaitable[Any]], request_type: Any, **options: Any
    ) -> None:
        """Register a handler of one request and one answer."""

        async def answer(data: bytes, peer: PeerID) -> bytes:
            async def handle(asker: Asker) -> bytes:
                context = Context(name, self._p2p.peer_id, peer, asker)
                response = await handler(request_type.FromString(data), context)
                return bytes(response.SerializeToString())

            return await self._metering.answer(data, peer, handle)

        await self._p2p._client.add_unary_handler(name, answer)


def metering_of(p2p: P2P, company: Company) -> Metering:
    """Return the metering of a node over its p2pd."""

    async def connections() -> dict[str, str]:
        found = await p2p.list_peers()
        return {info.peer_id.to_base58(): str(info.addrs[0]) for info in found if info.addrs}

    return Metering(company, Origins(connections), p2p._client.disconnect)
