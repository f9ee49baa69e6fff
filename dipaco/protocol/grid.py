"""The grid: levels, modules and paths, and their names (DiPaCo sections 2.3, 2.6).

A *level* is a run of consecutive blocks with several alternative *modules*; a *path* takes one
module of every level. What belongs to one path alone (private blocks, embedding or head) forms
that path's private module. Modules are named `L0.E3` (level 0, alternative 3) and `P17` (private
to path 17); a path is an integer whose digits in mixed radix are its modules, the first level
most significant. Paths that were added to a finished run follow: in every level, the first of them
has the module behind those of the grid, the second the next one. `dipaco.modules.layout` says
which parameters a module has.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from functools import cached_property

from dipaco.base.errors import ConfigurationError

from .config import GridConfig, ModelConfig

PRIVATE_LEVEL = "P"


class Grid:
    """The modules and paths of a run, computed from its configuration alone.

    Every process builds it from the plan. Raises `ConfigurationError` when the levels do not fit
    the model, when a level is left without parameters, or when the offsets do not fit the levels.
    """

    def __init__(
        self,
        model: ModelConfig,
        grid: GridConfig,
        level_offsets: Sequence[float] | None = None,
    ) -> None:
        self.model = model
        self.config = grid
        self.path_count = grid.path_count
        self.level_starts = _level_starts(model, grid)
        self.level_names = self._find_levels()
        self._offsets = _level_offsets(self.level_names, level_offsets)
        # Answers of earlier calls: a peer asks for the same few, again and again.
        self._modules_by_path: dict[int, tuple[str, ...]] = {}
        self._paths_by_module: dict[str, tuple[int, ...]] = {}

    def _find_levels(self) -> tuple[str, ...]:
        """Return the shared levels, then that of private modules if there are some.

        Raises `ConfigurationError` for a level that would have no parameters.
        """
        shared = tuple(f"L{index}" for index in range(len(self.config.modules_per_level)))
        owners = {self.level_of_block(block) for block in range(self.model.block_count)}
        if self.model.adapters is None:  # otherwise embedding and head are those of the base
            owners |= {self.level_of_embedding, self.level_of_head}
        empty = next((level for level in shared if level not in owners), None)
        if empty is not None:
            raise ConfigurationError(
                f"level {empty} has no shared parameters: all its blocks are in private_blocks "
                f"{list(self.config.private_blocks)}; leave it a block or use fewer levels"
            )
        return (*shared, PRIVATE_LEVEL) if PRIVATE_LEVEL in owners else shared

    def level_of_block(self, block: int) -> str:
        """Return the level that a block of the model belongs to."""
        if block in self.config.private_blocks:
            return PRIVATE_LEVEL
        return f"L{bisect.bisect_right(self.level_starts, block) - 1}"

    @property
    def level_of_embedding(self) -> str:
        """The level that the embedding belongs to."""
        return PRIVATE_LEVEL if self.config.private_embedding else "L0"

    @property
    def level_of_head(self) -> str:
        """The level that the last norm and the output head belong to."""
        last = f"L{len(self.config.modules_per_level) - 1}"
        return PRIVATE_LEVEL if self.config.private_head else last

    @cached_property
    def _modules(self) -> tuple[str, ...]:
        shared = tuple(
            f"L{level}.E{number}"
            for level, count in enumerate(self.config.module_counts)
            for number in range(count)
        )
        private = range(self.path_count) if self.has_private else ()
        return shared + tuple(f"{PRIVATE_LEVEL}{path}" for path in private)

    @cached_property
    def _module_set(self) -> frozenset[str]:
        return frozenset(self._modules)

    @property
    def has_private(self) -> bool:
        """Whether paths have parameters of their own."""
        return PRIVATE_LEVEL in self.level_names

    def modules(self) -> tuple[str, ...]:
        """Return all modules of the run: level by level, then the private ones by path."""
        return self._modules

    def has_module(self, module: str) -> bool:
        """Return whether the run has a module of this name; for names that peers sent."""
        return module in self._module_set

    def modules_of_path(self, path: int) -> tuple[str, ...]:
        """Return the modules of `path` in level order, the private one last."""
        modules = self._modules_by_path.get(path)
        if modules is None:
            modules = self._modules_by_path[path] = self._find_modules(path)
        return modules

    def _find_modules(self, path: int) -> tuple[str, ...]:
        shared = tuple(f"L{level}.E{digit}" for level, digit in enumerate(self.digits(path)))
        return (*shared, f"{PRIVATE_LEVEL}{path}") if self.has_private else shared

    def paths_of_module(self, module: str) -> tuple[int, ...]:
        """Return the paths through `module`, ascending."""
        paths = self._paths_by_module.get(module)
        if paths is None:
            paths = self._paths_by_module[module] = self._find_paths(module)
        return paths

    def _find_paths(self, module: str) -> tuple[int, ...]:
        level = self.level_of(module)
        if level == PRIVATE_LEVEL:
            return (int(module[1:]),)
        index, number = int(level[1:]), int(module.partition(".E")[2])
        below = math.prod(self.config.modules_per_level[index + 1 :])
        count = self.config.modules_per_level[index]
        if number >= count:
            return (self.config.combination_count + number - count,)
        return tuple(
            (above * count + number) * below + rest
            for above in range(self.config.combination_count // (below * count))
            for rest in range(below)
        )

    def digits(self, path: int) -> tuple[int, ...]:
        """Return which module `path` takes in every shared level."""
        if not 0 <= path < self.path_count:
            raise ConfigurationError(
                f"path {path} does not exist; this run has paths 0 to {self.path_count - 1}"
            )
        beyond = path - self.config.combination_count
        if beyond >= 0:
            return tuple(count + beyond for count in self.config.modules_per_level)
        digits = []
        for count in reversed(self.config.modules_per_level):
            path, digit = divmod(path, count)
            digits.append(digit)
        return tuple(reversed(digits))

    def level_of(self, module: str) -> str:
        """Return the level of `module`: `L0`, `L1`, ... or `P`."""
        if module not in self._module_set:
            raise ConfigurationError(
                f"module '{module}' does not exist; this run has "
                f"{self._modules[0]} to {self._modules[-1]}"
            )
        return module.partition(".")[0] if module[0] == "L" else PRIVATE_LEVEL

    def level_offset(self, level: str) -> float:
        """Return where in a round the boundary of `level` lies, in (0, 1]."""
        return self._offsets[level]

    def levels_in_time_order(self) -> tuple[str, ...]:
        """Return the levels in the order of their boundaries within a round."""
        return tuple(sorted(self.level_names, key=self.level_offset))

    def steps_before(self, level: str, inner_steps: int) -> int:
        """Return how many of a round's `inner_steps` are done before the boundary of `level`.

        Used where a round is counted in steps: in the simulator and in the swarm's test mode.
        """
        return math.floor(self._offsets[level] * inner_steps + 1e-9)


def _level_starts(model: ModelConfig, grid: GridConfig) -> tuple[int, ...]:
    """Return the first block of every level, checked."""
    levels, blocks = len(grid.modules_per_level), model.block_count
    outside = [block for block in grid.private_blocks if not 0 <= block < blocks]
    if outside:
        raise ConfigurationError(
            f"private_blocks {outside} do not exist; the model has blocks 0 to {blocks - 1}"
        )
    if levels > blocks:
        raise ConfigurationError(
            f"{levels} levels do not fit in {blocks} blocks; give fewer modules_per_level or a "
            f"greater block_count"
        )
    if grid.level_starts is None:
        return tuple(level * blocks // levels for level in range(levels))
    starts = grid.level_starts
    ascending = all(a < b for a, b in itertools.pairwise(starts))
    if len(starts) != levels or starts[0] != 0 or not ascending or starts[-1] >= blocks:
        raise ConfigurationError(
            f"level_starts {list(starts)} must be {levels} ascending blocks from 0 to at most "
            f"{blocks - 1}, the first 0"
        )
    return starts


def _level_offsets(
    level_names: tuple[str, ...], offsets: Sequence[float] | None
) -> dict[str, float]:
    """Return the boundary of every level, evenly spread by default, checked."""
    if offsets is None:
        count = len(level_names)
        return {level: (index + 1) / count for index, level in enumerate(level_names)}
    if len(offsets) != len(level_names) or not all(0 < offset <= 1 for offset in offsets):
        raise ConfigurationError(
            f"level_offsets {list(offsets)} must be {len(level_names)} numbers in (0, 1], one for "
            f"each of {', '.join(level_names)}"
        )
    return dict(zip(level_names, offsets, strict=True))
