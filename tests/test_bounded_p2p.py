"""What a stranger sends to an averager costs a bounded amount of memory, time and streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dipaco.modules.codecs import CODECS
from dipaco.peer.averaging import bounded_p2p
from dipaco.peer.averaging.bounded_p2p import (
    LEAST_LIMIT_BYTES,
    BoundedP2P,
    BoundedReader,
    greatest_message_bytes,
)
from dipaco.peer.averaging.codec import PartCodec
from dipaco.peer.averaging.group import averager_prefix
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2
from support.allreduce_harness import make_peer_id
from support.host_process import HostProcess, loopback_dht
from support.stream_writer import StreamWriter

Message = averaging_pb2.AveragingData
LIMIT_S = 60.0
HOST_SCRIPT = Path(__file__).parent / "support" / "averager_host.py"
Serve = Callable[..., Awaitable[None]]


def framed(message: Any) -> bytes:
    data = message.SerializeToString()
    return P2P.MESSAGE_MARKER + len(data).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + data


def read_all(*pieces: bytes, limit_bytes: int = LEAST_LIMIT_BYTES) -> list[Any]:
    """What Hivemind reads of a stream."""

    async def read() -> list[Any]:
        reader = asyncio.StreamReader()
        for piece in pieces:
            reader.feed_data(piece)
        reader.feed_eof()
        bounded: Any = BoundedReader(reader, limit_bytes)
        return [(await P2P.receive_protobuf(Message, bounded))[0] for _ in pieces]

    return asyncio.run(read())


def test_messages_arrive_and_too_long_ones_are_refused_before_they_are_read() -> None:
    message = Message(group_id=b"group")
    assert read_all(framed(message), framed(message)) == [message, message]
    header = P2P.MESSAGE_MARKER + (2**40).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)
    with pytest.raises(ValueError, match=f"{2**40} bytes, at most {LEAST_LIMIT_BYTES}"):
        read_all(header)
    assert read_all(framed(message), limit_bytes=len(message.SerializeToString()) + 8)


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("part_bytes", [1024, 2**19, 2**21])
def test_every_part_fits_the_limit(codec: str, part_bytes: int) -> None:
    import torch

    part_codec = PartCodec(CODECS[codec])
    values = part_codec.codec.part_values(part_bytes)
    message = Message(
        group_id=b"g" * 64,
        peer_id=b"p" * 64,
        code=averaging_pb2.PART_FOR_AVERAGING,
        tensor_part=part_codec.encode(torch.randn(values)),
    )
    assert len(framed(message)) <= greatest_message_bytes(part_codec, part_bytes)


class Streams:
    """A `BoundedP2P` without p2pd: a handler, and streams that are opened to it."""

    def __init__(self) -> None:
        self.p2p = BoundedP2P()
        self.p2p.peer_id = make_peer_id(99)
        self.p2p._client_listen_maddr = None  # nothing to remove at its end
        self.serve: Serve | None = None
        self.heard: list[tuple[str, Any]] = []
        self.most = 2**62
        """The handler hears so many messages of a stream and ends."""
        self.tasks: list[asyncio.Task[None]] = []

    async def add(self) -> None:
        await self.p2p.add_protobuf_handler(
            "handler", self._handle, Message, stream_input=True, stream_output=True
        )

    async def _handle(
        self, stream: AsyncIterator[Any], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        own = []
        async for message in stream:
            own.append(message)
            self.heard.append((context.remote_id.to_base58(), message))
            yield message
            if len(own) == self.most:
                # Meanwhile all is read that is read ahead.
                for _ in range(50):
                    await asyncio.sleep(0)
                return

    async def open(self, peer: PeerID, *pieces: bytes) -> StreamWriter:
        """Open a stream of a peer that sends this and then stays open; wait until it is read."""
        assert self.serve is not None
        reader, writer = asyncio.StreamReader(), StreamWriter()
        for piece in pieces:
            reader.feed_data(piece)
        expected = len(self.heard) + len(pieces)
        serving = self.serve(SimpleNamespace(peer_id=peer), reader, writer)
        task = asyncio.ensure_future(serving)
        self.tasks.append(task)
        while not task.done() and len(self.heard) < expected:
            await asyncio.sleep(0)
        return writer

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def with_streams(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Streams], Awaitable[None]]
) -> None:
    async def run() -> None:
        streams = Streams()

        async def note(self: P2P, name: str, handler: Serve, balanced: bool = False) -> None:
            streams.serve = handler

        monkeypatch.setattr(P2P, "add_binary_stream_handler", note)
        await streams.add()
        try:
            await asyncio.wait_for(work(streams), LIMIT_S)
        finally:
            await streams.close()

    asyncio.run(run())


def test_a_peer_and_all_strangers_have_so_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    message = framed(Message(group_id=b"group"))

    async def attack(streams: Streams) -> None:
        member, stranger = make_peer_id(0), make_peer_id(1)
        streams.p2p.expected = {member.to_base58()}
        own = bounded_p2p.GREATEST_STREAMS_OF_A_STRANGER
        for _ in range(own):
            assert not (await streams.open(stranger, message)).closed
        assert (await streams.open(stranger, message)).closed, "too many of a stranger"
        for number in range(2, 2 + bounded_p2p.GREATEST_STREAMS_OF_STRANGERS - own):
            assert not (await streams.open(make_peer_id(number), message)).closed
        assert (await streams.open(make_peer_id(50), message)).closed, "strangers are too many"
        for _ in range(bounded_p2p.GREATEST_STREAMS_OF_A_PEER):
            assert not (await streams.open(member, message)).closed, "a member comes in"
        assert (await streams.open(member, message)).closed, "not as often as it likes"
        await streams.close()
        assert not (await streams.open(stranger, message)).closed, "an end frees a place"

    with_streams(monkeypatch, attack)


def test_who_sends_on_when_the_handler_has_ended_is_not_heard_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = framed(Message(group_id=b"group"))

    async def flood(streams: Streams) -> None:
        streams.most = 1
        for _ in range(bounded_p2p.GREATEST_STREAMS_OF_A_STRANGER + 1):
            reader, writer = asyncio.StreamReader(), StreamWriter()
            reader.feed_data(20 * message)
            assert streams.serve is not None
            await streams.serve(SimpleNamespace(peer_id=make_peer_id(1)), reader, writer)
            assert writer.closed
            assert bytes(writer.data) == message, "answered, and not refused"

    with_streams(monkeypatch, flood)


def test_a_handler_that_fails_says_so_and_one_whose_caller_is_gone_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = framed(Message(group_id=b"group"))

    async def call(streams: Streams) -> None:
        serve = streams.serve
        assert serve is not None
        gone, writer = asyncio.StreamReader(), StreamWriter()
        gone.feed_data(message)
        gone.feed_eof()
        await serve(SimpleNamespace(peer_id=make_peer_id(1)), gone, writer)
        assert writer.closed

        async def fail(*_: object) -> AsyncIterator[Any]:
            raise ValueError("no such part")
            yield

        await streams.p2p.add_protobuf_handler(
            "other", fail, Message, stream_input=True, stream_output=True
        )
        serve, writer = streams.serve, StreamWriter()
        assert serve is not None
        await serve(SimpleNamespace(peer_id=make_peer_id(1)), asyncio.StreamReader(), writer)
        assert writer.closed
        reader: Any = asyncio.StreamReader()
        reader.feed_data(bytes(writer.data))
        _, error = await P2P.receive_protobuf(Message, reader)
        assert error is not None
        assert error.message == "no such part"

    with_streams(monkeypatch, call)


def test_who_states_too_much_is_named_once_and_its_stream_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    header = P2P.MESSAGE_MARKER + (2**36).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)

    async def attack(streams: Streams) -> None:
        for _ in range(3):
            assert (await streams.open(make_peer_id(1), header)).closed
        assert streams.heard == []

    with_streams(monkeypatch, attack)
    warnings = [r.getMessage() for r in caplog.records if r.name == bounded_p2p.__name__]
    said = [text for text in warnings if make_peer_id(1).to_base58() in text]
    assert f"{2**36} bytes" in said[0]
    levels = [r.levelno for r in caplog.records if r.name == bounded_p2p.__name__]
    assert levels.count(logging.WARNING) == 1


# -- with real processes

MIB = 2**20


@pytest.fixture
def host() -> Iterator[HostProcess]:
    process = HostProcess(HOST_SCRIPT, 0, [], ["--size=1000"])
    yield process
    process.close()


def peak_mib(process_id: int) -> float:
    """The greatest resident memory that a process has had."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


@pytest.mark.swarm
def test_streams_of_a_stranger_do_not_fill_an_averager(host: HostProcess) -> None:
    """Three streams that state and send 64 MiB each; resident memory of the averager's process."""
    hello = host.answer()
    averager = hello["processes"][0]
    handle = f"{averager_prefix('test', 'L0')}::AveragingService.rpc_aggregate_part"
    dht = loopback_dht(hello["addresses"])

    async def pour(p2p: P2P, target: PeerID) -> None:
        _, reader, writer = await p2p.call_binary_stream_handler(target, handle)
        writer.write(P2P.MESSAGE_MARKER + (64 * MIB).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
        with contextlib.suppress(OSError):
            for _ in range(63):
                writer.write(bytes(MIB))
                await asyncio.wait_for(writer.drain(), LIMIT_S)
            # It is full, or the averager ends the stream.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(), 5.0)
        writer.close()

    async def attack() -> None:
        p2p = await dht.replicate_p2p()
        target = PeerID.from_base58(hello["peer_id"])
        await asyncio.gather(*(pour(p2p, target) for _ in range(3)), return_exceptions=True)
        await p2p.shutdown()

    try:
        before = peak_mib(averager)
        asyncio.run(attack())
        grown = peak_mib(averager) - before
    finally:
        dht.shutdown()
    print(f"peak grew by {grown:.1f} MiB")
    assert grown < 32


def test_the_handlers_of_one_that_has_ended_without_a_word_are_taken_over() -> None:
    async def serve(*_: object) -> None:
        pass

    async def take_over() -> None:
        daemon = await P2P.create(
            host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False, startup_timeout=LIMIT_S
        )
        try:
            ended = await BoundedP2P.replicate(daemon.daemon_listen_maddr)
            await ended.add_binary_stream_handler("meet", serve)
            heir = await BoundedP2P.replicate(daemon.daemon_listen_maddr)
            with pytest.raises(Exception, match="already set"):
                await heir.add_binary_stream_handler("meet", serve)
            heir.replaced = ended.listens_at
            for name in ("meet", "one that it did not have"):
                await heir.add_binary_stream_handler(name, serve)
        finally:
            await daemon.shutdown()

    asyncio.run(asyncio.wait_for(take_over(), 3 * LIMIT_S))
