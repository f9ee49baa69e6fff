"""What a RUN.toml means in parameters, bytes and memory, computed before anything is made.

Everything follows from the configuration by the code that a peer runs: the grid counts the
parameters, the codec its bytes, the store what it keeps. No data is read. The figures are for a
full grid: one peer on every path, all of them reachable and equally fast. Called by
`dipaco-bootstrap plan`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dipaco.dht.manifest import MAX_MANIFEST_BYTES, sign_manifest
from dipaco.modules.codecs import CODECS, Codec
from dipaco.modules.config import ModelConfig
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.grid import PRIVATE_LEVEL, Grid
from dipaco.modules.outer import sections
from dipaco.modules.plan import RunBlobs
from dipaco.modules.state import greatest_state_bytes
from dipaco.modules.store import KEPT_OPTIMIZERS, KEPT_STATES
from dipaco.modules.transformer import PathModel, token_losses
from dipaco.peer.member.ledger import MOST_PARTS
from dipaco.routing.token_files import token_dtype
from torch._subclasses import FakeTensorMode

from .run_config import RunConfig

FP32_BYTES = 4
# First and second moment of a parameter, fp32.
ADAMW_BYTES = 8
_ANY_SHA256 = "0" * 64


@dataclass(frozen=True)
class LevelFigures:
    """The modules of a level and what its outer step moves. Private modules are the level "P"."""

    level: str
    modules: int
    paths_per_module: int
    parameters: int
    """Of one module."""
    state_bytes: int
    """Parameters and momentum, with the header, at most."""
    holds: str
    """Which parameters of a path: blocks, embedding, head."""
    sent_bytes: dict[str, int]
    """By codec: outer gradients that a peer sends in a round, and as many it receives."""


@dataclass(frozen=True)
class PlanFigures:
    """The figures of a run. Bytes of a round are those that one peer sends; it receives as many."""

    name: str
    paths: int
    path_parameters: int
    total_parameters: int
    shared_parameters: int
    private_parameters: int
    """Of one path."""
    levels: tuple[LevelFigures, ...]
    codec: str
    tokens_per_step: int
    tokens_per_round: int | None
    """Of one path; None when a round has as many steps as fit."""
    outer_gradient_bytes: dict[str, int]
    """In a round, all levels, by codec."""
    private_copy_bytes: int
    """In a round: copies of private modules for the peers that keep them."""
    best_copy_bytes: int
    """In a round in which the held-out loss improved: copies of the path's best states."""
    round_mbit_per_s: float
    """All of these, with the run's codec, spread over a round."""
    join_bytes: int
    """What a newcomer fetches: base model and states, without its shard."""
    shard_bytes: int | None
    """Token file of a path on average; None when the tokens of the corpus are not given."""
    disk_bytes: dict[str, int]
    device_bytes: dict[str, int]
    """Memory of the GPU, or of whatever trains the path."""
    main_memory_bytes: dict[str, int]
    manifest_bytes: int
    greatest_manifest_bytes: int

    @property
    def disk_total_bytes(self) -> int:
        """Everything that a peer has on disk, the shard if it is known."""
        return sum(self.disk_bytes.values())

    @property
    def device_total_bytes(self) -> int:
        """What a peer needs on its device to train one sequence at a time."""
        return sum(self.device_bytes.values())

    @property
    def main_memory_total_bytes(self) -> int:
        """What a peer has in main memory at most, besides its programs."""
        return sum(self.main_memory_bytes.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            **asdict(self),
            "disk_total_bytes": self.disk_total_bytes,
            "device_total_bytes": self.device_total_bytes,
            "main_memory_total_bytes": self.main_memory_total_bytes,
        }


def plan_figures(config: RunConfig, corpus_tokens: int | None = None) -> PlanFigures:
    """Compute the figures of a run; `corpus_tokens` are those of its training documents.

    Raises ConfigurationError when the grid is impossible or the manifest would be too large.
    """
    grid = Grid(config.model, config.grid, config.rounds.level_offsets)
    counts = grid.parameter_counts()
    levels = tuple(_level(config, grid, level) for level in grid.level_names)
    codec = config.averaging.codec
    gradients = {
        name: sum(level.sent_bytes[name] for level in levels) for name in levels[0].sent_bytes
    }
    copies = min(config.rounds.copies, grid.path_count) - 1
    states = sum(level.state_bytes for level in levels)
    private = sum(level.state_bytes for level in levels if level.level == PRIVATE_LEVEL)
    best = FP32_BYTES * counts["path"] if config.rounds.early_stopping else 0
    every = config.rounds.replication_every_rounds
    sent = gradients[codec] + copies * (private + best) // every
    shard = _shard_bytes(config, grid, corpus_tokens)
    steps = config.rounds.inner_steps
    tokens_per_step = config.inner.batch_sequences * config.model.sequence_length
    manifest_bytes = _manifest_bytes(config)
    if manifest_bytes > MAX_MANIFEST_BYTES:
        raise ConfigurationError(
            f"the manifest would have {manifest_bytes} bytes, at most {MAX_MANIFEST_BYTES} are "
            f"allowed; give fewer mirrors"
        )
    return PlanFigures(
        name=config.name,
        paths=grid.path_count,
        path_parameters=counts["path"],
        total_parameters=counts["total"],
        shared_parameters=counts["shared"],
        private_parameters=counts["private"],
        levels=levels,
        codec=codec,
        tokens_per_step=tokens_per_step,
        tokens_per_round=steps * tokens_per_step if steps else None,
        outer_gradient_bytes=gradients,
        private_copy_bytes=copies * private // every,
        best_copy_bytes=copies * best // every,
        round_mbit_per_s=round(8e-6 * sent / config.rounds.duration_s, 3),
        join_bytes=FP32_BYTES * counts["path"] + states,
        shard_bytes=shard,
        disk_bytes={
            "own states": KEPT_STATES * states,
            "copies of private states": copies * KEPT_STATES * private,
            "best states": (copies + 1) * best,
            "AdamW states": KEPT_OPTIMIZERS * ADAMW_BYTES * counts["path"],
            "base model": FP32_BYTES * counts["path"],
            "token files": (1 + min(config.rounds.copies, grid.path_count)) * (shard or 0),
        },
        device_bytes=_device_bytes(config, counts["path"]),
        main_memory_bytes=_main_memory_bytes(config, grid, counts["path"]),
        manifest_bytes=manifest_bytes,
        greatest_manifest_bytes=MAX_MANIFEST_BYTES,
    )


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


def _level(config: RunConfig, grid: Grid, level: str) -> LevelFigures:
    modules = [module for module in grid.modules() if grid.level_of(module) == level]
    layout = grid.layout(level)
    paths = len(grid.paths_of_module(modules[0]))
    return LevelFigures(
        level=level,
        modules=len(modules),
        paths_per_module=paths,
        parameters=layout.size,
        state_bytes=greatest_state_bytes(layout, paths),
        holds=_holds(layout.names),
        sent_bytes={
            name: all_reduce_bytes(layout.size, paths, codec, config.averaging.part_bytes)
            for name, codec in CODECS.items()
        },
    )


def _holds(names: tuple[str, ...]) -> str:
    """Say which parameters these are: "blocks 1-4, 7", "embedding", "final norm"."""
    blocks = sorted({int(name.split(".")[2]) for name in names if ".layers." in name})
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and block == ranges[-1][1] + 1:
            ranges[-1][1] = block
        else:
            ranges.append([block, block])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    others = {"embed_tokens": "embedding", "lm_head": "head", "model.norm": "final norm"}
    parts = [f"block{'s' if len(blocks) > 1 else ''} {shown}"] if blocks else []
    return ", ".join(
        [*parts, *(word for key, word in others.items() if any(key in name for name in names))]
    )


def _device_bytes(config: RunConfig, path_parameters: int) -> dict[str, int]:
    """Return what training keeps on the device at least: a batch is split until it fits there."""
    return {
        "parameters": FP32_BYTES * path_parameters,
        "gradients": FP32_BYTES * path_parameters,
        "AdamW": ADAMW_BYTES * path_parameters,
        "pass of one sequence, about": pass_bytes(config.model),
    }


def pass_bytes(config: ModelConfig) -> int:
    """Return what a forward pass of one sequence keeps for the backward one, beside parameters.

    It is made in bfloat16, as a recent GPU does it, with tensors that have shapes but no memory:
    activations, the parameters in bfloat16, and two gradients of the logits, which come first
    and are the largest. Kernels differ, so it is not exact.
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
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(tokens)
            token_losses(logits, tokens)
    return sum(storage.nbytes() for storage in kept.values()) + 2 * FP32_BYTES * logits.numel()


def _main_memory_bytes(config: RunConfig, grid: Grid, path_parameters: int) -> dict[str, int]:
    """Return what a peer holds beside its device, fp32, if all that can happen happens at once."""
    path = FP32_BYTES * path_parameters
    sizes = {level: FP32_BYTES * grid.layout(level).size for level in grid.level_names}
    return {
        "anchors": path,
        "outer momentum": path,
        "contributions remembered": MOST_PARTS * path,
        "averagers' buffers": sum(sizes[level] for level in sizes if level != PRIVATE_LEVEL),
        # The snapshot, its outer gradient, and the state that comes of it.
        "outer step": 4 * max(sizes.values()),
        # Anchors are scored in the model, whose parameters are put aside.
        "local parameters, while anchors are scored": path,
        "best parameters, while they are written": path if config.rounds.early_stopping else 0,
    }


def _shard_bytes(config: RunConfig, grid: Grid, corpus_tokens: int | None) -> int | None:
    if corpus_tokens is None:
        return None
    size = token_dtype(config.model.vocabulary_size).itemsize
    return corpus_tokens * config.router.train_paths * size // grid.path_count


def _manifest_bytes(config: RunConfig) -> int:
    """Sign the plan with blobs that do not exist, by a key that nobody keeps."""
    blobs = RunBlobs(
        tokenizer=_ANY_SHA256, router=_ANY_SHA256, base=_ANY_SHA256, shards=_ANY_SHA256,
        genesis=_ANY_SHA256,
    )  # fmt: skip
    plan = config.plan(blobs, start_s=2e9, successor_of=_ANY_SHA256[:16])
    return len(sign_manifest(plan, Ed25519PrivateKey.generate()))
