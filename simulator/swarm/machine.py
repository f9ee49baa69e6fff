"""One machine: the other shell around a member, with virtual time in place of threads.

It asks the member what to do between two inner steps, tells it what happened, and carries out what
it wants (`carrying`). It can crash at any event, sleep, restart with its old disk or an empty one,
and its clock can be wrong.

What is simplified: inner steps that nothing interrupts are taken as one, up to the next boundary
or a share of a round; what happens meanwhile waits for the end of the real step under way. A wait
is asked again after a quarter of a second first, later after a whole one.
"""

from __future__ import annotations

import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

from dipaco.dht.certificates import Certificate
from dipaco.dht.records import refresh_period_s
from dipaco.peer.member.actions import Action, Left, TakeStep, Wait
from dipaco.peer.member.events import (
    Admitted,
    Answered,
    Averaged,
    CallAnswered,
    Event,
    LeaveWanted,
    PauseWanted,
    ResumeWanted,
    Revoked,
    Stepped,
    Turn,
    Viewed,
)

from .carrying import Carrying
from .liveness import RIGHT_CLOCK_S
from .network import Link, Reply
from .publishing import Publishing
from .world import Body, Disk, World

# Of a round: the longest stretch of inner steps that is taken as one.
STRETCH_SHARE = 1 / 6


@dataclass
class _Stretch:
    """Inner steps under way."""

    begin_s: float
    steps: int
    number: int


class Machine(Body):
    """See the module's text. Everything that is not on disk is gone when `start` is called."""

    def __init__(
        self,
        world: World,
        peer: str,
        link: Link,
        *,
        step_s: float,
        trains: bool = True,
        pinned: int | None = None,
        clock_error_s: float = 0.0,
    ) -> None:
        super().__init__(world, peer, link)
        self.step_s, self.trains, self.pinned = step_s, trains, pinned
        self.clock_error_s = clock_error_s
        self.has_left = False
        world.network.join(peer, link, self)
        link.is_up = False

    def forget(self) -> None:
        """Be as after a start: nothing in memory."""
        super().forget()
        self.carrying = Carrying(self)
        self.publishing = Publishing(self)
        self._inbox: deque[Event] = deque()
        self._stretch: _Stretch | None = None
        self._is_waiting = False
        self._waits = 0
        self._turns = 0

    # -- life

    def start(self) -> None:
        """Begin, with what lies on the disk, unless it runs."""
        if self.link.is_up:
            return
        self.link.is_up, self.link.hangs = True, False
        self.link.life += 1
        self.link.awake_s = 0.0
        self.has_left = False
        self._measure_clock()
        self.forget()
        for kept in self.disk.states.values():
            self.serve_state(kept[-1])
            for state in kept:
                self.book.add_all(self.disk.chains.get(state.reference.digest, ()))
        held = tuple(kept[-1].reference for kept in self.disk.states.values())
        self.world.say(self.peer, "!", f"starts with {len(held)} states on disk")
        self.member = self.world.make_member(self, self.book, held)
        for peer, admission in (self.world.directory.guests or {}).items():
            self._ask_member(Admitted(peer, admission))
        self._known_revoked: frozenset[str] = frozenset()
        self.later(0.0, self._turn, self._turns)
        self.later(self.world.engine.between(0.1, 1.0), self._refresh)

    def _measure_clock(self) -> None:
        """Begin with the right time if there is anybody to ask, as who has another one does not
        join (design 4.1)."""
        others = [m for m in self.world.machines.values() if m.is_awake and m is not self]
        is_asked = any(one.link.side == self.link.side for one in others)
        if is_asked and abs(self.clock_error_s) >= RIGHT_CLOCK_S:
            self.step_clock(-self.clock_error_s)

    def crash(self, *, hangs: bool, empty_disk: bool) -> None:
        """End without a word. `hangs`: callers find nobody who would refuse."""
        if not self.link.is_up:
            return
        self.world.say(self.peer, "!", "crashes" + (" and loses its disk" if empty_disk else ""))
        self.world.watch.crashed(self)
        self._lose_all("it crashed")
        self.link.is_up, self.link.hangs = False, hangs
        self.carrying.end()
        if empty_disk:
            self.disk = Disk()

    def _lose_all(self, why: str) -> None:
        for module in list(self.works):
            self.world.watch.lost(self, module, why)
        self.works.clear()

    def suspend(self, seconds: float) -> None:
        """Sleep; everything that is due meanwhile happens at the end."""
        self.world.say(self.peer, "!", f"sleeps for {seconds:.0f} s")
        self.link.awake_s = max(self.link.awake_s, self.world.now_s + seconds)

    def step_clock(self, seconds: float) -> None:
        """Put the clock forward or back."""
        self.world.say(self.peer, "!", f"its clock jumps by {seconds:.1f} s")
        self.clock_error_s += seconds

    def ask_to_pause(self, *, pause: bool) -> None:
        """Say that the machine is needed, or that it is not needed any more."""
        event = PauseWanted("its owner needs it") if pause else ResumeWanted()
        if self.link.is_up:
            self.world.network.run(self.peer, self.link.life, self.deliver, event)

    def ask_to_leave(self) -> None:
        """Press Ctrl+C."""
        self.world.network.run(
            self.peer, self.link.life, self.deliver, LeaveWanted("Ctrl+C was pressed")
        )

    def _stop(self) -> None:
        """The member has left."""
        self._lose_all("it left")
        self.world.watch.left(self)
        self.has_left = True
        self.publishing.withdraw()
        self.link.is_up = False
        self.carrying.end()

    # -- the loop

    def deliver(self, event: Event) -> None:
        """Report an event: at once, or when the inner step under way has ended."""
        if not self.link.is_up:
            return
        if self._stretch is not None:
            self._inbox.append(event)
            self._cut_short(self._stretch)
            return
        self._handle(event)
        if self._is_waiting:
            self._is_waiting = False
            self._waits = 0
            self._turns += 1
            self.later(0.0, self._turn, self._turns)

    def _handle(self, event: Event) -> list[Action]:
        """Let the member handle an event, and all that is answered at once."""
        self.carrying.note(event)
        actions = self._ask_member(event)
        self.carrying.review_offers()
        while self.answers and self.link.is_up:
            self._ask_member(self.answers.popleft())
        return actions

    def _ask_member(self, event: Event) -> list[Action]:
        world = self.world
        world.say(self.peer, "hears", event)
        self.handled += 1
        self._note_met(event)
        try:
            actions = self.member.handle(event, self.believed_s)
        except Exception:
            last = traceback.format_exc().strip().splitlines()
            world.watch.wrong(self, f"handling {event.kind} raised: {' | '.join(last[-5:])}")
            return []
        for action in actions:
            if not self.link.is_up:
                break
            world.say(self.peer, "wants", action)
            self.carrying.do(action)
        return actions

    def _note_met(self, event: Event) -> None:
        if isinstance(event, CallAnswered):
            self.met.update(event.answered)
        elif isinstance(event, Answered):
            self.met.update(event.holdings)
        elif isinstance(event, Averaged):
            self.met.update(row.peer for row in event.table)

    def _turn(self, number: int) -> None:
        if number != self._turns or self._stretch is not None:
            return
        self._is_waiting = False
        actions = self._handle(Turn(self.step_s if self.steps else 0.0))
        if not self.link.is_up:
            return
        answers = [a for a in actions if isinstance(a, TakeStep | Wait | Left)]
        if len(answers) != 1:
            found = ", ".join(answer.kind for answer in answers) or "nothing"
            self.world.watch.wrong(self, f"a turn was answered with {found}")
        elif isinstance(answers[0], Left):
            self._stop()
            return
        elif isinstance(answers[0], TakeStep):
            self._waits = 0
            self._begin_steps(answers[0].slack_s)
            return
        self._is_waiting = True
        self._turns += 1
        self._waits += 1
        self.later(0.25 if self._waits < 8 else 1.0, self._turn, self._turns)

    def _begin_steps(self, slack_s: float) -> None:
        rounds = self.world.plan.rounds
        steps = 1
        if not rounds.inner_steps:
            longest_s = min(slack_s, STRETCH_SHARE * rounds.duration_s)
            steps = max(1, int(longest_s / self.step_s))
        self._turns += 1
        self._stretch = _Stretch(self.world.now_s, steps, self._turns)
        self.later(steps * self.step_s, self._stepped, self._stretch.number)

    def _cut_short(self, stretch: _Stretch) -> None:
        """Let a stretch end with the real step that is under way."""
        passed_s = self.world.now_s - stretch.begin_s
        steps = max(1, -int(-passed_s // self.step_s))
        if steps < stretch.steps:
            self._turns += 1
            stretch.steps, stretch.number = steps, self._turns
            end_s = stretch.begin_s + steps * self.step_s
            self.later(end_s - self.world.now_s, self._stepped, stretch.number)

    def _stepped(self, number: int) -> None:
        stretch = self._stretch
        if stretch is None or stretch.number != number:
            return
        self._stretch = None
        self.steps += stretch.steps
        self._handle(Stepped(stretch.steps * self.world.tokens_per_step))
        while self._inbox and self.link.is_up:
            self._handle(self._inbox.popleft())
        self._turn(self._turns)

    # -- what is published and read

    @property
    def refresh_period_s(self) -> float:
        """How often records are renewed: as `peer.publisher` does."""
        return refresh_period_s(self.world.plan.rounds)

    def _refresh(self) -> None:
        """Publish and read, once a refresh period."""
        self.publish()
        engine = self.world.engine
        self.later(engine.between(*self.world.conditions.look_s), self.read, False)
        self.later(self.refresh_period_s * engine.between(0.95, 1.05), self._refresh)

    def read(self, is_answer: bool, further: tuple[int, ...] = ()) -> None:
        """Read what the member watches, and `further` buckets, and tell it."""
        scope = self.scope.with_buckets(further) if further else self.scope
        view = self.world.directory.read(self.peer, self.believed_s, scope)
        revoked = self.world.directory.revoked
        if revoked != self._known_revoked:
            self._known_revoked = revoked
            self.deliver(Revoked(tuple(sorted(revoked))))
        self.deliver(Viewed(view, is_answer))

    def publish(self) -> None:
        """Write all records that say something new or have grown old."""
        self.publishing.publish()

    def serve(self, caller: str, what: str, content: Any, reply: Reply) -> None:
        """Answer a call."""
        self.carrying.serve(caller, what, content, reply)

    def hear_call(self, *said: Any) -> None:
        """Take what the other side of a call of a meeting says."""
        self.carrying.averaging.hear(*said)

    def hear_broken_call(self, *call: Any) -> None:
        """Take note that a call of a meeting broke."""
        self.carrying.averaging.call_broke(*call)

    def hear_signature(self, certificate: Certificate) -> None:
        """Take the signature of another member of a group."""
        self.carrying.signing.hear(certificate)
