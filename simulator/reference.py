"""The swarm in one process: what real peers compute, bit for bit, without a network.

A round is what it is in a swarm of fixed-steps peers (`RoundsConfig.inner_steps`): levels end one
after the other, each in the middle of everybody's training. Before a level's boundary every
worker has done its share of the round's inner steps; at the boundary each module of the level is
averaged and stepped, and local parameters become the new anchor while the other levels train on.
The arithmetic is `dipaco.modules` alone, the code that the peers run. What a peer does besides,
matchmaking, transfers, faults, does not exist here: everybody is always on time.

Bits are equal between this and a swarm if their inner steps are: the same device type, the same
build of PyTorch and the same number of threads. The outer step is equal everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from dipaco.modules.compose import load_path
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.evaluate import LossSum, sum_losses
from dipaco.modules.outer import (
    WireCodec,
    average_contributions,
    canonical_table,
    contribution_weights,
    outer_step,
)
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.token_files import reported_rows

from .early_stopping import BestReport, EarlyStopping
from .keeping import (
    KEEP_CHOICES,
    DiskShelf,
    DiskStates,
    KeptStates,
    MemoryShelf,
    MemoryStates,
    WorkerShelf,
)
from .live_folder import LiveFolder
from .path_worker import PathWorker, SimulatedPeer, Workbench

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PathReport:
    """One path after a round."""

    path: int
    step: int
    """Inner steps of the path so far."""
    train_loss: float | None
    """Mean over the round's inner steps, nats a token."""
    validation: LossSum
    """Its committed states on its held-out sequences."""
    best: BestReport | None = None
    """Its best states so far; None without early stopping."""


@dataclass(frozen=True)
class RoundReport:
    """The swarm after a round. Round -1 is the state before any."""

    round_index: int
    digests: Mapping[str, str]
    versions: Mapping[str, int]
    paths: tuple[PathReport, ...]
    seconds: float

    @property
    def validation(self) -> LossSum:
        """All paths together, every token counting alike."""
        return LossSum.total(path.validation for path in self.paths)

    @property
    def best_validation(self) -> LossSum:
        """All paths together, each with its best states so far, or its present ones without."""
        return LossSum.total(
            path.best.validation if path.best else path.validation for path in self.paths
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values: a line of `dipaco-simulate --json`."""
        return {
            "round": self.round_index,
            "digests": dict(self.digests),
            "versions": dict(self.versions),
            "paths": [
                {
                    "path": path.path,
                    "step": path.step,
                    "train_loss": path.train_loss,
                    "validation_loss": path.validation.loss,
                    "validation_tokens": path.validation.tokens,
                    "best": path.best.as_dict() if path.best else None,
                }
                for path in self.paths
            ],
            "validation": {
                "perplexity": self.validation.perplexity,
                "tokens": self.validation.tokens,
            },
            "best_validation": {
                "perplexity": self.best_validation.perplexity,
                "tokens": self.best_validation.tokens,
            },
            "seconds": round(self.seconds, 3),
        }


class ReferenceSwarm:
    """All peers of a run in one process.

    :param run: an opened run directory with every blob that its plan names
    :param peers: who trains what; one peer per path by default. Paths that nobody trains keep
        their states, as in a swarm with fewer peers than paths
    :param steps_per_round: inner steps of a round; by default what the plan says
    :param first_round: number of the first round. It stands in the states, so a swarm that began
        to train in round r has the digests of a simulation with `first_round=r`
    :param states: start from these module states in place of the genesis, with fresh AdamW states
    :param threads: threads for tensor arithmetic, of the whole process; they can change bits
    :param optimizer: "adamw" or "adamw8bit", as the peers are told
    :param codec: by default the plan's
    :param dedicated_models: a model per worker in place of one that all take turns on; the same
        bits, more memory, no copying
    :param validation_sequences: held-out sequences to score per path after each round, at most;
        None is all of them and 0 none, which also leaves early stopping out
    :param best_folder: keep the paths' best states there, in memory without it
    :param keep: where workers and states are while nobody uses them: `KEEP_CHOICES`
    :param directory: for "disk": the folder, `live` of `CheckpointFolder`. A simulation that
        is in it already, even one killed within a round, goes on; `first_round` and `states` are
        then those of the folder

    Raises ConfigurationError for peers that cannot be, or if no number of inner steps is given.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        peers: Sequence[SimulatedPeer] | None = None,
        steps_per_round: int | None = None,
        first_round: int = 0,
        states: Mapping[str, ModuleState] | None = None,
        threads: int | None = None,
        device: torch.device | str = "cpu",
        optimizer: str = "adamw",
        micro_batch_size: int | None = None,
        codec: WireCodec | None = None,
        dedicated_models: bool = False,
        validation_sequences: int | None = None,
        best_folder: Path | None = None,
        keep: str = "memory",
        folder: Path | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.run = run
        self.plan = run.plan()
        self.grid = run.grid(self.plan)
        self.device = torch.device(device)
        self.optimizer = optimizer
        self.steps_per_round = _steps_per_round(steps_per_round, self.plan.rounds.inner_steps)
        self.next_round = first_round
        self.peers = _checked_peers(peers, self.grid.path_count)
        self._codec = codec or WireCodec(self.plan.averaging.codec)
        self._validation_sequences = validation_sequences
        self.best = EarlyStopping(
            run, self.plan, self.grid, sequences=validation_sequences, folder=best_folder
        )
        shards = run.shard_index(self.plan).paths
        self._shard_sequences = (
            {shard.path: shard.train_sequences for shard in shards}
            if self.plan.outer.shard_weights
            else None
        )
        self._committed: set[str] = set()
        self._live = self._open_live(keep, folder, dedicated_models)
        self.states: KeptStates = self._open_states(states or {})
        self._workers = self._make_workers(micro_batch_size, dedicated_models, keep)
        if self._live is not None:
            if self._live.exists:
                self.find_position()
            else:
                self._live.save(self)

    def _open_live(
        self, keep: str, folder: Path | None, dedicated_models: bool
    ) -> LiveFolder | None:
        if keep not in KEEP_CHOICES:
            raise ConfigurationError(f"keep '{keep}' is unknown; give {', '.join(KEEP_CHOICES)}")
        if keep != "disk":
            return None
        if folder is None or dedicated_models:
            raise ConfigurationError("to keep workers on disk a simulation needs a directory")
        live = LiveFolder(folder)
        found = live.check(self)
        if found is not None:
            self.next_round = found
        return live

    def _open_states(self, given: Mapping[str, ModuleState]) -> KeptStates:
        base = None
        if self.plan.blobs.genesis is None:
            base = self.run.base_parameters(self.plan)

        def genesis(module: str) -> ModuleState:
            return self.run.genesis_state(self.plan, module, base)

        if self._live is not None:
            return DiskStates(self._live.anchors, self.grid, given, genesis)
        return MemoryStates(self.grid, given, genesis)

    def _make_workers(
        self, micro_batch_size: int | None, dedicated_models: bool, keep: str
    ) -> tuple[PathWorker, ...]:
        def bench() -> Workbench:
            return Workbench(
                self.plan,
                self.device,
                optimizer=self.optimizer,
                micro_batch_size=micro_batch_size,
            )

        shelf: WorkerShelf
        if self._live is not None:
            shelf = DiskShelf(self._live.workers)
        else:
            parking = self.device if keep == "device" else torch.device("cpu")
            shelf = MemoryShelf(parking, keeps_optimizers=parking.type == self.device.type)
        shared = None if dedicated_models else bench()
        streams = {
            path: BatchStream(
                self.run.train_tokens(self.plan, path),
                seed=self.plan.seed,
                path=path,
                batch_sequences=self.plan.inner.batch_sequences,
            )
            for path in {peer.path for peer in self.peers}
        }
        return tuple(
            PathWorker(
                number,
                peer,
                self.grid,
                shared or bench(),
                streams[peer.path],
                self.states,
                shelf,
            )
            for number, peer in enumerate(self.peers)
        )

    def find_position(self) -> None:
        """See which modules took their outer step in the round that was begun; after a restart.

        A level's boundary has passed when somebody has trained beyond it; if nobody has, a module
        whose state names the round was stepped, and the others are still to be.
        """
        done = max(
            (len(w.round_losses) for w in self._workers if w.round_index == self.next_round),
            default=0,
        )
        self._committed.clear()
        for module in self.states:
            boundary = self.grid.steps_before(self.grid.level_of(module), self.steps_per_round)
            progress = self.states.summary(module).progress.values()
            stepped = any(entry.last_round >= self.next_round for entry in progress)
            if done > boundary or stepped:
                self._committed.add(module)

    @property
    def is_on_disk(self) -> bool:
        """Whether workers and states are on disk at any instant, so that nothing is to be saved."""
        return self._live is not None

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Run `count` rounds and yield the report of each."""
        for _ in range(count):
            yield self.run_round()

    def run_round(self) -> RoundReport:
        """Run one round and report it.

        Raises ConfigurationError if nothing says how many inner steps a round has (a run by the
        clock), CorpusError if a path has no training sequences, IntegrityError if a result is not
        finite; the states are then those of the last good commit.
        """
        if not self.steps_per_round:
            raise ConfigurationError(
                "the rounds of this run follow the clock (rounds.inner_steps is 0), which a "
                "simulation does not have; say how many inner steps a round has with "
                "--steps-per-round 100"
            )
        started = time.monotonic()
        for worker in self._workers:
            worker.begin_round(self.next_round)
        for level in self._levels_in_time_order():
            self._train(self.grid.steps_before(level, self.steps_per_round))
            for module in self.grid.modules():
                if self.grid.level_of(module) == level and module not in self._committed:
                    self._commit(module)
                    self._committed.add(module)
        self._train(self.steps_per_round)
        losses = [worker.round_losses for worker in self._workers]
        report = self._report(self.next_round, losses, started)
        self.next_round += 1
        self._committed.clear()
        if self._live is not None:
            self.best.commit()
            self._live.save(self)
        return report

    def report(self) -> RoundReport:
        """Report the present states without training: the line before the first round."""
        return self._report(self.next_round - 1, [[] for _ in self._workers], time.monotonic())

    def _levels_in_time_order(self) -> tuple[str, ...]:
        """Return the levels as their boundaries follow each other in a round."""
        names = self.grid.level_names
        return tuple(
            sorted(names, key=lambda name: (self.grid.level_offset(name), names.index(name)))
        )

    def _train(self, target: int) -> None:
        """Let every worker do the round's inner steps up to `target`."""
        for worker in self._workers:
            worker.train(target - len(worker.round_losses))

    def _commit(self, module: str) -> None:
        """Average the outer gradients of a module and take one Nesterov step.

        A module whose workers trained nothing since its last boundary is left alone, because a
        contribution has a positive number of tokens.
        """
        contributors = {
            worker.peer.peer: worker
            for worker in self._workers
            if worker.unmerged_tokens.get(module, 0) > 0
        }
        if not contributors:
            return
        table = canonical_table(worker.contribution(module) for worker in contributors.values())
        # One at a time: of hundreds of paths they would not fit in memory together.
        gradients = (contributors[row.peer].outer_gradient(module) for row in table)
        weights = contribution_weights(table, self._shard_sequences)
        average = average_contributions(gradients, weights, self._codec)
        state = outer_step(self.states[module], average, table, self.plan.outer, self.next_round)
        self.states.put(state)
        for worker in self._workers:
            if module in worker.modules:
                worker.commit(module)

    def _report(
        self, round_index: int, losses: Sequence[Sequence[float]], started: float
    ) -> RoundReport:
        paths: dict[int, PathReport] = {}
        for path in sorted({peer.path for peer in self.peers}):
            own = [
                (worker, own_losses)
                for worker, own_losses in zip(self._workers, losses, strict=True)
                if worker.peer.path == path
            ]
            every = [loss for _, own_losses in own for loss in own_losses]
            validation, best = self._validate(path, round_index, trained=bool(every))
            paths[path] = PathReport(
                path=path,
                step=max(worker.path_step for worker, _ in own),
                train_loss=sum(every) / len(every) if every else None,
                validation=validation,
                best=best,
            )
        return RoundReport(
            round_index=round_index,
            digests={module: self.states.digest(module) for module in self.states},
            versions={module: self.states.summary(module).version for module in self.states},
            paths=tuple(paths.values()),
            seconds=time.monotonic() - started,
        )

    def _validate(
        self, path: int, round_index: int, *, trained: bool
    ) -> tuple[LossSum, BestReport | None]:
        """Score the committed states of a path on its held-out sequences; keep the best."""
        if self._validation_sequences == 0:
            return LossSum(), None
        states = {module: self.states[module] for module in self.grid.modules_of_path(path)}
        load_path(self._scoring_model, self.grid, path, states)
        held_out = self.run.validation_tokens(self.plan, path)
        rows = reported_rows(held_out, self.plan.rounds, self._validation_sequences)
        prefix_tokens = self.plan.routing.prefix_tokens
        score = LossSum(*sum_losses(self._scoring_model, rows, prefix_tokens))
        best = self.best.consider(
            path, round_index, self._scoring_model, states, score, trained=trained
        )
        return score, best

    @cached_property
    def _scoring_model(self) -> PathModel:
        """A model of its own, so that scoring never disturbs the workers."""
        return PathModel(self.plan.model).to(self.device)

    @property
    def workers(self) -> tuple[PathWorker, ...]:
        """The workers, in the order of `peers`. Used by checkpoints and tests."""
        return self._workers


def one_peer_per_path(path_count: int) -> tuple[SimulatedPeer, ...]:
    """Return the swarm in which every path has one peer."""
    return tuple(SimulatedPeer(path) for path in range(path_count))


def _steps_per_round(given: int | None, planned: int) -> int:
    """Return the steps of a round; 0 when neither caller nor plan says: no round can be run."""
    if given is not None and given < 1:
        raise ConfigurationError(f"--steps-per-round {given} must be at least 1")
    return planned if given is None else given


def _checked_peers(
    peers: Sequence[SimulatedPeer] | None, path_count: int
) -> tuple[SimulatedPeer, ...]:
    """Return the peers in canonical order, or raise ConfigurationError."""
    if peers is None:
        return one_peer_per_path(path_count)
    if not peers:
        raise ConfigurationError("a simulation needs at least one path to train")
    for peer in peers:
        if not 0 <= peer.path < path_count:
            raise ConfigurationError(
                f"path {peer.path} is not one of the {path_count} paths of this run; "
                f"give 0 to {path_count - 1}"
            )
    if len({(peer.path, peer.replica) for peer in peers}) < len(peers):
        raise ConfigurationError("a path is given twice; its replicas must differ in number")
    if len({peer.peer for peer in peers}) < len(peers):
        raise ConfigurationError("two simulated peers have the same name")
    return tuple(sorted(peers, key=lambda peer: (peer.path, peer.peer)))
