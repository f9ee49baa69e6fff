"""Meetings over streams: what is on the wire, real rooms in memory, and callers that lie."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
import uvloop
from dipaco.peer.averaging import meeting_room
from dipaco.peer.averaging.call_codec import (
    GREATEST_FRAME_BYTES,
    LENGTH_BYTES,
    decode,
    encode,
    frame,
    read_frame,
)
from dipaco.peer.averaging.group import ROW_BYTES, GatherRow
from dipaco.peer.averaging.meeting_room import GREATEST_CALLS_OF_A_PEER, MeetingRoom, _Line
from dipaco.peer.averaging.parts import AveragingFailed
from dipaco.peer.member.calls import (
    Absent,
    Closing,
    Confirm,
    Gathering,
    Group,
    Invite,
    Join,
    Leave,
    Message,
    Redirect,
    Refused,
    Searching,
    Standing,
)
from dipaco.peer.member.meeting import Meeting
from dipaco.peer.member.reception import GREATEST_GROUP
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hypothesis import given
from hypothesis import strategies as st
from support.allreduce_harness import make_peer_id

LIMIT_S = 60.0
KEY = "L0.E0/1/0/" + "ab" * 32
PEERS = [make_peer_id(number) for number in range(4)]
NAMES = [peer.to_base58() for peer in PEERS]
LEADER = Standing(3, NAMES[0])
MESSAGES: list[Message] = [
    Join(b"row", b"12345678"),
    Invite(LEADER),
    Confirm(),
    Leave(),
    Leave(LEADER),
    Absent(),
    Searching(LEADER),
    Gathering(LEADER, 5),
    Redirect(LEADER),
    Refused("the group has closed"),
    Closing(LEADER),
    Group(tuple(NAMES[:2]), (b"one", b"two")),
]


def packed(*values: Any) -> bytes:
    return zlib.compress(msgpack.packb(values))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message)[LENGTH_BYTES:]) == message


def test_the_greatest_group_fits_into_a_frame() -> None:
    rows = tuple(random.Random(0).randbytes(ROW_BYTES) for _ in range(GREATEST_GROUP))
    group = Group((NAMES[0],) * GREATEST_GROUP, rows)
    assert len(encode(group)) <= GREATEST_FRAME_BYTES + LENGTH_BYTES
    assert decode(encode(group)[LENGTH_BYTES:]) == group


def test_the_list_of_a_large_group_takes_few_bytes_a_member() -> None:
    """Its leader sends it to everybody: with 256 members 3 MB."""
    letters = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    ends = ("".join(random.Random(n).choices(letters, k=44)) for n in range(256))
    peers = tuple(f"12D3KooW{end}" for end in ends)
    rows = [GatherRow(3, "L0.E3", 7, "ab" * 32, 5, peer, 12_345_678, 100) for peer in peers]
    group = Group(peers, tuple(row.to_bytes() for row in rows))
    assert len(encode(group)) < 256 * 50


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        decode(data)
    except ValueError:
        return


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["dance"],
        ["join", b"row"],
        ["join", "row", b"view"],
        ["join", bytes(ROW_BYTES + 1), b"view"],
        ["redirect", [-1, NAMES[0]]],
        ["redirect", [2**31, NAMES[0]]],
        ["redirect", [True, NAMES[0]]],
        ["redirect", [0, "no peer id"]],
        ["redirect", None],
        ["gathering", [0, NAMES[0]], 1.5],
        ["refused", "two\nlines"],
        ["refused", "x" * 1000],
        ["group", [NAMES[0]], [b"row"]],
        ["group", packed([NAMES[0]], [])],
        ["group", packed([NAMES[0]] * (GREATEST_GROUP + 1), [b""] * (GREATEST_GROUP + 1))],
        ["group", packed(["no peer id"], [b""])],
        ["group", packed(NAMES[0])],
        ["group", packed([NAMES[0]], [b"row"])[:-1]],
        ["group", packed([NAMES[0]], [b"row"]) + b"more"],
        ["group", zlib.compress(msgpack.packb(7))],
        ["group", zlib.compress(bytes(2**24))],
        ["group", b"no zlib"],
        {"join": 1},
        7,
    ],
)
def test_bad_messages_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="message|bounds|peer id|rows"):
        decode(msgpack.packb(values))


Handler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class MemoryP2P:
    """A node whose streams are pairs of sockets; all nodes of a test share `nodes`."""

    peer_id: PeerID
    nodes: dict[PeerID, MemoryP2P]
    handlers: dict[str, Handler] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def add_binary_stream_handler(self, name: str, handler: Handler) -> None:
        self.handlers[name] = handler

    async def remove_binary_stream_handler(self, name: str) -> None:
        del self.handlers[name]

    async def call_binary_stream_handler(
        self, peer: PeerID, name: str
    ) -> tuple[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter]:
        node = self.nodes.get(peer)
        if node is None or name not in node.handlers:
            raise ConnectionError("routing: not found")
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=near)
        info = StreamInfo(self.peer_id, None, name)  # type: ignore[arg-type]
        serving = node.handlers[name](info, *await asyncio.open_connection(sock=far))
        node.tasks.append(asyncio.create_task(serving))  # type: ignore[arg-type]
        return StreamInfo(peer, None, name), reader, writer  # type: ignore[arg-type]


async def rooms(count: int) -> list[tuple[MemoryP2P, MeetingRoom]]:
    nodes: dict[PeerID, MemoryP2P] = {}
    found = []
    for peer in PEERS[:count]:
        nodes[peer] = MemoryP2P(peer, nodes)
        room = MeetingRoom(nodes[peer], "test::meet/1")  # type: ignore[arg-type]
        await room.open()
        found.append((nodes[peer], room))
    return found


async def meet(
    room: MeetingRoom, number: int, close_s: float, *, window_s: float = 20.0, alone: bool = False
) -> Group:
    candidates = NAMES[number : number + 1] if alone else NAMES[:3]

    def make(now_s: float, first_number: int) -> Meeting:
        return Meeting(
            NAMES[number],
            candidates,
            f"row {number}".encode(),
            lambda peer, row: None if row.startswith(b"row") else "its row is bad",
            now_s=now_s,
            window_s=window_s,
            close_s=close_s,
            give_up_s=close_s + window_s,
            awaited=frozenset(candidates) if not alone else frozenset(NAMES[:2]),
            first_number=first_number,
        )

    met, _ = await room.meet(KEY, make, lambda together: None)
    return met.group


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), LIMIT_S)

    asyncio.run(bounded())


def test_rooms_meet_and_the_next_meeting_is_another() -> None:
    async def test() -> None:
        found = [room for _, room in await rooms(3)]
        for _ in range(2):
            close_s = time.time() + LIMIT_S
            calls = [meet(room, number, close_s) for number, room in enumerate(found)]
            groups = await asyncio.gather(*calls)
            assert groups == [Group(tuple(NAMES[:3]), (b"row 0", b"row 1", b"row 2"))] * 3

    run(test)


def test_a_caller_that_came_first_is_answered_when_the_meeting_begins() -> None:
    async def test() -> None:
        (_, first), (_, second), (_, third) = await rooms(3)
        early = [asyncio.create_task(meet(r, n, time.time() + LIMIT_S)) for n, r in
                 ((1, second), (2, third))]  # fmt: skip
        while not first._lines:
            await asyncio.sleep(0.01)
        group = await meet(first, 0, time.time() + LIMIT_S)
        assert await asyncio.gather(*early) == [group, group]

    run(test)


def test_what_a_meeting_missed_is_said() -> None:
    async def test() -> None:
        (_, room), *_ = await rooms(1)
        with pytest.raises(AveragingFailed, match="no other peer came"):
            await meet(room, 0, time.time() + 0.2, window_s=0.2)

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        frame(b"x" * 300),
        frame(b"\xff\xfe"),
        frame(KEY.encode()) + frame(b"no msgpack \xc1"),
        frame(KEY.encode()) + encode(Group((), ())),
        frame(KEY.encode()) + b"\x00\x00\x00\x05abc",
    ],
)
def test_callers_that_lie_are_hung_up_on(said: bytes) -> None:
    async def test() -> None:
        (liar, _), (_, room) = await rooms(2)
        _, reader, writer = await liar.call_binary_stream_handler(PEERS[1], "test::meet/1")
        writer.write(said)
        writer.write_eof()
        assert await reader.read() == b""
        await asyncio.gather(*liar.nodes[PEERS[1]].tasks)
        assert not room._lines
        assert not room._callers

    run(test)


def test_what_is_said_on_a_line_that_has_just_broken_goes_nowhere() -> None:
    """uvloop raises then, and the meeting, which the others go on with, ended for this peer."""

    async def test() -> None:
        near, _far = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=near)
        line = _Line(None, writer)
        writer.transport.abort()
        line.send(b"as it breaks")
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        line.send(b"after it broke")
        assert writer.is_closing()

    uvloop.run(asyncio.wait_for(test(), LIMIT_S))


def test_a_peer_has_only_so_many_calls_and_a_bad_row_is_refused() -> None:
    async def test() -> None:
        (liar, _), (_, room) = await rooms(2)
        meeting = asyncio.create_task(meet(room, 1, time.time() + LIMIT_S, alone=True))
        streams = []
        for _ in range(GREATEST_CALLS_OF_A_PEER):
            _, reader, writer = await liar.call_binary_stream_handler(PEERS[1], "test::meet/1")
            writer.write(frame(KEY.encode()) + encode(Join(b"bad", b"view")))
            streams.append((reader, writer))
        for reader, _ in streams:
            assert decode(await read_frame(reader)) == Refused("its row is bad")
        waiting = []
        for _ in range(GREATEST_CALLS_OF_A_PEER + 1):
            _, reader, writer = await liar.call_binary_stream_handler(PEERS[1], "test::meet/1")
            waiting.append((reader, writer))
        assert await waiting[-1][0].read() == b""
        room.expect(None)
        with pytest.raises(AveragingFailed, match="nobody is waited for"):
            await meeting

    run(test)


def test_strangers_do_not_fill_the_room_for_those_who_are_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_room, "GREATEST_CALLS_OF_STRANGERS", 2)

    async def test() -> None:
        (_, _), (_, room), (stranger, _), (member, _) = await rooms(4)
        room.expected = {NAMES[3]}
        handle, streams = "test::meet/1", []
        for _ in range(2):
            streams.append(await stranger.call_binary_stream_handler(PEERS[1], handle))
        _, refused, _ = await stranger.call_binary_stream_handler(PEERS[1], handle)
        assert await refused.read() == b""
        assert room._callers == {NAMES[2]: 2}
        streams.append(await member.call_binary_stream_handler(PEERS[1], handle))
        while room._callers[NAMES[3]] == 0:
            await asyncio.sleep(0)

    run(test)
