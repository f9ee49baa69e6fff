"""One machine: the other shell around a member, with virtual time in place of threads.

It asks the member what to do between two inner steps, tells it what happened, and carries out what
it wants (`carrying`). It can crash at any event, sleep, restart with its old disk or an empty one,
and its clock can be wrong.

Three things are simpler than in a real peer. Inner steps that nothing interrupts are taken as one
stretch, up to the next boundary or a share of a round; an event ends the stretch with the step that
is under way. An action that concerns the model is done at once, where a real peer waits for the end
of that step. A member that waits is asked again after a quarter of a second, and later after one.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dipaco.protocol.chain.steps import Head, Row
from dipaco.protocol.chain.trunk import Trunk
from dipaco.protocol.coverage import bucket_count, home_bucket, scope_of
from dipaco.protocol.member.actions import Action, Left, Publish, Say, TakeStep, Tell, Wait
from dipaco.protocol.member.events import (
    Event,
    LeaveWanted,
    Meanwhile,
    PauseWanted,
    Stepped,
    Turn,
    Viewed,
)
from dipaco.protocol.member.knowledge import MemberSettings
from dipaco.protocol.member.member import Member
from dipaco.protocol.records import ProgressEntry, refresh_period_s
from dipaco.protocol.view import claimed_tokens

from .carrying import Carrying
from .machine_records import MachineRecords
from .machine_store import Store
from .network import Link
from .world import FILE_BYTES, Content, World

# The longest stretch of inner steps, as a share of a round.
_STRETCH_SHARE = 1 / 4
# Rounding may put a moment that has passed a little into the future.
_LEAST_WAIT_S = 0.25
# A peer whose clock is further off does not join (design 4.1, rounds).
_RIGHT_CLOCK_S = 2.0


@dataclass
class Work:
    """What a machine trains of one module. Numbers are counts of its own tokens."""

    anchor: str
    """The step whose state is the anchor."""
    base: int
    """Tokens before this count are in the anchor, or lost."""
    snapshot: int
    """Tokens before this count are in the last contribution, in the anchor, or lost."""


@dataclass
class _Stretch:
    """Inner steps that are under way."""

    begin_s: float
    steps: int
    number: int


class Machine:
    """The machine of one peer. `start` begins a life with nothing but what lies on the disk."""

    is_honest = True
    content: Content = "good"
    """What its contributions are worth."""
    carries: ClassVar[type[Carrying]] = Carrying
    """What carries out its member's actions."""

    def __init__(
        self,
        world: World,
        peer: str,
        link: Link,
        *,
        step_s: float = 1.0,
        trains: bool = True,
        clock_error_s: float = 0.0,
    ) -> None:
        self.world, self.peer, self.link = world, peer, link
        self.step_s, self.trains, self.clock_error_s = step_s, trains, clock_error_s
        self.number = len(world.machines)
        world.machines[peer] = self
        world.network.join(peer, link, self.serve)
        link.is_up = False
        self.store = Store(world)
        self.tokens = 0
        """All that were ever trained here."""
        self.handled = 0
        """Events that its members have handled."""
        self.refresh_period_s = refresh_period_s(world.plan.rounds)
        self._forget()

    def _forget(self) -> None:
        """Have nothing in memory, as after a start."""
        world, count = self.world, bucket_count(self.world.grid.path_count)
        self.path: int | None = None
        self.round_index = 0
        self.works: dict[str, Work] = {}
        self.scope = scope_of((), (home_bucket(self.peer, None, count),), world.grid)
        """What it reads of the swarm."""
        self.claim = Say("joining", None, 0.0, "", False)
        self.progress: dict[int, ProgressEntry] = {}
        self._waiting: Mapping[int, int] = {}
        """Paths that nobody claimed in the last view, and since which round."""
        self.answers: deque[Event] = deque()
        """What actions had for an answer at once."""
        self.carrying = self.carries(self)
        self.publishing = MachineRecords(self)
        self._stretch: _Stretch | None = None
        self._is_waiting = False
        self._waits = 0
        self._turns = 0

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.link.is_up

    @property
    def believed_s(self) -> float:
        """The swarm time, as this machine believes it to be."""
        return self.world.engine.now_s + self.clock_error_s

    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        """Do something in this life of the machine, when it is awake."""
        self.world.engine.after(
            delay_s, self.world.network.run, self.peer, self.link.life, what, *arguments
        )

    def act(self, action: Action) -> None:
        """Carry out what the member wants."""
        self.carrying.do(action)
        if isinstance(action, Tell) and action.steps:
            self.after_telling(action)

    def after_telling(self, action: Tell) -> None:
        """Called after a step was told; scenarios put faults here."""

    def start_work(self, module: str, anchor: str) -> None:
        """Begin to train a module from a state."""
        self.works[module] = Work(anchor, self.tokens, self.tokens)

    def contribute(self, action: Publish, path: int, work: Work) -> Row:
        """Make a contribution of what was trained of a module; returns its row."""
        module, round_index, parent = action.module, action.round_index, action.parent
        said = self._claimed(work.snapshot - work.base, round_index)
        state = action.state
        row = Row(module, round_index, parent, state, path, self.peer, said, "", FILE_BYTES)
        return self.world.make_file(row, work.base, work.snapshot, self.content)

    def _claimed(self, tokens: int, round_index: int) -> int:
        """Return how many of the trained tokens its row says."""
        return claimed_tokens(self.world.plan, tokens, round_index)

    def seen_digest(self, head: Head) -> Head:
        """Return a state as this machine computes it."""
        return head

    # -- life

    def start(self) -> None:
        """Begin a life with what lies on the disk, unless the machine runs."""
        if self.link.is_up:
            return
        self.link.is_up, self.link.hangs = True, False
        self.link.life += 1
        self.link.awake_s = 0.0
        if abs(self.clock_error_s) >= _RIGHT_CLOCK_S:
            self.step_clock(-self.clock_error_s)
        self.store.restart()
        self._forget()
        self.world.say(self.peer, "!", f"starts with {len(self.store.disk)} states on disk")
        self.member = self._make_member()
        self.later(0.0, self._turn, self._turns)
        self.later(self.world.engine.between(0.1, 1.0), self._refresh)

    def _make_member(self) -> Member:
        book, held = self.world.book, tuple(self.store.held.values())
        genesis = {head: book.genesis(head.module) for head in held}
        chains = {
            head.module: (Trunk(), book.steps_between(genesis[head], head.step)) for head in held
        }
        settings = MemberSettings(self.peer, trains=self.trains)
        return Member(settings, self.world.plan, self.world.grid, chains=chains, held=held)

    def crash(self, *, hangs: bool, empty_disk: bool) -> None:
        """End without a word. If it `hangs`, callers are not even refused."""
        if not self.link.is_up:
            return
        self.world.say(self.peer, "!", "crashes" + (" and loses its disk" if empty_disk else ""))
        self.lose_all("crash")
        self.link.is_up, self.link.hangs = False, hangs
        if empty_disk:
            self.store = Store(self.world)

    def lose_all(self, why: str) -> None:
        """Stop training; what no contribution has is lost."""
        for module in list(self.works):
            self.world.watch.ended(self, module, why)
        self.works, self.path = {}, None

    def suspend(self, seconds: float) -> None:
        """Sleep; everything that is due meanwhile happens at the end."""
        self.world.say(self.peer, "!", f"sleeps for {seconds:.0f} s")
        self.link.awake_s = max(self.link.awake_s, self.world.now_s + seconds)

    def step_clock(self, seconds: float) -> None:
        """Put the clock forward or back."""
        self.world.say(self.peer, "!", f"its clock jumps by {seconds:.1f} s")
        self.clock_error_s += seconds

    def ask_to_pause(self, *, pause: bool) -> None:
        """Say that the owner needs the machine, or needs it no more."""
        self.later(0.0, self.deliver, PauseWanted("needed" if pause else ""))

    def ask_to_leave(self) -> None:
        """Press Ctrl+C."""
        self.later(0.0, self.deliver, LeaveWanted())

    def _stop(self) -> None:
        """End, because the member has left."""
        self.lose_all("leave")
        self.publishing.withdraw()
        self.link.is_up = False

    # -- the loop

    def deliver(self, event: Event) -> None:
        """Report an event. The next turn comes at once, or when the inner step under way ends."""
        if not self.link.is_up:
            return
        if self._stretch is not None:
            self._cut_short(self._stretch)
        self._handle(event)
        if self._is_waiting:
            self._is_waiting = False
            self._waits = 0
            self._turns += 1
            self.later(0.0, self._turn, self._turns)

    def _handle(self, event: Event) -> list[Action]:
        """Let the member handle an event, and then what its actions had for an answer at once."""
        actions = self._ask_member(event)
        while self.answers and self.link.is_up:
            self._ask_member(self.answers.popleft())
        return actions

    def _ask_member(self, event: Event) -> list[Action]:
        world = self.world
        world.say(self.peer, "hears", event)
        self.handled += 1
        try:
            actions = self.member.handle(event, self.believed_s)
        except Exception:
            last = traceback.format_exc().strip().splitlines()
            what = f"handling {type(event).__name__} raised: {' | '.join(last[-5:])}"
            world.watch.wrong(self, what)
            return []
        for action in actions:
            if not self.link.is_up:
                break
            world.say(self.peer, "wants", action)
            if not isinstance(action, TakeStep | Wait | Left):
                self.act(action)
        return actions

    def _turn(self, number: int) -> None:
        if number != self._turns or self._stretch is not None:
            return
        self._is_waiting = False
        actions = self._handle(Turn(self.step_s if self.tokens else 0.0))
        if not self.link.is_up:
            return
        answers = [a for a in actions if isinstance(a, TakeStep | Wait | Left)]
        if len(answers) != 1:
            found = ", ".join(type(answer).__name__ for answer in answers) or "nothing"
            self.world.watch.wrong(self, f"a turn was answered with {found}")
        elif isinstance(answers[0], Left):
            self._stop()
            return
        elif isinstance(answers[0], TakeStep):
            self._waits = 0
            self._begin_steps()
            return
        self._is_waiting = True
        self._turns += 1
        self._waits += 1
        self.later(0.25 if self._waits < 8 else 1.0, self._turn, self._turns)

    def _begin_steps(self) -> None:
        schedule, now_s, steps = self.world.schedule, self.believed_s, 1
        if not schedule.fixed_steps:
            longest_s = min(self._moments(now_s)) - now_s
            longest_s = min(longest_s, _STRETCH_SHARE * schedule.duration_s)
            steps = max(1, int(longest_s / self.step_s))
        self._turns += 1
        self._stretch = _Stretch(self.world.now_s, steps, self._turns)
        self.later(steps * self.step_s, self._stepped, self._stretch.number)
        self._look_meanwhile(self._stretch)

    def _moments(self, now_s: float) -> list[float]:
        """Return the next times at which a member has something to do by the clock: of each level
        the next boundary, and what comes shortly before G and at G."""
        schedule, rounds = self.world.schedule, self.world.plan.rounds
        found = []
        for level in self.world.grid.levels_in_time_order():
            passed = schedule.passed(level, now_s)
            since_s = now_s - schedule.boundary(passed, level).time_s
            gather_s, grace_s = rounds.gather_limit_s, rounds.grace_limit_s
            afters_s = (gather_s - 0.8 * grace_s, gather_s, gather_s + grace_s)
            found += [now_s + s - since_s for s in afters_s if s > since_s]
            found.append(schedule.boundary(passed + 1, level).time_s)
        return found

    def _look_meanwhile(self, stretch: _Stretch) -> None:
        """Let the member hear of the next moment if it comes before the stretch ends."""
        wait_s = max(_LEAST_WAIT_S, min(self._moments(self.believed_s)) - self.believed_s)
        end_s = stretch.begin_s + stretch.steps * self.step_s
        if not self.world.schedule.fixed_steps and self.world.now_s + wait_s < end_s:
            self.later(wait_s, self._meanwhile, stretch.number)

    def _meanwhile(self, number: int) -> None:
        if self._stretch is not None and self._stretch.number == number:
            self._handle(Meanwhile())
            self._look_meanwhile(self._stretch)

    def _cut_short(self, stretch: _Stretch) -> None:
        """Count the steps of a stretch that have ended, and let it end with the step under way."""
        ended = min(int((self.world.now_s - stretch.begin_s) / self.step_s), stretch.steps - 1)
        self.tokens += ended * self.world.tokens_per_step
        stretch.begin_s += ended * self.step_s
        stretch.steps -= ended
        if stretch.steps > 1:
            self._turns += 1
            stretch.steps, stretch.number = 1, self._turns
            end_s = stretch.begin_s + self.step_s
            self.later(end_s - self.world.now_s, self._stepped, stretch.number)

    def _stepped(self, number: int) -> None:
        stretch = self._stretch
        if stretch is None or stretch.number != number:
            return
        self._stretch = None
        tokens = stretch.steps * self.world.tokens_per_step
        self.tokens += tokens
        self._handle(Stepped())
        self._turn(self._turns)

    # -- what is published and read

    def _refresh(self) -> None:
        """Publish and read, once a refresh period."""
        self.publishing.publish()
        engine = self.world.engine
        self.later(engine.between(*self.world.network.conditions.look_s), self.read, False)
        self.later(self.refresh_period_s * engine.between(0.95, 1.05), self._refresh)

    def read(self, is_answer: bool, further: tuple[int, ...] = ()) -> None:
        """Read what the member watches, and `further` buckets, and tell the member."""
        scope = self.scope.with_buckets(further) if further else self.scope
        view = self.world.directory.read(self.peer, self.believed_s, scope)
        view = view.watched(self.world.plan, self.world.grid, self._waiting)
        self._waiting = view.waiting
        self.deliver(Viewed(view, is_answer))

    # -- others

    def serve(self, caller: str, verb: str, content: Any) -> tuple[Any, int]:
        """Answer a call. An inner step keeps nobody waiting."""
        return self.carrying.serve(caller, verb, content)
