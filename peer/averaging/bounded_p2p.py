"""A P2P whose streams cost this peer a bounded amount of memory, whoever is at the other end.

Hivemind reads a protobuf message of whatever length its first eight bytes state, and prefetches
several, from anybody who opens a stream: three streams of 200 MiB are 600 MiB. And a stream whose
sender goes on when its handler has ended stays for ever. Here a message has a greatest length, in
what others send and in what they answer, a stream ends with its handler, and there are so many
streams of a peer at once. Peers that nothing is expected of share a few, so that they cannot keep
out others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import Any

from dipaco.dht.repetition import Complaints
from dipaco.peer.owner.uplink import StreamMeter, Uplink
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.p2pclient import StreamHandler
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils.multiaddr import Multiaddr

from .codec import PartCodec

logger = logging.getLogger(__name__)

# Streams of a reduce and its checks that one member has open at once: those of the attempt before
# may still linger.
GREATEST_STREAMS_OF_A_PEER = 8
# Of a peer that this one does not know as a trainer of the module, and of all such together.
GREATEST_STREAMS_OF_A_STRANGER = 2
GREATEST_STREAMS_OF_STRANGERS = 8
# Messages of a stream that are read before they are used.
PREFETCHED = 1
# What else is in a message; and the limit where parts are small.
OVERHEAD_BYTES = 2**16
LEAST_LIMIT_BYTES = 2**20
COMPLAINT_PERIOD_S = 60.0
MAX_COMPLAINTS = 20


def greatest_message_bytes(codec: PartCodec, part_bytes: int) -> int:
    """Return what a message of an all-reduce can have at most."""
    encoded_bytes = codec.codec.encoded_bytes(codec.codec.part_values(part_bytes))
    return max(LEAST_LIMIT_BYTES, encoded_bytes) + OVERHEAD_BYTES


class BoundedReader:
    """A stream's reader that refuses to wait for more bytes than a message can have."""

    def __init__(self, reader: asyncio.StreamReader, limit_bytes: int) -> None:
        self._reader, self._limit_bytes = reader, limit_bytes

    async def readexactly(self, count: int) -> bytes:
        """Return `count` bytes. Raises ValueError for too many, before any is read."""
        if count > self._limit_bytes:
            raise ValueError(f"a message of {count} bytes, at most {self._limit_bytes} are allowed")
        return await self._reader.readexactly(count)


class BoundedP2P(P2P):
    """A connection to a running p2pd; made by `replicate`, as its base class is.

    `limit_bytes` is the greatest message. `expected` are the peers that take part in what goes on
    here; both are replaced as a whole.
    """

    limit_bytes: int = LEAST_LIMIT_BYTES
    uplink: Uplink | None = None
    expected: Collection[str] = frozenset()
    replaced: str = ""
    """Where one listened that has ended without a word: p2pd keeps its handlers until they are
    called, and takes no others of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: Counter[str] = Counter()
        self._complaints = Complaints(COMPLAINT_PERIOD_S, MAX_COMPLAINTS)

    async def _add_protobuf_stream_handler(
        self,
        name: str,
        handler: Callable[[AsyncIterator[Any], P2PContext], AsyncGenerator[Any, None]],
        input_protobuf_type: type[Any],
        max_prefetch: int = PREFETCHED,
        balanced: bool = False,
    ) -> None:
        """Serve a servicer's method, in the place of the base class's function of that name."""

        async def serve(
            stream: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            peer = stream.peer_id.to_base58()
            if not self.admits(peer):
                self._complain(peer, "too many streams at once")
                writer.close()
                return
            self._streams[peer] += 1
            context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=stream.peer_id)
            requests: asyncio.Queue[Any] = asyncio.Queue(PREFETCHED)
            bounded = _Complaining(reader, self, peer)
            answers = handler(_drawn_from(requests), context)
            reading = asyncio.create_task(_read_into(requests, bounded, input_protobuf_type))
            answering = asyncio.create_task(_answer(answers, self._paced(writer)))
            try:
                await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                writer.close()
                self._streams -= Counter([peer])
                reading.cancel()
                answering.cancel()
                await asyncio.gather(reading, answering, return_exceptions=True)

        await self.add_binary_stream_handler(name, serve, balanced)

    async def add_binary_stream_handler(
        self, name: str, handler: StreamHandler, balanced: bool = False
    ) -> None:
        """Serve streams as the handler likes."""
        if self.replaced:
            await self._remove_handler(name, Multiaddr(self.replaced))
        await super().add_binary_stream_handler(name, handler, balanced)

    @property
    def listens_at(self) -> str:
        """Where p2pd hands streams over."""
        return str(self._client.control.listen_maddr)

    async def _remove_handler(self, name: str, listened_at: Multiaddr) -> None:
        """Have p2pd forget a handler of a process that has ended, if it is still there."""
        reader, writer = await self._client.control.daemon_connector.open_connection()
        try:
            request = p2pd_pb2.RemoveStreamHandlerRequest(addr=listened_at.to_bytes(), proto=[name])
            kind = p2pd_pb2.Request.REMOVE_STREAM_HANDLER
            await write_pbmsg(writer, p2pd_pb2.Request(type=kind, removeStreamHandler=request))
            await read_pbmsg_safe(reader, p2pd_pb2.Response())
        finally:
            writer.close()

    async def call_binary_stream_handler(
        self, peer_id: PeerID, handler_name: str
    ) -> tuple[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream on which the other side can answer no more than `limit_bytes` at once."""
        info, reader, writer = await super().call_binary_stream_handler(peer_id, handler_name)
        bounded: Any = BoundedReader(reader, self.limit_bytes)
        return info, bounded, self._paced(writer)

    def _paced(self, writer: asyncio.StreamWriter) -> Any:
        return writer if self.uplink is None else _PacedWriter(writer, self.uplink)

    def admits(self, peer: str) -> bool:
        """Tell whether a peer may open one more stream."""
        if peer in self.expected:
            return self._streams[peer] < GREATEST_STREAMS_OF_A_PEER
        strangers = sum(n for other, n in self._streams.items() if other not in self.expected)
        return (
            self._streams[peer] < GREATEST_STREAMS_OF_A_STRANGER
            and strangers < GREATEST_STREAMS_OF_STRANGERS
        )

    def _complain(self, peer: str, what: str) -> None:
        logger.log(self._complaints.level(peer), "refused a stream of %s: %s", peer, what)


async def _drawn_from(requests: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (request := await requests.get()) is not None:
        yield request


async def _read_into(
    requests: asyncio.Queue[Any], reader: BoundedReader, message_class: type[Any]
) -> None:
    """Read messages until the stream ends or breaks; None is the end of what the caller sends."""
    try:
        while True:
            message, _ = await P2P.receive_protobuf(message_class, reader)  # type: ignore[arg-type]
            await requests.put(message)
    except asyncio.IncompleteReadError:
        return
    except Exception as error:
        logger.debug("a stream broke: %r", error)


async def _answer(answers: AsyncGenerator[Any, None], writer: Any) -> None:
    """Send answers to their end, or what went wrong with them."""
    try:
        async with contextlib.aclosing(answers):
            async for answer in answers:
                await P2P.send_protobuf(answer, writer)
    except Exception as error:
        logger.debug("a stream's handler failed", exc_info=True)
        # If it was the stream that broke, nobody hears of it.
        with contextlib.suppress(Exception):
            await P2P.send_protobuf(RPCError(message=str(error)), writer)


class _PacedWriter:
    """A stream's writer whose messages have gone, at the rate that the owner allows, once they are
    drained. Everything else is the writer's own."""

    def __init__(self, writer: asyncio.StreamWriter, uplink: Uplink) -> None:
        self._writer, self._uplink = writer, uplink
        self._meter = StreamMeter(uplink, is_reduce=True)
        self._written_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._written_bytes += len(data)
        self._writer.write(data)

    async def drain(self) -> None:
        count, self._written_bytes = self._written_bytes, 0
        began_s = time.monotonic()
        await self._writer.drain()
        self._meter.wrote(count, began_s, time.monotonic())
        await self._uplink.reduce(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class _Complaining(BoundedReader):
    """Says in the log who sent too much."""

    def __init__(self, reader: asyncio.StreamReader, p2p: BoundedP2P, peer: str) -> None:
        super().__init__(reader, p2p.limit_bytes)
        self._p2p, self._peer = p2p, peer

    async def readexactly(self, count: int) -> bytes:
        try:
            return await super().readexactly(count)
        except ValueError as error:
            self._p2p._complain(self._peer, str(error))
            raise
