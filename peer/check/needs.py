"""What training a path of a run takes: memory, disk and line, computed before anything is made.

Everything follows from the run by the code that a peer runs: the grid counts the parameters, the
codec its bytes, the store what it keeps. Used by `dipaco-bootstrap plan` for a run that is being
planned, and by `dipaco-peer --check` for this machine. The figures of traffic are for a full grid:
one peer on every path, all of them reachable and equally fast.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from dipaco.modules.codecs import CODECS, Codec
from dipaco.modules.command_line import shown_bytes
from dipaco.modules.config import (
    AveragingConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    RoundsConfig,
)
from dipaco.modules.grid import PRIVATE_LEVEL, Grid
from dipaco.modules.outer import sections
from dipaco.modules.state import greatest_state_bytes
from dipaco.modules.store import KEPT_OPTIMIZERS, KEPT_STATES
from dipaco.modules.transformer import PathModel, token_losses
from dipaco.peer.exchange.steps import SHARE_OF_A_STATE
from dipaco.peer.member.ledger import GREATEST_PARTS
from torch._subclasses import FakeTensorMode

FP32_BYTES = 4
# First and second moment of a parameter, in fp32 or in 8 bits.
ADAMW_BYTES = {"adamw": 8, "adamw8bit": 2}
ONE_PASS = "pass of one sequence, about"
# Names of what main memory holds only now and then.
REMEMBERED = "contributions remembered"
SCORING = "local parameters, while anchors are scored"
BEST = "best parameters, while they are written"


class Run(Protocol):
    """What the figures follow from; a `RunConfig` and a `RunPlan` have it."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def grid(self) -> GridConfig: ...

    @property
    def inner(self) -> InnerConfig: ...

    @property
    def rounds(self) -> RoundsConfig: ...

    @property
    def averaging(self) -> AveragingConfig: ...


def grid_of(run: Run) -> Grid:
    """Return the grid of a run. Raises ConfigurationError when it is impossible."""
    return Grid(run.model, run.grid, run.rounds.level_offsets)


def state_bytes(grid: Grid, level: str) -> int:
    """Return the size of a state of a level's module, at most."""
    return greatest_state_bytes(grid.layout(level), paths_per_module(grid, level))


def paths_per_module(grid: Grid, level: str) -> int:
    """Return how many paths go through a module of a level."""
    module = next(module for module in grid.modules() if grid.level_of(module) == level)
    return len(grid.paths_of_module(module))


def device_bytes(
    run: Run,
    path_parameters: int,
    optimizer: Literal["adamw", "adamw8bit"] = "adamw",
    *,
    in_bf16: bool = True,
) -> dict[str, int]:
    """Return what training keeps on the device at least: a batch is split until it fits there."""
    return {
        "parameters": FP32_BYTES * path_parameters,
        "gradients": FP32_BYTES * path_parameters,
        "AdamW": ADAMW_BYTES[optimizer] * path_parameters,
        ONE_PASS: pass_bytes(run.model, in_bf16=in_bf16),
    }


def pass_bytes(config: ModelConfig, *, in_bf16: bool = True) -> int:
    """Return what a forward pass of one sequence keeps for the backward one, beside parameters.

    It is made with tensors that have shapes but no memory: activations, with `in_bf16` the
    parameters in bfloat16, as a recent GPU has them, and two gradients of the logits, which come
    first and are the largest. Kernels differ, so it is not exact.
    """
    kept: dict[int, torch.UntypedStorage] = {}
    with FakeTensorMode():
        model = PathModel(config)
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                kept[storage._cdata] = storage
            return tensor

        tokens = torch.ones(1, config.sequence_length, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bf16):
                logits = model(tokens)
            token_losses(logits, tokens)
    return sum(storage.nbytes() for storage in kept.values()) + 2 * FP32_BYTES * logits.numel()


def main_memory_bytes(run: Run, grid: Grid, path_parameters: int) -> dict[str, int]:
    """Return what a peer holds beside its device, fp32, if all that can happen happens at once."""
    path = FP32_BYTES * path_parameters
    sizes = {level: FP32_BYTES * grid.layout(level).size for level in grid.level_names}
    return {
        "anchors": path,
        "outer momentum": path,
        REMEMBERED: GREATEST_PARTS * path,
        # See `peer/exchange/steps.py`.
        "latest outer steps": int(SHARE_OF_A_STATE * 2 * path),
        "averagers' buffers": sum(sizes[level] for level in sizes if level != PRIVATE_LEVEL),
        # The snapshot, its outer gradient, and the state that comes of it.
        "outer step": 4 * max(sizes.values()),
        # Anchors are scored in the model, whose parameters are put aside.
        SCORING: path,
        BEST: path if run.rounds.early_stopping else 0,
    }


def seldom_bytes(main_memory: dict[str, int]) -> int:
    """Return how much of a peer's main memory is empty most of the time: one contribution is
    remembered in each round, more only after rounds without a commit."""
    more = main_memory[REMEMBERED] * (GREATEST_PARTS - 1) // GREATEST_PARTS
    return more + main_memory[SCORING] + main_memory[BEST]


def shared_memory_bytes(grid: Grid) -> int:
    """Return what averager processes share with the training process, in /dev/shm."""
    return sum(FP32_BYTES * grid.layout(level).size for level in grid.level_names)


def disk_bytes(run: Run, grid: Grid, shard_bytes: int) -> dict[str, int]:
    """Return what a peer has on disk, with a shard of `shard_bytes`."""
    path_parameters = grid.parameter_counts()["path"]
    keepers = min(run.rounds.copies, grid.path_count)
    best = FP32_BYTES * path_parameters if run.rounds.early_stopping else 0
    states = {level: state_bytes(grid, level) for level in grid.level_names}
    return {
        "own states": KEPT_STATES * sum(states.values()),
        "copies of private states": (keepers - 1) * KEPT_STATES * states.get(PRIVATE_LEVEL, 0),
        "best states": keepers * best,
        "AdamW states": KEPT_OPTIMIZERS * ADAMW_BYTES["adamw"] * path_parameters,
        "base model": FP32_BYTES * path_parameters,
        "token files": (1 + keepers) * shard_bytes,
    }


def copy_bytes(run: Run, grid: Grid) -> tuple[int, int]:
    """Return what one peer sends in a round, spread over several: copies of private modules, and
    of the path's best states if its held-out loss improved."""
    copies = min(run.rounds.copies, grid.path_count) - 1
    every = run.rounds.replication_every_rounds
    private = state_bytes(grid, PRIVATE_LEVEL) if PRIVATE_LEVEL in grid.level_names else 0
    best = FP32_BYTES * grid.parameter_counts()["path"] if run.rounds.early_stopping else 0
    return copies * private // every, copies * best // every


def gradient_bytes(run: Run, grid: Grid, level: str) -> dict[str, int]:
    """Return by codec what one peer sends in a round of a level's outer gradients."""
    size, peers = grid.layout(level).size, paths_per_module(grid, level)
    return {
        name: all_reduce_bytes(size, peers, codec, run.averaging.part_bytes)
        for name, codec in CODECS.items()
    }


def round_mbit_per_s(run: Run, grid: Grid) -> float:
    """Return what one peer sends, with the run's codec, spread over a round."""
    codec = run.averaging.codec
    sent = sum(gradient_bytes(run, grid, level)[codec] for level in grid.level_names)
    return 8e-6 * (sent + sum(copy_bytes(run, grid))) / run.rounds.duration_s


def too_slow(run: Run, upload_mbit_per_s: float | None) -> list[str]:
    """Return a line for each level whose outer gradients cannot be sent in time with an upload
    limit, with the limit that would do; none without a limit.

    Whoever states little upload reduces little, so what has to be sent is one's own contribution,
    half of what everybody sends with equal shares, in the first half of the commit window.
    """
    if upload_mbit_per_s is None:
        return []
    grid, rounds, lines = grid_of(run), run.rounds, []
    time_s = rounds.window_s / 2 - rounds.matchmaking_s
    for level in grid.level_names:
        sent = gradient_bytes(run, grid, level)[run.averaging.codec] // 2
        needed = 8e-6 * sent / max(time_s, 0.1)
        if needed > upload_mbit_per_s:
            lines.append(
                f"{level}: an outer step sends {shown_bytes(sent)} in {time_s:.0f} s, which "
                f"--max-upload-mbps {upload_mbit_per_s:g} does not carry: this peer's work on it "
                f"will not be averaged with others'; give at least --max-upload-mbps {needed:.2g}"
            )
    return lines


def all_reduce_bytes(elements: int, peers: int, codec: Codec, part_bytes: int) -> int:
    """Return what one of `peers` sends, and receives, on average over them, so that they all have
    the mean of so many fp32 numbers.

    In every section of the group each part has a reducer: the others of the section send it their
    numbers, and get the average. Of all sections but one the reducer sends the sum in fp32 to the
    part's root, and gets the average from there.
    """
    part = codec.part_values(part_bytes)
    whole, rest = divmod(elements, part)
    parts = whole * codec.encoded_bytes(part) + (codec.encoded_bytes(rest) if rest else 0)
    levels = len(sections(peers))
    averages = 2 * (peers - levels) + (levels - 1)
    return (averages * parts + (levels - 1) * FP32_BYTES * elements) // peers
