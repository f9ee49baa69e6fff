"""Answers the requests of others: tell, ask, get, put, hello and call back, each on its own stream.

Everything is bounded: the number of streams and uploads for each peer and for all strangers
together, the bytes sent per second for each peer, and the size and duration of what is read. The
side that asked closes the stream: if this end does, p2pd may lose the last part of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dipaco.base.blocking import run_blocking
from dipaco.base.errors import DipacoError, IntegrityError
from dipaco.base.files import TEMPORARY_SUFFIX, hold
from dipaco.base.refusals import Refusals
from dipaco.base.repetition import Complaints
from dipaco.base.token_bucket import Budget
from dipaco.peer.exchange.contact.hello import SOFTWARE
from dipaco.peer.exchange.contact.reachability import CallingBack
from dipaco.peer.exchange.files.content import OpenContent, opened
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.exchange.streams.messages import (
    TURNED_AWAY,
    AskReply,
    AskRequest,
    Beginning,
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
    read_beginning,
)
from dipaco.peer.exchange.streams.places import Place, Places
from dipaco.peer.exchange.streams.transport import Stream, Transport
from dipaco.protocol.allowances import (
    ANSWER_SHARE,
    ASKED,
    REQUEST_COST_BYTES,
    SENT,
    STREAMS,
    UPLOADS,
    Asker,
    Standing,
)
from dipaco.protocol.chain.steps import Row
from dipaco.protocol.member.events import Told
from dipaco.protocol.plan import PROTOCOL_VERSION

from .served_run import NO_ANSWER, ServedRun

logger = logging.getLogger("dipaco.peer.exchange.responder")

REQUEST_TIMEOUT_S, _WRITE_TIMEOUT_S, _CLOSE_TIMEOUT_S = 10.0, 60.0, 30.0
_RETRY_AFTER_S = 1.0
_READ_BYTES, _CHUNK_BYTES = 2**20, 2**17
# What would have to wait longer than this is not sent.
LONGEST_WAIT_S = 60.0
# A file that is put has to come at this rate at least.
LEAST_PUT_BYTES_S, PUT_GRACE_S = 2.0**14, 30.0
_COMPLAINT_PERIOD_S, _MAX_COMPLAINTS = 60.0, 256
# For files whose bytes are still coming.
_PUT_PREFIX = ".put-"


class Responder:
    """Answers streams. Lives on the exchange's event loop."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.run: ServedRun | None = None
        self.on_told: Callable[[Told], None] = lambda told: None
        """Called with the good rows and steps that another peer tells. Returns at once."""
        self._calling = CallingBack()
        self._asked, self._sent = Budget(ASKED), Budget(SENT)
        self._streams = Places(STREAMS, self._asked.debt_s)
        self._uploads = Places(UPLOADS, self._sent.debt_s)
        self._refusals = Refusals()
        self._complaints = Complaints(_COMPLAINT_PERIOD_S, _MAX_COMPLAINTS)

    def serve(self, run: ServedRun) -> None:
        """Answer about this run from now on."""
        self.run, self._transport.admission = run, run.admission

    def _asker(self, stream: Stream) -> Asker:
        """Return who pays for what is asked on a stream."""
        run = self.run
        if run is None or not run.check.is_in(stream.peer):
            return Asker(Standing.STRANGER, stream.origin)
        is_contributor = run.contributors.has_contributed(stream.peer)
        return Asker(Standing.CONTRIBUTOR if is_contributor else Standing.ADMITTED, stream.peer)

    async def handle(self, stream: Stream) -> None:
        """Answer one stream."""
        place = self._streams.take(self._asker(stream), stream.abort)
        if place is None:
            await self._refuse(stream)
            return
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                beginning = await read_beginning(stream)
                received_s = time.time()
                place = self._known_by(beginning, place, stream)
                cost = beginning.size_bytes + REQUEST_COST_BYTES
                await self._pay(self._asked, place.asker, cost, REQUEST_TIMEOUT_S)
                left = beginning.size_bytes - len(beginning.data)
                if beginning.is_of_members and place.asker.standing is Standing.STRANGER:
                    await _turn_away(stream, left)
                    return
                data = beginning.data + await stream.read_exactly(left)
            place.moved(len(data))
            self._refusals.answered(stream.peer)
            # What this peer tells and asks by itself comes first.
            stream.rank = Standing.CONTRIBUTOR - place.asker.standing
            await self._answer(stream, decode_request(data), received_s, place)
            await asyncio.wait_for(stream.read(1), _CLOSE_TIMEOUT_S)
            stream.close()
        except MessageError as error:
            level = self._complaints.level(stream.peer)
            logger.log(level, "refused a message from %s: %s", stream.peer, error)
            stream.close()
        except _Refused:
            await self._refuse(stream)
        except (TimeoutError, OSError, EOFError, RuntimeError, DipacoError) as error:
            logger.debug("a stream of %s ended: %r", stream.peer, error)
            stream.abort()
        except BaseException:
            stream.abort()  # Otherwise the other side waits until its limit.
            raise
        finally:
            self._streams.give_back(place)

    def _known_by(self, beginning: Beginning, place: Place, stream: Stream) -> Place:
        """Return the place of a request by the admission that it shows. Raises `_Refused`."""
        if place.asker.standing is not Standing.STRANGER or self.run is None:
            return place
        if beginning.admission is None or not self.run.check.admit(
            stream.peer, beginning.admission
        ):
            return place
        self._streams.give_back(place)
        found = self._streams.take(self._asker(stream), stream.abort)
        if found is None:
            raise _Refused
        return found

    async def _refuse(self, stream: Stream) -> None:
        """Break a stream off, and the connection of a stranger that goes on opening others."""
        stream.abort()
        is_stranger = self._asker(stream).standing is Standing.STRANGER
        if self._refusals.refused(stream.peer) and is_stranger:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._transport.disconnect(stream.peer), _CLOSE_TIMEOUT_S)

    async def _pay(
        self, budget: Budget[Standing], asker: Asker, count: int, longest_s: float
    ) -> None:
        """Wait until the payer may use so many bytes. Raises `_Refused` when that takes too
        long."""
        try:
            await budget.pay(asker, count, longest_s)
        except TimeoutError:
            raise _Refused from None

    async def _answer(
        self, stream: Stream, request: Request, received_s: float, place: Place
    ) -> None:
        match request:
            case HelloRequest():
                await self._reply(stream, place, self._hello(received_s))
            case CallBackRequest():
                seen = (await self._transport.connected()).get(stream.peer, ())
                answer = await self._calling.answer(stream.peer, request.addresses, seen)
                await self._reply(stream, place, answer)
            case TellRequest():
                await self._reply(stream, place, TellReply())
                told = await run_blocking(self._told, stream.peer, request)
                if told is not None:
                    self.on_told(told)
            case AskRequest():
                reply = await run_blocking(self._asked_for, request)
                sent_bytes = await self._reply(stream, place, reply)
                self._asked.take(place.asker, sent_bytes // ANSWER_SHARE)
            case GetRequest():
                await self._get(stream, request, place)
            case PutRequest():
                await self._put(stream, request, place)

    def _told(self, peer: str, request: TellRequest) -> Told | None:
        return None if self.run is None else self.run.told(peer, request)

    def _asked_for(self, request: AskRequest) -> AskReply:
        return NO_ANSWER if self.run is None else self.run.answer(request)

    async def _reply(self, stream: Stream, place: Place, message: Message) -> int:
        """Send a reply, and return its size."""
        data = framed(message)
        await self._pay(self._sent, place.asker, len(data), LONGEST_WAIT_S)
        await stream.write(data, _WRITE_TIMEOUT_S)
        return len(data)

    def _hello(self, received_s: float) -> HelloReply:
        return HelloReply(
            protocol=PROTOCOL_VERSION,
            software=SOFTWARE[:64],
            received_s=received_s,
            sent_s=time.time(),
            run=self.run.run_id if self.run is not None else None,
        )

    # -- get

    async def _get(self, stream: Stream, request: GetRequest, place: Place) -> None:
        upload = None
        if self._transport.uplink.serves:
            upload = self._uploads.take(place.asker, stream.abort)
        if upload is None:
            await self._reply(stream, place, GetReply(status="busy", retry_after_s=_RETRY_AFTER_S))
            return
        try:
            async with opened(self.run, request.sha256.hex()) as content:
                if content is None:
                    await self._reply(stream, place, GetReply(status="absent"))
                elif request.offset > content.size_bytes:
                    beyond = GetReply(status="beyond", total_bytes=content.size_bytes)
                    await self._reply(stream, place, beyond)
                else:
                    await self._reply(
                        stream, place, GetReply(status="ok", total_bytes=content.size_bytes)
                    )
                    await self._send(content, request.offset, stream, (place, upload))
        finally:
            self._uploads.give_back(upload)

    async def _send(
        self, content: OpenContent, offset: int, stream: Stream, places: tuple[Place, Place]
    ) -> None:
        while offset < content.size_bytes:
            data = await content.read(offset, min(_READ_BYTES, content.size_bytes - offset))
            if not data:
                raise EOFError("the file was cut off while it was served")
            view = memoryview(data)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                began_s = time.monotonic()
                await self._pay(self._sent, places[0].asker, len(chunk), LONGEST_WAIT_S)
                waited_s = time.monotonic() - began_s
                waited_s += await stream.write(chunk, _WRITE_TIMEOUT_S)
                for place in places:
                    place.excuse(waited_s)
                    place.moved(len(chunk))
            offset += len(view)

    # -- put

    async def _put(self, stream: Stream, request: PutRequest, place: Place) -> None:
        run = self.run
        row = None if run is None else await run_blocking(run.row_to_store, stream.peer, request)
        if run is None or row is None or run.contributions is None:
            await self._reply(stream, place, PutReply(status="refused"))
            return
        try:
            status = await self._take_file(stream, run.contributions, row, place)
        finally:
            # The caller does not tell this peer of the row besides, and another may have the file.
            self.on_told(Told(stream.peer, row.module, (row,)))
        await self._reply(stream, place, PutReply(status=status))

    async def _take_file(
        self, stream: Stream, files: ContributionFiles, row: Row, place: Place
    ) -> Literal["stored", "refused", "full"]:
        if await run_blocking(files.find, row.file) is not None:
            return "stored"
        if not await run_blocking(files.promise, row):
            return "full"
        try:
            await self._reply(stream, place, PutReply(status="send"))
            limit_s = PUT_GRACE_S + row.bytes / LEAST_PUT_BYTES_S
            is_stored = await asyncio.wait_for(_receive(stream, files, row, place), limit_s)
        finally:
            files.release(row)
        return "stored" if is_stored else "refused"


class _Refused(Exception):
    """The caller has used up what it may ask for."""


async def _turn_away(stream: Stream, left_bytes: int) -> None:
    """Refuse a request without reading the rest of it. The caller closes the stream."""
    await stream.write(TURNED_AWAY, _WRITE_TIMEOUT_S)
    while data := await stream.read(_CHUNK_BYTES):
        left_bytes -= len(data)
        if left_bytes < 0:
            break
    stream.close()


async def _receive(stream: Stream, files: ContributionFiles, row: Row, place: Place) -> bool:
    """Write what is put to the disk; returns whether it is what the row names."""
    handle, name = await run_blocking(_scratch, files)
    hasher, left, path = hashlib.sha256(), row.bytes, Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            while left:
                data = await stream.read(min(left, _CHUNK_BYTES))
                if not data:
                    return False
                left -= len(data)
                place.moved(len(data))
                hasher.update(data)
                await run_blocking(file.write, data)
        if hasher.hexdigest() != row.file:
            return False
        try:
            await run_blocking(lambda: files.install(row, path, is_mail=True))
        except IntegrityError:
            return False
        return True
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _scratch(files: ContributionFiles) -> tuple[int, str]:
    folder = files.kept.folder
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(TEMPORARY_SUFFIX, _PUT_PREFIX, folder)
    hold(handle)
    return handle, name
