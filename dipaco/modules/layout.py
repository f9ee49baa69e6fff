"""Which parameters make a module, and where they lie in its flat tensor (DiPaCo section 2.3)."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from dipaco.base.errors import ConfigurationError
from dipaco.protocol.config import GridConfig, ModelConfig
from dipaco.protocol.grid import PRIVATE_LEVEL, Grid

from .foreign_model import new_path
from .transformer import EMBEDDING, FINAL_NORM, HEAD

_BLOCK = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ModuleLayout:
    """Where the parameters of a module lie in its flat tensor: by name, in sorted order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes) or list(self.names) != sorted(set(self.names)):
            raise ValueError("a layout needs sorted, distinct names and one shape for each")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.sizes[:-1], initial=0))

    @cached_property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return sum(self.sizes)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters as views of `flat` [size]; no copies.

        Raises ValueError when `flat` has another shape.
        """
        if flat.shape != (self.size,):
            raise ValueError(f"expected a flat tensor of {self.size} elements, got {flat.shape}")
        # Slices, because torch forbids in-place changes to the outputs of torch.split.
        return {
            name: flat[start : start + size].view(shape)
            for name, shape, size, start in zip(
                self.names, self.shapes, self.sizes, self._starts, strict=True
            )
        }


def layout_of(grid: Grid, module_or_level: str) -> ModuleLayout:
    """Return the layout of a module, which is the same for all modules of its level.

    Raises `ConfigurationError` for a name that the grid does not have.
    """
    layouts = _layouts(grid.model, grid.config)
    if module_or_level in layouts:
        return layouts[module_or_level]
    return layouts[grid.level_of(module_or_level)]


def parameter_counts(grid: Grid) -> dict[str, int]:
    """Count parameters: of one `path`, of the whole run (`total`), of all `shared` modules.

    `private` counts those of one path that no other path has.
    """
    layouts = _layouts(grid.model, grid.config)
    private = layouts[PRIVATE_LEVEL].size if grid.has_private else 0
    per_level = [layouts[level].size for level in grid.level_names if level != PRIVATE_LEVEL]
    shared = sum(
        size * count for size, count in zip(per_level, grid.config.module_counts, strict=True)
    )
    return {
        "path": sum(per_level) + private,
        "total": shared + private * grid.path_count,
        "shared": shared,
        "private": private,
    }


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Ask the model itself for its parameters, without memory for them."""
    return dict(_meta_shapes(model))


@lru_cache(maxsize=8)
def _meta_shapes(model: ModelConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    with torch.device("meta"):
        path_model = new_path(model)
    return tuple((name, tuple(value.shape)) for name, value in path_model.named_parameters())


@lru_cache(maxsize=8)
def _layouts(model: ModelConfig, config: GridConfig) -> dict[str, ModuleLayout]:
    """Give every parameter of the model to one level."""
    grid, shapes = Grid(model, config), parameter_shapes(model)
    owned: dict[str, list[str]] = {level: [] for level in grid.level_names}
    for name in sorted(shapes):
        owned[_owner(grid, name)].append(name)
    return {
        level: ModuleLayout(tuple(names), tuple(shapes[name] for name in names))
        for level, names in owned.items()
    }


def _owner(grid: Grid, name: str) -> str:
    """Return the level that a parameter of a path belongs to."""
    if name == EMBEDDING:
        return grid.level_of_embedding
    if name in (FINAL_NORM, HEAD):
        return grid.level_of_head
    match = _BLOCK.match(name)
    if match is None:
        raise ConfigurationError(f"parameter '{name}' belongs to no level of the grid")
    return grid.level_of_block(int(match[1]))
