"""Peers that meet over a network in memory, on a virtual clock: every bad day is a seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dipaco.peer.member.calls import (
    LAST_MESSAGES,
    Absent,
    Call,
    Group,
    Heard,
    Lost,
    MeetingAction,
    Message,
    Met,
    Missed,
    Passed,
    Refused,
    Tell,
)
from dipaco.peer.member.meeting import Meeting
from dipaco.peer.member.reception import Reception

KEY = "meeting"


@dataclass
class Faults:
    """What goes wrong; nothing by default."""

    latency_s: tuple[float, float] = (0.1, 0.2)
    loss: float = 0.0
    """Share of messages that never arrive."""
    cut: frozenset[tuple[str, str]] = frozenset()
    """Pairs (caller, called) of which the first cannot call the second, as long as the second
    has not called it: a connection serves both ways."""
    crashes: dict[str, float] = field(default_factory=dict)
    """When a peer dies."""
    frozen: frozenset[str] = frozenset()
    """Those whose death nobody is told: their calls stay open."""


@dataclass
class Peer:
    """One peer of a test: a meeting once it has come, and a reception before and after."""

    name: str
    comes_s: float
    make: Callable[[float], Meeting]
    meeting: Meeting | None = None
    reception: Reception = field(default_factory=Reception)
    group: Group | None = None
    missed: str = ""
    ended_s: float = 0.0


class MeetingNet:
    """Runs the meetings of all peers until they have ended."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.peers: dict[str, Peer] = {}
        self.now_s = 0.0
        self.messages = 0
        self._faults = faults
        self._cut = set(faults.cut)
        self._random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._arrives: dict[tuple[str, str, int, bool], float] = {}
        self._open: set[tuple[str, str, int]] = set()
        """Calls (caller, called, number) that stand."""

    def add(self, name: str, comes_s: float, make: Callable[[float], Meeting]) -> None:
        self.peers[name] = Peer(name, comes_s, make)
        self.at(comes_s, lambda: self._come(name))

    def at(self, time_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_s, self._count, what))
        self._count += 1

    def run(self) -> None:
        for name, time_s in self._faults.crashes.items():
            self.at(time_s, lambda name=name: self._crash(name))  # type: ignore[misc]
        while self._heap:
            self.now_s, _, what = heapq.heappop(self._heap)
            assert self.now_s < 10_000, "a meeting does not end"
            what()

    def is_dead(self, name: str) -> bool:
        return self.now_s >= self._faults.crashes.get(name, float("inf"))

    def happen(self, name: str, event: Heard | Lost | Passed | object) -> None:
        peer = self.peers[name]
        if peer.meeting is not None and not self.is_dead(name):
            self._carry_out(peer, peer.meeting.step(self.now_s, event))  # type: ignore[arg-type]

    def _come(self, name: str) -> None:
        if self.is_dead(name):
            return
        peer = self.peers[name]
        peer.meeting = peer.make(self.now_s)
        self.happen(name, Passed())
        for heard in peer.reception.begin(KEY):
            self.happen(name, heard)

    def _carry_out(self, peer: Peer, actions: list[MeetingAction]) -> None:
        meeting = peer.meeting
        for action in actions:
            if isinstance(action, Call):
                self._call(peer.name, action)
            elif isinstance(action, Tell):
                self._say(peer.name, action.peer, action.number, action.mine, action.message)
            else:
                peer.ended_s, peer.meeting = self.now_s, None
                if isinstance(action, Met):
                    peer.group = action.group
                    peer.reception.end(KEY)
                elif isinstance(action, Missed):
                    peer.missed = action.reason
        if meeting is not None and meeting is peer.meeting:
            wake_s = meeting.wake_s
            assert wake_s > self.now_s, "a meeting wants to be woken in the past"
            self.at(wake_s, lambda: self._wake(peer, meeting, wake_s))

    def _wake(self, peer: Peer, meeting: Meeting, wake_s: float) -> None:
        if peer.meeting is meeting and meeting.wake_s == wake_s:
            self.happen(peer.name, Passed())

    def _call(self, caller: str, action: Call) -> None:
        called = action.peer
        unreachable = called not in self.peers or (caller, called) in self._cut
        if unreachable or (self.is_dead(called) and called not in self._faults.frozen):
            lost = Lost(called, action.number, True)
            self.at(self.now_s + self._latency(), lambda: self.happen(caller, lost))
            return
        self._open.add((caller, called, action.number))
        self._cut.discard((called, caller))
        self._say(caller, called, action.number, True, action.message)

    def _say(self, source: str, target: str, number: int, mine: bool, message: Message) -> None:
        call = (source, target, number) if mine else (target, source, number)
        if call not in self._open:
            return
        self.messages += 1
        if self._random.random() < self._faults.loss:
            return
        way = (*call, mine)
        arrives_s = max(self.now_s + self._latency(), self._arrives.get(way, 0.0))
        self._arrives[way] = arrives_s
        self.at(arrives_s, lambda: self._arrive(source, target, number, mine, message))

    def _arrive(self, source: str, target: str, number: int, mine: bool, message: Message) -> None:
        peer = self.peers[target]
        if self.is_dead(target):
            return
        if isinstance(message, LAST_MESSAGES):
            self._open.discard((source, target, number) if mine else (target, source, number))
        if peer.meeting is not None or not mine:
            self.happen(target, Heard(source, number, not mine, message))
            return
        answer = peer.reception.hold(KEY, source, number, message)  # type: ignore[arg-type]
        if isinstance(answer, (Absent, Refused)):
            self._say(target, source, number, False, answer)

    def _crash(self, name: str) -> None:
        self.peers[name].meeting = None
        for caller, called, number in sorted(self._open):
            if name not in (caller, called) or name in self._faults.frozen:
                continue
            self._open.discard((caller, called, number))
            other, mine = (called, False) if caller == name else (caller, True)
            lost = Lost(name, number, mine)
            self.at(self.now_s + self._latency(), lambda o=other, e=lost: self.happen(o, e))  # type: ignore[misc]

    def _latency(self) -> float:
        return self._random.uniform(*self._faults.latency_s)
