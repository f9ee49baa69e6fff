"""Messages and transfers between the machines: delay, loss, bandwidth, reachability, splits.

What is simplified: a machine's latency is one number, and a pair's the sum of both. Lost packets
are sent again by TCP, so a loss is a delay, and now and then a broken call. Transfers wait for one
another at both ends (first come, first served); messages do not wait behind them. A machine that
cannot be called has no relay; whom it has called can call it back over that connection, which
lasts until a side restarts or the network splits between them. A split lets nothing through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .engine import Engine

# What a call costs that brings nothing much: headers, acknowledgements.
CALL_BYTES = 300
# From here on bytes count for the time that they take.
BULK_BYTES = 16_384


# Called with the answer and how many bytes it has.
Reply = Callable[..., None]


class Host(Protocol):
    """A machine as the network knows it."""

    def serve(self, caller: str, what: str, content: Any, reply: Reply) -> None:
        """Answer a call, now or later, or never."""
        ...


class _Nobody:
    """In the place of a host until it has joined."""

    def serve(self, caller: str, what: str, content: Any, reply: Reply) -> None:
        """Answer nothing."""


_NOBODY = _Nobody()


# What calls and transfers are for, beside reading and writing the DHT ("views").
MEETINGS, REDUCES, CERTIFICATES, STATES, QUESTIONS = (
    "meetings",
    "reduces",
    "certificates",
    "states",
    "questions",
)
KIND_OF_CALL = {
    "chain": CERTIFICATES,
    "certificate": CERTIFICATES,
    "state": STATES,
    "shard": STATES,
    "offer": STATES,
}


@dataclass
class Traffic:
    """What a peer has asked and moved. Views of the swarm are counted apart."""

    requests: int = 0
    bytes: float = 0.0
    view_requests: int = 0
    """Of DHT nodes, to read and write records."""
    view_bytes: float = 0.0
    requests_by: dict[str, int] = field(default_factory=dict)
    """By what they were for."""
    bytes_by: dict[str, float] = field(default_factory=dict)

    def ask(self, kind: str) -> None:
        """Count a request."""
        self.requests += 1
        self.requests_by[kind] = self.requests_by.get(kind, 0) + 1

    def move(self, kind: str, size: float) -> None:
        """Count bytes that are sent or received."""
        self.bytes += size
        self.bytes_by[kind] = self.bytes_by.get(kind, 0.0) + size


@dataclass
class Link:
    """How one machine hangs in the network."""

    host: Host = field(default_factory=lambda: _NOBODY)
    latency_s: float = 0.03
    jitter_s: float = 0.01
    loss: float = 0.0
    uplink: float = 2e6
    """Bytes a second."""
    downlink: float = 8e6
    can_be_called: bool = True
    is_relayed: bool = False
    """Where it cannot be called: whether questions and states reach it all the same."""
    is_up: bool = True
    """Whether the process lives."""
    hangs: bool = False
    """Whether the machine vanished without a word: calls to it are not even refused."""
    awake_s: float = 0.0
    """Suspended until this time."""
    side: int = 0
    """In a split: the part of the network that it is in."""
    life: int = 0
    """Counts restarts, each of which breaks all connections."""
    sends_free_s: float = 0.0
    receives_free_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)


class Network:
    """Between all machines of a history."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.links: dict[str, Link] = {}
        self.split = 0
        """Number of the split that is on; 0 for none."""
        self._splits = 0
        self._opened: dict[tuple[str, str], tuple[int, int]] = {}
        """Connections, with the lives of both sides."""

    def join(self, peer: str, link: Link, host: Host) -> None:
        """Add a machine."""
        link.host = host
        self.links[peer] = link

    def cut(self, sides: dict[str, int]) -> None:
        """Split the network; who is not named is in part 0."""
        self._splits += 1
        self.split = self._splits
        for peer, link in self.links.items():
            link.side = sides.get(peer, 0)
        for caller, callee in list(self._opened):
            if self.links[caller].side != self.links[callee].side:
                del self._opened[caller, callee]

    def heal(self) -> None:
        """End the split."""
        self.split = 0
        for link in self.links.values():
            link.side = 0

    def run(self, peer: str, life: int, what: Callable[..., None], *arguments: Any) -> None:
        """Let a machine do something once it is awake; nothing if it has died or restarted."""
        link = self.links[peer]
        if not link.is_up or link.life != life:
            return
        if link.awake_s > self.engine.now_s:
            self.engine.at(link.awake_s, self.run, peer, life, what, *arguments)
        else:
            what(*arguments)

    def connected(self, one: str, other: str) -> bool:
        """Tell whether packets pass between two machines, whoever calls."""
        a, b = self.links[one], self.links[other]
        return a.is_up and b.is_up and a.side == b.side

    def can_call(self, caller: str, callee: str, *, relayed: bool = False) -> bool:
        """Open a connection, or use one: tell whether a call gets through to one that is awake.

        `relayed`: it may take the way through a relay.
        """
        if not self.connected(caller, callee):
            return False
        a, b = self.links[caller], self.links[callee]
        if b.can_be_called:
            if not a.can_be_called:
                # Nobody needs the connections of those that can be called anyway.
                self._opened[caller, callee] = (a.life, b.life)
            return True
        if relayed and b.is_relayed:
            return True
        return self._opened.get((callee, caller)) == (b.life, a.life)

    def can_talk(self, one: str, other: str) -> bool:
        """Tell whether either can call the other, and both are awake."""
        now_s, a, b = self.engine.now_s, self.links[one], self.links[other]
        dialable = a.can_be_called or b.can_be_called
        return self.connected(one, other) and dialable and max(a.awake_s, b.awake_s) <= now_s

    def delay_s(self, sender: str, receiver: str) -> float:
        """Draw how long a message takes one way."""
        a, b = self.links[sender], self.links[receiver]
        engine = self.engine
        delay_s = a.latency_s + b.latency_s
        delay_s += (a.jitter_s + b.jitter_s) * engine.random.random()
        while engine.chance(a.loss + b.loss):
            delay_s += engine.between(0.2, 0.6)
        return delay_s

    def arrival_s(self, sender: str, receiver: str, size: float, kind: str = QUESTIONS) -> float:
        """Draw when something that is sent now has arrived, and take the bandwidth for it."""
        now_s = self.engine.now_s
        a, b = self.links[sender], self.links[receiver]
        a.traffic.move(kind, size)
        b.traffic.move(kind, size)
        delay_s = self.delay_s(sender, receiver)
        if size < BULK_BYTES:
            return now_s + delay_s
        a.sends_free_s = max(now_s, a.sends_free_s) + size / a.uplink
        b.receives_free_s = max(now_s, b.receives_free_s) + size / b.downlink
        return max(a.sends_free_s, b.receives_free_s) + delay_s

    def tell(
        self,
        sender: str,
        receiver: str,
        what: Callable[..., None],
        *arguments: Any,
        size: float = CALL_BYTES,
        kind: str = QUESTIONS,
    ) -> float:
        """Send a message on an open connection; it is lost when that has broken by then.

        Returns when it will have arrived.
        """
        if not self.connected(sender, receiver):
            return 0.0
        lives = self.links[sender].life, self.links[receiver].life
        arrival_s = self.arrival_s(sender, receiver, size, kind)
        self.engine.at(arrival_s, self._arrive, sender, receiver, lives, what, arguments)
        return arrival_s

    def _arrive(
        self,
        sender: str,
        receiver: str,
        lives: tuple[int, int],
        what: Callable[..., None],
        arguments: tuple[Any, ...],
    ) -> None:
        a, b = self.links[sender], self.links[receiver]
        # What is on its way when its sender dies may still arrive; a dead receiver takes nothing.
        if b.is_up and b.life == lives[1] and a.side == b.side:
            self.run(receiver, b.life, what, *arguments)

    def call(
        self,
        caller: str,
        callee: str,
        what: str,
        content: Any,
        on_answer: Callable[[Any], None],
        *,
        limit_s: float,
        size: float = CALL_BYTES,
    ) -> None:
        """Call a peer. `on_answer` gets the answer, or None when none begins within the limit.

        A long answer takes what it takes; when it breaks off, that is noticed after the limit too.
        """
        engine, source = self.engine, self.links[caller]
        kind, life = KIND_OF_CALL.get(what, QUESTIONS), source.life
        source.traffic.ask(kind)
        call = _Call(self, caller, callee, life, kind, on_answer, limit_s)
        engine.after(limit_s, self.run, caller, life, call.time_is_up)
        target = self.links.get(callee)
        if target is None:
            refused_s = min(limit_s, engine.between(0.1, 3.0))
            engine.after(refused_s, self.run, caller, life, call.finish, None)
            return
        if not self.can_call(caller, callee, relayed=True):
            if not target.hangs and source.side == target.side:
                # Refused at once; who vanished or is cut off lets the caller wait.
                refused_s = 2 * source.latency_s + 0.05
                engine.after(refused_s, self.run, caller, life, call.finish, None)
            return
        if engine.chance(0.1 * (source.loss + target.loss)):
            return
        serve, reply = target.host.serve, call.reply
        self.tell(caller, callee, serve, caller, what, content, reply, size=size, kind=kind)


class _Call:
    """A call that waits for its answer. Once answered or given up it lets go of who made it."""

    __slots__ = (
        "_answered_s",
        "_callee",
        "_caller",
        "_kind",
        "_life",
        "_limit_s",
        "_network",
        "_on_answer",
    )

    def __init__(
        self,
        network: Network,
        caller: str,
        callee: str,
        life: int,
        kind: str,
        on_answer: Callable[[Any], None],
        limit_s: float,
    ) -> None:
        self._network, self._caller, self._callee = network, caller, callee
        self._life, self._kind = life, kind
        self._limit_s, self._answered_s = limit_s, 0.0
        self._on_answer: Callable[[Any], None] | None = on_answer

    def finish(self, answer: Any) -> None:
        """Tell the caller."""
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            on_answer(answer)

    def time_is_up(self) -> None:
        """Give up, unless the answer is on its way."""
        if self._on_answer is None:
            return
        network = self._network
        engine = network.engine
        if engine.now_s < self._answered_s:
            again_s = self._answered_s + self._limit_s
            engine.at(again_s, network.run, self._caller, self._life, self.time_is_up)
        else:
            self.finish(None)

    def reply(self, answer: Any, size: float = CALL_BYTES) -> None:
        """Send the answer back."""
        if self._on_answer is not None:
            self._answered_s = self._network.tell(
                self._callee, self._caller, self.finish, answer, size=size, kind=self._kind
            )
