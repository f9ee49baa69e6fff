"""Being called back: which addresses are called, how often, and what follows from the answers."""

import asyncio
import socket
import threading

import pytest

from dipaco.base.errors import NetworkError
from dipaco.peer.exchange.contact import reachability
from dipaco.peer.exchange.contact.reachability import (
    AGAIN_S,
    CALL_PERIOD_S,
    CALLS_AT_ONCE,
    GREETING,
    QUESTIONS,
    SOON_S,
    CallingBack,
    ReachabilityWatch,
    hosts_of,
    probe,
    tcp_address,
    to_call,
)
from dipaco.peer.exchange.streams.messages import CallBackReply
from dipaco.protocol.view import SwarmView
from support.swarms.swarm_views import record

ME = "/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
LOOPBACK = "/ip4/127.0.0.1/tcp/4001" + ME
HOME = "/ip4/192.168.1.20/tcp/4001"
PUBLIC = "/ip4/8.8.8.8/tcp/4001"
VICTIM = "/ip4/9.9.9.9/tcp/80"
RELAY = f"{PUBLIC}{ME}/p2p-circuit"


def reply(result, *, near=False):
    return CallBackReply(result=result, near=near)


# -- addresses


@pytest.mark.parametrize("address", [RELAY, "/dns4/example.org/tcp/1", "/ip4/8.8.8.8/udp/4001/quic", "nonsense", ""])
def test_what_has_no_host_and_port_is_not_called(address):
    assert tcp_address(address) is None


def test_only_hosts_from_which_a_caller_comes_are_called():
    other_port = "/ip4/8.8.8.8/tcp/9"
    places = to_call([VICTIM, PUBLIC, HOME, other_port, PUBLIC], hosts_of(["/ip4/8.8.8.8/tcp/50000"]))
    assert [(str(host), port) for host, port in places] == [("8.8.8.8", 4001), ("8.8.8.8", 9)]
    assert to_call([VICTIM], hosts_of([RELAY])) == ()
    assert len(to_call([f"/ip4/8.8.8.8/tcp/{port}" for port in range(1, 100)], hosts_of([PUBLIC]))) == 4
    assert len(to_call(["/ip6/2001:db8::5/tcp/7"], hosts_of(["/ip6/2001:db8::5/tcp/1"]))) == 1


# -- who is asked


def listen(greeting):
    """Listen on loopback and say something to each caller; returns the address too."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(greeting)

    threading.Thread(target=serve, daemon=True).start()
    return server, f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("greeting", "result"), [(GREETING, "reached"), (b"220 mail.example.org\r\n", "silent"), (b"", "silent")]
)
def test_a_caller_is_called_where_it_says(greeting, result):
    server, address = listen(greeting)
    with server:
        answer = asyncio.run(CallingBack().answer("Pa", [address], [LOOPBACK]))
    assert answer == reply(result, near=True)


def test_nobody_listens():
    server, address = listen(b"")
    server.close()
    answer = asyncio.run(CallingBack().answer("Pa", [address], [LOOPBACK]))
    assert answer == reply("silent", near=True)


def test_calls_are_few_and_seldom(monkeypatch):
    now = [0.0]
    calls = []

    async def greets(host, port):
        calls.append(asyncio.get_running_loop().create_future())
        return await calls[-1]

    monkeypatch.setattr(reachability, "greets", greets)

    async def ask():
        service = CallingBack(monotonic=lambda: now[0])
        waiting = [
            asyncio.create_task(service.answer(f"P{number}", [PUBLIC], [PUBLIC])) for number in range(CALLS_AT_ONCE + 1)
        ]
        while len(calls) < CALLS_AT_ONCE or not waiting[-1].done():
            await asyncio.sleep(0)
        for call in calls:
            call.set_result(True)
        results = [(await one).result for one in waiting]
        results.append((await service.answer("P0", [PUBLIC], [PUBLIC])).result)
        now[0] += CALL_PERIOD_S
        again = asyncio.create_task(service.answer("P0", [PUBLIC], [PUBLIC]))
        while len(calls) == CALLS_AT_ONCE:
            await asyncio.sleep(0)
        calls[-1].set_result(False)
        return [*results, (await again).result]

    assert asyncio.run(ask()) == ["reached"] * CALLS_AT_ONCE + ["untried", "untried", "silent"]


def test_who_comes_through_a_relay_or_from_elsewhere_is_not_called():
    service = CallingBack()
    assert asyncio.run(service.answer("Pa", [PUBLIC], [RELAY])).result == "untried"
    assert asyncio.run(service.answer("Pa", [HOME], [PUBLIC])).result == "elsewhere"


# -- who asks


class Asked:
    """Other peers, each with its answer; None does not answer."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    @property
    def peers(self):
        return tuple(str(number) for number in range(len(self.answers)))

    def call_back(self, peer, addresses):
        self.calls.append(tuple(addresses))
        answer = self.answers[int(peer)]
        if answer is None:
            raise NetworkError("it does not answer")
        return answer


REACHED, SILENT, ELSEWHERE = reply("reached"), reply("silent"), reply("elsewhere")
NEAR, UNTRIED = reply("reached", near=True), reply("untried")


@pytest.mark.parametrize(
    ("own", "answers", "expected", "asked"),
    [
        ([HOME, PUBLIC], [REACHED, REACHED, SILENT], "direct", 2),
        ([HOME, PUBLIC], [SILENT, SILENT, REACHED], "outgoing", 2),
        ([HOME, PUBLIC], [SILENT, REACHED, REACHED], "direct", 3),
        ([HOME, PUBLIC, RELAY], [SILENT, SILENT], "outgoing", 2),
        # Nothing that it announces is where it is seen: unless it says that it is elsewhere.
        ([HOME], [ELSEWHERE, ELSEWHERE], "outgoing", 2),
        ([PUBLIC], [ELSEWHERE, ELSEWHERE], "unknown", 2),
        # A neighbour in the same house says nothing about those outside.
        ([HOME], [NEAR, SILENT, SILENT], "outgoing", 2),
        ([HOME], [NEAR, NEAR], "direct", 2),
        ([LOOPBACK], [NEAR], "direct", 1),
        ([PUBLIC], [None, UNTRIED, REACHED, REACHED], "direct", 4),
        ([PUBLIC], [None] * 9, "unknown", QUESTIONS),
        ([PUBLIC], [SILENT, REACHED], "unknown", 2),
        ([], [ELSEWHERE, ELSEWHERE], "outgoing", 2),
    ],
)
def test_what_follows_from_answers(own, answers, expected, asked):
    others = Asked(*answers)
    assert probe(others.call_back, others.peers, own)[0] == expected
    assert len(others.calls) == asked


def test_public_addresses_are_tried_first_and_relays_never():
    others = Asked(REACHED)
    probe(others.call_back, others.peers, [HOME, LOOPBACK, RELAY, "/ip4/10.0.0.1/tcp/1", HOME, PUBLIC])
    assert others.calls[0][0] == PUBLIC
    assert RELAY not in others.calls[0]
    assert len(others.calls[0]) == 4


class Watched:
    """A watch whose thread is the caller's, with a clock that the test turns."""

    def __init__(self, *answers):
        self.others = Asked(*answers)
        self.now_s = 0.0
        self.own = (PUBLIC,)
        self.told = []
        self.watch = ReachabilityWatch(
            self.others.call_back,
            "me",
            lambda: self.own,
            self.thread,
            lambda own, found: self.told.append((own, found)),
            monotonic=lambda: self.now_s,
        )

    def thread(self, name, work):
        class Now:
            start = staticmethod(work)

        return Now()

    def look(self, seconds=0.0):
        """Let time pass and show the swarm; returns how many peers were asked."""
        self.now_s += seconds
        before = len(self.others.calls)
        there = (record(peer, "serving") for peer in ("me", *self.others.peers))
        peers = {r.peer_id: r.model_copy(update={"addresses": ()}) for r in there}
        self.watch.on_view(SwarmView(0.0, peers=peers))
        return len(self.others.calls) - before


def test_it_asks_at_once_and_again_when_addresses_change_or_much_later():
    peer = Watched(REACHED, REACHED)
    assert peer.look() == 2
    assert peer.look(1.0) == 0
    assert peer.look(SOON_S) == 0
    assert peer.told == [((PUBLIC,), "direct")]
    peer.others.answers = [SILENT, SILENT]
    peer.own = (HOME, PUBLIC)
    assert peer.look(SOON_S) == 2
    assert peer.told[1:] == [((HOME, PUBLIC), "outgoing")]
    assert peer.look(SOON_S) == 0
    assert peer.look(AGAIN_S) == 2
    assert len(peer.told) == 2


def test_what_nobody_can_tell_is_asked_again_soon():
    peer = Watched(None, None)
    assert peer.look() == 2
    assert peer.told == [((PUBLIC,), "unknown")]
    assert peer.look(SOON_S) == 2
    peer.others.answers = [REACHED, REACHED]
    assert peer.look(SOON_S) == 2
    assert peer.told[1:] == [((PUBLIC,), "direct")]
    # A peer that has been called can still be called, though nobody answers for a while.
    peer.others.answers = [None, None]
    assert peer.look(AGAIN_S) == 2
    assert len(peer.told) == 2


def test_a_peer_without_others_asks_nobody():
    peer = Watched()
    assert peer.look() == 0
    assert peer.told == []
