"""The peers of a simulation: what each trains, and how, and what everybody begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dipaco.base.errors import ConfigurationError
from dipaco.modules.state import ModuleState
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.training.trainer import PathTrainer


@dataclass(frozen=True)
class SimulatorSettings:
    """How a simulation is carried out. It changes no result, except where a field says so."""

    device: torch.device | str = "cpu"
    """Where paths are trained and scored. Another type of device has other bits."""
    optimizer: str = "adamw"
    """"adamw" or "adamw8bit", as the peers are told. They have different bits."""
    validation_sequences: int | None = None
    """Held-out sequences to score per path after each round, at most; None is all, 0 none."""
    exact: bool = True
    """Whether a CPU computes the same bits as peers of a run with fixed steps. Otherwise it does
    what those of a run by the clock do: bf16, if it is made for that."""


@dataclass(frozen=True)
class SimulatedPeer:
    """A peer and its path. Several peers on one path are its replicas, numbered from 0."""

    path: int
    replica: int = 0
    name: str = ""
    """Peer ID in the swarm that is simulated; decides the order of summation among replicas."""

    @property
    def peer_id(self) -> str:
        """The name in contribution tables, unique within a swarm."""
        return self.name or f"{self.path}/{self.replica:06d}"


def checked_peers(
    peers: Sequence[SimulatedPeer] | None, path_count: int
) -> tuple[SimulatedPeer, ...]:
    """Return the peers in canonical order, by default one per path.

    Raises ConfigurationError for peers that this run cannot have.
    """
    if peers is None:
        return tuple(SimulatedPeer(path) for path in range(path_count))
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
    if len({peer.peer_id for peer in peers}) < len(peers):
        raise ConfigurationError("two simulated peers have the same name")
    return tuple(sorted(peers, key=lambda peer: (peer.path, peer.peer_id)))


def first_states(run: RunFolder, given: Mapping[str, ModuleState]) -> dict[str, ModuleState]:
    """Return a state of every module: a `given` one, or that of the run's genesis.

    Raises IntegrityError for a genesis that is damaged.
    """
    plan = run.plan()
    # Read once for all modules. A successor run begins with states of its own instead.
    first = run.first_parameters(plan) if plan.blobs.genesis is None else None
    return {
        module: given.get(module) or run.genesis_state(plan, module, first)
        for module in run.grid(plan).modules()
    }


def new_trainers(
    run: RunFolder,
    peers: Sequence[SimulatedPeer],
    states: Mapping[str, ModuleState],
    steps_per_round: int,
    settings: SimulatorSettings,
) -> dict[SimulatedPeer, PathTrainer]:
    """Return a trainer for each peer, which begins with these states of its path's modules.

    Raises ConfigurationError for an unknown optimizer.
    """
    plan = run.plan()
    grid = run.grid(plan)
    device = torch.device(settings.device)
    trainers: dict[SimulatedPeer, PathTrainer] = {}
    for peer in peers:
        trainer = trainers[peer] = PathTrainer(
            plan,
            grid,
            device,
            new_model=lambda: run.path_model(plan, device),
            optimizer=settings.optimizer,
            # PyTorch compiles once for all trainers of one shape.
            compile_model=device.type == "cuda",
            exact=settings.exact,
            steps_per_round=steps_per_round,
        )
        batches = BatchStream(
            run.train_tokens(plan, peer.path),
            seed=plan.seed,
            path=peer.path,
            batch_sequences=plan.inner.batch_sequences,
        )
        own_states = {module: states[module] for module in grid.modules_of_path(peer.path)}
        trainer.start_path(peer.path, own_states, batches)
        trainer.replica = peer.replica
    return trainers
