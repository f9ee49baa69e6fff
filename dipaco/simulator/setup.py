"""What a simulation begins with: the states of all modules, and a trainer for each peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dipaco.modules.state import ModuleState
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.training.trainer import PathTrainer

from .settings import SimulatedPeer, SimulatorSettings


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
            # PyTorch compiles once: trainers of one shape share what it made.
            compile_model=device.type == "cuda",
            exact=settings.exact,
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
