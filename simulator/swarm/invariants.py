"""What has to hold in every history, checked while it runs and when it has come to rest.

`agreement`: at rest, all honest trainers of a module stand on one state. Not where none of them
can be called, not even through a relay: they never meet. Who takes long over an inner step may be
behind, but on no fork: it decides between two steps, and the others go on meanwhile. Where all are
slow, behind the newest of them.
`work`: at rest, every step that an honest peer trained is in that state once or in the peer's
unmerged remainder once. Of a stay on a path that ended (a crash, a leave, a move, parameters that
were no numbers) the last steps may be missing: those after its last merged boundary. Where liars
could take the copies of a chain (see `copies`), somebody may go on from before the parts that a
peer keeps apart: what is older than these may be gone.
`descent`: no honest member replaces a chain by one with fewer certified contributors that train
since their common ancestor, as far as its certificates go; but three may win over each other in a
circle, where a third one that it knows may come between. What has not shown itself weighs nothing
(design 4.4): of two peers that cannot be called none can show itself to the other, nor can who
sleeps, or is gone, to one that came meanwhile.
`liveness`: while an honest trainer of a module lives, connected to more than half of those that
train it, or claim it still, the module commits at least every `LIVENESS_ROUNDS` rounds; twice as
many where peers move and rounds are counted, as each begins its rounds when it comes, and may have
to meet the others anew, or nobody has committed the module yet, as each believes for two rounds
that who claims it will come (`liveness.py`).
`coverage`: with more paths than trainers and no faults, every path is trained within
ceil(K/P)+1 dwells.
`copies`: two rounds after a commit that no other chain has won over since, with those who train the
module or with the last one who did, three peers hold that state or a later one, where three honest
ones can be reached, and more honest peers made it, and each one since, than there are liars that
answer calls: keepers have no documents to score a state with, and cannot tell one liar from one
trainer. What was committed by clocks that were ahead nobody keeps before its round has come, nor
does who is behind; and three holders may crash within the time that it takes to replace them
(`copies.py`).
`cost`: requests and bytes of an honest peer in a round stay below bounds without the swarm's size;
reading the swarm is counted apart. A bootstrap node may serve a shard to each who begins a path
besides: where all are new, nobody else has one. A counted round is as long as its steps, and
shorter than its limit: where several passed in that time, each of them may cost as much.
`checks`: who found out a reducer, or was shown what it did, does not commit what that group made.
`contract`: a member answers every turn, wants only what the contract allows, and never raises.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping

from dipaco.modules.outer import Contribution
from dipaco.peer.member.actions import Adopt, Commit
from dipaco.peer.member.keeping import OFFER_LIMIT_S

from .carrying import SHARD_BYTES
from .copies import COPY_ROUNDS, Copies, contributors, descends
from .findings import Figures, Stay, Violation
from .liveness import RIGHT_CLOCK_S, Liveness, is_in_reach, is_slow
from .work import SimulatedState, contents_by_peer, counts_of
from .world import Body, World

INVARIANTS = (
    "agreement",
    "work",
    "descent",
    "liveness",
    "coverage",
    "copies",
    "cost",
    "checks",
    "contract",
)
# In a round and for each module of the path: requests, and states of bytes.
REQUESTS_PER_MODULE, REQUESTS = 150, 150
STATES_PER_MODULE, STATES = 12, 12


class Invariants:
    """The watch of one world."""

    def __init__(self, world: World, *, coverage: bool, stops: bool = True) -> None:
        self._world = world
        self._stops = stops
        """End a history with its first violation."""
        self._checks_coverage = coverage
        self.violations: list[Violation] = []
        self.figures = Figures()
        self.liars = 0
        """Peers that answer calls and train nothing."""
        self.faulty_s = -math.inf
        """When something last went wrong that many notice: a split, a sleep, a crash."""
        self._round_s = world.plan.rounds.duration_s
        self._stays: dict[tuple[str, str], list[Stay]] = {}
        self._training: dict[str, dict[str, Body]] = {}
        """Who trains a module."""
        self._gone: dict[tuple[str, str], set[int]] = {}
        """Steps that may be missing."""
        self._versions: dict[tuple[str, int], str] = {}
        self._forked: set[tuple[str, int]] = set()
        self._liveness = Liveness(world, self._violated)
        self._copies = Copies(world, self._violated)
        self._up_since: dict[str, float] = {}
        """Since when a machine is there, and knows the time."""
        self._trained: dict[int, tuple[float, int]] = {}
        self._seen_steps: Counter[str] = Counter()
        self._traffic: dict[str, tuple[int, float]] = {}
        self._begun = 0
        """Paths that somebody has begun in the present round."""
        self._found_out: dict[str, set[tuple[str, tuple[Contribution, ...]]]] = {}
        self._unsettled: set[str] = set()
        world.engine.after(self._round_s / 2, self._sample)
        world.engine.after(self._round_s, self._count_traffic)

    def _violated(self, invariant: str, what: str) -> None:
        world = self._world
        self.violations.append(Violation(invariant, round(world.now_s, 2), what))
        world.say("*", "!", f"VIOLATION of {invariant}: {what}")
        if self._stops:
            world.engine.stop()

    # -- what happens

    def started(self, machine: Body) -> None:
        """A machine begins to train a path."""
        self._begun += 1
        for module in machine.works:
            self._stays.setdefault((machine.peer, module), []).append(Stay(machine.steps))
            self._training.setdefault(module, {})[machine.peer] = machine

    def lost(self, machine: Body, module: str, why: str) -> None:
        """The unmerged work of a module is gone."""
        stay = self._stays[machine.peer, module][-1]
        stay.end = machine.steps
        if why == "it went back to its anchor":
            self._stays[machine.peer, module].append(Stay(machine.steps))
        else:
            self._training[module].pop(machine.peer, None)
            if why == "it crashed":
                self._liveness.crashed(module, machine.peer)
            if machine.is_honest:
                self._copies.stopped_training(machine, module)

    def found_out(self, machine: Body, digest: str, table: tuple[Contribution, ...]) -> None:
        """An average is known to be wrong where it was found out and where that was told."""
        self.figures.found_out += machine.is_honest
        self._found_out.setdefault(machine.peer, set()).add((digest, table))

    def crashed(self, machine: Body) -> None:
        """A machine ends without a word."""
        self._copies.crashed(machine)

    def left(self, machine: Body) -> None:
        """A machine has left, with the copies that it held."""
        self.faulty_s = self._world.now_s

    def wrong(self, machine: Body, what: str) -> None:
        """The contract is broken."""
        self._violated("contract", f"{machine.peer}: {what}")

    def committed(self, machine: Body, action: Commit, state: SimulatedState) -> None:
        """A machine carries out a commit."""
        if not machine.is_honest:
            return
        reference, said = state.reference, state.statement
        known = self._found_out.get(machine.peer, ())
        if said is not None and (said.parent, said.table) in known:
            self._violated("checks", f"{machine.peer} commits {reference}, which it knows is wrong")
        place = (reference.module, reference.version)
        if self._versions.setdefault(place, reference.digest) != reference.digest:
            self._forked.add(place)
            self.figures.forks = len(self._forked)
        self.figures.commits += self._copies.committed(state)
        self._liveness.committed(reference.module)

    def adopted(self, machine: Body, action: Adopt, old: SimulatedState) -> None:
        """A machine is about to put a foreign state under its work."""
        if not machine.is_honest:
            return
        self.figures.adoptions += 1
        self.figures.put_back += len(action.on_top)
        self._note_gone(machine, action, old)
        book, module = machine.book, action.module
        new, before = action.reference.digest, old.reference.digest
        if old.reference.version == 0 or not old.is_sound:
            return
        ancestor = book.common_ancestor(module, new, before)
        if ancestor is None:
            return
        mine, theirs = self._since_fork(machine, module, before, new)
        if len(theirs) < len(mine) and not self._is_in_circle(machine, module, before, new):
            self._violated(
                "descent",
                f"{machine.peer} takes {new[:8]} of {module}, with {sorted(theirs)} since "
                f"{ancestor[:8]}, for {before[:8]}, with {sorted(mine)}",
            )

    def _since_fork(
        self, machine: Body, module: str, before: str, new: str
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Return who contributed to each of two chains since they parted, as a machine knows it.

        Names that only sign are nobody, and who has slept ever since a machine came is not known
        to be more than that.
        """
        real, book = self._world.machines, machine.book
        ancestor = book.common_ancestor(module, new, before)
        mine = frozenset(
            peer
            for peer in book.contributors_since(module, before, ancestor) & frozenset(real)
            if peer == machine.peer or peer in machine.met or real[peer].is_awake
        )
        if not machine.link.can_be_called:
            mine = frozenset(
                peer for peer in mine if peer == machine.peer or real[peer].link.can_be_called
            )
        return mine, book.contributors_since(module, new, ancestor) & frozenset(real)

    def _is_in_circle(self, machine: Body, module: str, before: str, new: str) -> bool:
        """Tell whether a third chain may replace the one, and the other may replace that."""

        def may_replace(one: str, other: str) -> bool:
            mine, theirs = self._since_fork(machine, module, one, other)
            return len(theirs) >= len(mine)

        others = {known.statement.digest for known in machine.book.all_of(module)} - {before, new}
        return any(may_replace(before, other) and may_replace(other, new) for other in others)

    def _note_gone(self, machine: Body, action: Adopt, old: SimulatedState) -> None:
        """Note the own steps of a chain given up that are in no part, if liars can be why."""
        peer, world = machine.peer, self._world
        states = world.stock.states
        new, work = states[action.reference.digest], machine.works[action.module]
        line, makers = states.get(old.reference.digest), math.inf
        while line is not None and not descends(world, new, line):
            makers = min(makers, len(contributors(world, line)))
            line = states.get(line.parent)
        if makers <= self.liars:
            kept = (_steps_of(content, peer) for content in (new.content, *work.parts.values()))
            gone = _steps_of(old.content, peer).difference(*kept)
            self._gone.setdefault((peer, action.module), set()).update(gone)

    # -- while it runs

    def _honest(self) -> list[Body]:
        machines = self._world.machines.values()
        return [m for m in machines if m.is_honest and m.is_alive]

    def _trainers(self, module: str, *, honest: bool = True) -> list[Body]:
        """Return who trains a module and lives."""
        found = self._training.get(module, {}).values()
        return sorted(
            (m for m in found if m.is_alive and m.is_honest == honest and module in m.works),
            key=lambda m: m.number,
        )

    def _sample(self) -> None:
        world = self._world
        world.engine.after(self._round_s / 2, self._sample)
        for machine in world.machines.values():
            if not machine.is_awake or abs(machine.clock_error_s) >= RIGHT_CLOCK_S:
                self._up_since.pop(machine.peer, None)
            else:
                self._up_since.setdefault(machine.peer, world.now_s)
            if machine.path is not None and machine.steps > self._seen_steps[machine.peer]:
                self._trained[machine.path] = (world.now_s, machine.steps)
            self._seen_steps[machine.peer] = machine.steps
        honest = self._honest()
        untrained = sum(m.path is None and m.trains for m in honest)
        moves = sum(m.trains for m in honest) < world.grid.path_count
        is_counted = world.plan.rounds.inner_steps > 0
        before_s = world.now_s - COPY_ROUNDS * self._round_s
        # A keeper decides thrice before it has a copy, each time between two of its steps.
        reachable = sum(
            m.link.can_be_called
            and 3 * m.step_s < OFFER_LIMIT_S
            and self._up_since.get(m.peer, world.now_s) <= before_s
            for m in honest
        )
        for module in world.grid.modules():
            others = untrained + len(self._trainers(module, honest=False))
            trainers = self._trainers(module)
            takes_turns = moves and (is_counted or not self._copies.commits.get(module))
            is_outnumbered = is_counted and self.liars >= len(trainers)
            takes_longer = takes_turns or is_outnumbered
            self._liveness.check(module, trainers, others, takes_longer=takes_longer)
            if not world.network.split and self.faulty_s <= before_s - self._round_s:
                self._copies.check(module, trainers, before_s, reachable, self.liars)
        if self._checks_coverage:
            self._check_coverage()

    def _check_coverage(self) -> None:
        world, now_s = self._world, self._world.now_s
        trainers = sum(m.trains for m in self._honest())
        count = world.grid.path_count
        if count <= trainers or not trainers:
            return
        dwells = math.ceil(count / trainers) + 1
        rounds = dwells * world.plan.rounds.dwell_rounds + 1
        for path in range(count):
            since_s, _ = self._trained.get(path, (world.plan.start_s, 0))
            if now_s - since_s > rounds * self._round_s:
                self._violated(
                    "coverage", f"path {path} was not trained for {rounds} rounds ({dwells} dwells)"
                )

    def _count_traffic(self) -> None:
        world = self._world
        world.engine.after(self._round_s, self._count_traffic)
        levels, passed = len(world.grid.level_names), self._rounds_passed()
        shards, self._begun = self._begun * SHARD_BYTES / world.state_bytes, 0
        # Also of who is down just now, or its next round would be counted with the one before.
        for machine in (m for m in world.machines.values() if m.is_honest):
            traffic = machine.link.traffic
            before = self._traffic.get(machine.peer, (0, 0.0))
            requests = traffic.requests - before[0]
            states = (traffic.bytes - before[1]) / world.state_bytes
            self._traffic[machine.peer] = (traffic.requests, traffic.bytes)
            self.figures.greatest_requests = max(self.figures.greatest_requests, requests)
            self.figures.greatest_states = max(self.figures.greatest_states, states)
            most_requests = REQUESTS + REQUESTS_PER_MODULE * levels
            most_states = STATES + STATES_PER_MODULE * levels
            served = 0.0 if machine.trains else shards
            if requests > passed * most_requests or states > passed * most_states + served:
                self._violated(
                    "cost",
                    f"{machine.peer} made {requests} requests and moved {states:.1f} states "
                    f"in {passed} rounds; at most {most_requests} and {most_states} in each",
                )

    def _rounds_passed(self) -> int:
        """Return how many rounds some module has ended in the last `duration_s`, at least one."""
        if not self._world.plan.rounds.inner_steps:
            return 1
        since_s, passed = self._world.now_s - self._round_s, 1
        for commits in self._copies.commits.values():
            lately = itertools.takewhile(lambda made: made[0] > since_s, reversed(commits))
            passed = max(passed, len({state.reference.last_round for _, state in lately}))
        return passed

    # -- at rest

    def begin_rest(self) -> None:
        """All faults are over: from now on modules are expected to settle."""
        self._unsettled = set(self._world.grid.modules())
        self._rest_s = self._world.now_s
        self._settle()

    def _settle(self) -> None:
        """Look again and again whether all stand on one state: while they commit, they do not."""
        for module in sorted(self._unsettled):
            machines = self._trainers(module)
            never_meet = len(machines) > 1 and not any(map(is_in_reach, machines))
            if never_meet:
                self._unsettled.discard(module)
            elif self._is_settled(module, machines):
                self._unsettled.discard(module)
                self._check_work(module)
        if self._unsettled:
            self.figures.rounds_to_rest = (self._world.now_s - self._rest_s) / self._round_s
            self._world.engine.after(self._round_s / 25, self._settle)

    def _is_settled(self, module: str, machines: list[Body]) -> bool:
        """Tell whether those that train a module stand on one state, or are on the way to it."""
        slow = [m for m in machines if is_slow(m)]
        newest = {m.works[module].anchor.reference.digest for m in machines if m not in slow}
        if not newest and slow:
            newest = {max((m.works[module].anchor for m in slow), key=_age).reference.digest}
        if len(newest) > 1:
            return False
        behind = {m.works[module].anchor.reference.digest for m in slow} - newest
        states, digest = self._world.stock.states, next(iter(newest), "")
        while behind and digest in states:
            digest = states[digest].parent
            behind.discard(digest)
        return not behind

    def end(self) -> None:
        """The rest is over."""
        for module in sorted(self._unsettled):
            anchors = [
                f"{m.peer}: v{m.works[module].anchor.reference.version} "
                f"{m.works[module].anchor.reference.digest[:8]}"
                for m in self._honest()
                if module in m.works
            ]
            rounds = (self._world.now_s - self._rest_s) / self._round_s
            self._violated(
                "agreement", f"{module} after {rounds:.1f} calm rounds: {'; '.join(anchors)}"
            )

    def _final(self, module: str) -> SimulatedState | None:
        machines = self._trainers(module)
        fast = [m for m in machines if not is_slow(m)]
        held = [m.works[module].anchor for m in fast or machines]
        held = held or [m.served[module] for m in self._honest() if module in m.served]
        return max(held, key=_age, default=None)

    def _check_work(self, module: str) -> None:
        state = self._final(module)
        if state is None:
            return
        of_peers = contents_by_peer(state.content)
        for machine in self._world.machines.values():
            peer = machine.peer
            work = machine.works.get(module) if machine.is_alive else None
            is_known = work is not None or peer in of_peers or (peer, module) in self._stays
            if not machine.is_honest or not is_known:
                continue
            machine.count_steps()
            counts: Counter[int] = Counter()
            contents: list[Mapping[tuple[str, int], int]] = [of_peers.get(peer, {})]
            if work is not None:
                is_behind = is_slow(machine) and work.anchor is not state
                contents = [work.anchor.content if is_behind else contents[0], work.shift]
            for content in contents:
                for begin, end, count in counts_of(content, peer):
                    for step in range(begin, end):
                        counts[step] += count
            self._check_steps(machine, module, counts)
            strangers = {who for who, _ in work.shift} - {peer} if work else set()
            if strangers:
                self._violated("work", f"{peer} has work of {sorted(strangers)} on top of {module}")

    def _check_steps(self, machine: Body, module: str, counts: Counter[int]) -> None:
        for stay in self._stays.get((machine.peer, module), ()):
            end = machine.steps if stay.end is None else stay.end
            is_missing = False
            self.figures.trained_steps += end - stay.begin
            for step in range(stay.begin, end):
                count = counts.pop(step, 0)
                self.figures.kept_steps += count
                if count == 1 and not is_missing:
                    continue
                if count == 0 and step in self._gone.get((machine.peer, module), ()):
                    continue
                where = f"step {step} of {machine.peer} in {module} (its stay: {stay})"
                if count not in (0, 1):
                    self._violated("work", f"{where} counts {count} times")
                    return
                if count == 1 and is_missing:
                    self._violated("work", f"{where} is there, but earlier ones are not")
                    return
                if stay.end is None:
                    self._violated("work", f"{where} is lost")
                    return
                is_missing = True
        if any(counts.values()):
            step = next(step for step, count in sorted(counts.items()) if count)
            self._violated("work", f"step {step} of {machine.peer} is in {module}; not its work")


def _steps_of(content: Mapping[tuple[str, int], int], peer: str) -> set[int]:
    """Return the steps of a peer that are in a content."""
    return {step for begin, end, _ in counts_of(content, peer) for step in range(begin, end)}


def _age(state: SimulatedState) -> tuple[int, str]:
    """Return what is greatest of the newest state."""
    return state.reference.version, state.reference.digest
