"""Meetings over libp2p: carries out what a `Meeting` wants and reports what happens to it.

Lives in the event loop of an averager's process. A call of a meeting is a raw libp2p stream
(`call_codec`). p2pd connects to a peer by the addresses that it knows of it, from the DHT's
traffic or by asking other peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dipaco.peer.member.calls import (
    LAST_MESSAGES,
    Awaiting,
    Call,
    CallerMessage,
    Heard,
    Lost,
    MeetingAction,
    MeetingEvent,
    Message,
    Met,
    Missed,
    Passed,
    Tell,
)
from dipaco.peer.member.meeting import Meeting
from dipaco.peer.member.reception import GREATEST_HELD, Reception
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from .call_codec import decode, encode, frame, read_frame, read_key
from .parts import AveragingFailed

logger = logging.getLogger(__name__)

# Connecting to a peer and opening a stream to it.
DIAL_LIMIT_S = 10.0
# A caller has this long to say which meeting it comes to.
GREETING_LIMIT_S = 10.0
GREATEST_CALLS_OF_A_PEER = 8
# Of all peers together that are no candidates of the latest meeting.
GREATEST_CALLS_OF_STRANGERS = GREATEST_HELD // 2
# Who was called keeps the stream open for so long after its last word.
LINGER_S = 3.0
# What a peer that reads nothing may leave unsent.
GREATEST_UNSENT_BYTES = 2**18
# Numbers of calls that one meeting makes at most.
_NUMBERS_OF_A_MEETING = 10_000


@dataclass
class _Line:
    """One stream: a call that this peer made, or one that was made to it."""

    task: asyncio.Task[None] | None
    writer: asyncio.StreamWriter | None = None
    key: str = ""
    unsent: list[bytes] = field(default_factory=list)

    def send(self, data: bytes) -> None:
        """Write, now or as soon as the stream is open."""
        if self.writer is None:
            self.unsent.append(data)
            return
        # A stream that has just broken: who reads it is about to say that the call is lost.
        # uvloop raises RuntimeError for what is written to it.
        if self.writer.is_closing():
            return
        if self.writer.transport.get_write_buffer_size() > GREATEST_UNSENT_BYTES:
            self.writer.transport.abort()
            return
        self.writer.write(data)


class MeetingRoom:
    """One peer's meetings, one at a time, under one libp2p handle.

    :param p2p: connected to this peer's p2pd
    :param handle: name of the stream's protocol, the same on every peer
    """

    def __init__(self, p2p: P2P, handle: str) -> None:
        self._p2p, self._handle = p2p, handle
        self._reception = Reception()
        self._lines: dict[tuple[str, int, bool], _Line] = {}
        self.expected: Collection[str] = ()
        """Candidates of the latest meeting; replaced as a whole."""
        self._callers: Counter[str] = Counter()
        self._number = 0
        self._key = ""
        self._meeting: Meeting | None = None
        self._outcome: asyncio.Future[Met] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._behind_s = 0.0
        self._tell: Callable[[int], None] = lambda _: None

    async def open(self) -> None:
        """Let others call."""
        await self._p2p.add_binary_stream_handler(self._handle, self._serve)

    async def close(self) -> None:
        """Take no more calls."""
        await self._p2p.remove_binary_stream_handler(self._handle)

    async def meet(
        self,
        key: str,
        make: Callable[[float, int], Meeting],
        tell: Callable[[int], None],
    ) -> tuple[Met, tuple[str, ...]]:
        """Run a meeting to its end and return what came of it and notices about others.

        `make` gets the time, in Unix seconds that no change of the clock moves while the meeting
        lasts, and the number of its first call; `tell` hears how many are together. Raises
        AveragingFailed.
        """
        loop = asyncio.get_running_loop()
        self._behind_s = time.time() - loop.time()
        self._number += _NUMBERS_OF_A_MEETING
        meeting = make(self._now_s(), self._number)
        self._key, self._meeting, self._tell = key, meeting, tell
        self._outcome = loop.create_future()
        try:
            self._happen(Passed())
            for heard in self._reception.begin(key):
                self._happen(heard)
            met = await self._outcome
            self._reception.end(key)
            return met, meeting.notices
        except AveragingFailed as failure:
            raise AveragingFailed(failure.reason, notices=meeting.notices) from None
        finally:
            self._end(meeting)

    def expect(self, peers: frozenset[str] | None) -> None:
        """The meeting under way waits for these; None: for nobody any more."""
        self._happen(Awaiting(peers))

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() + self._behind_s

    def _end(self, meeting: Meeting) -> None:
        """Forget the meeting; calls that it has not ended are broken off."""
        if self._timer is not None:
            self._timer.cancel()
        self._meeting, key, self._key = None, self._key, ""
        self._tell(0)
        for place, line in list(self._lines.items()):
            if line.key == key:
                self._hang_up(place)

    def _happen(self, event: MeetingEvent) -> None:
        """Report an event to the meeting under way, if there is one, and do what it wants."""
        meeting = self._meeting
        if meeting is None or self._outcome is None or self._outcome.done():
            return
        try:
            for action in meeting.step(self._now_s(), event):
                self._carry_out(action)
        except Exception as error:
            # Whoever waits for the meeting is told, and not the stream that the event came from.
            self._outcome.set_exception(error)
            return
        self._tell(meeting.together)
        if self._timer is not None:
            self._timer.cancel()
        if not self._outcome.done():
            # A timer may fire a moment early.
            due_s = meeting.wake_s - self._behind_s + 0.001
            self._timer = asyncio.get_running_loop().call_at(due_s, self._happen, Passed())

    def _carry_out(self, action: MeetingAction) -> None:
        assert self._outcome is not None
        if isinstance(action, Call):
            place = (action.peer, action.number, True)
            line = self._lines[place] = _Line(None, key=self._key)
            line.send(frame(self._key.encode()) + encode(action.message))
            line.task = asyncio.create_task(self._call(place, line))
        elif isinstance(action, Tell):
            self._say((action.peer, action.number, action.mine), action.message)
        elif isinstance(action, Met):
            self._outcome.set_result(action)
        elif isinstance(action, Missed):
            self._outcome.set_exception(AveragingFailed(action.reason))

    def _say(self, place: tuple[str, int, bool], message: Message) -> None:
        line = self._lines.get(place)
        if line is None:
            return
        line.send(encode(message))
        if isinstance(message, LAST_MESSAGES):
            self._hang_up(place)

    def _hang_up(self, place: tuple[str, int, bool]) -> None:
        """End a call: the caller closes its stream, who was called lets it."""
        line = self._lines.pop(place, None)
        if line is None:
            return
        if line.writer is None:
            if line.task is not None:
                line.task.cancel()
        elif place[2]:
            line.writer.close()
        else:
            # A stream that is closed while the other side writes loses what it has not read.
            asyncio.get_running_loop().call_later(LINGER_S, line.writer.close)

    # Calls that this peer makes.

    async def _call(self, place: tuple[str, int, bool], line: _Line) -> None:
        """Open a stream and listen to it to its end."""
        peer, number, _ = place
        try:
            peer_id = PeerID.from_base58(peer)
            opening = self._p2p.call_binary_stream_handler(peer_id, self._handle)
            _, reader, line.writer = await asyncio.wait_for(opening, DIAL_LIMIT_S)
            line.writer.write(b"".join(line.unsent))
            while True:
                message = decode(await read_frame(reader))
                if self._lines.get(place) is line:
                    self._happen(Heard(peer, number, True, message))
                if isinstance(message, LAST_MESSAGES):
                    return
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            logger.debug("call to %s ended: %r", peer, error)
        finally:
            self._close(line)
            if self._lines.get(place) is line:
                del self._lines[place]
                self._happen(Lost(peer, number, True))

    # Calls that are made to this peer.

    async def _serve(
        self, stream: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Listen to a call to its end."""
        peer = stream.peer_id.to_base58()
        line = _Line(asyncio.current_task(), writer)
        if not self._admits(peer):
            self._close(line)
            return
        self._number += 1
        place = (peer, self._number, False)
        self._callers[peer] += 1
        try:
            greeting = asyncio.wait_for(read_frame(reader), GREETING_LIMIT_S)
            line.key = read_key(await greeting)
            self._lines[place] = line
            while True:
                message = decode(await read_frame(reader))
                if self._lines.get(place) is line:
                    self._hear(place, line.key, message)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            logger.debug("call of %s ended: %r", peer, error)
        finally:
            self._close(line)
            self._callers -= Counter([peer])
            if self._lines.get(place) is line:
                del self._lines[place]
                self._reception.lost(line.key, peer, place[1])
                if line.key == self._key:
                    self._happen(Lost(peer, place[1], False))

    def _admits(self, peer: str) -> bool:
        """Tell whether a peer may call; those that nobody expects leave room for the others."""
        strangers = sum(n for other, n in self._callers.items() if other not in self.expected)
        return (
            self._callers[peer] < GREATEST_CALLS_OF_A_PEER
            and self._callers.total() < 2 * GREATEST_HELD
            and (peer in self.expected or strangers < GREATEST_CALLS_OF_STRANGERS)
        )

    def _hear(self, place: tuple[str, int, bool], key: str, message: Message) -> None:
        """Hand on what a caller said: to the meeting under way, or it is held for a later one."""
        peer, number, _ = place
        if not isinstance(message, CallerMessage):
            raise ValueError("a caller does not say that")
        if key == self._key:
            self._happen(Heard(peer, number, False, message))
            return
        answer = self._reception.hold(key, peer, number, message)
        if answer is not None:
            self._say(place, answer)

    def _close(self, line: _Line) -> None:
        if line.writer is not None:
            with contextlib.suppress(Exception):
                line.writer.close()
