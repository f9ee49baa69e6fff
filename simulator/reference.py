"""One round of DiPaCo on one page: start reading here.

A run has a grid of *levels*, each with some *modules*; a *path* takes one module from every level
and is itself a small transformer. Every path has a *shard*, the training sequences that were routed
to it. `ReferenceSwarm` is a whole swarm in one process, a worker for each peer, and does what the
peers do, in the order of DiPaCo's Algorithm 1 (Douillard et al., 2024):

1. Inner steps. Every worker trains its path on its shard; a round is a number of such steps.
2. The boundary of a level. Levels end one after another while training continues, so that the
   traffic of a swarm is spread over the round.
3. The outer step of each module of that level, in `_step_module`. *Publish*: a worker's outer
   gradient, the module's *anchor* minus its local parameters, becomes a file. *Gather*: here all
   files are at hand. *Step*: contributions are shortened to the median norm, weighted by shard
   (Eq. 2 and 3), averaged, scaled by the root of the paths (section 2.7), and one Nesterov step
   makes the new anchor. Workers go on from it. A private module has one path and takes the same
   step (section 2.6.1).
4. The report: digests of all anchors, and their loss on held-out sequences.

The arithmetic is in `dipaco.modules.outer`, `contributions` and `inner`, the code that peers run.
There are no messages and no faults here: everybody is always on time. A swarm with fixed steps
(`RoundsConfig.inner_steps`) has the same digests, bit for bit, if its inner steps have the same
bits, which takes the same type of device, build of PyTorch and number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dipaco.base.errors import ConfigurationError
from dipaco.modules.outer import OuterRule, canonical_table
from dipaco.modules.state import ModuleState
from dipaco.routing.run_folder import RunFolder

from .path_worker import Workbench, open_workers
from .report import Reporter, RoundReport
from .settings import SimulatedPeer, SimulatorSettings, checked_peers
from .storage import KeptStates, open_storage


class ReferenceSwarm:
    """All peers of a run in one process.

    :param run: an opened run folder with every blob that its plan names
    :param steps_per_round: inner steps of a round; by default what the plan says
    :param peers: who trains what; one peer per path by default
    :param first_round: number of the first round. It is part of the states
    :param states: start from these module states in place of the genesis

    The caller sets PyTorch's number of threads, which can change bits. Raises ConfigurationError
    for impossible peers and unknown settings.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        steps_per_round: int | None = None,
        peers: Sequence[SimulatedPeer] | None = None,
        first_round: int = 0,
        states: Mapping[str, ModuleState] | None = None,
        settings: SimulatorSettings | None = None,
    ) -> None:
        settings = settings or SimulatorSettings()
        self.plan = run.plan()
        self.grid = run.grid(self.plan)
        self.steps_per_round = _steps_per_round(steps_per_round, self.plan.rounds.inner_steps)
        self.peers = checked_peers(peers, self.grid.path_count)
        self.identity: dict[str, Any] = {
            "run": self.plan.run_id,
            "steps_per_round": self.steps_per_round,
            "optimizer": settings.optimizer,
            "peers": [[peer.path, peer.replica, peer.peer] for peer in self.peers],
        }
        """What must be the same when a simulation goes on from what is on disk."""
        self._rule = OuterRule.of(self.plan, run.shard_index(self.plan))
        self._storage = open_storage(run, settings, self.identity, states or {})
        self.states: KeptStates = self._storage.states
        """The anchors: the newest state of every module."""
        self.workers = open_workers(run, self.peers, Workbench(self.plan, settings), self._storage)
        """One for each of `peers`, in their order."""
        self._reporter = Reporter(run, settings)
        self.on_steps: Callable[[int], None] = lambda steps: None
        """Called with a number of inner steps that were done, for whoever watches."""
        self._stepped: set[str] = set()
        """The modules that have taken their outer step in this round."""
        self.next_round = first_round
        if self._storage.found_round is None:
            self._storage.note_next_round(first_round)
        else:
            self.go_on_in(self._storage.found_round)

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Run `count` rounds and yield the report of each."""
        for _ in range(count):
            yield self.run_round()

    def run_round(self) -> RoundReport:
        """Run one round and report it.

        Raises ConfigurationError if nothing says how many inner steps a round has (a run by the
        clock), CorpusError if a path has no training sequences, IntegrityError if a result is not
        finite; the states are then those of the last good step.
        """
        if not self.steps_per_round:
            raise ConfigurationError(
                "the rounds of this run follow the clock (rounds.inner_steps is 0), which a "
                "simulation does not have; say how many inner steps a round has with "
                "--steps-per-round 100"
            )
        started_s = time.monotonic()
        for worker in self.workers:
            worker.begin_round(self.next_round)
        for level in self.grid.levels_in_time_order():
            self._train_until(self.grid.steps_before(level, self.steps_per_round))
            for module in self.grid.modules():
                if self.grid.level_of(module) == level and module not in self._stepped:
                    self._step_module(module)
                    self._stepped.add(module)
        self._train_until(self.steps_per_round)
        report = self._reporter.report(
            self.next_round,
            self.workers,
            self.states,
            trained=True,
            started_s=started_s,
            sent_bytes=sum(
                self._rule.codec_of(module).file_bytes(self.grid.layout(module).size)
                for worker in self.workers
                for module in worker.modules
            ),
        )
        self.next_round += 1
        self._stepped.clear()
        self._storage.note_next_round(self.next_round)
        return report

    def _train_until(self, steps: int) -> None:
        """Let every worker train until it has done this many of the round's inner steps."""
        for worker in self.workers:
            missing = steps - len(worker.round_losses)
            worker.train(missing)
            if missing > 0:
                self.on_steps(missing)

    def _step_module(self, module: str) -> None:
        """Publish, gather and step. A module that nobody has trained since is left alone."""
        contributors = {
            worker.peer.peer: worker
            for worker in self.workers
            if worker.unmerged_tokens.get(module, 0) > 0
        }
        if not contributors:
            return
        table = canonical_table(worker.contribution(module) for worker in contributors.values())
        codec = self._rule.codec_of(module)
        files = [contributors[row.peer].publish(module, codec) for row in table]
        self.states.put(self._rule.step(self.states[module], files, table, self.next_round))
        for worker in self.workers:
            if module in worker.modules:
                worker.commit(module)

    def report(self) -> RoundReport:
        """Report the present states without training: the line before the first round."""
        before, now_s = self.next_round - 1, time.monotonic()
        return self._reporter.report(
            before, self.workers, self.states, trained=False, started_s=now_s
        )

    def go_on_in(self, round_index: int) -> None:
        """Continue a round that another process began, from the workers and states it left.

        A level's boundary has passed when somebody has trained beyond it; if nobody has, a module
        whose state names the round was stepped, and the others are still to be.
        """
        self.next_round = round_index
        done = max(
            (len(w.round_losses) for w in self.workers if w.round_index == round_index), default=0
        )
        self._stepped.clear()
        for module in self.states:
            boundary = self.grid.steps_before(self.grid.level_of(module), self.steps_per_round)
            progress = self.states.summary(module).progress.values()
            if done > boundary or any(entry.last_round >= round_index for entry in progress):
                self._stepped.add(module)


def _steps_per_round(given: int | None, planned: int) -> int:
    """Return the steps of a round; 0 when neither caller nor plan says: no round can be run."""
    if given is not None and given < 1:
        raise ConfigurationError(f"--steps-per-round {given} must be at least 1")
    return planned if given is None else given
