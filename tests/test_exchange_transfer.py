"""Content between two real nodes: whole, resumed, cut off, wrong, at once, and hostile readers."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import IntegrityError, NetworkError
from dipaco.peer.exchange import service, upload_slots
from dipaco.peer.exchange.messages import FetchReply, FetchRequest, write_message
from hivemind.p2p import PeerID
from support.exchange_nodes import CONTENT, NOBODY, SHA, Held, Nodes, fetch
from support.stream_writer import StreamWriter

pytestmark = pytest.mark.swarm

# Whoever waits longer waits for something that does not come.
LIMIT_S = 90.0


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_bytes_and_files_arrive(nodes: Nodes, blobs: BlobStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(CONTENT[::-1])
    server, client = nodes.serving(Held(CONTENT, file, b"")), nodes.asking()
    for data in (CONTENT, CONTENT[::-1], b""):
        sha = hashlib.sha256(data).hexdigest()
        assert fetch(client, blobs, server.peer_id, sha=sha).read_bytes() == data
    assert client.bytes_down == server.bytes_up == 2 * len(CONTENT)


def test_a_fetch_resumes(nodes: Nodes, blobs: BlobStore) -> None:
    server, client = nodes.serving(Held(CONTENT)), nodes.asking()
    blobs.partial_path(SHA).write_bytes(CONTENT[:1_000_001])
    assert fetch(client, blobs, server.peer_id).read_bytes() == CONTENT
    assert client.bytes_down == len(CONTENT) - 1_000_001


def test_a_file_that_is_cut_off_while_served(
    nodes: Nodes, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    held = Held(file)
    monkeypatch.setattr(service, "READ_BYTES", service.CHUNK_BYTES)
    server, client = nodes.serving(held), nodes.asking()
    send = service.OpenContent.read

    async def cut_off(self: service.OpenContent, offset: int, count: int) -> bytes | memoryview:
        return b"" if offset else await send(self, offset, count)

    monkeypatch.setattr(service.OpenContent, "read", cut_off)
    with pytest.raises(NetworkError, match="broke off"):
        fetch(client, blobs, server.peer_id)
    arrived = blobs.partial_path(SHA).stat().st_size
    assert 0 < arrived <= 3 * service.CHUNK_BYTES
    monkeypatch.setattr(service.OpenContent, "read", send)
    assert fetch(client, blobs, server.peer_id).read_bytes() == CONTENT
    assert client.bytes_down == len(CONTENT)


def test_wrong_content_is_refused_and_its_holder_named(
    nodes: Nodes, blobs: BlobStore, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held()
    held.contents[SHA] = CONTENT[:-1] + b"?"
    server, client = nodes.serving(held), nodes.asking()
    with pytest.raises(IntegrityError):
        fetch(client, blobs, server.peer_id)
    assert not blobs.has(SHA)
    assert len([r for r in caplog.records if f"peer {server.peer_id}: refused" in r.message]) == 1


def test_oversized_content_is_refused(nodes: Nodes, blobs: BlobStore) -> None:
    server, client = nodes.serving(Held(CONTENT)), nodes.asking()
    with pytest.raises(IntegrityError, match="at most 1000"):
        fetch(client, blobs, server.peer_id, max_bytes=1000)
    assert client.bytes_down == 0


def test_absent_unreachable_and_nonsensical_holders(nodes: Nodes, blobs: BlobStore) -> None:
    server, client = nodes.serving(Held()), nodes.asking()
    with pytest.raises(NetworkError, match="it does not hold it"):
        fetch(client, blobs, server.peer_id, NOBODY, "not a peer id")


def test_more_uploads_than_slots_are_told_busy_and_come_back(
    nodes: Nodes, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_AFTER_S", 0.2)
    contents = [bytes([i]) * 600_000 for i in range(4)]
    held = Held(*contents)
    told_busy = threading.Event()
    reply, found = service._reply, held.lookup

    async def take_note(writer: asyncio.StreamWriter, message: FetchReply) -> None:
        await reply(writer, message)
        if message.status == "busy":
            told_busy.set()

    def wait_for_the_next(sha256: str) -> Path | bytes | None:
        assert told_busy.wait(LIMIT_S)
        return found(sha256)

    monkeypatch.setattr(service, "_reply", take_note)
    held.lookup = wait_for_the_next  # type: ignore[method-assign]
    server, client = nodes.serving(held, max_uploads=1), nodes.asking()
    paths = []

    def one(data: bytes) -> None:
        sha = hashlib.sha256(data).hexdigest()
        paths.append(fetch(client, blobs, server.peer_id, sha=sha))

    threads = [threading.Thread(target=one, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(path.read_bytes() for path in paths) == contents


def test_uploads_of_one_content_open_it_once(
    nodes: Nodes, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(CONTENT)
    both_asked = threading.Barrier(2 + 1)
    answer, found = service.ExchangeService._answer_fetch, held.lookup

    async def meet(*arguments: Any) -> None:
        threading.Thread(target=both_asked.wait, args=(LIMIT_S,), daemon=True).start()
        await answer(*arguments)

    def wait_for_both(sha256: str) -> Path | bytes | None:
        both_asked.wait(LIMIT_S)
        return found(sha256)

    monkeypatch.setattr(service.ExchangeService, "_answer_fetch", meet)
    held.lookup = wait_for_both  # type: ignore[method-assign]
    server, client = nodes.serving(held), nodes.asking()
    stores = [blobs, BlobStore(tmp_path / "other")]
    threads = [threading.Thread(target=fetch, args=(client, s, server.peer_id)) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert all(store.verify(SHA) for store in stores)
    assert held.lookups == 1


def test_serving_goes_on_while_the_main_thread_computes(nodes: Nodes, blobs: BlobStore) -> None:
    server, client = nodes.serving(Held(CONTENT * 4)), nodes.asking()
    sha = hashlib.sha256(CONTENT * 4).hexdigest()
    thread = threading.Thread(
        target=fetch, args=(client, blobs, server.peer_id), kwargs={"sha": sha}
    )
    thread.start()
    deadline = time.monotonic() + LIMIT_S
    while thread.is_alive() and time.monotonic() < deadline:
        sum(range(10_000))
    assert blobs.verify(sha)


def test_a_malformed_fetch_gets_no_bytes(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    server, client = nodes.serving(Held(CONTENT)), nodes.asking()

    async def send(data: bytes) -> bytes:
        _, reader, writer = await client._connection().call_binary_stream_handler(
            PeerID.from_base58(server.peer_id), service.FETCH_HANDLE
        )
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
        return answer

    for data in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"\x00\x00\x00\x01\x80"):
        assert client._thread.call(send(data), 2 * LIMIT_S) == b""
    assert "refused a FetchRequest" in caplog.text
    assert server.bytes_up == 0


def test_a_reader_that_stops_gives_its_slot_back(
    nodes: Nodes, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CHUNK_TIMEOUT_S", 2.0)
    large = CONTENT * 10
    sha = hashlib.sha256(large).hexdigest()
    server, client = nodes.serving(Held(large), max_uploads=1), nodes.asking()

    async def stall() -> Any:
        return await client.open_stream(server.peer_id, sha, 0)

    stream = client._thread.call(stall(), LIMIT_S)
    assert fetch(client, blobs, server.peer_id, sha=sha).read_bytes() == large
    client._thread.call(asyncio.sleep(0, stream.close()), LIMIT_S)


def test_a_reader_that_drips_loses_its_slot_to_who_asks(
    nodes: Nodes, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CHUNK_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(upload_slots, "GRACE_S", 0.0)
    monkeypatch.setattr(upload_slots, "WANTED_RATE_BYTES_S", 2**50)
    large = CONTENT * 10
    sha = hashlib.sha256(large).hexdigest()
    server, client = nodes.serving(Held(large), max_uploads=1), nodes.asking()

    async def stall() -> Any:
        return await client.open_stream(server.peer_id, sha, 0)

    stream = client._thread.call(stall(), LIMIT_S)
    assert fetch(client, blobs, server.peer_id, sha=sha).read_bytes() == large
    client._thread.call(asyncio.sleep(0, stream.close()), LIMIT_S)


def test_who_has_asked_closes_the_stream() -> None:
    """When the other end does, p2pd may lose what is under way in it."""

    async def serve() -> None:
        serving = service.ExchangeService(software="test", protocol_version=1)
        serving.set_source(Held(b"content"), "run")
        sha = hashlib.sha256(b"content").hexdigest()
        reader, request, writer = asyncio.StreamReader(), StreamWriter(), StreamWriter()
        write_message(cast(Any, request), FetchRequest(sha256=sha, offset=0))
        reader.feed_data(request.data)
        stream: Any = SimpleNamespace(peer_id=PeerID.from_base58(NOBODY))
        task = asyncio.create_task(serving._serve_fetch(stream, reader, cast(Any, writer)))
        while not writer.data.endswith(b"content") and not task.done():
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not writer.closed
        reader.feed_eof()
        await task
        assert writer.closed

    asyncio.run(asyncio.wait_for(serve(), LIMIT_S))


def test_many_streams_of_one_peer_are_not_held_open(
    nodes: Nodes, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "REQUEST_TIMEOUT_S", 3600.0)
    server, client = nodes.serving(Held(CONTENT)), nodes.asking()
    most = service.MAX_STREAMS_PER_PEER

    writers = []

    async def open_many() -> list[asyncio.StreamReader]:
        readers = []
        for _ in range(most + 4):
            _, reader, writer = await client._connection().call_binary_stream_handler(
                PeerID.from_base58(server.peer_id), service.FETCH_HANDLE
            )
            writer.write(b"\0")
            readers.append(reader)
            writers.append(writer)
        return readers

    async def ended(readers: list[asyncio.StreamReader]) -> int:
        """How many of the streams end; the others stay open."""
        reads = {asyncio.ensure_future(reader.read()) for reader in readers}
        done: set[Any] = set()
        while len(done) < len(readers) - most:
            more, reads = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        for read in reads:
            read.cancel()
        return len(done)

    readers = client._thread.call(open_many(), LIMIT_S)
    assert client._thread.call(ended(readers), LIMIT_S) == 4

    async def close_all() -> None:
        for writer in writers:
            writer.close()

    client._thread.call(close_all(), LIMIT_S)
