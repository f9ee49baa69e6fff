"""The exchange: tell, ask, get and put, a synchronous facade over one thread with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dipaco.base.blobs import BlobStore
from dipaco.base.blocking import run_blocking
from dipaco.base.errors import (
    DipacoError,
    IntegrityError,
    NetworkError,
    ProtocolVersionError,
    StorageError,
)
from dipaco.peer.exchange.contact.clock import ClockSample
from dipaco.peer.exchange.contact.hello import Hello, clock_samples, say_hello
from dipaco.peer.exchange.files.contribution_files import check_is_of, mapped
from dipaco.peer.exchange.files.download_slots import DownloadSlots
from dipaco.peer.exchange.files.mirrors import MirrorSource
from dipaco.peer.exchange.files.partial_file import MAX_UNFINISHED, prune_partial_files
from dipaco.peer.exchange.files.refused_sources import RefusedSources
from dipaco.peer.exchange.files.transfer import (
    ContentAbsent,
    ContentStream,
    OffsetBeyondEnd,
    OnProgress,
    Source,
    SourceBusy,
    download,
    no_progress,
    spread,
)
from dipaco.peer.exchange.streams.calls import PROTOCOL_NAME, TurnedAway, begin, call
from dipaco.peer.exchange.streams.loop_thread import LoopThread
from dipaco.peer.exchange.streams.messages import (
    MAX_TOLD_ROWS,
    MAX_TOLD_STEPS,
    AskReply,
    AskRequest,
    CallBackReply,
    CallBackRequest,
    GetReply,
    GetRequest,
    PutReply,
    PutRequest,
    TellReply,
    TellRequest,
    decode,
    read_frame,
)
from dipaco.peer.exchange.streams.transport import Transport
from dipaco.protocol.chain.steps import Row, Step, pack_row, pack_step
from dipaco.protocol.member.events import Answered, Told

from .pages import Pages
from .responder import Responder
from .served_run import ServedRun, peers_of

logger = logging.getLogger("dipaco.peer.exchange.exchange")

CALL_TIMEOUT_S, _TELL_TIMEOUT_S, _CALL_BACK_TIMEOUT_S = 5.0, 10.0, 10.0
_STOP_TIMEOUT_S = 1.0
# Downloads at once: of contributions and what is wanted now, of everything, and from one peer.
_URGENT_AT_ONCE, _AT_ONCE = 8, 6
_URGENT_FROM_ONE, _FROM_ONE = 2, 4
_TELLS_AT_ONCE = 64
_CHUNK_BYTES = 2**17
# A contribution that nobody has yet is asked for again so soon, and then less and less often.
_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0


class Exchange:
    """One node's exchange. Thread-safe."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.uplink = transport.uplink
        """Counts what is sent and received."""
        self._responder = Responder(transport)
        self._thread = LoopThread("exchange", transport.check)
        self._slots = DownloadSlots(_AT_ONCE, _FROM_ONE)
        self._urgent_slots = DownloadSlots(_URGENT_AT_ONCE, _URGENT_FROM_ONE)
        self._refused = RefusedSources()
        self._pages = Pages()
        self._tells = asyncio.Semaphore(_TELLS_AT_ONCE)
        self._checking = ThreadPoolExecutor(2, thread_name_prefix="checking")
        self._gathering: dict[str, set[str]] = {}
        """By row: files that are on their way, with the peers that may have them."""
        self._named: dict[str, set[str]] = {}
        """By row: those of these peers that were named since its sources were asked last."""
        self._arrivals: dict[str, tuple[str, asyncio.Event]] = {}
        """By row: the hash of a file that is waited for."""

    # -- life

    def start(self) -> None:
        """Start to answer others. Raises `NetworkError`."""
        self._thread.start()
        self._thread.call(self._attach(), 60.0)

    def connect_again(self) -> None:
        """Answer others again after the network layer was started anew. Raises `NetworkError`."""
        self._thread.call(self._attach(), 60.0)

    async def _attach(self) -> None:
        await self._transport.start()
        await self._transport.serve(PROTOCOL_NAME, self._responder.handle)

    def stop(self) -> None:
        """Stop answering, within two seconds."""
        self._checking.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(Exception):
            self._thread.call(self._transport.close(), _STOP_TIMEOUT_S)
        self._thread.stop()

    def serve_run(self, run: ServedRun) -> None:
        """Answer about this run from now on, and ask others about it."""
        self._responder.serve(run)
        if run.contributions is not None:
            run.contributions.listen(self._has_come)

    def _has_come(self, sha256: str) -> None:
        """Look at once: a file is here, perhaps because its owner has put it."""

        async def wake() -> None:
            for wanted, arrival in self._arrivals.values():
                if wanted == sha256:
                    arrival.set()

        self._thread.spawn(wake())

    def listen(self, on_told: Callable[[Told], None]) -> None:
        """Tell of rows and steps that others tell, once they are checked; on another thread."""
        self._responder.on_told = on_told

    @property
    def peer_id(self) -> str:
        """This node's id."""
        return self._transport.peer_id

    def connected_peers(self) -> tuple[str, ...]:
        """Return the ids of the peers that are connected. Raises `NetworkError`."""
        return tuple(self._thread.call(self._transport.connected(), CALL_TIMEOUT_S + 5.0))

    @property
    def _run(self) -> ServedRun:
        run = self._responder.run
        if run is None:
            raise NetworkError("no run was joined yet")
        return run

    # -- hello and call back

    def hello(self, peer: str, timeout_s: float = CALL_TIMEOUT_S) -> Hello:
        """Say hello. Raises `NetworkError`, or `ProtocolVersionError` for another version."""
        return self._thread.call(say_hello(self._transport, peer, timeout_s), timeout_s + 1.0)

    def clock_samples(
        self, peers: Sequence[str], count: int, timeout_s: float
    ) -> dict[str, tuple[ClockSample, ...]]:
        """Measure the clocks of several peers at once; those that do not answer have none."""

        async def measure() -> list[tuple[ClockSample, ...]]:
            one = (clock_samples(self._transport, p, count, timeout_s) for p in peers)
            return await asyncio.gather(*one)

        return dict(zip(peers, self._thread.call(measure(), timeout_s + 2.0), strict=True))

    def call_back(self, peer: str, addresses: Sequence[str]) -> CallBackReply:
        """Ask a peer to call this one at these addresses. Raises `NetworkError`."""
        request = CallBackRequest(addresses=tuple(addresses)[:4])
        calling = call(self._transport, peer, request, CallBackReply, _CALL_BACK_TIMEOUT_S)
        return self._thread.call(calling, _CALL_BACK_TIMEOUT_S + 1.0)

    # -- tell and ask

    def tell(
        self,
        peers: Sequence[str],
        module: str,
        rows: Sequence[Row] = (),
        steps: Sequence[Step] = (),
        keep: bool = False,
    ) -> None:
        """Tell peers of rows and steps; returns at once, what does not arrive is not reported."""
        run = self._run
        # Hundreds that are gone would each keep those behind them waiting.
        peers = sorted(peers, key=lambda peer: not run.contributors.has_contributed(peer))
        rows, steps = rows[:MAX_TOLD_ROWS], steps[-MAX_TOLD_STEPS:]
        request = TellRequest(
            run=run.run_id,
            module=module,
            rows=[pack_row(row) for row in rows],
            steps=[pack_step(step) for step in steps],
            keep=keep,
            admissions=self._admissions(run, peers_of(rows, steps) | {self.peer_id}),
        )

        async def tell_all() -> None:
            await asyncio.gather(*(self._tell_one(run, peer, request) for peer in peers))

        self._thread.spawn(tell_all())

    def _admissions(self, run: ServedRun, peers: set[str]) -> dict[str, bytes]:
        found = run.chains.admissions_of(peers)
        if run.admission is not None and self.peer_id in peers:
            found[self.peer_id] = run.admission
        return found

    async def _tell_one(self, run: ServedRun, peer: str, request: TellRequest) -> None:
        try:
            async with self._tells:
                await call(self._transport, peer, request, TellReply, _TELL_TIMEOUT_S)
            run.contributors.called(peer, True)
        except (NetworkError, ProtocolVersionError) as error:
            logger.debug("%s was not told of %s: %s", peer, request.module, error)
            with contextlib.suppress(NetworkError):
                # While this node has no network layer, a silence says nothing of others.
                self._transport.check()
                run.contributors.called(peer, isinstance(error, TurnedAway))

    def ask(
        self, peer: str, module: str, locator: Sequence[str], timeout_s: float = CALL_TIMEOUT_S
    ) -> Answered | None:
        """Ask which steps come after some; blocks. The answer is checked.

        None: the peer is silent, talks nonsense, or is no longer admitted.
        """
        run = self._run
        if run.check.is_out(peer):
            return None
        request = AskRequest(
            run=run.run_id, module=module, locator=[bytes.fromhex(name) for name in locator[:64]]
        )

        async def ask() -> Answered:
            reply = await call(self._transport, peer, request, AskReply, timeout_s)
            answer = await run_blocking(run.answered, peer, module, reply)
            has_more = answer.has_more and self._pages.is_worth_more(
                peer, module, locator[:1], answer.steps
            )
            return dataclasses.replace(answer, has_more=has_more)

        try:
            return self._thread.call(ask(), timeout_s + 5.0)
        except (NetworkError, ProtocolVersionError) as error:
            logger.debug("%s does not answer about %s: %s", peer, module, error)
            return None

    # -- put

    def put(self, peer: str, row: Row, data: bytes | Path, timeout_s: float = 600.0) -> bool:
        """Push the file of this peer's row to a mailbox; blocks. True when the mailbox has it."""
        run = self._run
        content = data if isinstance(data, bytes) else mapped(data)
        request = PutRequest(
            run=run.run_id, row=pack_row(row), admissions=self._admissions(run, {row.peer})
        )

        async def put() -> bool:
            stream, reply = await begin(self._transport, peer, request, PutReply, CALL_TIMEOUT_S)
            try:
                if reply.status != "send":
                    return reply.status == "stored"
                for start in range(0, len(content), _CHUNK_BYTES):
                    piece = memoryview(content)[start : start + _CHUNK_BYTES]
                    await stream.write(piece, timeout_s)
                frame = await read_frame(stream, PutReply.max_bytes)
                return decode(PutReply, frame).status == "stored"
            finally:
                stream.close()

        try:
            return self._thread.call(put(), timeout_s)
        except Exception as error:
            logger.debug("%s does not take the file of %s: %s", peer, row.module, error)
            return False

    # -- get

    def get(
        self,
        sha256: str,
        peers: Sequence[str],
        into: BlobStore,
        *,
        max_bytes: int,
        timeout_s: float,
        mirrors: Sequence[str] = (),
        mirrors_first: bool = False,
        on_progress: OnProgress = no_progress,
    ) -> Path:
        """Fetch content by hash; blocks. Raises `NetworkError`, `IntegrityError`, `StorageError`.

        Peers are asked in an order of each fetcher's own, and mirrors after them or before.
        """
        asked = self._sources(spread(sha256, peers, self.peer_id))
        mirrored = [MirrorSource(address) for address in mirrors]
        getting = download(
            sha256,
            [*mirrored, *asked] if mirrors_first else [*asked, *mirrored],
            into,
            max_bytes=max_bytes,
            timeout_s=timeout_s,
            slots=self._slots,
            refused=self._refused,
            on_progress=on_progress,
        )
        return self._thread.call(getting, timeout_s + 5.0)

    def _sources(self, peers: Iterable[str]) -> list[Source]:
        return [_PeerSource(self._transport, peer) for peer in peers]

    # -- gather

    def gather(
        self,
        rows: Sequence[Row],
        others: Sequence[str],
        *,
        check: Callable[[Row, Path], None],
        on_done: Callable[[Row, str, bool], None],
        timeout_s: float,
    ) -> None:
        """Get the files of rows into `contributions`; returns at once.

        :param others: peers that may have them beside their owners
        :param check: raises `IntegrityError` when a file is no contribution; on a thread of its own
        :param on_done: hears, once for each row and on another thread, the reason why not (""),
            and whether the file came and was refused. Of a file that is on its way already the
            first alone is told; `others` are asked too.
        """

        async def begin_all() -> None:
            # On the loop alone, where files that are on their way end too.
            for row in rows:
                peers = {row.peer, *others} - {self.peer_id}
                if row.name in self._gathering:
                    self._gathering[row.name] |= peers
                    self._named.setdefault(row.name, set()).update(peers)
                    continue
                self._gathering[row.name] = peers
                self._thread.spawn(self._gather_one(row, check, on_done, timeout_s))

        self._thread.spawn(begin_all())

    async def _gather_one(
        self,
        row: Row,
        check: Callable[[Row, Path], None],
        on_done: Callable[[Row, str, bool], None],
        timeout_s: float,
    ) -> None:
        reason, is_refused = "", False
        try:
            try:
                await self._fetch_and_check(row, check, timeout_s)
            except StorageError:
                # Another row named this file too, and it was removed as not the other's.
                await self._fetch_and_check(row, check, timeout_s)
        except (IntegrityError, StorageError) as error:
            reason, is_refused = str(error), isinstance(error, IntegrityError)
        except Exception as error:
            reason = str(error) or type(error).__name__
        finally:
            self._gathering.pop(row.name, None)
            self._named.pop(row.name, None)
            self._arrivals.pop(row.name, None)
        if reason and self._run.contributions is not None:
            kept = self._run.contributions.kept
            with contextlib.suppress(StorageError):
                await run_blocking(prune_partial_files, kept, MAX_UNFINISHED)
        on_done(row, reason, is_refused)

    async def _fetch_and_check(
        self, row: Row, check: Callable[[Row, Path], None], timeout_s: float
    ) -> None:
        path = await self._file_of(row, timeout_s)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._checking, self._check_file, row, path, check)

    def _check_file(self, row: Row, path: Path, check: Callable[[Row, Path], None]) -> None:
        files = self._run.contributions
        assert files is not None
        check_is_of(row, path)
        if files.is_checked(row.file):
            return
        try:
            check(row, path)
        except IntegrityError:
            files.kept.remove(row.file)
            raise
        files.set_checked(row.file)

    async def _file_of(self, row: Row, timeout_s: float) -> Path:
        """Return the file of a row, fetched if it is not here; its peer may not have it yet."""
        files = self._run.contributions
        if files is None:
            raise NetworkError("this process takes no contributions")
        until_s, wait_s = time.monotonic() + timeout_s, _RETRY_S

        def named() -> list[Source]:
            return self._sources(spread(row.file, self._named.pop(row.name, ()), self.peer_id))

        while True:
            found = await run_blocking(files.find, row.file)
            if found is not None:
                return found
            left_s = until_s - time.monotonic()
            peers = self._gathering.get(row.name, set())
            order = [row.peer] if row.peer in peers else []
            order += spread(row.file, peers - {row.peer}, self.peer_id)
            try:
                path = await download(
                    row.file,
                    self._sources(order),
                    files.kept,
                    max_bytes=row.bytes,
                    timeout_s=max(1.0, left_s),
                    slots=self._urgent_slots,
                    refused=self._refused,
                    more=named,
                )
            except IntegrityError as error:
                # Another file under this name says nothing of the row.
                reason: DipacoError = NetworkError(str(error))
            except NetworkError as error:
                reason = error
            else:
                return await run_blocking(files.install, row, path)
            if time.monotonic() + wait_s > until_s:
                raise reason
            arrival = asyncio.Event()
            self._arrivals[row.name] = (row.file, arrival)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrival.wait(), wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)


class _PeerSource:
    """A peer as something to download from."""

    def __init__(self, transport: Transport, peer: str) -> None:
        self._transport, self.name = transport, peer

    async def open(self, sha256: str, offset: int) -> tuple[ContentStream, int]:
        """Ask for content. Raises what `transfer.Source` names, or what a call raises."""
        request = GetRequest(sha256=bytes.fromhex(sha256), offset=offset)
        try:
            stream, reply = await begin(
                self._transport, self.name, request, GetReply, CALL_TIMEOUT_S * 2
            )
        except NetworkError as error:
            # Others are asked then; a download ends with an error of its own.
            raise ConnectionError(str(error)) from None
        if reply.status == "ok":
            return stream, reply.total_bytes
        stream.close()
        if reply.status == "busy":
            raise SourceBusy(reply.retry_after_s)
        if reply.status == "beyond":
            raise OffsetBeyondEnd
        raise ContentAbsent
