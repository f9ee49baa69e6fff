"""What others are answered: tell, ask, get, put, hello and call back, each on a stream of its own.

Everything is bounded: streams and uploads in number, of each peer and of strangers together; what
is sent in bytes a second for each peer; what is read in size and time. The side that asked closes
the stream: when this end does, p2pd may lose the last of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dipaco.base.repetition import Complaints
from dipaco.protocol.chain import Row, Step, pack_row, pack_step, unpack_row, unpack_step
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.records import HeldState

from .chain_store import ChainStore
from .content import ContentSource, OpenContent, Parts, opened
from .contribution_files import PUT_PREFIX, ContributionFiles
from .hello import Greeting
from .limits import Bounds, ByteBuckets, Slot, Slots
from .loop_thread import run_blocking
from .messages import (
    MAX_REQUEST_BYTES,
    AskReply,
    AskRequest,
    CallBackRequest,
    GetReply,
    GetRequest,
    HelloReply,
    HelloRequest,
    Message,
    MessageError,
    PutReply,
    PutRequest,
    Request,
    TellReply,
    TellRequest,
    decode_request,
    framed,
    read_frame,
)
from .reachability import CallingBack
from .transport import Stream, Transport
from .verify import RowCheck

logger = logging.getLogger("dipaco.peer.exchange.service")

REQUEST_TIMEOUT_S, WRITE_TIMEOUT_S, CLOSE_TIMEOUT_S = 10.0, 60.0, 30.0
STREAMS = Bounds(most=256, most_of_a_peer=16, most_of_strangers=64, most_of_a_stranger=4, grace_s=5)
UPLOADS = Bounds(most=16, most_of_a_peer=4, most_of_strangers=6, most_of_a_stranger=2, grace_s=20)
RETRY_AFTER_S = 1.0
READ_BYTES, CHUNK_BYTES = 2**20, 2**17
# What one peer is sent: so much at once, and so much a second. A state of 400 MB takes less than
# a minute.
BURST_BYTES, RATE_BYTES_S, LONGEST_WAIT_S = 2.0**29, 2.0**24, 60.0
# What one peer makes us do, by the bytes of what it asks; also a short request costs some.
ASKED_BURST_BYTES, ASKED_RATE_BYTES_S, REQUEST_COST_BYTES = 2.0**22, 2.0**16, 512
# All who are not admitted have one such bucket together, beside their own.
STRANGERS = "strangers"
# A file that is put has to come at this rate at least.
LEAST_PUT_BYTES_S, PUT_GRACE_S = 2.0**14, 30.0
COMPLAINT_PERIOD_S, MAX_COMPLAINTS = 60.0, 256


@dataclass(frozen=True)
class ServedRun:
    """What others are answered about a run, and what their answers are checked by."""

    run_id: str
    content: ContentSource
    """States and blobs by hash. Contributions are looked up beside it."""
    chains: ChainStore
    check: RowCheck
    contributions: ContributionFiles | None = None
    """None: nothing is taken from others (`put` is refused)."""
    admission: bytes | None = None
    """This peer's own; None for a process that only reads."""

    def lookup(self, sha256: str) -> Path | Parts | None:
        """Return what is served by hash."""
        if self.contributions is not None:
            found = self.contributions.find(sha256)
            if found is not None:
                return found
        return self.content.lookup(sha256)


OnTold = Callable[[str, str, tuple[Row, ...], tuple[Step, ...], bool], None]
"""Hears the peer, the module, rows, steps, and whether a copy is to be kept. Returns at once."""


class ExchangeService:
    """Answers streams. Lives on the exchange's event loop."""

    def __init__(self, transport: Transport, me: Greeting) -> None:
        self._transport, self._me = transport, me
        self.system_time: Callable[[], float] = time.time
        self.run: ServedRun | None = None
        self.on_told: OnTold = lambda peer, module, rows, steps, keep: None
        self._calling = CallingBack()
        self._streams, self._uploads = Slots(STREAMS), Slots(UPLOADS)
        self._sent = ByteBuckets(BURST_BYTES, RATE_BYTES_S)
        self._asked = ByteBuckets(ASKED_BURST_BYTES, ASKED_RATE_BYTES_S)
        self._complaints = Complaints(COMPLAINT_PERIOD_S, MAX_COMPLAINTS)

    @property
    def greeting(self) -> Greeting:
        """What this node says of itself."""
        return self._me if self.run is None else replace(self._me, admission=self.run.admission)

    def serve(self, run: ServedRun) -> None:
        """Answer about this run from now on."""
        self.run = run

    def _is_stranger(self, peer: str) -> bool:
        return self.run is None or not self.run.check.is_in(peer)

    async def handle(self, stream: Stream) -> None:
        """Answer one stream."""
        slot = self._streams.take(stream.peer, self._is_stranger(stream.peer), stream.abort)
        if slot is None:
            stream.abort()
            return
        try:
            data = await asyncio.wait_for(read_frame(stream, MAX_REQUEST_BYTES), REQUEST_TIMEOUT_S)
            received_s = self.system_time()
            slot.moved(len(data))
            await self._pay(self._asked, stream.peer, len(data) + REQUEST_COST_BYTES)
            await self._answer(stream, decode_request(data), received_s, slot)
            await asyncio.wait_for(stream.read(1), CLOSE_TIMEOUT_S)
            stream.close()
        except MessageError as error:
            level = self._complaints.level(stream.peer)
            logger.log(level, "refused a message from %s: %s", stream.peer, error)
            stream.close()
        except (TimeoutError, OSError, EOFError, RuntimeError) as error:
            logger.debug("a stream of %s ended: %r", stream.peer, error)
            stream.abort()
        except asyncio.CancelledError:
            stream.abort()
            raise
        finally:
            self._streams.give_back(slot)

    async def _pay(self, buckets: ByteBuckets, peer: str, count: int) -> None:
        """Wait until a peer may have so much. Raises `TimeoutError` when that takes too long."""
        await buckets.pay(peer, count, LONGEST_WAIT_S)
        if self._is_stranger(peer):
            await buckets.pay(STRANGERS, count, LONGEST_WAIT_S)

    async def _answer(
        self, stream: Stream, request: Request, received_s: float, slot: Slot
    ) -> None:
        match request:
            case HelloRequest():
                await self._reply(stream, self._hello(stream.peer, request, received_s))
            case CallBackRequest():
                seen = (await self._transport.connected()).get(stream.peer, ())
                answer = await self._calling.answer(stream.peer, request.addresses, seen)
                await self._reply(stream, answer)
            case TellRequest():
                await self._reply(stream, TellReply())
                run = self.run
                if run is not None and request.run == run.run_id:
                    await self._hear(run, stream.peer, request)
            case AskRequest():
                await self._reply(stream, await run_blocking(self._told, request))
            case GetRequest():
                await self._get(stream, request, slot)
            case PutRequest():
                await self._put(stream, request, slot)

    async def _hear(self, run: ServedRun, peer: str, request: TellRequest) -> None:
        """Take in what is good of what a peer tells, and pass it on. A stranger is not heard."""
        if peer in request.admissions:
            run.check.admit(peer, request.admissions[peer])
        if self._is_stranger(peer):
            logger.debug("%s tells of %s and is not admitted", peer, request.module)
            return
        rows, steps = await run_blocking(checked, run, request.module, request)
        if rows or steps:
            is_whole = len(steps) == len(request.steps)
            self.on_told(peer, request.module, rows, steps, request.keep and is_whole)

    async def _reply(self, stream: Stream, message: Message) -> None:
        data = framed(message)
        await self._pay(self._sent, stream.peer, len(data))
        await stream.write(data, WRITE_TIMEOUT_S)

    def _hello(self, peer: str, request: HelloRequest, received_s: float) -> HelloReply:
        if request.admission is not None and self.run is not None:
            self.run.check.admit(peer, request.admission)
        return HelloReply(
            protocol=self._me.protocol,
            software=self._me.software[:64],
            received_s=received_s,
            sent_s=self.system_time(),
            run=self.run.run_id if self.run is not None else None,
        )

    # -- ask

    def _told(self, request: AskRequest) -> AskReply:
        run = self.run
        if run is None or request.run != run.run_id or request.module not in run.check.modules:
            return AskReply(steps=[], rows=[], has_more=False, held=None, admissions={})
        told = run.chains.answer(request.module, [name.hex() for name in request.locator])
        return AskReply(
            steps=[pack_step(step) for step in told.steps],
            rows=[pack_row(row) for row in told.rows],
            has_more=told.has_more,
            held=HeldState.of(told.held) if told.held is not None else None,
            admissions=run.chains.admissions_of(peers_of(told.rows, told.steps)),
        )

    # -- get

    async def _get(self, stream: Stream, request: GetRequest, slot: Slot) -> None:
        upload = None
        if self._transport.uplink.serves:
            upload = self._uploads.take(stream.peer, self._is_stranger(stream.peer), stream.abort)
        if upload is None:
            await self._reply(stream, GetReply(status="busy", retry_after_s=RETRY_AFTER_S))
            return
        try:
            async with opened(self.run, request.sha256.hex()) as content:
                if content is None:
                    await self._reply(stream, GetReply(status="absent"))
                elif request.offset > content.size_bytes:
                    beyond = GetReply(status="beyond", total_bytes=content.size_bytes)
                    await self._reply(stream, beyond)
                else:
                    await self._reply(stream, GetReply(status="ok", total_bytes=content.size_bytes))
                    await self._send(content, request.offset, stream, (slot, upload))
        finally:
            self._uploads.give_back(upload)

    async def _send(
        self, content: OpenContent, offset: int, stream: Stream, slots: tuple[Slot, Slot]
    ) -> None:
        while offset < content.size_bytes:
            data = await content.read(offset, min(READ_BYTES, content.size_bytes - offset))
            if not data:
                raise EOFError("the file was cut off while it was served")
            view = memoryview(data)
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                began_s = time.monotonic()
                await self._pay(self._sent, stream.peer, len(chunk))
                waited_s = time.monotonic() - began_s
                waited_s += await stream.write(chunk, WRITE_TIMEOUT_S)
                for slot in slots:
                    slot.excuse(waited_s)
                    slot.moved(len(chunk))
            offset += len(view)

    # -- put

    async def _put(self, stream: Stream, request: PutRequest, slot: Slot) -> None:
        run = self.run
        row = await run_blocking(_row_to_store, run, stream.peer, request)
        if run is None or row is None or run.contributions is None:
            await self._reply(stream, PutReply(status="refused"))
            return
        files = run.contributions
        if files.find(row.file) is not None:
            await self._reply(stream, PutReply(status="stored"))
            return
        if not files.promise(row):
            await self._reply(stream, PutReply(status="full"))
            return
        try:
            await self._reply(stream, PutReply(status="send"))
            limit_s = PUT_GRACE_S + row.bytes / LEAST_PUT_BYTES_S
            is_stored = await asyncio.wait_for(_receive(stream, files, row, slot), limit_s)
        finally:
            files.release(row)
        await self._reply(stream, PutReply(status="stored" if is_stored else "refused"))


async def _receive(stream: Stream, files: ContributionFiles, row: Row, slot: Slot) -> bool:
    """Write what is put to the disk; returns whether it is what the row names."""
    handle, name = await run_blocking(_scratch, files)
    hasher, left, path = hashlib.sha256(), row.bytes, Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            while left:
                data = await stream.read(min(left, CHUNK_BYTES))
                if not data:
                    return False
                left -= len(data)
                slot.moved(len(data))
                hasher.update(data)
                await run_blocking(file.write, data)
        if hasher.hexdigest() != row.file:
            return False
        await run_blocking(lambda: files.install(row, path, is_mail=True))
        return True
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _scratch(files: ContributionFiles) -> tuple[int, str]:
    files.folder.mkdir(parents=True, exist_ok=True)
    return tempfile.mkstemp(dir=files.folder, prefix=PUT_PREFIX)


def _row_to_store(run: ServedRun | None, peer: str, request: PutRequest) -> Row | None:
    """Return the row of a put if its file may be stored: it is of who puts it, and admitted."""
    if run is None or request.run != run.run_id:
        return None
    try:
        row = unpack_row(request.row)
    except RecordError as error:
        logger.debug("a put of %s: %s", peer, error)
        return None
    if row.peer != peer:
        return None
    good = run.check.good_rows(row.module, (row,), request.admissions)
    _keep(run, good, (), request.admissions)
    return good[0] if good else None


# -- what others say of rows and steps


def peers_of(rows: Iterable[Row], steps: Iterable[Step]) -> set[str]:
    """Return whose rows these are, or are in these steps."""
    return {row.peer for row in rows}.union(*(step.peers for step in steps))


def unpack_rows(values: list[object]) -> tuple[Row, ...]:
    """Read rows that came from elsewhere, leaving out what are none."""
    found = []
    for value in values:
        with contextlib.suppress(RecordError):
            found.append(unpack_row(value))
    return tuple(found)


def unpack_steps(values: list[object]) -> tuple[Step, ...]:
    """Read steps that came from elsewhere, up to the first that is none."""
    found = []
    for value in values:
        try:
            found.append(unpack_step(value))
        except RecordError:
            break
    return tuple(found)


def checked(
    run: ServedRun, module: str, said: TellRequest | AskReply
) -> tuple[tuple[Row, ...], tuple[Step, ...]]:
    """Return the good rows and steps of what a peer says of a module, and take them in."""
    if module not in run.check.modules:
        return (), ()
    rows = run.check.good_rows(module, unpack_rows(said.rows), said.admissions)
    steps = run.check.good_steps(module, unpack_steps(said.steps), said.admissions)
    _keep(run, rows, steps, said.admissions)
    return rows, steps


def _keep(
    run: ServedRun, rows: tuple[Row, ...], steps: tuple[Step, ...], admissions: Mapping[str, bytes]
) -> None:
    peers = peers_of(rows, steps)
    run.chains.note_admissions({p: a for p, a in admissions.items() if p in peers})
    run.chains.add_verified(steps)
    run.chains.note_rows(rows)
