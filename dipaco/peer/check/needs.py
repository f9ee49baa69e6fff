"""What training a path of a run takes: memory, disk and line, computed before anything is made.

Everything follows from the run by the code that a peer runs: the grid counts the parameters, the
codec its bytes, the store what it keeps. Used by `dipaco-bootstrap plan` for a run that is being
planned, and by `dipaco-peer --check` for this machine. The figures of traffic are for a full grid:
one peer on every path, all of them reachable and equally fast.
"""

from __future__ import annotations

import math
from typing import Protocol

from dipaco.base.kept_files import KEPT_ROUNDS, KEPT_STATES
from dipaco.base.progress import shown_bytes
from dipaco.modules.contributions import CODECS
from dipaco.modules.frozen_file import base_file_bytes, frozen_bytes
from dipaco.modules.layout import layout_of, parameter_counts, parameter_shapes
from dipaco.modules.memory import (
    ADAMW_BYTES,
    FP32_BYTES,
    head_bytes,
    pass_bytes,
)
from dipaco.modules.state import max_state_bytes
from dipaco.modules.transformer import LOGITS_AT_ONCE_ON_GPU
from dipaco.protocol.config import (
    ContributionsConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    RoundsConfig,
)
from dipaco.protocol.grid import PRIVATE_LEVEL, Grid
from dipaco.training.muon import is_for_muon
from dipaco.training.optimizer_states import KEPT_OPTIMIZERS, SAVE_EVERY_S

_OPTIMIZER_NAMES = {"adamw": "AdamW", "muon": "Muon and AdamW"}
ONE_PASS = "pass of one sequence, about"
_LOGITS = "logits, at most"
_FROZEN_BASE = "frozen base"
_DAY_S = 86_400.0


class Run(Protocol):
    """What the figures follow from; both a `RunConfig` and a `RunPlan` provide it."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def grid(self) -> GridConfig: ...

    @property
    def inner(self) -> InnerConfig: ...

    @property
    def rounds(self) -> RoundsConfig: ...

    @property
    def contributions(self) -> ContributionsConfig: ...


def grid_of(run: Run) -> Grid:
    """Return the grid of a run. Raises ConfigurationError when it is impossible."""
    return Grid(run.model, run.grid, run.rounds.level_offsets)


def state_bytes(grid: Grid, level: str) -> int:
    """Return the size of a state of a level's module, at most."""
    return max_state_bytes(layout_of(grid, level), paths_per_module(grid, level))


def paths_per_module(grid: Grid, level: str) -> int:
    """Return how many paths go through a module of a level."""
    module = next(module for module in grid.modules() if grid.level_of(module) == level)
    return len(grid.paths_of_module(module))


def device_bytes(
    run: Run,
    path_parameters: int,
    optimizer: str = "adamw",
    *,
    in_16_bits: bool = True,
) -> dict[str, int]:
    """Return what training keeps on the device at least: a batch is split until it fits there.

    Anchors are scored between steps: their copies take the room of the gradients.
    """
    adapters = run.model.adapters
    return {
        _FROZEN_BASE: frozen_bytes(run.model, adapters.base_format) if adapters else 0,
        "parameters": FP32_BYTES * path_parameters,
        "gradients": FP32_BYTES * path_parameters,
        _OPTIMIZER_NAMES[run.inner.optimizer]: _moments_bytes(run, path_parameters, optimizer),
        _LOGITS: head_bytes(run.model, 1, LOGITS_AT_ONCE_ON_GPU),
        ONE_PASS: pass_bytes(run.model, in_16_bits=in_16_bits),
    }


def _moments_bytes(run: Run, path_parameters: int, optimizer: str = "adamw") -> int:
    """Return the size of the inner optimizer's state of a path. Muon has one moment, in fp32."""
    matrices = 0
    if run.inner.optimizer == "muon":
        shapes = parameter_shapes(run.model)
        matrices = sum(math.prod(s) for name, s in shapes.items() if is_for_muon(name, s))
    return FP32_BYTES * matrices + ADAMW_BYTES[optimizer] * (path_parameters - matrices)


def main_memory_bytes(run: Run, grid: Grid, path_parameters: int) -> dict[str, int]:
    """Return what a peer holds beside its device, fp32, if all that can happen happens at once.

    Of one step of a whole path that is 12 bytes a parameter and the encoded contribution; of 150 M
    parameters 10.7 bytes each were measured, of 20 M 12.9 (`benchmarks/outer_memory.py`).
    Anchors lie in files, which are mapped.
    """
    path = FP32_BYTES * path_parameters
    return {
        "snapshots": path,
        "an encoded contribution": max(_file_bytes(run, grid, level) for level in grid.level_names),
        "new states, until they are on the disk": 2 * path,
    }


def disk_bytes(run: Run, grid: Grid, shard_bytes: int) -> dict[str, int]:
    """Return what a peer has on disk, with a shard of `shard_bytes`."""
    path_parameters = parameter_counts(grid)["path"]
    keepers = min(run.rounds.copies, grid.path_count)
    states = {level: state_bytes(grid, level) for level in grid.level_names}
    received = sum(received_bytes(run, grid, level) for level in grid.level_names)
    return {
        "own states": KEPT_STATES * sum(states.values()),
        "copies of private states": (keepers - 1) * KEPT_STATES * states.get(PRIVATE_LEVEL, 0),
        "contributions": KEPT_ROUNDS * (received + sent_bytes(run, grid)),
        "optimizer states": KEPT_OPTIMIZERS * _moments_bytes(run, path_parameters),
        "base model": base_file_bytes(run.model),
        "token files": (1 + keepers) * shard_bytes,
    }


def written_bytes(run: Run, grid: Grid) -> dict[str, int]:
    """Return what a peer writes to its disk in a day, if every round takes as long as it may."""
    rounds = _DAY_S / run.rounds.duration_s
    keepers = min(run.rounds.copies, grid.path_count)
    states = {level: state_bytes(grid, level) for level in grid.level_names}
    copies = (keepers - 1) * states.get(PRIVATE_LEVEL, 0)
    received = sum(received_bytes(run, grid, level) for level in grid.level_names)
    moments = _moments_bytes(run, parameter_counts(grid)["path"])
    return {
        "own states": round(rounds * sum(states.values())),
        "copies of private states": round(rounds * copies),
        "contributions": round(rounds * (received + sent_bytes(run, grid))),
        "optimizer states": round(_DAY_S / max(SAVE_EVERY_S, run.rounds.duration_s) * moments),
    }


def _file_bytes(run: Run, grid: Grid, level: str) -> int:
    """Return the most bytes of one contribution to a level's module."""
    return CODECS[run.contributions.codec].file_bytes(layout_of(grid, level).size)


def sent_bytes(run: Run, grid: Grid) -> int:
    """Return the bytes of one peer's contributions in a round, each counted once."""
    return sum(_file_bytes(run, grid, level) for level in grid.level_names)


def received_bytes(run: Run, grid: Grid, level: str) -> int:
    """Return what one peer receives in a round of a level's contributions: those of all others.

    A keeper of a private module receives what its trainer publishes.
    """
    copies = (min(run.rounds.copies, grid.path_count) - 1) if level == PRIVATE_LEVEL else 0
    return (paths_per_module(grid, level) - 1 + copies) * _file_bytes(run, grid, level)


def round_mbit_per_s(run: Run, grid: Grid) -> float:
    """Return what one peer receives, and sends on average, spread over a round."""
    moved = sum(received_bytes(run, grid, level) for level in grid.level_names)
    return 8e-6 * moved / run.rounds.duration_s


def too_slow(run: Run, upload_mbit_per_s: float | None) -> list[str]:
    """Return a line for each level whose contributions cannot be sent in time with an upload
    limit, with the limit that would do; none without a limit.

    In time is before a step is proposed, to all other trainers: they fetch a file at the same time,
    so it is with none of them before it is with most.
    """
    if upload_mbit_per_s is None:
        return []
    grid, time_s, lines = grid_of(run), run.rounds.gather_limit_s, []
    for level in grid.level_names:
        sent = max(1, paths_per_module(grid, level) - 1) * _file_bytes(run, grid, level)
        needed = 8e-6 * sent / time_s
        if needed > upload_mbit_per_s:
            lines.append(
                f"{level}: an outer step sends {shown_bytes(sent)} in {time_s:.0f} s, but "
                f"--max-upload-mbps {upload_mbit_per_s:g} is too low for that: this peer's work on "
                f"it will be missed; give at least --max-upload-mbps {needed:.2g}"
            )
    return lines
