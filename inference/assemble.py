"""Putting one path together from the states of its modules: an ordinary small transformer."""

from __future__ import annotations

import torch
from dipaco.modules.compose import load_path
from dipaco.modules.errors import NetworkError, StorageError
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel

from .sources import StateSource, SwarmSource


def assemble_path(
    source: StateSource,
    path: int,
    *,
    model: PathModel | None = None,
    device: torch.device | None = None,
) -> PathModel:
    """Return the model of `path` in evaluation mode, filled with its best states so far.

    Where there are none, or the source was opened for the newest states, it is filled with the
    newest good states of the path's modules.

    A `model` of the run's shape is overwritten in place and returned, which spares memory when
    paths are used one after the other; else a new one is made on `device` (default: CPU).

    Raises ConfigurationError if there is no such path; StorageError (disk) or NetworkError
    (swarm), naming the module, if there is no state of one of its modules. Called by evaluation
    and generation.
    """
    best = source.best_path(path) if 0 <= path < source.grid.path_count else None
    states = path_states(source, path) if best is None else {}
    if model is None:
        model = PathModel(source.plan.model).to(device or torch.device("cpu"))
    if best is not None:
        best.load_into(model)
    else:
        load_path(model, source.grid, path, states)
    return model.eval()


def path_states(source: StateSource, path: int) -> dict[str, ModuleState]:
    """Return the newest states of the modules of a path. Raises as `assemble_path` does."""
    states: dict[str, ModuleState] = {}
    for module in source.grid.modules_of_path(path):
        state = source.state(module)
        if state is None:
            kind = NetworkError if isinstance(source, SwarmSource) else StorageError
            raise kind(
                f"path {path} cannot be put together: there is no state of its module {module}; "
                f"{source.advice}"
            )
        states[module] = state
    return states
