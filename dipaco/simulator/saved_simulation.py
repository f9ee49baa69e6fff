"""A simulation on disk between two rounds: `simulation.pt` in its output folder.

Module states are in the folder's store, as every run folder has them. The file says which of them
the simulation stands on, and has what is nowhere else: local parameters and optimizer of each
trainer. It is written last, so a simulation that is killed while it saves goes on from the save
before, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.base.files import atomic_file
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState
from dipaco.routing.run_folder import RunFolder

from .reference import ReferenceSwarm

FORMAT = "dipaco-simulation/4"

Begin = Callable[[int, Mapping[str, ModuleState]], ReferenceSwarm]
"""Makes a swarm whose next round, and whose states, are these."""


def simulation_file(output: RunFolder) -> Path:
    """Return the file, which need not be there."""
    return output.path / "simulation.pt"


def save_simulation(swarm: ReferenceSwarm, output: RunFolder) -> None:
    """Save a swarm that has ended a round. Raises StorageError."""
    for state in swarm.states.values():
        output.states.save(state)
    content = {
        "format": FORMAT,
        **_identity(swarm),
        "next_round": swarm.next_round,
        "digests": {module: state.digest for module, state in swarm.states.items()},
        "trainers": [trainer.state_dict() for trainer in swarm.trainers.values()],
    }
    with atomic_file(simulation_file(output)) as file:
        torch.save(content, file)


def resumed_simulation(output: RunFolder, begin: Begin) -> ReferenceSwarm:
    """Return the swarm that was saved, made by `begin`.

    Raises ConfigurationError if that is a swarm with other arguments, IntegrityError if what was
    saved is damaged.
    """
    file = simulation_file(output)
    grid = output.grid(output.plan())
    try:
        # Mapped, so that it is not in memory a second time.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        states = {
            module: output.states.load(module, layout_of(grid, module), content["digests"][module])
            for module in grid.modules()
        }
        next_round, kept = int(content["next_round"]), list(content["trainers"])
    except Exception as error:  # Damage shows as errors of pickle, of zip, or of missing keys.
        raise IntegrityError(
            f"the simulation in {file} cannot be resumed ({_short(error)}); give another --out"
        ) from error
    swarm = begin(next_round, states)
    _check_same(content, _identity(swarm), file)
    for trainer, kept_training in zip(swarm.trainers.values(), kept, strict=True):
        trainer.load_state_dict(kept_training)
    return swarm


def _identity(swarm: ReferenceSwarm) -> dict[str, Any]:
    """Return what must be the same when a simulation goes on."""
    return {
        "run": swarm.plan.run_id,
        "steps_per_round": swarm.steps_per_round,
        "optimizer": swarm.settings.optimizer,
        "peers": [[peer.path, peer.replica, peer.peer_id] for peer in swarm.peers],
    }


def _check_same(content: Mapping[str, Any], identity: Mapping[str, Any], file: Path) -> None:
    for name, value in identity.items():
        if content[name] != value:
            raise ConfigurationError(
                f"the simulation in {file} has {name} {_short(content[name])}, this one "
                f"{_short(value)}; give the same arguments, or another --out"
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
