"""From the trained modules of one run to the first states of the next (design 4.9, successor).

The next run may have the same grid with other shards, the grid that a dense model is forked into,
a larger grid, other levels, or other private parts: what is carried over is found for each
parameter by its name. Pure, and the same on every machine.

* A new path comes from one old path: level by level, alternative e of n takes the old
  alternative e * old_n // n; between grids of different numbers of levels, path p of n comes from
  the old path p * old_n // n. Paths that were added to either grid are not counted here.
* An added path comes from the same added path of the old run, and a new one from the old path that
  it is to be a copy of.
* A parameter that is private in the new run is that of the old path.
* A parameter that is shared in both is that of the old module that all paths through the new one
  come from, else of alternative e * old_n // n of the old level.
* A parameter that was private and is shared now is the mean over the old paths.

The same holds for parameters and outer momentum; a state begins with version 0 and no progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from dipaco.base.blobs import is_sha256
from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.protocol.grid import PRIVATE_LEVEL, Grid

from .layout import layout_of
from .state import ModuleState, first_usual_norm

LoadState = Callable[[str], ModuleState]


class Growth:
    """How the modules of `new` come from those of `old`.

    `copied` are the old paths that those which are added now begin as. Raises ConfigurationError
    when the paths of the two are different models.
    """

    def __init__(self, old: Grid, new: Grid, copied: Sequence[int] = ()) -> None:
        differing = sorted(
            name
            for name in type(old.model).model_fields
            if getattr(old.model, name) != getattr(new.model, name)
        )
        if differing:
            name = differing[0]
            raise ConfigurationError(
                f"model.{name} is {getattr(new.model, name)}, but the modules to start from were "
                f"trained with {getattr(old.model, name)}; write {name} = "
                f"{getattr(old.model, name)} under [model], or leave it out"
            )
        if new.config.added_paths > old.config.added_paths + len(copied):
            raise ValueError("the source of an added path is missing")
        self._old = old
        self._new = new
        self._of_added = (*range(old.config.combination_count, old.path_count), *copied)
        self._old_level = {
            name: level for level in old.level_names for name in layout_of(old, level).names
        }

    def origin_path(self, path: int) -> int:
        """Return the old path that a new path comes from."""
        old, new = self._old.config, self._new.config
        if path >= new.combination_count:
            return self._of_added[path - new.combination_count]
        old_counts, new_counts = old.modules_per_level, new.modules_per_level
        if len(old_counts) != len(new_counts):
            return path * old.combination_count // new.combination_count
        origin = 0
        for digit, old_count, new_count in zip(
            self._new.digits(path), old_counts, new_counts, strict=True
        ):
            origin = origin * old_count + digit * old_count // new_count
        return origin

    def _origins(self, module: str) -> dict[str, tuple[str, ...]]:
        """Return for each parameter of a new module the old modules that it is the mean of."""
        paths = self._new.paths_of_module(module)
        old_paths = sorted({self.origin_path(path) for path in paths})
        return {
            name: self._origins_of_parameter(module, self._old_level[name], old_paths)
            for name in layout_of(self._new, module).names
        }

    def _origins_of_parameter(
        self, module: str, old_level: str, old_paths: list[int]
    ) -> tuple[str, ...]:
        if old_level == PRIVATE_LEVEL:
            return tuple(f"{PRIVATE_LEVEL}{path}" for path in old_paths)
        level = int(old_level[1:])
        alternatives = {self._old.digits(path)[level] for path in old_paths}
        if len(alternatives) == 1:
            return (f"{old_level}.E{alternatives.pop()}",)
        new_level, _, number = module.partition(".E")
        new_count = self._new.config.modules_per_level[int(new_level[1:])]
        old_count = self._old.config.modules_per_level[level]
        return (f"{old_level}.E{int(number) * old_count // new_count}",)

    def state(self, module: str, load: LoadState) -> ModuleState:
        """Return the first state of a new module; `load` gives the old states by their module."""
        layout = layout_of(self._new, module)
        parameters = torch.empty(layout.size, dtype=torch.float32)
        momentum = torch.empty(layout.size, dtype=torch.float32)
        to_parameters, to_momentum = layout.views(parameters), layout.views(momentum)
        # All parameters that come from the same modules at once: few states in memory together.
        by_sources: dict[tuple[str, ...], list[str]] = {}
        for name, sources in self._origins(module).items():
            by_sources.setdefault(sources, []).append(name)
        for sources, names in by_sources.items():
            sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
            for source in sources:
                old = load(source)
                values = old.layout.views(old.parameters), old.layout.views(old.momentum)
                for name in names:
                    added = values[0][name].double(), values[1][name].double()
                    known = sums.get(name)
                    sums[name] = (known[0] + added[0], known[1] + added[1]) if known else added
            for name in names:
                # In fp64, so that one origin alone is carried over bit for bit.
                to_parameters[name].copy_(sums[name][0] / len(sources))
                to_momentum[name].copy_(sums[name][1] / len(sources))
        return ModuleState(
            module, 0, parameters, momentum, {}, layout, first_usual_norm(parameters)
        )

    def states(self, load: LoadState) -> Iterator[ModuleState]:
        """Yield the first state of every new module, in the order of the grid."""
        for module in self._new.modules():
            yield self.state(module, load)

    def unused(self) -> tuple[str, ...]:
        """Return the old modules that nothing is taken from: what a smaller grid gives up."""
        used = {
            source
            for module in self._new.modules()
            for sources in self._origins(module).values()
            for source in sources
        }
        return tuple(module for module in self._old.modules() if module not in used)


def path_parameters(grid: Grid, path: int, load: LoadState) -> dict[str, torch.Tensor]:
    """Return all parameters of one path by name, fp32 on the CPU: the model that a path is."""
    parameters: dict[str, torch.Tensor] = {}
    for module in grid.modules_of_path(path):
        state = load(module)
        for name, view in state.layout.views(state.parameters).items():
            parameters[name] = view.contiguous()
    return dict(sorted(parameters.items()))


def check_genesis(state: ModuleState, module: str) -> ModuleState:
    """Return `state` if a run may begin with it as `module`. Raises IntegrityError if not.

    Called wherever the genesis of a successor run is read: by peers, tools and the simulator.
    """
    if state.module != module:
        raise IntegrityError(f"the genesis names a state of {state.module} for {module}")
    if state.version or state.progress:
        raise IntegrityError(
            f"the genesis state of {module} has version {state.version} and counts "
            f"{state.tokens} tokens; a run begins with version 0 and none"
        )
    return state


def check_genesis_index(index: object, grid: Grid) -> dict[str, str]:
    """Return the genesis index, module to digest, checked: every module of the run, no other.

    Raises IntegrityError.
    """
    if not isinstance(index, Mapping) or not all(
        isinstance(digest, str) and is_sha256(digest) for digest in index.values()
    ):
        raise IntegrityError("the genesis index is not a table of modules and digests")
    missing = [module for module in grid.modules() if module not in index]
    if missing:
        raise IntegrityError(f"the genesis names no state of module {missing[0]}")
    if len(index) != len(grid.modules()):
        unknown = next(module for module in index if not grid.has_module(str(module)))
        raise IntegrityError(f"the genesis names '{str(unknown)[:40]}', no module of this run")
    return {module: index[module] for module in grid.modules()}
