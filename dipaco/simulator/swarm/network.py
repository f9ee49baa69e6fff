"""Messages and transfers between the machines: delay, loss, bandwidth, reachability, splits.

Much is simpler than in a real network. A machine has one latency, and that of a pair is the sum.
What is lost is gone, and the caller notices at its limit. Transfers wait for one another at both
ends, first come, first served; messages do not wait behind them. A machine that cannot be called
gets answers to its own calls alone. A split lets nothing through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dipaco.protocol.wire_sizes import CALL_BYTES

from .engine import Engine

# Messages from this size on take the time that their bytes need.
_BULK_BYTES = 16_384
# The "size" of an answer that never comes: the stream is opened, and nothing is sent.
NO_ANSWER = -1
# After so long a caller gives up a peer that says nothing.
STALL_S = 10.0


Serve = Callable[[str, str, Any], tuple[Any, int]]
"""Takes the caller, verb and content of a call; returns the answer and its size in bytes."""


@dataclass
class Conditions:
    """What goes wrong everywhere alike."""

    loss: float = 0.0
    """Share of all messages that are lost."""
    write_s: tuple[float, float] = (0.05, 0.5)
    """Least and greatest time until a record in the DHT can be read."""
    writes_lost: float = 0.0
    """Share of the writes into the DHT that are lost."""
    records_missed: float = 0.0
    """Share of the records that a reader does not see."""
    look_s: tuple[float, float] = (0.2, 1.5)
    """Least and greatest time that reading the swarm takes."""
    look_fails: float = 0.0
    path_fails: float = 0.0
    """Share of the shards that cannot be had at first."""


@dataclass
class Traffic:
    """What a peer has asked and moved, by verb. The DHT counts as the verb "views"."""

    requests: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    """Counts of records "written" to and "read" from the DHT."""


@dataclass
class Link:
    """The line of one machine, and whether the machine runs."""

    latency_s: float = 0.03
    jitter_s: float = 0.01
    uplink_bytes_s: float = 2e6
    downlink_bytes_s: float = 8e6
    can_be_called: bool = True
    is_up: bool = True
    """Whether the process runs."""
    hangs: bool = False
    """Whether the machine vanished without a word: calls to it are not even refused."""
    awake_s: float = 0.0
    """Suspended until this time."""
    side: int = 0
    """The part of a split network that it is in."""
    life: int = 0
    """Counts restarts: what was under way before one is gone."""
    sends_free_s: float = 0.0
    receives_free_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)


class Network:
    """The network between all machines of a history."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.links: dict[str, Link] = {}
        self.hosts: dict[str, Serve] = {}
        self.conditions = Conditions()
        self.split = 0
        """The number of the present split; 0 for none."""
        self._splits = 0

    def join(self, peer: str, link: Link, host: Serve) -> None:
        """Add a machine."""
        self.links[peer], self.hosts[peer] = link, host

    def cut(self, sides: dict[str, int]) -> None:
        """Split the network; a peer that is not named is in part 0."""
        self._splits += 1
        self.split = self._splits
        for peer, link in self.links.items():
            link.side = sides.get(peer, 0)

    def heal(self) -> None:
        """End the split."""
        self.split = 0
        for link in self.links.values():
            link.side = 0

    def run(self, peer: str, life: int, what: Callable[..., object], *arguments: Any) -> None:
        """Let a machine do something once it is awake; nothing if it has died or restarted."""
        link = self.links[peer]
        if not link.is_up or link.life != life:
            return
        if link.awake_s > self.engine.now_s:
            self.engine.at(link.awake_s, self.run, peer, life, what, *arguments)
        else:
            what(*arguments)

    def _can_call(self, caller: str, callee: str) -> bool:
        """Tell whether a call gets through, to a machine that is awake."""
        a, b = self.links[caller], self.links.get(callee)
        return b is not None and a.is_up and b.is_up and b.can_be_called and a.side == b.side

    def send(
        self,
        sender: str,
        receiver: str,
        verb: str,
        size_bytes: int,
        what: Callable[..., object],
        *arguments: Any,
    ) -> float:
        """Let the receiver do something; returns when the message arrives, or 0 if it is lost."""
        engine, a, b = self.engine, self.links[sender], self.links[receiver]
        size_bytes, life = CALL_BYTES + size_bytes, b.life
        a.traffic.sent[verb] += size_bytes
        now_s = engine.now_s
        arrival_s = now_s + a.latency_s + b.latency_s
        arrival_s += (a.jitter_s + b.jitter_s) * engine.random.random()
        if size_bytes >= _BULK_BYTES:
            begin_s = max(now_s, a.sends_free_s, b.receives_free_s)
            takes_s = size_bytes / min(a.uplink_bytes_s, b.downlink_bytes_s)
            a.sends_free_s = begin_s + size_bytes / a.uplink_bytes_s
            b.receives_free_s = begin_s + size_bytes / b.downlink_bytes_s
            arrival_s += begin_s + takes_s - now_s
        if engine.chance(self.conditions.loss):
            return 0.0

        def arrive() -> None:
            # What is on its way when its sender dies still arrives; a split swallows it.
            if a.side == b.side:
                b.traffic.received[verb] += size_bytes
                self.run(receiver, life, what, *arguments)

        engine.at(arrival_s, arrive)
        return arrival_s

    def tell(self, sender: str, receiver: str, content: Any, size_bytes: int) -> None:
        """Send a message that wants no answer, if it gets through."""
        self.links[sender].traffic.requests["tell"] += 1
        if self._can_call(sender, receiver):
            host = self.hosts[receiver]
            self.send(sender, receiver, "tell", size_bytes, host, sender, "tell", content)

    def call(
        self,
        caller: str,
        callee: str,
        verb: str,
        content: Any,
        on_answer: Callable[[Any], None],
        *,
        limit_s: float = STALL_S,
        size_bytes: int = 0,
    ) -> None:
        """Call a peer. `on_answer` gets the answer, or None if none has begun within `limit_s`."""
        source = self.links[caller]
        source.traffic.requests[verb] += 1
        call = _Call(self, caller, callee, verb, source.life, limit_s, on_answer)
        if self._can_call(caller, callee):
            self.send(caller, callee, verb, size_bytes, call.serve, content)
            if size_bytes >= _BULK_BYTES:
                call.limit_s += 4 * size_bytes / source.uplink_bytes_s
        else:
            target = self.links.get(callee)
            if target is None or (not target.hangs and source.side == target.side):
                call.limit_s = min(limit_s, 2 * source.latency_s + 0.05)  # It is refused at once.
        self.engine.after(call.limit_s, self.run, caller, source.life, call.time_is_up)


@dataclass(slots=True)
class _Call:
    """A call that waits for its answer."""

    network: Network
    caller: str
    callee: str
    verb: str
    life: int
    """The life of the caller."""
    limit_s: float
    on_answer: Callable[[Any], None] | None
    answered_s: float = 0.0

    def serve(self, content: Any) -> None:
        """Let the callee answer."""
        network, caller, callee, verb = self.network, self.caller, self.callee, self.verb
        if self.on_answer is not None:
            answer, size_bytes = network.hosts[callee](caller, verb, content)
            if size_bytes != NO_ANSWER:
                self.answered_s = network.send(
                    callee, caller, verb, size_bytes, self.finish, answer
                )

    def finish(self, answer: Any) -> None:
        """Give the caller its answer, once."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None and self.network.links[self.caller].life == self.life:
            on_answer(answer)

    def time_is_up(self) -> None:
        """Give up, unless a long answer is on its way."""
        network = self.network
        if network.engine.now_s < self.answered_s:
            again_s = self.answered_s + self.limit_s
            network.engine.at(again_s, network.run, self.caller, self.life, self.time_is_up)
        else:
            self.finish(None)
