"""Putting modules into a path model and taking them out again, always in place.

Parameters are overwritten, never replaced, so optimizers, compiled functions and other views of
the model stay valid while a peer changes paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from dipaco.protocol.grid import Grid

from .device import own_pages
from .layout import layout_of
from .state import ModuleState
from .transformer import PathModel


def load_path(model: PathModel, grid: Grid, path: int, states: Mapping[str, ModuleState]) -> None:
    """Fill `model` with the states of all modules of `path`; further states are ignored.

    Raises KeyError, before anything is changed, when a module of the path is missing.
    """
    modules = {module: states[module] for module in grid.modules_of_path(path)}
    for module, state in modules.items():
        scatter_module(model, grid, module, state.parameters)


def gather_module(model: PathModel, grid: Grid, module: str) -> torch.Tensor:
    """Return a copy of the module's parameters in `model`, flat fp32 [size] on the CPU.

    `model` must hold a path through `module`; the model itself does not know which alternative of
    the level it holds.
    """
    layout = layout_of(grid, module)
    flat = own_pages(layout.size)
    with torch.no_grad():
        for name, view in layout.views(flat).items():
            view.copy_(model.get_parameter(name))
    return flat


def scatter_module(model: PathModel, grid: Grid, module: str, flat: torch.Tensor) -> None:
    """Overwrite the module's parameters in `model` with `flat` fp32 [size]."""
    with torch.no_grad():
        for name, view in layout_of(grid, module).views(flat).items():
            model.get_parameter(name).copy_(view)


@contextmanager
def lent_parameters(
    model: PathModel, grid: Grid, path: int, states: Mapping[str, ModuleState]
) -> Iterator[None]:
    """Let `model` be another path meanwhile: its parameters lie in the memory of `states`.

    They are only to be read. On another device they are copies. Its own parameters are what they
    were afterwards, the same memory. Raises KeyError when a module of the path is missing.
    """
    lent = {
        name: view
        for module in grid.modules_of_path(path)
        for name, view in layout_of(grid, module).views(states[module].parameters).items()
    }
    own = {name: model.get_parameter(name).data for name in lent}
    try:
        for name, view in lent.items():
            model.get_parameter(name).data = view.to(own[name].device)
        yield
    finally:
        for name, data in own.items():
            model.get_parameter(name).data = data


def add_to_module(
    model: PathModel, grid: Grid, module: str, anchor: torch.Tensor, base: torch.Tensor
) -> None:
    """Set local = anchor + (local - base) in place: put the progress since `base` on `anchor`.

    Both are flat fp32 [size]. Where local still equals `base` it becomes `anchor` exactly.
    """
    layout = layout_of(grid, module)
    anchors, bases = layout.views(anchor), layout.views(base)
    with torch.no_grad():
        for name in layout.names:
            parameter = model.get_parameter(name)
            parameter.sub_(bases[name].to(parameter.device))
            parameter.add_(anchors[name].to(parameter.device))
