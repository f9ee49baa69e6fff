"""One round of DiPaCo on one page: start reading here.

A run has a grid of *levels*, each with some *modules*. A *path* takes one module from every level
and is itself a small transformer. Every path has a *shard*: the training sequences that were routed
to it. `ReferenceSwarm` is a whole swarm in one process. It has a trainer for each peer and does
what the peers do, in the order of DiPaCo's Algorithm 1 (Douillard et al., 2024):

1. Inner steps. Every trainer trains its path on its shard. A round is a number of such steps.
2. The boundary of a level. Levels end one after another while training continues, so that the
   traffic of a swarm is spread over the round.
3. The outer step of each module of that level, in `_step_module`. *Publish*: each trainer's outer
   gradient, the *anchor* minus its local parameters, becomes a file. *Gather*: in a swarm files
   are fetched and some come too late; here all are at hand. *Step*: the files give the next anchor,
   and every trainer of the module goes on from it.
4. The report: digests of all anchors, and their loss on held-out sequences.

Three things are on other pages, and are those that peers run:

* `PathTrainer` (`training/trainer.py`) is a model, its inner optimizer, and for each of its modules
  the anchor from which it trains. `inner_step` trains one batch. `snapshot` copies a module at a
  boundary, and `encode` makes a contribution of that. `adopt` makes a new state the anchor and puts
  on it what the trainer has learned since the snapshot.
* `ModuleState` (`modules/state.py`) is what can be an anchor: parameters, outer momentum, and how
  many tokens each path has contributed. Its digest is the SHA-256 of all that.
* `OuterRule.step` (`modules/outer.py`) is the arithmetic. Contributions are shortened to the median
  norm, weighted by shard (Eq. 2 and 3), averaged and scaled by the root of the number of paths
  (section 2.7). One Nesterov step with that average makes the new anchor. The module of a single
  path takes the same step (section 2.6.1).

There are no messages and no faults here: everybody is always on time. A swarm with fixed steps
(`RoundsConfig.inner_steps`) has the same digests, bit for bit, if its inner steps have the same
bits. That takes the same type of device, build of PyTorch and number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from dipaco.base.errors import ConfigurationError
from dipaco.modules.outer import OuterRule, canonical_rows
from dipaco.modules.state import ModuleState
from dipaco.protocol.chain.outer_row import OuterRow
from dipaco.routing.run_folder import RunFolder

from .round_report import Reporter, RoundNotes, RoundReport
from .simulated_peers import (
    SimulatedPeer,
    SimulatorSettings,
    checked_peers,
    first_states,
    new_trainers,
)


class ReferenceSwarm:
    """All peers of a run in one process, and in its memory.

    With AdamW that is 12 bytes for each parameter of each peer's path, and 8 for each parameter of
    each module.

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
        self.settings = settings or SimulatorSettings()
        self.plan = run.plan()
        self.grid = run.grid(self.plan)
        self.steps_per_round = _steps_per_round(steps_per_round, self.plan.rounds.inner_steps)
        self.peers = checked_peers(peers, self.grid.path_count)
        self.states = first_states(run, states or {})
        """The anchors: the newest state of every module."""
        self.trainers = new_trainers(
            run, self.peers, self.states, self.steps_per_round, self.settings
        )
        """The trainer of each peer."""
        self.next_round = first_round
        self.on_steps: Callable[[int], None] = lambda steps: None
        """Called with a number of inner steps that were done, for a progress bar."""
        self._rule = OuterRule.of(self.plan, run.shard_index(self.plan))
        self._reporter = Reporter(run, self.settings)

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Run `count` rounds and yield the report of each."""
        for _ in range(count):
            yield self.run_round()

    def check_steps(self) -> None:
        """Raise ConfigurationError if nothing says how many inner steps a round has."""
        if not self.steps_per_round:
            raise ConfigurationError(
                "the rounds of this run follow the clock (rounds.inner_steps is 0), which a "
                "simulation does not have; say how many inner steps a round has with "
                "--steps-per-round 100"
            )

    def run_round(self) -> RoundReport:
        """Run one round and report it.

        Raises ConfigurationError if nothing says how many inner steps a round has (a run by the
        clock), CorpusError if a path has no training sequences, IntegrityError if a result is not
        finite; the states are then those of the last good step.
        """
        self.check_steps()
        notes = RoundNotes()
        steps_done = 0
        for level in self.grid.levels_in_time_order():
            boundary = self.grid.steps_before(level, self.steps_per_round)
            self._train(boundary - steps_done, notes)
            steps_done = boundary
            for module in self.grid.modules():
                if self.grid.level_of(module) == level:
                    self._step_module(module, notes)
        self._train(self.steps_per_round - steps_done, notes)
        report = self._reporter.report(self.next_round, self.trainers, self.states, notes)
        self.next_round += 1
        return report

    def _train(self, steps: int, notes: RoundNotes) -> None:
        """Let every trainer do so many inner steps."""
        for peer, trainer in self.trainers.items():
            for _ in range(steps):
                notes.losses[peer].append(trainer.inner_step())
            if steps:
                self.on_steps(steps)

    def _step_module(self, module: str, notes: RoundNotes) -> None:
        """Publish, gather and step. A module that nobody has trained since is left alone."""
        paths = self.grid.paths_of_module(module)
        trainers = {p: trainer for p, trainer in self.trainers.items() if p.path in paths}

        # Publish: a row says whose contribution it is, and of how many tokens.
        rows: list[OuterRow] = []
        files: dict[str, bytearray] = {}
        for peer, trainer in trainers.items():
            snapshot = trainer.snapshot(module)
            if snapshot.tokens:
                rows.append(OuterRow(peer.path, peer.peer_id, snapshot.tokens))
                files[peer.peer_id] = snapshot.encode(self._rule.codec)
        notes.sent_bytes += sum(map(len, files.values()))

        rows = self._gather(module, rows)
        if not rows:
            return

        # Step: sums depend on their order, so everybody adds up in one.
        ordered = canonical_rows(rows)
        in_order = [files[row.peer] for row in ordered]
        state = self._rule.step(self.states[module], in_order, ordered, self.next_round)
        self.states[module] = state
        for trainer in trainers.values():
            trainer.adopt(module, state)

    def _gather(self, module: str, rows: list[OuterRow]) -> list[OuterRow]:
        """Return which of the published contributions are in the step: here all of them."""
        return rows

    def report(self) -> RoundReport:
        """Report the present states without training: the line before the first round."""
        return self._reporter.report(self.next_round - 1, self.trainers, self.states, RoundNotes())


def _steps_per_round(given: int | None, planned: int) -> int:
    """Return the steps of a round; 0 when neither caller nor plan says: no round can be run."""
    if given is not None and given < 1:
        raise ConfigurationError(f"--steps-per-round {given} must be at least 1")
    return planned if given is None else given
