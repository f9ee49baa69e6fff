"""Fetches content by its SHA-256 from any of several holders, in pieces that can resume.

This knows no network: a holder is a `Source`, and the exchange makes one of every peer and of every
mirror. What a download has received stays in the blob store's partial file, so another holder, or
the next start of this process, continues where it ended. Nothing is believed: a holder may send
other bytes, too many, too few, too slowly or none. When the finished file has the wrong hash and
one holder sent all of it, that holder is named in the log and skipped. When several did, nobody
knows who lied: the file is started over, and from then on each holder has to send all of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from dipaco.base.blobs import BlobStore
from dipaco.base.blocking import run_blocking
from dipaco.base.errors import IntegrityError, NetworkError, StorageError
from dipaco.peer.exchange.streams.reasons import short_reason

from .download_slots import DownloadSlots
from .partial_file import PartialFile
from .refused_sources import RefusedSources

logger = logging.getLogger("dipaco.peer.exchange.files.transfer")

# Written to disk at once; arrives within the limit, or the holder is too slow to be waited for.
BLOCK_BYTES = 2**20
BLOCK_TIMEOUT_S = 30.0
OPEN_TIMEOUT_S = 15.0
# A holder is left when others can be asked, or others want its slot, and it has sent less of a
# block than this rate makes after the grace: who drips would else hold the slot to the end.
SLOW_GRACE_S = 3.0
LEAST_RATE_BYTES_S = 2**16
# How often that is looked at.
_LOOK_S = 0.25
# Once a holder was silent, so many others at most are called at the same time.
_MAX_CALLED = 64
# A holder that has answered only "busy" for so long is given up.
BUSY_LIMIT_S = 300.0
# Failures of one holder in a row without this much progress in between: then it is given up. A
# slow one that does send is left for the others, and asked again.
MAX_FAILURES = 3
_PROGRESS_BYTES = 2**16
RETRY_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
# How often a download that somebody else has begun is looked at.
_POLL_S = 0.1

_ResultT = TypeVar("_ResultT")
# Stands for bytes that an earlier process or download left in the partial file.
_EARLIER = "an earlier download"


class ContentAbsent(Exception):
    """The source does not hold the content."""


class SourceBusy(Exception):
    """The source has no free slot; ask again after `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("it is busy")
        self.retry_after_s = min(max(retry_after_s, 0.1), _LONGEST_PAUSE_S)


class OffsetBeyondEnd(Exception):
    """More bytes lie in the partial file than the source's content has."""


OnProgress = Callable[[int, int], None]
"""Called with how many bytes are here, and of how many."""


def no_progress(done: int, total: int) -> None:
    """Report no progress."""


MoreSources = Callable[[], Iterable["Source"]]
"""Returns the sources that were named since the last call."""


def _no_more() -> Iterable[Source]:
    """Name no source."""
    return ()


class ContentStream(Protocol):
    """Bytes on their way from a source."""

    async def read(self, count: int) -> bytes:
        """Return up to `count` more bytes, and b"" at the end."""
        ...

    def close(self) -> None:
        """Stop; may be called at any time."""
        ...


class Source(Protocol):
    """Somebody who may hold the content."""

    name: str
    """What log lines and error messages call it."""

    async def open(self, sha256: str, offset: int) -> tuple[ContentStream, int]:
        """Begin to send from `offset`; also returns the size of the whole content, as it says.

        Raises `ContentAbsent`, `SourceBusy`, `OffsetBeyondEnd`, or anything else when it fails.
        """
        ...


def spread(sha256: str, holders: Iterable[str], me: str) -> tuple[str, ...]:
    """Order holders by a hash of content, holder and fetcher.

    Every fetcher has another order, so that many who want one content at once spread over all
    who hold it (rendezvous hashing).
    """

    def weight(holder: str) -> bytes:
        return hashlib.sha256(f"{sha256}/{holder}/{me}".encode()).digest()

    return tuple(sorted({holder for holder in holders if holder != me}, key=weight))


async def download(
    sha256: str,
    sources: Sequence[Source],
    destination: BlobStore,
    *,
    max_bytes: int,
    timeout_s: float,
    slots: DownloadSlots,
    refused: RefusedSources,
    on_progress: OnProgress = no_progress,
    more: MoreSources = _no_more,
) -> Path:
    """Fetch content into `destination` and return its file; at once when it is there.

    `sources` are asked in their order, and those that `more` names while it lasts. Content larger
    than `max_bytes` is refused before it is sent. One of the `slots` is taken while a source sends,
    not while all are busy. A slow source gives it up when others wait, or can be asked. Sources
    that are among the `refused` are not asked.
    Raises `NetworkError` when no source can give the content within `timeout_s`, however fast it
    sends, `IntegrityError` when those that could gave another, and `StorageError` when it cannot
    be written. What has arrived is kept for the next attempt.
    """
    deadline = time.monotonic() + timeout_s
    with PartialFile(destination, sha256) as partial:
        while not destination.has(sha256):
            if await run_blocking(partial.try_open):
                if destination.has(sha256):
                    break  # another download ended before the file was opened
                attempt = _Download(
                    sha256, partial, max_bytes, deadline, slots, refused, on_progress, more
                )
                return await attempt.run(sources)
            if time.monotonic() > deadline:
                raise NetworkError(f"{sha256[:12]} is being fetched by another process, slowly")
            await asyncio.sleep(_POLL_S)
        return destination.path(sha256)


@dataclass
class _Holder:
    """What this download knows of one source."""

    source: Source
    reason: str = "it was not asked"
    sent_bytes: int = 0
    failures: int = 0
    gone: bool = False
    absent: bool = False
    """Whether it lacked the content at the last request."""
    refused: bool = False
    """Whether it sent something other than the content asked for."""
    retry_at: float = 0.0
    busy_since: float | None = None
    """Since when it has said nothing else."""
    slow_times: int = 0
    """How often it was left for another because it sent too slowly, since it delivered last."""


class _Download:
    """One download, from a locked partial file to a blob."""

    def __init__(
        self,
        sha256: str,
        partial: PartialFile,
        max_bytes: int,
        deadline: float,
        slots: DownloadSlots,
        refused: RefusedSources,
        on_progress: OnProgress,
        more: MoreSources,
    ) -> None:
        self._sha256, self._partial = sha256, partial
        self._max_bytes, self._deadline = max_bytes, deadline
        self._slots, self._refused = slots, refused
        self._on_progress, self._more = on_progress, more
        self._holders: list[_Holder] = []
        self._whole = False
        """Whether each holder has to send everything, because a mixed file was wrong."""
        self._senders = {_EARLIER} if partial.size_bytes else set[str]()

    async def run(self, sources: Sequence[Source]) -> Path:
        """Ask one holder after the other until the content is here."""
        self._holders = [self._holder(source) for source in sources]
        while True:
            self._hear_of_more()
            for holder in sorted(self._holders, key=self._reluctance):
                if holder.gone or holder.retry_at > time.monotonic():
                    continue
                name, slow_times = holder.source.name, holder.slow_times
                await self._take_slot(name)
                try:
                    path = await self._attempt(holder)
                    if path is not None:
                        self._slots.delivered(name)
                finally:
                    self._slots.release(name)
                if path is not None:
                    return path
                if time.monotonic() > self._deadline:
                    raise self._failure("in time")
                if holder.slow_times > slow_times and not holder.sent_bytes:
                    await self._call_others()
                    break
            await self._pause()

    def _holder(self, source: Source) -> _Holder:
        if self._refused.has(source.name, self._sha256):
            reason = "it sent a file of another hash some minutes ago"
            return _Holder(source, reason=reason, gone=True, refused=True)
        return _Holder(source, slow_times=self._slots.times_slow(source.name))

    def _hear_of_more(self) -> None:
        """Add the sources that were named meanwhile; one without the content may have it now."""
        for source in self._more():
            known = next((h for h in self._holders if h.source.name == source.name), None)
            if known is None:
                self._holders.append(self._holder(source))
            elif known.absent:
                known.gone = known.absent = False

    async def _call_others(self) -> None:
        """Look for a holder that answers, among twice as many each time: hundreds may be gone."""
        others = [h for h in self._holders if self._may_answer(h) and not h.sent_bytes]
        others.sort(key=self._reluctance)
        count = 1
        while others and time.monotonic() < self._deadline:
            count = min(2 * count, _MAX_CALLED)
            called, others = others[:count], others[count:]
            if any(await asyncio.gather(*map(self._answers, called))):
                return

    async def _answers(self, holder: _Holder) -> bool:
        """Tell whether a holder gives the file within the time that a silent one has."""
        try:
            opening = holder.source.open(self._sha256, self._partial.size_bytes)
            stream, _ = await asyncio.wait_for(opening, SLOW_GRACE_S)
            stream.close()
        except TimeoutError:
            self._note_slow(holder, _TooSlow("it does not answer"), 0)
            return False
        except Exception as error:
            # It says so again when its turn comes. One that is always busy ends no search.
            logger.debug("%s: %r", holder.source.name, error)
            return False
        return True

    def _may_answer(self, holder: _Holder) -> bool:
        """Tell whether a holder can be asked now, and is not one that was silent twice."""
        is_silent = holder.failures > 1 and not holder.sent_bytes
        return not (holder.gone or is_silent or holder.retry_at > time.monotonic())

    def _reluctance(self, holder: _Holder) -> tuple[bool, int, bool]:
        """Those that were silent come last, before them those that were slow, then those that have
        all of their slots already."""
        is_silent = holder.slow_times > 0 and not holder.sent_bytes
        return is_silent, holder.slow_times, not self._slots.has_room(holder.source.name)

    async def _take_slot(self, source: str) -> None:
        try:
            left_s = max(0.1, self._deadline - time.monotonic())
            async with asyncio.timeout(left_s):
                await self._slots.acquire(source)
        except TimeoutError:
            what = f"{self._sha256[:12]}: other downloads took all the time"
            raise NetworkError(what) from None

    async def _pause(self) -> None:
        """Wait until a holder may be asked again; raise when none ever will be."""
        waiting = [holder.retry_at for holder in self._holders if not holder.gone]
        if not waiting:
            raise self._failure("")
        now = time.monotonic()
        if min(waiting) > self._deadline:
            await asyncio.sleep(max(0.0, self._deadline - now))
            raise self._failure("in time")
        # Spread in time, so that many who were told "busy" at once don't come back at once.
        await asyncio.sleep(max(0.0, min(waiting) - now) * random.uniform(1.0, 1.3))

    def _failure(self, when: str) -> NetworkError | IntegrityError:
        """Return the error that says what every holder answered."""
        asked = [f"{holder.source.name}: {holder.reason}" for holder in self._holders[:4]]
        more = len(self._holders) - len(asked)
        what = f"nobody sent {self._sha256[:12]} {when}".rstrip()
        if not asked:
            return NetworkError(f"nobody is known to hold {self._sha256[:12]}")
        message = f"{what} ({'; '.join(asked)}{f'; and {more} more' if more else ''})"
        if not when and any(holder.refused for holder in self._holders):
            return IntegrityError(message)
        return NetworkError(message)

    async def _attempt(self, holder: _Holder) -> Path | None:
        """Fetch from one holder; return the file when it is complete and right."""
        before = holder.sent_bytes
        try:
            stream, total_bytes = await self._open(holder)
            try:
                await self._receive(stream, total_bytes, holder)
            finally:
                stream.close()
            return await self._commit(holder)
        except ContentAbsent:
            holder.gone = holder.absent = True
            holder.reason = "it does not hold it"
        except SourceBusy as busy:
            self._note_busy(holder, busy)
        except _StartedOver:
            holder.reason = "what it sent did not match what others had sent"
        except (StorageError, NetworkError):
            raise
        except _TooSlow as error:
            self._note_slow(holder, error, holder.sent_bytes - before)
        except _Refused as refusal:
            holder.gone = holder.refused = True
            holder.reason = str(refusal)
            if refusal.is_proven:
                self._refused.note(holder.source.name, self._sha256)
            logger.warning("%s: refused %s: %s", holder.source.name, self._sha256[:12], refusal)
        except Exception as error:
            self._note_failure(holder, error, holder.sent_bytes - before)
        return None

    def _note_busy(self, holder: _Holder, busy: SourceBusy) -> None:
        now = time.monotonic()
        holder.busy_since = holder.busy_since if holder.busy_since is not None else now
        holder.retry_at = now + busy.retry_after_s
        holder.gone = now - holder.busy_since > BUSY_LIMIT_S
        holder.reason = "it is busy"

    def _note_slow(self, holder: _Holder, error: _TooSlow, received: int) -> None:
        self._note_failure(holder, error, received)
        if not holder.sent_bytes:
            # One that does send is not left for it at once.
            holder.retry_at = time.monotonic() + 2 * SLOW_GRACE_S * holder.failures
        holder.slow_times += 1
        self._slots.was_slow(holder.source.name)

    def _note_failure(self, holder: _Holder, error: Exception, received: int) -> None:
        holder.reason = short_reason(error)
        holder.failures = 1 if received >= _PROGRESS_BYTES else holder.failures + 1
        holder.gone = holder.failures >= MAX_FAILURES
        holder.retry_at = time.monotonic() + RETRY_PAUSE_S * holder.failures
        logger.debug("%s: %s failed: %r", holder.source.name, self._sha256[:12], error)

    async def _open(self, holder: _Holder) -> tuple[ContentStream, int]:
        """Begin a stream that goes on where the partial file ends, or refuse what it claims."""
        alone = self._whole and bool(self._senders - {holder.source.name})
        offset = 0 if alone else self._partial.size_bytes
        remaining = max(0.1, self._deadline - time.monotonic())
        opening = holder.source.open(self._sha256, offset)
        limit_s = min(OPEN_TIMEOUT_S, remaining)
        try:
            stream, total_bytes = await self._unless_slow(opening, holder, limit_s, bytearray())
        except OffsetBeyondEnd:
            if offset == 0:
                raise _Refused("it says that its copy ends before the first byte") from None
            await self._disagree(holder, "it has fewer bytes than it sent before")
        if total_bytes > self._max_bytes:
            stream.close()
            # How many it may have is what somebody else's row says.
            raise _Refused(
                f"it announces {total_bytes} bytes, at most {self._max_bytes} are allowed",
                is_proven=False,
            )
        if total_bytes < offset:
            stream.close()
            await self._disagree(holder, "it has fewer bytes than it sent before")
        if alone:
            await self._start_over()
        return stream, total_bytes

    async def _receive(self, stream: ContentStream, total_bytes: int, holder: _Holder) -> None:
        """Append what the stream sends, a block at a time, until it is complete."""
        while self._partial.size_bytes < total_bytes:
            self._on_progress(self._partial.size_bytes, total_bytes)
            wanted = min(BLOCK_BYTES, total_bytes - self._partial.size_bytes)
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                holder.reason = "it was still sending"
                raise self._failure("in time")
            block = bytearray()
            filling, limit_s = _fill(block, stream, wanted), min(BLOCK_TIMEOUT_S, left_s)
            try:
                await self._unless_slow(filling, holder, limit_s, block)
            finally:
                # This includes what arrived before the stream broke: the next holder goes on from
                # there.
                if block:
                    self._senders.add(holder.source.name)
                    holder.sent_bytes += len(block)
                    holder.busy_since = None
                    await run_blocking(self._partial.append, block)

    async def _unless_slow(
        self,
        doing: Coroutine[object, object, _ResultT],
        holder: _Holder,
        limit_s: float,
        block: bytearray,
    ) -> _ResultT:
        """Return what a source gives. Raises `TimeoutError` after `limit_s`, and `_TooSlow` sooner
        when somebody waits whom another source, or this slot, would serve better.

        :param block: what has come, which grows meanwhile
        """
        task, began_s, waited_s = asyncio.ensure_future(doing), time.monotonic(), 0.0
        # Where each has to send everything, a slow one needs more time than before to get further.
        grace_s = SLOW_GRACE_S * 2 ** min(4, holder.slow_times if self._whole else 0)
        try:
            while waited_s < limit_s:
                done, _ = await asyncio.wait({task}, timeout=min(_LOOK_S, limit_s - waited_s))
                if done:
                    return task.result()
                waited_s = time.monotonic() - began_s
                is_slow = waited_s > grace_s + len(block) / LEAST_RATE_BYTES_S
                if is_slow and self._is_hurried(holder):
                    raise _TooSlow("it sent too slowly")
            raise TimeoutError
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def _is_hurried(self, holder: _Holder) -> bool:
        return self._slots.is_wanted(holder.source.name) or self._can_ask_others(holder)

    def _can_ask_others(self, holder: _Holder) -> bool:
        self._hear_of_more()
        return any(self._may_answer(other) for other in self._holders if other is not holder)

    async def _commit(self, holder: _Holder) -> Path:
        """Check the hash of the complete file and make it a blob."""
        try:
            return await run_blocking(self._partial.commit)
        except IntegrityError as error:
            await self._reopen()
            await self._disagree(holder, str(error))

    async def _disagree(self, holder: _Holder, complaint: str) -> NoReturn:
        """Drop what was received: refuse its only sender, or start over when there were several."""
        others = self._senders - {holder.source.name}
        await self._start_over()
        if not others:
            raise _Refused(complaint)
        names = ", ".join(sorted(others | {holder.source.name}))
        logger.warning("%s: parts from %s do not fit, starting over", self._sha256[:12], names)
        self._whole = True
        raise _StartedOver

    async def _start_over(self) -> None:
        await run_blocking(self._partial.clear)
        self._senders.clear()

    async def _reopen(self) -> None:
        """Take a new partial file in place of the wrong one, which the store has removed."""
        while not await run_blocking(self._partial.try_open):
            if time.monotonic() > self._deadline:
                raise self._failure("in time")
            await asyncio.sleep(_POLL_S)


class _Refused(Exception):
    """The holder sent something that cannot be the content, which is proven by its hash."""

    def __init__(self, complaint: str, *, is_proven: bool = True) -> None:
        super().__init__(complaint)
        self.is_proven = is_proven


class _TooSlow(Exception):
    """The holder sends less than others might."""


class _StartedOver(Exception):
    """Parts from several senders did not make the content."""


async def _fill(block: bytearray, stream: ContentStream, wanted: int) -> None:
    """Read until `block` has `wanted` bytes; what arrived is in it even when this fails."""
    while len(block) < wanted:
        data = await stream.read(wanted - len(block))
        if not data:
            raise EOFError("the stream ended too early")
        block += data
