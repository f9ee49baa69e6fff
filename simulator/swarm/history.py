"""A seed is a whole history: who takes part, what goes wrong and when, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dipaco.dht.admission import Admission
from dipaco.dht.certificates import CertificateBook
from dipaco.modules.state import StateReference
from dipaco.peer.member.knowledge import MemberSettings
from dipaco.peer.member.member import Member

from .engine import Engine
from .findings import Figures, Violation
from .hostile import BareIdentities, Braggart, Falsifier, Liar, Saboteur
from .invariants import Invariants
from .liveness import is_slow
from .machine import Machine
from .network import Link
from .scenario import Scenario, draw_scenario, small_plan
from .trace import Trace
from .world import START_S, Body, Decider, MakeMember, World

# Rounds without faults in which all has to settle.
CALM_ROUNDS = 6
# Who is slow decides between two steps: to see a state, ask for its chain, fetch and take it.
CALM_STEPS = 8
# Of a round: what an inner step of a slow machine takes at most. Who is slower is of no use.
SLOWEST_SHARE = 0.6


@dataclass
class Result:
    """What came of a history."""

    scenario: Scenario
    violations: list[Violation]
    figures: Figures
    events: int
    """Events that members have handled."""
    trace: Trace = field(default_factory=Trace)

    @property
    def command(self) -> str:
        """What shows this history again."""
        drawn = self.scenario
        return (
            f"python benchmarks/swarm_faults.py --seed {drawn.seed} "
            f"--profile {drawn.profile} --members {drawn.members} --rounds {drawn.rounds} --trace"
        )


def real_member(machine: Body, book: CertificateBook, held: tuple[StateReference, ...]) -> Decider:
    """Return the member that real peers have."""
    settings = MemberSettings(
        me=machine.peer,
        pinned=machine.pinned,
        trains=machine.trains,
        can_be_called=machine.link.can_be_called,
        seed=f"{machine.peer}/{machine.link.life}",
    )
    world = machine.world
    member = Member(settings, world.plan, world.grid, book=book, held=held)
    member.known.recall(book.all())
    return member


def run_history(
    seed: int,
    profile: str = "mixed",
    *,
    members: int | None = None,
    paths: int | None = None,
    rounds: int | None = None,
    trace: Trace | None = None,
    make_member: MakeMember = real_member,
    is_open: bool = False,
) -> Result:
    """Live through a history and its rest; `is_open`: one of `invited` without invitations."""
    drawn = draw_scenario(seed, profile, members=members, paths=paths, rounds=rounds)
    return _History(drawn, trace or Trace(), make_member, is_open=is_open).run()


class _History:
    """One history while it lasts."""

    def __init__(
        self, drawn: Scenario, trace: Trace, make_member: MakeMember, *, is_open: bool
    ) -> None:
        self._drawn = drawn
        self._engine = engine = Engine(drawn.seed, START_S - drawn.duration_s / 2)
        plan = small_plan(
            drawn.grid,
            duration_s=drawn.duration_s,
            inner_steps=drawn.inner_steps,
            private=drawn.private,
            matchmaking_s=min(engine.random.choice((2.0, 5.0)), drawn.duration_s / 10),
            by_invitation=drawn.profile == "invited" and not is_open,
        )
        self.world = World(plan, engine, make_member, trace)
        few = (drawn.profile in ("calm", "latency")) and not drawn.inner_steps
        self.watch = Invariants(self.world, coverage=few)
        self.world.watch = self.watch
        self._machines: list[Machine] = []
        self._round_s = drawn.duration_s
        self._end_s = START_S + drawn.rounds * self._round_s

    def run(self) -> Result:
        """Begin everything, let it go wrong, let it rest."""
        self._place_machines()
        for fault in self._drawn.faults:
            getattr(self, f"_add_{fault}")()
        engine = self._engine
        engine.run(self._end_s)
        if not self.watch.violations:
            self._calm_down()
            engine.run(self._end_s + 2 * self._round_s)
            self.watch.begin_rest()
            slowest_s = max((m.step_s for m in self._machines if is_slow(m)), default=0.0)
            engine.run(self._end_s + CALM_ROUNDS * self._round_s + CALM_STEPS * slowest_s)
        if not self.watch.violations:
            self.watch.end()
        return Result(
            self._drawn,
            self.watch.violations,
            self.watch.figures,
            sum(machine.handled for machine in self._machines),
            self.world.trace,
        )

    # -- who takes part

    def _place_machines(self) -> None:
        world, random, drawn = self.world, self._engine.random, self._drawn
        first = Machine(world, "boot", self._link(), step_s=1.0, trains=False)
        self._machines.append(first)
        for path in range(world.grid.path_count):
            first.have_shard(path)
        is_hostile = "hostile" in drawn.faults or "invited" in drawn.faults
        insiders = (drawn.members - 1) // 3 if is_hostile else 0
        falsifiers = max(1, drawn.members // 3) if "falsified" in drawn.faults else 0
        for number in range(drawn.members):
            kind: type[Machine] = Machine
            if number >= drawn.members - insiders:
                kind = random.choice((Machine, Saboteur, Braggart))
            elif number and number >= drawn.members - falsifiers:
                kind = Falsifier
            machine = kind(
                world,
                f"p{number}",
                self._link(),
                step_s=self._step_s(),
                clock_error_s=self._engine.between(-0.3, 0.3),
            )
            self._machines.append(machine)
            for path in range(world.grid.path_count):
                # Blobs have copies: the first peers of a run have all of them.
                if number < 2 or random.random() < 0.4:
                    machine.have_shard(path)
        for number, machine in enumerate(self._machines):
            start_s = self._engine.between(-0.4, 0.1) * self._round_s
            if number > 2 and random.random() < 0.3:
                start_s = self._engine.between(0.0, 0.6) * drawn.rounds * self._round_s
            self._engine.at(START_S + start_s, machine.start)

    def _link(self) -> Link:
        engine = self._engine
        return Link(
            latency_s=engine.between(0.005, 0.08),
            jitter_s=engine.between(0.0, 0.02),
            uplink=engine.between(1e6, 2e7),
            downlink=engine.between(5e6, 5e7),
        )

    def _step_s(self) -> float:
        """Draw what an inner step takes."""
        drawn, random = self._drawn, self._engine.random
        if drawn.inner_steps:
            return self._engine.between(0.2, 0.6) * drawn.duration_s / drawn.inner_steps
        step_s: float = random.choice((0.5, 2.0, 8.0)) * self._engine.between(0.7, 1.4)
        return min(step_s, drawn.duration_s / 6)

    def _trainers(self) -> list[Machine]:
        return [m for m in self._machines if m.trains]

    # -- what goes wrong

    def _add_latency(self) -> None:
        engine, random = self._engine, self._engine.random
        slow = random.random() < 0.4
        copies_bytes = 4 * len(self.world.grid.level_names) * self.world.state_bytes
        for machine in self._machines:
            link = machine.link
            link.latency_s = engine.between(0.005, 0.09)
            link.jitter_s = engine.between(0.0, 0.03)
            link.loss = engine.between(0.0, 0.03)
            # Whose line carries less than its copies in a round cannot have them anywhere, and a
            # counted round is as long as its steps.
            round_s = self._drawn.inner_steps * machine.step_s or self._round_s
            link.uplink = max(copies_bytes / round_s, engine.between(1e5, 2e6))
            if machine.peer not in ("boot", "p0") and random.random() < 0.3:
                link.can_be_called = False
            if slow and machine.peer not in ("boot", "p0", "p1") and random.random() < 0.2:
                machine.step_s = min(100.0 * machine.step_s, SLOWEST_SHARE * self._round_s)

    def _add_closed(self) -> None:
        """Put most trainers behind routers: only relays reach them."""
        for machine in self._trainers():
            if self._engine.chance(0.8):
                machine.link.can_be_called, machine.link.is_relayed = False, True

    def _add_dht(self) -> None:
        engine, world = self._engine, self.world
        world.directory.write_s = (0.1, engine.between(1.0, 15.0))
        world.directory.lost = engine.between(0.0, 0.25)
        world.directory.missed = engine.between(0.0, 0.15)
        world.conditions.look_s = (0.3, engine.between(1.0, 12.0))
        world.conditions.look_fails = engine.between(0.0, 0.1)
        world.conditions.path_fails = engine.between(0.0, 0.5)

    def _add_churn(self) -> None:
        life_rounds = self._engine.between(3.0, 12.0)
        for machine in self._trainers():
            self._live(machine, life_rounds)
        if self._engine.chance(0.5):
            boot = self._machines[0]
            self._at_some_time(self._crash, boot, None)

    def _live(self, machine: Machine, life_rounds: float) -> None:
        """Let a machine end after some time, again and again."""
        life_s = self._engine.random.expovariate(1.0 / (life_rounds * self._round_s))
        time_s = max(START_S, self._engine.now_s) + life_s
        if time_s < self._end_s:
            self._engine.at(time_s, self._crash, machine, life_rounds)

    def _crash(self, machine: Machine, life_rounds: float | None) -> None:
        engine = self._engine
        self._note_fault()
        if engine.chance(0.3):
            machine.ask_to_leave()
        else:
            machine.crash(hangs=engine.chance(0.5), empty_disk=engine.chance(0.25))
        if life_rounds is not None:
            away_s = engine.random.expovariate(1.0 / (0.7 * self._round_s))
            engine.after(min(away_s, 5 * self._round_s) + 1.0, self._restart, machine, life_rounds)

    def _restart(self, machine: Machine, life_rounds: float) -> None:
        if machine.is_alive:  # It takes its time to leave.
            self._engine.after(5.0, self._restart, machine, life_rounds)
            return
        self._note_fault()
        machine.start()
        self._live(machine, life_rounds)

    def _add_split(self) -> None:
        time_s, engine = START_S, self._engine
        for _ in range(engine.random.randint(1, 3)):
            time_s += engine.between(0.5, 5.0) * self._round_s
            length_s = engine.between(0.1, 5.0) * self._round_s
            if time_s + length_s > self._end_s:
                break
            engine.at(time_s, self._cut)
            engine.at(time_s + length_s, self._heal)
            time_s += length_s

    def _cut(self) -> None:
        parts = self._engine.random.choice((2, 2, 2, 3))
        sides = {peer: self._engine.random.randrange(parts) for peer in self.world.machines}
        self._note_fault()
        self.world.say("*", "!", f"the network splits: {sides}")
        self.world.network.cut(sides)

    def _heal(self) -> None:
        self._note_fault()
        self.world.say("*", "!", "the network is whole again")
        self.world.network.heal()

    def _add_suspend(self) -> None:
        engine = self._engine
        for _ in range(engine.random.randint(1, 2 * self._drawn.members)):
            machine = engine.random.choice(self._machines)
            rounds = engine.random.choice((0.02, 0.1, 0.5, 2.0, 6.0)) * engine.between(0.5, 1.5)
            self._at_some_time(self._suspend, machine, rounds * self._round_s)

    def _suspend(self, machine: Machine, seconds: float) -> None:
        self._note_fault()
        if machine.is_alive:
            machine.suspend(min(seconds, self._end_s - self._engine.now_s))
            self._engine.after(seconds, self._note_fault)

    def _add_pause(self) -> None:
        """Let owners need their machines for a while: some at night, some for a minute."""
        engine = self._engine
        for machine in self._trainers():
            time_s = START_S
            while engine.chance(0.75):
                time_s += engine.between(0.0, 5.0) * self._round_s
                length_s = engine.random.choice((0.02, 0.5, 3.0)) * self._round_s
                length_s *= engine.between(0.5, 1.5)
                if time_s + length_s > self._end_s:
                    break
                engine.at(time_s, self._pause, machine, True)
                engine.at(time_s + length_s, self._pause, machine, False)
                time_s += length_s

    def _pause(self, machine: Machine, pause: bool) -> None:
        self._note_fault()
        machine.ask_to_pause(pause=pause)

    def _add_clock(self) -> None:
        engine = self._engine
        for _ in range(engine.random.randint(1, self._drawn.members)):
            machine = engine.random.choice(self._machines)
            seconds = engine.random.choice((1.0, 5.0, 60.0, 3600.0)) * engine.between(-1.0, 1.0)
            self._at_some_time(self._step_clock, machine, seconds)

    def _step_clock(self, machine: Machine, seconds: float) -> None:
        """Put a clock wrong; the peer measures it against its neighbours' within ten refreshes."""
        self._note_fault()
        machine.step_clock(seconds)
        wrong_s = self._engine.between(0.5, 10.0) * machine.refresh_period_s
        self._engine.after(wrong_s, self._set_clock, machine)

    def _set_clock(self, machine: Machine) -> None:
        machine.step_clock(-machine.clock_error_s)

    def _add_hostile(self) -> None:
        engine, world = self._engine, self.world
        if engine.chance(0.7):
            self._at_some_time(
                lambda: BareIdentities(world, engine.random.choice((3, 10, 30))), least=-0.3
            )
        self.watch.liars = engine.random.randint(0, 2)
        for number in range(self.watch.liars):
            Liar(world, f"liar{number}", self._link(), serves=engine.chance(0.5))

    def _add_falsified(self) -> None:
        """Reducers that lie come with `_place_machines`; now and then a finder falls silent."""
        self._add_suspend()

    def _add_invited(self) -> None:
        """Let three times as many liars come as there are members, and a crowd of names.

        None of them is invited, but one, who lets a dozen names in by an invitation for one.
        """
        engine, world = self._engine, self.world
        guests = [machine.peer for machine in self._machines]
        uninvited = [f"liar{number}" for number in range(3 * self._drawn.members)]
        leaked = [f"leak{number}" for number in range(12)]
        if world.plan.admission == "invitation":
            world.directory.guests = {
                **{peer: Admission(f"of {peer}", 1, 0) for peer in guests},
                **{peer: Admission("leaked", 1, number) for number, peer in enumerate(leaked)},
            }
        self.watch.liars = 1
        BareIdentities(world, 30)
        for peer in uninvited:
            others = [other for other in uninvited if other != peer]
            Liar(world, peer, self._link(), serves=engine.chance(0.5), others=others)
        Liar(world, leaked[0], self._link(), serves=True, others=leaked[1:])
        if engine.chance(0.3):
            self._at_some_time(self._revoke_leaked)

    def _revoke_leaked(self) -> None:
        self.world.say("*", "!", "the operator revokes the invitation that leaked")
        self.world.directory.revoked = frozenset({"leaked"})

    def _at_some_time(
        self, what: Callable[..., object], *arguments: object, least: float = 0.3
    ) -> None:
        share = self._engine.between(least, 0.95)
        time_s = START_S + max(-0.3 * self._round_s, share * self._drawn.rounds * self._round_s)
        self._engine.at(min(time_s, self._end_s), what, *arguments)

    def _note_fault(self) -> None:
        self.watch.faulty_s = self._engine.now_s

    # -- rest

    def _calm_down(self) -> None:
        """End all faults; who is dead stays dead, and liars go on lying."""
        world = self.world
        self.world.say("*", "!", "all faults end")
        world.network.heal()
        world.directory.lost = world.directory.missed = 0.0
        world.directory.write_s = (0.05, 0.5)
        conditions = world.conditions
        conditions.look_s = (0.2, 1.5)
        conditions.look_fails = conditions.path_fails = conditions.not_finite = 0.0
        for machine in self._machines:
            machine.link.awake_s = min(machine.link.awake_s, self._engine.now_s)
            machine.clock_error_s = max(-0.3, min(0.3, machine.clock_error_s))
            machine.link.loss = 0.0
