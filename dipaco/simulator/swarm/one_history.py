"""A seed is a whole history: who takes part, what goes wrong and when, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .engine import Engine
from .faults import Faults
from .invariants import Invariants, Violation
from .machine import Machine
from .network import Link
from .scenario import Scenario, small_plan
from .world import START_S, World

# Rounds without faults at the end, and how many of them it may take until all has settled.
_CALM_ROUNDS, _SETTLED_ROUNDS = 6, 2
# Even a slow machine takes so many inner steps in a round.
_STEPS_IN_ROUND = 15

MachineOf = Callable[[str], Callable[..., Machine]]
"""Returns what makes the machine of a peer, by its name: `boot0` and `boot1` are bootstrap nodes;
`p0`, `p1` and so on train."""


@dataclass
class Result:
    """What came of a history."""

    scenario: Scenario
    violations: list[Violation]
    figures: Counter[str]
    """See `invariants` and `token_accounts`."""
    world: World
    """The world as it was at the end."""


def run_history(
    drawn: Scenario,
    machine_of: MachineOf = lambda peer: Machine,
    *,
    log: list[str] | None = None,
) -> Result:
    """Live through a history and the calm after it; `log` gets its lines.

    `machine_of` is how insiders come in: they are subclasses of `Machine` that are not honest.
    Raises ValueError if the profile has liars and nobody lies.
    """
    round_s, end_s = drawn.duration_s, START_S + drawn.rounds * drawn.duration_s
    engine = Engine(drawn.seed, START_S - round_s / 2)
    plan = small_plan(
        drawn.grid, duration_s=round_s, inner_steps=drawn.inner_steps, private=drawn.private
    )
    world = World(plan, engine, log)
    watch = Invariants(world)
    engine.after(round_s, watch.sample)
    _place_machines(world, drawn, machine_of)
    faults = Faults(world, drawn)
    faults.begin()
    engine.run(end_s)
    faults.end()
    since_s = end_s + _SETTLED_ROUNDS * round_s
    for level in world.grid.levels_in_time_order():
        boundary_s = end_s + (_CALM_ROUNDS + world.grid.level_offset(level)) * round_s
        engine.at(boundary_s - 1.0, watch.check_rest, level, since_s)
    engine.run(end_s + (_CALM_ROUNDS + 1) * round_s)
    watch.end()
    watch.figures["events"] = sum(machine.handled for machine in world.machines.values())
    return Result(drawn, watch.violations, watch.figures, world)


def _place_machines(world: World, drawn: Scenario, machine_of: MachineOf) -> None:
    engine, random, round_s = world.engine, world.engine.random, drawn.duration_s
    for number in range(2 if "all_nat" in drawn.faults else 1):
        link = Link(latency_s=0.02, uplink_bytes_s=1e7, downlink_bytes_s=1e7)
        boot = machine_of(f"boot{number}")(world, f"boot{number}", link, trains=False)
        engine.at(START_S - 0.45 * round_s, boot.start)
    for number in range(drawn.members):
        machine = _make_trainer(world, drawn, f"p{number}", machine_of)
        start_s = engine.between(-0.4, 0.1) * round_s
        if number > 2 and random.random() < 0.3:
            start_s = engine.between(0.0, 0.6) * drawn.rounds * round_s
        engine.at(START_S + start_s, machine.start)
    for machine in world.machines.values():
        for path in range(world.grid.path_count):
            # Shards have copies: the first peers of a run have all of them, others have some.
            if machine.number < 2 or random.random() < 0.4:
                machine.store.shards.add(path)


def _make_trainer(world: World, drawn: Scenario, peer: str, machine_of: MachineOf) -> Machine:
    engine = world.engine
    link = Link(
        latency_s=engine.between(0.005, 0.15),
        jitter_s=engine.between(0.0, 0.05),
        uplink_bytes_s=engine.between(1e6, 2e7),
        downlink_bytes_s=engine.between(5e6, 5e7),
    )
    step_s = engine.random.choice((0.5, 2.0, 8.0)) * engine.between(0.7, 1.4)
    step_s = min(step_s, drawn.duration_s / _STEPS_IN_ROUND)
    if drawn.inner_steps:
        step_s = engine.between(0.2, 0.6) * drawn.duration_s / drawn.inner_steps
    clock_error_s = engine.between(-0.3, 0.3)
    return machine_of(peer)(world, peer, link, step_s=step_s, clock_error_s=clock_error_s)
