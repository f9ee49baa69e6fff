"""The two ends of a call in an all-reduce: what a called peer answers, what a calling peer sends.

Contributions and sums go one way, averages the other. Who waits for something far away beats with
the code `ACCEPTED`; who fails says `INTERNAL_ERROR` and whom it blames.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import AsyncIterator  # noqa: UP035  Hivemind's servicers do not know the other one.

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.proto.averaging_pb2 import AveragingData as Message
from hivemind.utils.asyncio import anext

from .parts import AveragingFailed, FirstFailure, NoGroup

PEER_ID_BYTES = 64
# So long who is called stays after its last answer, for the caller to close the stream.
STAY_S = 10.0


class Counter:
    """Messages that were drawn, and so sent or about to be."""

    value = 0


async def counted(messages: AsyncIterator[Message], counter: Counter) -> AsyncIterator[Message]:
    """Count what is drawn from `messages`."""
    async for message in messages:
        yield message
        counter.value += 1
    counter.value += 1


class Answers:
    """What a called peer says, which is averaged parts.

    It has failed when nothing moves in either direction: it cannot answer what it has not got, so
    a slow upload is no fault of its.
    """

    def __init__(
        self,
        stream: AsyncIterator[Message],
        sent: Counter,
        report: Callable[[Message], AveragingFailed],
        failure: FirstFailure,
        patience_s: float,
        *,
        may_beat: bool,
    ) -> None:
        self._stream, self._sent, self._report = stream, sent, report
        self._failure, self._patience_s, self._may_beat = failure, patience_s, may_beat
        # Cancelling it would close the stream.
        self._coming: asyncio.Future[Message] | None = None

    async def next(self) -> Message:
        """Wait for the next part. Raises AveragingFailed, or what went wrong."""
        while True:
            before = self._sent.value
            try:
                message = await self._failure.or_result(self._come(), self._patience_s)
            except StopAsyncIteration:
                raise ConnectionError("it ended before its last part") from None
            except TimeoutError:
                if self._sent.value == before:
                    raise
                continue
            except AveragingFailed:
                await self._say_why()
                raise
            self._coming = None
            if message.code == averaging_pb2.AVERAGED_PART:
                return message
            if message.code != averaging_pb2.ACCEPTED or not self._may_beat:
                raise self._report(message)

    async def _say_why(self) -> None:
        """Keep the call, until the other side has heard that this peer has failed, and why."""
        with contextlib.suppress(Exception):
            while (await self._come()).code != averaging_pb2.INTERNAL_ERROR:
                self._coming = None

    def _come(self) -> asyncio.Future[Message]:
        if self._coming is None:
            self._coming = asyncio.ensure_future(anext(self._stream))
        return self._coming

    async def close(self) -> None:
        """End the call."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait({self._coming})
        with contextlib.suppress(Exception):
            await self._stream.aclose()  # type: ignore[attr-defined]


class Inbox:
    """What a calling peer sends. Its first message names the group."""

    def __init__(
        self,
        stream: AsyncIterator[Message],
        group_id: bytes,
        report: Callable[[Message], AveragingFailed],
    ) -> None:
        self._stream, self._group_id, self._report = stream, group_id, report
        self._is_first = True

    async def next(self, patience_s: float, *, may_beat: bool = False) -> Message:
        """Return the next message with numbers.

        Raises StopAsyncIteration at the end, AveragingFailed when the sender has failed and says
        so, TimeoutError when it is silent for `patience_s`, and ValueError for anything else.
        """
        while True:
            message = await self._receive(patience_s)
            is_beat = may_beat and message.code == averaging_pb2.ACCEPTED
            if message.code == averaging_pb2.INTERNAL_ERROR:
                raise self._report(message)
            if self._is_first:
                if message.group_id != self._group_id:
                    raise ValueError("its first message names another group")
                if message.code != averaging_pb2.PART_FOR_AVERAGING and not is_beat:
                    raise ValueError("its first message is not a part")
            self._is_first = False
            if not is_beat:
                return message

    async def _receive(self, patience_s: float) -> Message:
        # `wait_for` can lose a cancellation that comes together with a message.
        coming = asyncio.ensure_future(anext(self._stream))
        try:
            await asyncio.wait({coming}, timeout=patience_s)
            if not coming.done():
                raise TimeoutError
            return coming.result()
        finally:
            coming.cancel()


async def until_closed(messages: AsyncIterator[Message]) -> None:
    """Wait until the caller closes its stream, which cancels this, and drop what it still sends.

    For who is called, after its last answer: when it closes first, p2pd resets the stream, and an
    answer that is under way is lost (1 in 20,000 on a busy machine).
    """
    with contextlib.suppress(Exception):
        async with asyncio.timeout(STAY_S):
            async for _ in messages:
                pass
            await asyncio.Event().wait()


def farewell(failure: AveragingFailed) -> Message:
    """Return what a member says last that has failed, with whom it blames."""
    blamed = PeerID.from_base58(failure.blamed).to_bytes() if failure.blamed else b""
    return Message(code=averaging_pb2.INTERNAL_ERROR, peer_id=blamed)


def reported(name: str, message: Message, members: Sequence[str], me: str) -> AveragingFailed:
    """Turn an error message of the member `name` into a failure; whom it blames is unproven."""
    group = tuple(members)
    blamed = ""
    if 0 < len(message.peer_id) <= PEER_ID_BYTES:
        blamed = PeerID(message.peer_id).to_base58()
    is_error = message.code == averaging_pb2.INTERNAL_ERROR
    if is_error and blamed in group and blamed not in (name, me):
        return AveragingFailed(
            f"peer {name} reports that peer {blamed} failed", group, (), (), blamed
        )
    if message.code == averaging_pb2.BAD_GROUP_ID:
        return NoGroup(f"peer {name} knows nothing of the group", group, (name,))
    code = averaging_pb2.MessageCode.Name(message.code)
    return AveragingFailed(f"peer {name} sent {code} instead of a part", group, (name,))


def describe(error: Exception) -> str:
    """Return one short line; some exceptions have no text."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return "it was silent for too long"
    return f"{error}".splitlines()[0][:200] if f"{error}" else type(error).__name__
