"""What a RUN.toml means in parameters, bytes and memory, computed before anything is made.

What a peer needs is computed where peers compute it (`dipaco.peer.check.needs`). No data is read.
Called by `dipaco-bootstrap plan`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dipaco.dht.manifest import MAX_MANIFEST_BYTES, sign_manifest
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunBlobs
from dipaco.peer.check.needs import (
    FP32_BYTES,
    copy_bytes,
    device_bytes,
    disk_bytes,
    gradient_bytes,
    grid_of,
    main_memory_bytes,
    paths_per_module,
    round_mbit_per_s,
    state_bytes,
)
from dipaco.routing.token_files import token_dtype

from .run_config import RunConfig

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
    grid = grid_of(config)
    counts = grid.parameter_counts()
    levels = tuple(_level(config, grid, level) for level in grid.level_names)
    gradients = {
        name: sum(level.sent_bytes[name] for level in levels) for name in levels[0].sent_bytes
    }
    private_copies, best_copies = copy_bytes(config, grid)
    states = sum(level.state_bytes for level in levels)
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
        codec=config.averaging.codec,
        tokens_per_step=tokens_per_step,
        tokens_per_round=steps * tokens_per_step if steps else None,
        outer_gradient_bytes=gradients,
        private_copy_bytes=private_copies,
        best_copy_bytes=best_copies,
        round_mbit_per_s=round(round_mbit_per_s(config, grid), 3),
        join_bytes=FP32_BYTES * counts["path"] + states,
        shard_bytes=shard,
        disk_bytes=disk_bytes(config, grid, shard or 0),
        device_bytes=device_bytes(config, counts["path"]),
        main_memory_bytes=main_memory_bytes(config, grid, counts["path"]),
        manifest_bytes=manifest_bytes,
        greatest_manifest_bytes=MAX_MANIFEST_BYTES,
    )


def _level(config: RunConfig, grid: Grid, level: str) -> LevelFigures:
    modules = [module for module in grid.modules() if grid.level_of(module) == level]
    layout = grid.layout(level)
    return LevelFigures(
        level=level,
        modules=len(modules),
        paths_per_module=paths_per_module(grid, level),
        parameters=layout.size,
        state_bytes=state_bytes(grid, level),
        holds=_holds(layout.names),
        sent_bytes=gradient_bytes(config, grid, level),
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
