"""A seed is a whole history: who takes part, what goes wrong and when, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .engine import Engine
from .faults import Faults
from .hostile import KINDS, Liar
from .invariants import Invariants, Violation
from .machine import Machine
from .network import Link
from .scenario import Scenario, draw_scenario, small_plan
from .trace import Trace
from .world import START_S, Decider, MakeMember, World

# Rounds without faults in which all has to settle; it has begun to after so many.
CALM_ROUNDS, SETTLED_ROUNDS = 6, 2
# Inner steps that even a slow machine takes in a round.
STEPS_IN_ROUND = 15


@dataclass
class Result:
    """What came of a history."""

    scenario: Scenario
    violations: list[Violation]
    figures: Counter[str]
    """See `invariants` and `work`."""
    trace: Trace = field(default_factory=Trace)

    @property
    def command(self) -> str:
        """What shows this history again."""
        drawn = self.scenario
        return (
            f"python benchmarks/swarm_faults.py --seed {drawn.seed} --profile {drawn.profile} "
            f"--members {drawn.members} --rounds {drawn.rounds} --trace"
        )


def real_member(machine: Machine) -> Decider:
    """Return the member that real peers have."""
    from dipaco.peer.member.knowledge import MemberSettings
    from dipaco.peer.member.member import Member

    world, store = machine.world, machine.store
    held = tuple(store.held.values())
    steps = [
        step
        for head in held
        for step in store.book.steps_between(store.book.genesis(head.module), head.step)
    ]
    settings = MemberSettings(machine.peer, trains=machine.trains)
    return Member(settings, world.plan, world.grid, steps=steps, held=held)


def run_history(
    seed: int,
    profile: str = "mixed",
    *,
    members: int | None = None,
    rounds: int | None = None,
    trace: Trace | None = None,
    make_member: MakeMember = real_member,
) -> Result:
    """Live through a history and its rest."""
    drawn = draw_scenario(seed, profile, members=members, rounds=rounds)
    return _History(drawn, trace or Trace(), make_member).run()


class _History:
    """One history while it lasts."""

    def __init__(self, drawn: Scenario, trace: Trace, make_member: MakeMember) -> None:
        self._drawn = drawn
        self._engine = Engine(drawn.seed, START_S - drawn.duration_s / 2)
        plan = small_plan(
            drawn.grid,
            duration_s=drawn.duration_s,
            inner_steps=drawn.inner_steps,
            private=drawn.private,
        )
        self.world = World(plan, self._engine, make_member, trace)
        self.watch = Invariants(self.world)
        self.world.watch = self.watch
        self._machines: list[Machine] = []
        self._end_s = START_S + drawn.rounds * drawn.duration_s

    def run(self) -> Result:
        """Begin everything, let it go wrong, let it rest."""
        engine, round_s, grid = self._engine, self._drawn.duration_s, self.world.grid
        self._place_machines()
        faults = Faults(self.world, self._drawn, self._machines)
        faults.begin()
        engine.run(self._end_s)
        faults.end()
        since_s = self._end_s + SETTLED_ROUNDS * round_s
        for level in grid.levels_in_time_order():
            boundary_s = self._end_s + (CALM_ROUNDS + grid.level_offset(level)) * round_s
            engine.at(boundary_s - 1.0, self.watch.check_rest, level, since_s)
        engine.run(self._end_s + (CALM_ROUNDS + 1) * round_s)
        self.watch.end()
        figures = self.watch.figures
        figures["events"] = sum(machine.handled for machine in self._machines)
        return Result(self._drawn, self.watch.violations, figures, self.world.trace)

    def _place_machines(self) -> None:
        drawn, engine = self._drawn, self._engine
        random, round_s = engine.random, drawn.duration_s
        for number in range(2 if "all_nat" in drawn.faults else 1):
            boot = Machine(
                self.world,
                f"boot{number}",
                Link(latency_s=0.02, uplink=1e7, downlink=1e7),
                trains=False,
            )
            self._machines.append(boot)
            engine.at(START_S - 0.45 * round_s, boot.start)
        for number in range(drawn.members):
            machine = self._make_trainer(f"p{number}", number)
            self._machines.append(machine)
            start_s = engine.between(-0.4, 0.1) * round_s
            if number > 2 and random.random() < 0.3:
                start_s = engine.between(0.0, 0.6) * drawn.rounds * round_s
            engine.at(START_S + start_s, machine.start)
        for machine in self._machines:
            for path in range(self.world.grid.path_count):
                # Blobs have copies: the first peers of a run have all of them.
                if machine.number < 2 or random.random() < 0.4:
                    machine.have_shard(path)

    def _make_trainer(self, peer: str, number: int) -> Machine:
        engine, drawn = self._engine, self._drawn
        link = Link(
            latency_s=engine.between(0.005, 0.15),
            jitter_s=engine.between(0.0, 0.05),
            uplink=engine.between(1e6, 2e7),
            downlink=engine.between(5e6, 5e7),
        )
        step_s = engine.random.choice((0.5, 2.0, 8.0)) * engine.between(0.7, 1.4)
        step_s = min(step_s, drawn.duration_s / STEPS_IN_ROUND)
        if drawn.inner_steps:
            step_s = engine.between(0.2, 0.6) * drawn.duration_s / drawn.inner_steps
        clock_error_s = engine.between(-0.3, 0.3)
        if "hostile" in drawn.faults and number and number % 4 == 1:
            lies = engine.random.choice(KINDS)
            return Liar(
                self.world, peer, link, step_s=step_s, clock_error_s=clock_error_s, lies=lies
            )
        return Machine(self.world, peer, link, step_s=step_s, clock_error_s=clock_error_s)
