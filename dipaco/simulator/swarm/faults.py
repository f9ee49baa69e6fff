"""What goes wrong in a history, and when. Each fault has a method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dipaco.protocol.member.actions import Tell

from .machine import Machine
from .network import Conditions
from .scenario import Scenario
from .world import START_S, World

# An inner step of a slow machine takes at most this share of a round; a slower one is of no use.
_SLOWEST_SHARE = 0.2


class Faults:
    """The faults of one history, drawn from its engine."""

    def __init__(self, world: World, drawn: Scenario) -> None:
        self._world, self._drawn = world, drawn
        self._engine, self._network = world.engine, world.network
        self._machines: list[Machine] = list(world.machines.values())
        self._round_s = drawn.duration_s
        self._end_s = START_S + drawn.rounds * drawn.duration_s

    def begin(self) -> None:
        """Arrange everything that will go wrong."""
        for fault in self._drawn.faults:
            getattr(self, f"_add_{fault}")()

    def end(self) -> None:
        """End all faults. Dead peers stay dead, and liars go on lying."""
        self._world.say("*", "!", "all faults end")
        self._network.heal()
        self._network.conditions = Conditions()
        for machine in self._machines:
            machine.link.awake_s = min(machine.link.awake_s, self._engine.now_s)
            machine.clock_error_s = max(-0.3, min(0.3, machine.clock_error_s))

    def _trainers(self) -> list[Machine]:
        return [machine for machine in self._machines if machine.trains]

    def _at_some_time(self, what: Callable[..., object], *arguments: object) -> None:
        share = self._engine.between(0.0, 0.95)
        self._engine.at(START_S + share * (self._end_s - START_S), what, *arguments)

    # -- lines

    def _add_latency(self) -> None:
        """Give everybody a bad line and some a slow machine, and make the DHT unreliable."""
        engine, conditions = self._engine, self._network.conditions
        for machine in self._machines:
            link = machine.link
            link.latency_s = engine.between(0.005, 0.2)
            link.jitter_s = engine.between(0.0, 0.1)
            link.uplink_bytes_s = engine.between(1e5, 2e6)
            link.downlink_bytes_s = engine.between(5e5, 5e6)
            if machine.trains and engine.chance(0.1):
                machine.step_s = min(20.0 * machine.step_s, _SLOWEST_SHARE * self._round_s)
        conditions.write_s = (0.1, engine.between(1.0, 15.0))
        conditions.writes_lost = engine.between(0.0, 0.25)
        conditions.records_missed = engine.between(0.0, 0.15)
        conditions.look_s = (0.3, engine.between(1.0, 12.0))
        conditions.look_fails = engine.between(0.0, 0.1)
        conditions.path_fails = engine.between(0.0, 0.5)

    def _add_loss(self) -> None:
        self._network.conditions.loss = self._engine.between(0.0, 0.1)

    def _add_nat(self) -> None:
        """Put two thirds of the trainers behind routers. The first one can always be called."""
        for machine in self._trainers()[1:]:
            machine.link.can_be_called = not self._engine.chance(2 / 3)

    def _add_all_nat(self) -> None:
        """Put all trainers behind routers: only the two bootstrap nodes can be called."""
        for machine in self._trainers():
            machine.link.can_be_called = False

    def _add_split(self) -> None:
        time_s, engine = START_S, self._engine
        for _ in range(engine.random.randint(1, 3)):
            time_s += engine.between(0.5, 5.0) * self._round_s
            length_s = engine.between(0.2, 8.0) * self._round_s
            if time_s > self._end_s - 0.2 * self._round_s:
                break
            engine.at(time_s, self._cut)
            time_s = min(time_s + length_s, self._end_s)
            engine.at(time_s, self._network.heal)

    def _cut(self) -> None:
        parts = self._engine.random.choice((2, 2, 2, 3))
        sides = {peer: self._engine.random.randrange(parts) for peer in self._world.machines}
        self._world.say("*", "!", f"the network splits: {sides}")
        self._network.cut(sides)

    # -- machines

    def _add_churn(self) -> None:
        life_rounds = self._engine.between(4.0, 8.0)
        for machine in self._trainers():
            self._live(machine, life_rounds)
        if "all_nat" not in self._drawn.faults and self._engine.chance(0.5):
            self._at_some_time(lambda: self._machines[0].crash(hangs=True, empty_disk=False))

    def _live(self, machine: Machine, life_rounds: float) -> None:
        """Let a machine end after some time, again and again."""
        life_s = self._engine.random.expovariate(1.0 / (life_rounds * self._round_s))
        time_s = max(START_S, self._engine.now_s) + life_s
        if time_s < self._end_s:
            self._engine.at(time_s, self._end_life, machine, life_rounds)

    def _end_life(self, machine: Machine, life_rounds: float) -> None:
        engine = self._engine
        if engine.chance(0.4):
            machine.ask_to_leave()
        else:
            machine.crash(hangs=engine.chance(0.5), empty_disk=engine.chance(0.25))
        away_s = min(engine.random.expovariate(1.0 / (0.7 * self._round_s)), 5 * self._round_s)
        back_s = engine.now_s + away_s + 1.0
        if back_s < self._end_s:
            engine.at(back_s, self._restart, machine, life_rounds)

    def _restart(self, machine: Machine, life_rounds: float) -> None:
        if machine.is_alive:  # It is still leaving.
            self._engine.after(5.0, self._restart, machine, life_rounds)
            return
        machine.start()
        self._live(machine, life_rounds)

    def _add_suspend(self) -> None:
        """Let machines sleep, and let some pause because their owners need them."""
        engine = self._engine
        for _ in range(engine.random.randint(1, 2 * self._drawn.members)):
            machine = engine.random.choice(self._machines)
            rounds = engine.random.choice((0.02, 0.1, 0.5, 2.0, 6.0)) * engine.between(0.5, 1.5)
            is_pause = machine.trains and engine.chance(0.25)
            what = self._pause if is_pause else self._suspend
            self._at_some_time(what, machine, rounds * self._round_s)

    def _suspend(self, machine: Machine, seconds: float) -> None:
        if machine.is_alive:
            machine.suspend(min(seconds, self._end_s - self._engine.now_s))

    def _pause(self, machine: Machine, seconds: float) -> None:
        if machine.is_alive:
            machine.ask_to_pause(pause=True)
            end_s = min(self._engine.now_s + seconds, self._end_s)
            self._engine.at(end_s, lambda: machine.ask_to_pause(pause=False))

    def _add_clock(self) -> None:
        engine = self._engine
        for _ in range(engine.random.randint(1, self._drawn.members)):
            machine = engine.random.choice(self._machines)
            seconds = engine.random.choice((1.0, 5.0, 60.0, 3600.0)) * engine.between(-1.0, 1.0)
            self._at_some_time(self._step_clock, machine, seconds)

    def _step_clock(self, machine: Machine, seconds: float) -> None:
        """Set a clock wrong. Within ten refreshes the peer compares it with its neighbours'."""
        machine.step_clock(seconds)
        wrong_s = self._engine.between(0.5, 10.0) * machine.refresh_period_s
        self._engine.after(wrong_s, lambda: machine.step_clock(-machine.clock_error_s))

    def _add_dying(self) -> None:
        """Let trainers die after they told of a step, before they gave their files to anybody."""
        chance = self._engine.between(0.05, 0.3)
        for machine in self._trainers():
            machine.after_telling = partial(self._die_telling, machine, chance)  # type: ignore[method-assign]

    def _die_telling(self, machine: Machine, chance: float, action: Tell) -> None:
        engine = self._engine
        is_own_in = machine.peer in action.steps[-1].peers
        if engine.now_s >= self._end_s or not is_own_in or not engine.chance(chance):
            return
        machine.crash(hangs=engine.chance(0.5), empty_disk=engine.chance(0.25))
        away_s = min(engine.random.expovariate(1.0 / (3 * self._round_s)), 10 * self._round_s)
        if engine.now_s + away_s < self._end_s:
            engine.after(away_s + 1.0, machine.start)

    def _add_hostile(self) -> None:
        """Check that there are liars: the caller put them in the places of some trainers."""
        if all(machine.is_honest for machine in self._machines):
            raise ValueError("this profile has liars; give `run_history` their class")
