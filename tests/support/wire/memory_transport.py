"""Streams between exchanges of one process, over pairs of sockets: all but p2pd is real."""

import asyncio
import socket

from dipaco.base.errors import NetworkError
from dipaco.peer.exchange.streams.transport import Stream
from dipaco.peer.owner.uplink import Uplink
from dipaco.protocol.allowances import NOWHERE


class MemoryNetwork:
    """The nodes that can be called, by their names."""

    def __init__(self):
        self.nodes = {}

    def kill(self, peer):
        """Break off all streams of a peer, and let nobody reach it any more."""
        node = self.nodes.pop(peer)
        for stream in node.streams:
            node.loop.call_soon_threadsafe(stream.abort)


class MemoryTransport:
    """One peer's way into a `MemoryNetwork`."""

    def __init__(self, network, peer_id, uplink=None, origin="127.0.0.0/24"):
        self.network, self.peer_id, self.origin = network, peer_id, origin
        self.admission = None
        self.disconnected = []
        self.uplink = uplink or Uplink()
        self.handlers = {}
        self.streams = []

    def check(self):
        pass

    async def start(self):
        self.loop = asyncio.get_running_loop()
        self.network.nodes[self.peer_id] = self

    async def close(self):
        self.network.nodes.pop(self.peer_id, None)

    async def serve(self, protocol, handler):
        self.handlers[protocol] = handler

    async def open_stream(self, peer, protocol):
        node = self.network.nodes.get(peer)
        if node is None or protocol not in node.handlers:
            raise NetworkError(f"peer {peer}: connection refused")
        mine, theirs = socket.socketpair()
        asyncio.run_coroutine_threadsafe(node.accept(self, theirs, node.handlers[protocol]), node.loop)
        return await self._stream(peer, mine)

    async def accept(self, other, end, handler):
        await handler(await self._stream(other.peer_id, end, other.origin))

    async def _stream(self, peer, end, origin=NOWHERE):
        end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=end)
        stream = Stream(peer, reader, writer, self.uplink, origin)
        self.streams.append(stream)
        return stream

    async def connected(self):
        return {peer: () for peer in self.network.nodes if peer != self.peer_id}

    async def disconnect(self, peer):
        self.disconnected.append(peer)
