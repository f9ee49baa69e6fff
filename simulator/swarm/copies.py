"""Whether states have as many copies as they should (promise 7).

Two rounds after a commit three peers hold that state or a later one, where three honest ones can be
reached. Nobody can promise that of a state whose holders all crash before there can be others: as
many as there should be within two rounds, or fewer, all of them, within two rounds of its commit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dipaco.dht.view import plausible_state
from dipaco.modules.state import StateReference

from .work import SimulatedState
from .world import Body, World

COPIES = 3
COPY_ROUNDS = 2


class Copies:
    """The watch of the copies of every module."""

    def __init__(self, world: World, violated: Callable[[str, str], None]) -> None:
        self._world = world
        self._violated = violated
        self._round_s = world.plan.rounds.duration_s
        self.commits: dict[str, list[tuple[float, SimulatedState]]] = {}
        """By module: when, and what."""
        self._crashes: dict[str, list[tuple[float, int]]] = {}
        """By module: when somebody crashed that held it, and which version."""
        self._lost: dict[str, list[tuple[float, int, int]]] = {}
        """By module: when the last holder of some versions crashed; behind which, up to which."""
        self._went: dict[str, SimulatedState] = {}
        """What stood under the work of the last one that stopped training a module."""

    def committed(self, state: SimulatedState) -> bool:
        """Note a commit; returns whether it is the first of this state, as far as one remembers."""
        commits = self.commits.setdefault(state.reference.module, [])
        is_first = all(known is not state for _, known in commits[-4:])
        commits.append((self._world.now_s, state))
        return is_first

    def stopped_training(self, machine: Body, module: str) -> None:
        """Somebody does not train a module any more."""
        self._went[module] = machine.works[module].anchor

    def crashed(self, machine: Body) -> None:
        """Somebody ended without a word, with the copies that it held."""
        now_s, others = self._world.now_s, self._world.machines.values()
        for module, state in machine.served.items():
            version = state.reference.version
            self._crashes.setdefault(module, []).append((now_s, version))
            holders = (m for m in others if m is not machine and m.is_alive and module in m.served)
            left = max((m.served[module].reference.version for m in holders), default=0)
            if left < version:
                self._lost.setdefault(module, []).append((now_s, left, version))

    def check(
        self, module: str, trainers: list[Body], before_s: float, reachable: int, liars: int
    ) -> None:
        """Is there a third copy of what was committed until `before_s`, and of what came later?

        `trainers` are honest; `reachable` honest peers could hold copies, and `liars` answer calls.
        """
        state, makers = None, math.inf
        for time_s, made in reversed(self.commits.get(module, ())):
            state, makers = made, min(makers, len(contributors(self._world, made)))
            if time_s <= before_s and not self._was_lost_young(made.reference, time_s):
                break
        else:
            return
        if liars and makers <= liars:
            return
        wanted, plan = state.reference, self._world.plan
        if not plausible_state(wanted, plan, self._world.grid, before_s):
            return
        never_meet = len(trainers) > 1 and not any(m.link.can_be_called for m in trainers)
        if reachable < COPIES or never_meet or self._has_lost(state, trainers):
            return

        if sum(_holds(m, wanted) for m in trainers) >= COPIES:
            return
        # Who spoils reduces may serve copies all the same.
        holders = [
            m.peer for m in self._world.machines.values() if m.is_alive and _holds(m, wanted)
        ]
        if len(holders) < COPIES and not self._crashed_together(wanted):
            self._violated(
                "copies",
                f"{COPY_ROUNDS} rounds after version {wanted.version} of {module} only "
                f"{', '.join(holders) or 'nobody'} hold it, of {reachable} that could",
            )

    def _crashed_together(self, wanted: StateReference) -> bool:
        """Tell whether as many holders as there should be crashed before others could follow."""
        crashed = self._crashes.get(wanted.module, ())
        times_s = [time_s for time_s, version in crashed if version >= wanted.version]
        pairs = zip(times_s, times_s[COPIES - 1 :], strict=False)
        return any(last_s - first_s < COPY_ROUNDS * self._round_s for first_s, last_s in pairs)

    def _was_lost_young(self, made: StateReference, committed_s: float) -> bool:
        """Tell whether the last holder of a state crashed before there had to be three, and nobody
        came back with it."""
        machines = self._world.machines.values()
        if any(m.is_alive and _holds(m, made) for m in machines):
            return False
        return any(
            left < made.version <= version
            and 0.0 <= time_s - committed_s < COPY_ROUNDS * self._round_s
            for time_s, left, version in self._lost.get(made.module, ())
        )

    def _has_lost(self, state: SimulatedState, trainers: list[Body]) -> bool:
        """Tell whether all who train a module have taken another chain, which may be shorter, or
        one of those who made the state: who stands on it yet hears of that when its step is done.

        Where nobody trains it, the last one who did.
        """
        world, module = self._world, state.reference.module
        made = contributors(world, state)
        makers = [m.works[module].anchor for m in trainers if m in made]
        if any(not _are_of_one_chain(world, anchor, state) for anchor in makers):
            return True
        if trainers:
            anchors = (m.works[module].anchor for m in trainers)
            return not any(descends(world, anchor, state) for anchor in anchors)
        last = self._went.get(module, state)
        return not _are_of_one_chain(world, last, state)


def _holds(machine: Body, wanted: StateReference) -> bool:
    """Tell whether a machine serves a state or a later one."""
    held = machine.served.get(wanted.module)
    return held is not None and held.reference.version >= wanted.version


def descends(world: World, state: SimulatedState, from_: SimulatedState) -> bool:
    """Tell whether a state is another one or was made from it."""
    line: SimulatedState | None = state
    while line is not None and line is not from_:
        line = world.stock.states.get(line.parent)
    return line is from_


def _are_of_one_chain(world: World, one: SimulatedState, other: SimulatedState) -> bool:
    """Tell whether one of two states was made from the other."""
    return descends(world, one, other) or descends(world, other, one)


def contributors(world: World, state: SimulatedState) -> list[Body]:
    """Return the honest living machines in the group that made a state."""
    table = state.statement.table if state.statement is not None else ()
    machines = (world.machines[row.peer] for row in table)
    return [m for m in machines if m.is_honest and m.is_alive]
