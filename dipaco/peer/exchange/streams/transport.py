"""The one interface to the network: streams between peers, named by their ids.

Everything that peers say to each other goes over these streams. Hivemind's p2pd is behind them;
another library would need the methods of `Transport` (design 4.10, wire). Tests have a transport in
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from dipaco.base.errors import NetworkError
from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.peer.owner.uplink import Uplink
from dipaco.protocol.allowances import NOWHERE, origin_of

_DAEMON_TIMEOUT_S = 10.0
_DETACH_TIMEOUT_S = 0.4
_ResultT = TypeVar("_ResultT")


class Stream:
    """Bytes to and from one peer, whose id the transport vouches for.

    The side that opened it closes it: what the other one wrote last may be lost otherwise. All
    bytes are counted by the `uplink`, and wait for it.
    """

    def __init__(
        self,
        peer: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        uplink: Uplink,
        origin: str = NOWHERE,
    ) -> None:
        self.peer = peer
        self.origin = origin
        """The prefix of the address that the other side is seen at, see `allowances.origin_of`."""
        self.rank = 0
        """The rank of what is sent on this stream. The `uplink` sends lower ranks first."""
        self._reader, self._writer, self._uplink = reader, writer, uplink

    async def read(self, count: int) -> bytes:
        """Return up to `count` bytes, and b"" at the end."""
        data = await self._reader.read(count)
        self._uplink.received_bytes += len(data)
        return data

    async def read_exactly(self, count: int) -> bytes:
        """Return `count` bytes. Raises `asyncio.IncompleteReadError` when the stream ends."""
        data = await self._reader.readexactly(count)
        self._uplink.received_bytes += len(data)
        return data

    async def write(self, data: bytes | memoryview, timeout_s: float) -> float:
        """Send; returns when there is room for more, and for how many seconds this peer's limit
        held it up.

        Raises `TimeoutError` when the other side takes no bytes for `timeout_s`, or an OSError.
        """
        left, held_up_s = memoryview(data), 0.0
        while left:
            piece = left[: self._uplink.piece_bytes(len(left))]
            held_up_s += await self._uplink.send(len(piece), self.rank)
            self._writer.write(piece)
            await asyncio.wait_for(self._writer.drain(), timeout_s)
            left = left[len(piece) :]
        return held_up_s

    def close(self) -> None:
        """End it once everything is sent. May be called twice."""
        with contextlib.suppress(Exception):
            self._writer.close()

    def abort(self) -> None:
        """Break it off at once; the other side gets an error or the end."""
        with contextlib.suppress(Exception):
            self._writer.transport.abort()


Handler = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    """What carries streams. Used on the exchange's event loop, but for `peer_id` and `check`."""

    uplink: Uplink
    """Counts and limits what all streams send."""
    admission: bytes | None
    """This peer's own, which all its requests show."""

    @property
    def peer_id(self) -> str:
        """This node's id. Raises `NetworkError` before `start`."""
        ...

    def check(self) -> None:
        """Raise `NetworkError` while this node has no network layer. From any thread."""
        ...

    async def start(self) -> None:
        """Connect this loop, also again after `check` has raised. Raises `NetworkError`."""
        ...

    async def close(self) -> None:
        """Take all handlers back, within a second."""
        ...

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Call `handler` with every stream that others open under this name."""
        ...

    async def open_stream(self, peer: str, protocol: str) -> Stream:
        """Open a stream to a peer. Raises what the library raises; `reasons` words it."""
        ...

    async def connected(self) -> Mapping[str, tuple[str, ...]]:
        """Return the peers that are connected, with the addresses that they are seen at.

        Raises `NetworkError`.
        """
        ...

    async def disconnect(self, peer: str) -> None:
        """Drop the connection to a peer; the next stream makes a new one."""
        ...


class HivemindTransport:
    """Streams of the p2pd that a node's DHT process runs."""

    def __init__(
        self, dht: GuardedDHT | None, uplink: Uplink | None = None, p2p: P2P | None = None
    ) -> None:
        """`p2p`: a p2pd without a DHT, which has been started already and which its owner ends."""
        self._dht, self._p2p = dht, p2p
        self.uplink = uplink or Uplink()
        self.admission: bytes | None = None
        self._protocols: list[str] = []

    @property
    def p2p(self) -> P2P:
        """Hivemind's own object. Raises `NetworkError` before `start`."""
        if self._p2p is None:
            raise NetworkError("the exchange is not running")
        return self._p2p

    @property
    def peer_id(self) -> str:
        """This node's id."""
        return str(self.p2p.peer_id.to_base58())

    def check(self) -> None:
        """Raise `NetworkError` while there is no DHT process and p2pd."""
        if self._dht is not None:
            self._dht.check()

    async def start(self) -> None:
        """Connect to p2pd, and let go of the one before. Raises `NetworkError`."""
        if self._dht is not None:
            gone, self._p2p = self._p2p, await self._dht.replicate_p2p()
            self._protocols.clear()
            if gone is not None:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(gone.shutdown(), _DETACH_TIMEOUT_S)

    async def close(self) -> None:
        """Take the handlers back, if p2pd still answers."""
        p2p, self._p2p = self._p2p, None
        if p2p is None:
            return
        removing = asyncio.gather(
            *(p2p.remove_binary_stream_handler(name) for name in self._protocols),
            return_exceptions=True,
        )
        with contextlib.suppress(Exception):
            await asyncio.wait_for(removing, _DETACH_TIMEOUT_S)
        await p2p.shutdown()

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Register a handler with p2pd. Raises `NetworkError`."""

        async def handle(
            info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            origin = origin_of(str(info.addr))
            await handler(Stream(info.peer_id.to_base58(), reader, writer, self.uplink, origin))

        await _asked(self.p2p.add_binary_stream_handler(protocol, handle))
        self._protocols.append(protocol)

    async def open_stream(self, peer: str, protocol: str) -> Stream:
        """Open a stream; p2pd dials when there is no connection."""
        opening = self.p2p.call_binary_stream_handler(PeerID.from_base58(peer), protocol)
        _, reader, writer = await opening
        return Stream(peer, reader, writer, self.uplink)

    async def connected(self) -> Mapping[str, tuple[str, ...]]:
        """Ask p2pd for its connections. Raises `NetworkError`."""
        found = await _asked(self.p2p.list_peers())
        seen: dict[str, tuple[str, ...]] = {}
        for info in found:
            peer = info.peer_id.to_base58()
            seen[peer] = (*seen.get(peer, ()), *(str(address) for address in info.addrs))
        return seen

    async def disconnect(self, peer: str) -> None:
        """Tell p2pd to drop a connection; Hivemind has no public call for it."""
        await self.p2p._client.disconnect(PeerID.from_base58(peer))


async def _asked(answer: Awaitable[_ResultT]) -> _ResultT:
    """Return what p2pd answers. Raises `NetworkError` while it is silent or gone."""
    try:
        return await asyncio.wait_for(answer, _DAEMON_TIMEOUT_S)
    except Exception as error:
        raise NetworkError(f"p2pd does not answer: {str(error) or 'it is silent'}") from error
