"""What has to hold in every history, and what is counted for rates.

* agreement: at rest all honest trainers of a module stand on one step, or on one chain where rounds
  are counted.
* digest: at rest a state has the digest that its step has.
* files, contract: an anchor changes only by whole steps whose files were checked, or to a state
  that was fetched; a member answers every turn and never raises.
* liveness: in calm rounds every module that is trained steps in every round.
* copies: at rest three peers hold the head, where three can be reached.

These are counted: what became of the work (`token_accounts`); versions that forked, and those of
them in which a step took the place of one whose rows it holds as well (*outbid*: no work is lost by
it); rounds that ended with a step and without; messages, requests and bytes of the honest trainers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dipaco.protocol.chain.steps import Head
from dipaco.protocol.member.actions import Adopt

from .machine import Machine
from .token_accounts import Accounts
from .trace import shown
from .world import START_S, World

INVARIANTS = ("agreement", "digest", "files", "contract", "liveness", "copies")
_COPIES, _COPY_ROUNDS = 3, 2
# So many violations of each kind are written down.
_MAX_NOTED = 5


@dataclass(frozen=True)
class Violation:
    """What did not hold, and when."""

    invariant: str
    time_s: float
    what: str


class Invariants:
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.watch = self
        self.violations: list[Violation] = []
        self.figures: Counter[str] = Counter()
        self._accounts = Accounts(world)
        self._round_s = world.plan.rounds.duration_s
        self._versions: dict[tuple[str, int], dict[str, None]] = {}
        """By module and version: the steps that honest peers have adopted."""
        self._taken_s: dict[str, float] = {}
        """By step: when it was first adopted."""
        self._training: dict[tuple[str, str], float] = {}
        """By peer and module: since when it trains."""
        self._trained_s: dict[int, float] = {}
        """When the work of each path was last adopted."""
        self._greatest_wait_s = 0.0
        self.last_rounds: dict[int, int] = {}
        """Of each path: the last round of which an honest peer has adopted its work."""

    def violated(self, invariant: str, what: str) -> None:
        """Write down that something did not hold."""
        world = self._world
        world.say("*", "!", f"VIOLATION of {invariant}: {what}")
        if sum(one.invariant == invariant for one in self.violations) < _MAX_NOTED:
            self.violations.append(Violation(invariant, world.now_s - START_S, what))

    # -- what happens

    def started(self, machine: Machine) -> None:
        """Note that a machine begins to train a path."""
        for module in machine.works:
            if self._accounts.open(machine, module):
                self._training[machine.peer, module] = self._world.now_s

    def adopted(self, machine: Machine, action: Adopt) -> None:
        """Note that a machine has another anchor of a module."""
        head, world = action.head, self._world
        if not machine.is_honest:
            return
        of_version = self._versions.setdefault((head.module, head.version), {})
        if of_version and head.step not in of_version:
            steps = [world.book.link(step).step for step in (*of_version, head.step)]
            world.say(machine.peer, "!", f"forks {head.module} v{head.version}: {shown(steps)}")
        of_version[head.step] = None
        if head.step not in self._taken_s:
            self._taken_s[head.step] = world.now_s
            step = world.book.link(head.step).step
            for row in step.rows if step is not None else ():
                last = self.last_rounds.get(row.path, -1)
                self.last_rounds[row.path] = max(last, row.round_index)
                self._path_waited(row.path)
        self.figures["rounds with a step"] += action.is_round

    def _path_waited(self, path: int) -> None:
        """Note that work of a path is adopted now, for which it has waited."""
        now_s = max(START_S, self._world.now_s)
        waited_s = now_s - self._trained_s.get(path, START_S)
        self._greatest_wait_s = max(self._greatest_wait_s, waited_s)
        self._trained_s[path] = now_s

    def holds(self, machine: Machine, head: Head) -> None:
        """Note that a machine serves another state of a module."""
        if machine.is_honest and self._world.is_forged(head):
            self.figures["forged"] += 1
            self._world.say(machine.peer, "!", f"holds a forged state of {shown(head)}")

    def carried_on(self, machine: Machine) -> None:
        """Note that a round of a module has ended without a step."""
        self.figures["rounds without a step"] += machine.is_honest

    def ended(self, machine: Machine, module: str, why: str) -> None:
        """Note that a machine has stopped training a module."""
        self._accounts.close(machine, module, why)
        self._training.pop((machine.peer, module), None)

    def wrong(self, machine: Machine, what: str, invariant: str = "contract") -> None:
        """Note that a member did what it may not do, or raised."""
        if machine.is_honest:
            self.violated(invariant, f"{machine.peer}: {what}")

    # -- samples

    def _trainers(self, module: str) -> list[Machine]:
        """Return the honest machines that run and train a module."""
        machines = self._world.machines
        found = [machines[peer] for peer, of in self._training if of == module]
        return [machine for machine in found if machine.is_honest and machine.is_alive]

    def sample(self) -> None:
        """Count, every round, who takes part."""
        world = self._world
        world.engine.after(self._round_s, self.sample)
        if world.now_s < START_S:
            return
        for machine in world.machines.values():
            if machine.is_alive and machine.is_honest and machine.works:
                self.figures["peer rounds"] += 1

    def _short_of_copies(self, module: str) -> str | None:
        """Return which copies are missing of the step that was the head some rounds ago; None where
        none is, or there need not be three."""
        world = self._world
        machines = world.machines.values()
        reachable = [m for m in machines if m.is_alive and m.link.can_be_called]
        until_s = world.now_s - _COPY_ROUNDS * self._round_s
        links = world.book.back_from(self.final(module))
        old = next((link for link in links if self._taken_s.get(link.name, 1e18) <= until_s), None)
        is_enough = sum(machine.is_honest for machine in reachable) >= _COPIES
        if old is None or old.step is None or not is_enough or world.network.split:
            return None
        holders = [
            machine.peer
            for machine in reachable
            if (head := machine.store.held.get(module)) is not None
            and world.book.stands_on(head.step, old.name)
            and head.digest == world.head(head.step).digest
        ]
        if len(holders) >= _COPIES:
            return None
        return f"version {old.version} of {module} is held by {', '.join(holders) or 'nobody'}"

    def final(self, module: str) -> str:
        """Return the step in which the winning chain of a module ends."""
        world, trainers = self._world, self._trainers(module)
        steps = {machine.works[module].anchor for machine in trainers}
        if not steps:
            held = (m.store.held.get(module) for m in world.machines.values() if m.is_honest)
            steps = {head.step for head in held if head is not None}
        links = [world.book.link(step) for step in steps]
        found = min(links, key=lambda link: link.rank, default=None)
        return world.book.genesis(module) if found is None else found.name

    # -- rest

    def check_rest(self, level: str, since_s: float) -> None:
        """Check the modules of a level just before a boundary; the calm began at `since_s`."""
        world = self._world
        for module in world.grid.modules():
            if world.grid.level_of(module) == level:
                trainers = self._trainers(module)
                if trainers:
                    self._check_agreement(module, trainers)
                    self._check_liveness(module, since_s)
                # Keepers have no documents, so they follow liars that are as many as trainers.
                liars = sum(of == module for _, of in self._training) - len(trainers)
                short = self._short_of_copies(module)
                if short and liars < max(1, len(trainers)):
                    self.violated("copies", short)

    def _check_agreement(self, module: str, trainers: list[Machine]) -> None:
        book, final = self._world.book, self.final(module)
        stands = {m.peer: m.works[module].anchor for m in trainers}
        if self._world.plan.rounds.inner_steps:
            apart = [p for p, step in stands.items() if not book.stands_on(final, step)]
        else:
            apart = [peer for peer, step in stands.items() if step != final]
        for machine in trainers:
            held, right = machine.store.held[module], self._world.head(stands[machine.peer])
            if held.digest != right.digest:
                self.violated("digest", f"{machine.peer} has {module} with a wrong digest")
        if apart:
            what = {peer: f"v{book.link(s).version} {s[:8]}" for peer, s in sorted(stands.items())}
            self.violated("agreement", f"{module} at {what}")

    def _check_liveness(self, module: str, since_s: float) -> None:
        world, rounds = self._world, self._world.plan.rounds
        known_s = [s for (_, of), s in self._training.items() if of == module]
        if min(known_s, default=1e18) > since_s:
            return
        times_s = [
            self._taken_s.get(link.name, 0.0) for link in world.book.back_from(self.final(module))
        ]
        calm = sum(time_s > since_s + self._round_s for time_s in times_s)
        wanted = int((world.now_s - since_s) / self._round_s) - 2
        if calm < wanted and not (rounds.inner_steps and calm > wanted / 2):
            self.violated("liveness", f"{module} had {calm} steps in {wanted} calm rounds")

    def end(self) -> None:
        """Add up what the history came to."""
        world, figures = self._world, self.figures
        finals = {module: self.final(module) for module in world.grid.modules()}
        figures.update(self._accounts.balance(finals))
        for path in range(world.grid.path_count):
            self._path_waited(path)
        # Figures are counts, so this one is in hundredths of a round.
        figures["greatest wait"] = round(100 * self._greatest_wait_s / self._round_s)
        figures["versions"] = len(self._versions)
        forks = [steps for steps in self._versions.values() if len(steps) > 1]
        figures["forked"], figures["outbid"] = len(forks), sum(map(self._is_outbid, forks))
        for machine in world.machines.values():
            if machine.is_honest and machine.trains:
                requests, sent = machine.link.traffic.requests, machine.link.traffic.sent
                figures["tells"] += requests["tell"]
                figures["requests"] += requests.total() - requests["tell"] - requests["views"]
                figures["bytes"] += sent.total() - sent["views"]

    def _is_outbid(self, steps: Iterable[str]) -> bool:
        """Tell whether each of some steps has all rows of the lighter ones."""
        links = sorted((self._world.book.link(step) for step in steps), key=lambda link: link.rank)
        made = [link.step for link in reversed(links) if link.step is not None]
        return all(set(a.rows) < set(b.rows) for a, b in itertools.pairwise(made))
