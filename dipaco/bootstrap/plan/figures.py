"""What a RUN.toml means in parameters, bytes and memory, computed before anything is made.

What a peer needs is computed where peers compute it (`dipaco.peer.check.needs`). Of the data the
first document is read.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.base.errors import ConfigurationError
from dipaco.bootstrap.run_config import RunConfig
from dipaco.modules.contributions import CODECS
from dipaco.modules.frozen_base import FILE_FORMATS
from dipaco.modules.frozen_file import base_file_bytes, base_parameter_count, frozen_bytes
from dipaco.modules.layout import ModuleLayout, layout_of, parameter_counts, parameter_shapes
from dipaco.modules.llama import WEIGHTS_FILE
from dipaco.modules.memory import ADAMW_BYTES
from dipaco.modules.transformer import EMBEDDING, HEAD
from dipaco.peer.check.needs import (
    device_bytes,
    disk_bytes,
    greatest_bases,
    greatest_paths,
    grid_of,
    main_memory_bytes,
    paths_per_module,
    state_bytes,
)
from dipaco.protocol.chain import MAX_ROWS
from dipaco.protocol.grid import Grid
from dipaco.protocol.invitations import opened
from dipaco.protocol.manifest import MAX_MANIFEST_BYTES, sign_manifest
from dipaco.protocol.plan import BaseFile, BaseSource, RunBlobs
from dipaco.routing.documents.corpus import CorpusConfig, Part, iterate_documents
from dipaco.routing.tokens.token_files import token_dtype

from .times import Times, plan_times
from .traffic import Crowd, LevelLoad, RoleTraffic, role_traffic

# Hashes do not change how large a manifest is.
_ANY_SHA256 = "0" * 64


@dataclass(frozen=True)
class Expected:
    """The peers that are expected to take part."""

    peers: int | None = None
    """None: one for each path."""
    line_mbit_per_s: float = 20.0
    """The slowest line among them, up and down."""
    tokens_per_s: float | None = None
    """That each of them trains; None: nobody knows."""


@dataclass(frozen=True)
class LevelFigures:
    """The modules of a level and what a round of one moves. Private modules are the level "P"."""

    level: str
    modules: int
    paths_per_module: int
    trainers: int
    """Of one module, as many as are expected."""
    rows: int
    """Of them, as many as one step takes in."""
    parameters: int
    """Of one module."""
    state_bytes: int
    """Parameters and momentum, with the header, at most."""
    holds: str
    """Which parameters of a path: blocks, embedding, head."""
    codec: str
    """Of the run, for this level."""
    file_bytes: dict[str, int]
    """By codec: one contribution."""
    moved_bytes: dict[str, int]
    """By codec: what a trainer sends in a round on average, and receives: the contributions of
    those who train the module or keep it."""


@dataclass(frozen=True)
class CodecFigures:
    """What a codec would mean for a peer that trains one path, over all levels."""

    bytes_a_parameter: float
    moved_bytes: int
    """Sent in a round, and as much received."""
    mbit_per_s: float
    """That, spread over a round."""
    line_share: float
    """The part of the slowest line that it takes."""
    publish_s: float
    """Until the largest contribution has gone out once on that line."""
    in_time: bool
    """The slowest line carries a round in a round, and a contribution before the step is made."""


@dataclass(frozen=True)
class StartFigures:
    """The checkpoint that every path begins as, and trains."""

    name: str
    parameters: int
    in_tables: int
    """Of them in its embedding and head, which grow with the vocabulary."""


@dataclass(frozen=True)
class WholeFigures:
    """What a peer would need of the same run if it trained the base, and not adapters."""

    moved_bytes: int
    """Sent in a round, and as much received."""
    device_bytes: int


@dataclass(frozen=True)
class BaseFigures:
    """The frozen base of a run with adapters."""

    name: str
    rank: int
    parameters: int
    file_bytes: int
    """That a peer has on its disk."""
    memory_bytes: dict[str, int]
    """By format."""
    greatest: dict[str, dict[int, int]]
    """By format and GiB of a GPU: parameters of the largest base like this one."""
    whole: WholeFigures


@dataclass(frozen=True)
class PlanFigures:
    """The figures of a run, for a peer that trains one path."""

    name: str
    paths: int
    peers: int
    path_parameters: int
    base: BaseFigures | None
    """With adapters, which all other parameters are then."""
    total_parameters: int
    shared_parameters: int
    private_parameters: int
    """Of one path."""
    levels: tuple[LevelFigures, ...]
    begins_as: StartFigures | None
    """Without adapters, where there is a checkpoint."""
    tokens_per_step: int
    tokens_per_round: int | None
    """Of one path; None when a round has as many steps as fit."""
    line_mbit_per_s: float
    gather_s: float
    """After a boundary a step is made with what is there by then."""
    codecs: dict[str, CodecFigures]
    moved_bytes: int
    """In a round with the run's codecs: sent, and as much received."""
    round_mbit_per_s: float
    requests: int
    """That a peer makes in a round to others: rows told, files and steps fetched."""
    crowd: Crowd
    roles: tuple[RoleTraffic, ...]
    """What each role moves in a round of such a swarm, with the run's codecs."""
    join_bytes: int
    """What a newcomer fetches: base model and states, without its shard."""
    shard_bytes: int | None
    """Token file of a path on average; None when the tokens of the corpus are not given."""
    disk_bytes: dict[str, int]
    device_bytes: dict[str, int]
    """Memory of the GPU, or of whatever trains the path."""
    greatest_paths: dict[str, dict[int, int]]
    """By optimizer and GiB of a GPU: parameters of the largest path like this one."""
    main_memory_bytes: dict[str, int]
    manifest_bytes: int
    greatest_manifest_bytes: int
    times: Times | None
    """None when no speed is given."""

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

    @property
    def main_memory_a_parameter(self) -> float:
        """The same in bytes for each parameter of a path."""
        return self.main_memory_total_bytes / self.path_parameters

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            **asdict(self),
            "roles": [role.as_json() for role in self.roles],
            "disk_total_bytes": self.disk_total_bytes,
            "device_total_bytes": self.device_total_bytes,
            "main_memory_total_bytes": self.main_memory_total_bytes,
            "main_memory_a_parameter": round(self.main_memory_a_parameter, 2),
        }


def plan_figures(
    config: RunConfig, corpus_tokens: int | None = None, expected: Expected | None = None
) -> PlanFigures:
    """Compute the figures of a run; `corpus_tokens` are those of its training documents.

    Raises ConfigurationError when the grid is impossible or the manifest would be too large.
    """
    expected = expected or Expected()
    grid = grid_of(config)
    counts = parameter_counts(grid)
    peers, speed = expected.peers or grid.path_count, expected.tokens_per_s
    levels = tuple(_level(config, grid, level, peers) for level in grid.level_names)
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
    moved = sum(level.moved_bytes[level.codec] for level in levels)
    crowd = Crowd(peers)
    loads = [
        LevelLoad(one.modules, one.paths_per_module / grid.path_count, one.file_bytes[one.codec])
        for one in levels
    ]
    return PlanFigures(
        name=config.name,
        paths=grid.path_count,
        peers=peers,
        path_parameters=counts["path"],
        base=_base(config, peers),
        total_parameters=counts["total"],
        shared_parameters=counts["shared"],
        private_parameters=counts["private"],
        levels=levels,
        begins_as=_begins_as(config),
        tokens_per_step=tokens_per_step,
        tokens_per_round=steps * tokens_per_step if steps else None,
        line_mbit_per_s=expected.line_mbit_per_s,
        gather_s=config.rounds.gather_limit_s,
        codecs={name: _codec(config, levels, name, expected) for name in CODECS},
        moved_bytes=moved,
        round_mbit_per_s=round(8e-6 * moved / config.rounds.duration_s, 3),
        requests=sum(_requests(level, config.rounds.copies) for level in levels),
        crowd=crowd,
        roles=role_traffic(loads, grid.path_count, config.rounds, crowd),
        join_bytes=base_file_bytes(config.model) + states,
        shard_bytes=shard,
        disk_bytes=disk_bytes(config, grid, shard or 0),
        device_bytes=device_bytes(config, counts["path"]),
        greatest_paths={o: greatest_paths(config, counts["path"], o) for o in ADAMW_BYTES},
        main_memory_bytes=main_memory_bytes(config, grid, counts["path"]),
        manifest_bytes=manifest_bytes,
        greatest_manifest_bytes=MAX_MANIFEST_BYTES,
        times=plan_times(config, speed, peers, grid.path_count, corpus_tokens) if speed else None,
    )


def look_at_data(config: CorpusConfig) -> None:
    """Read the first document of each part, so that a wrong name is told before hours of work.

    A data set of the Hub is not fetched. Raises CorpusError.
    """
    if config.hub is not None and not Path(config.hub).is_dir():
        return
    parts: tuple[Part, ...] = ("train", "validation") if config.has_validation else ("train",)
    for part in parts:
        next(iterate_documents(config, part))


def _begins_as(config: RunConfig) -> StartFigures | None:
    if config.base.checkpoint is None or config.model.adapters is not None:
        return None
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(config.model).items()}
    return StartFigures(
        name=config.base.name or config.base.checkpoint.name,
        parameters=sum(sizes.values()),
        in_tables=sizes[EMBEDDING] + sizes.get(HEAD, 0),
    )


def _base(config: RunConfig, peers: int) -> BaseFigures | None:
    model = config.model
    if model.adapters is None:
        return None
    whole = config.model_copy(update={"model": model.without_adapters})
    grid = grid_of(whole)
    levels = [_level(whole, grid, level, peers) for level in grid.level_names]
    return BaseFigures(
        name=config.base.name or "the base of the run before",
        rank=model.adapters.rank,
        parameters=base_parameter_count(model),
        file_bytes=base_file_bytes(model),
        memory_bytes={name: frozen_bytes(model, name) for name in FILE_FORMATS},
        greatest=greatest_bases(config),
        whole=WholeFigures(
            moved_bytes=sum(level.moved_bytes[level.codec] for level in levels),
            device_bytes=sum(device_bytes(whole, parameter_counts(grid)["path"]).values()),
        ),
    )


def _level(config: RunConfig, grid: Grid, level: str, peers: int) -> LevelFigures:
    modules = [module for module in grid.modules() if grid.level_of(module) == level]
    layout, paths = layout_of(grid, level), paths_per_module(grid, level)
    trainers = max(1, round(peers * paths / grid.path_count))
    # A keeper of a copy follows the steps: it fetches the contributions too.
    others = max(trainers, min(config.rounds.copies, peers)) - 1
    files = {name: codec.file_bytes(layout.size) for name, codec in CODECS.items()}
    return LevelFigures(
        level=level,
        modules=len(modules),
        paths_per_module=paths,
        trainers=trainers,
        rows=min(trainers, MAX_ROWS),
        parameters=layout.size,
        state_bytes=state_bytes(grid, level),
        holds=_holds(layout),
        codec=config.contributions.codec,
        file_bytes=files,
        moved_bytes={name: others * count for name, count in files.items()},
    )


def _codec(
    config: RunConfig, levels: tuple[LevelFigures, ...], name: str, expected: Expected
) -> CodecFigures:
    moved = sum(level.moved_bytes[name] for level in levels)
    parameters = sum(level.parameters for level in levels)
    rate = 8e-6 * moved / config.rounds.duration_s
    publish_s = 8e-6 * max(level.file_bytes[name] for level in levels) / expected.line_mbit_per_s
    share = rate / expected.line_mbit_per_s
    return CodecFigures(
        bytes_a_parameter=round(sum(level.file_bytes[name] for level in levels) / parameters, 3),
        moved_bytes=moved,
        mbit_per_s=round(rate, 3),
        line_share=round(share, 4),
        publish_s=round(publish_s, 1),
        in_time=share <= 1 and publish_s <= config.rounds.gather_limit_s,
    )


def _requests(level: LevelFigures, copies: int) -> int:
    """Return what a trainer asks of others in a round of a module: it tells its row to each, and
    fetches their files; the one that proposes tells the step to all."""
    others = max(level.trainers, copies) - 1
    return 2 * others + -(-others // max(1, level.trainers))


def _holds(layout: ModuleLayout) -> str:
    """Say which parameters these are: "blocks 1-4, 7", "embedding (28.31 M)", "final norm"."""
    names, sizes = layout.names, dict(zip(layout.names, layout.sizes, strict=True))
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
    for key, word in others.items():
        if found := [name for name in names if key in name]:
            # The tables of a vocabulary may be the larger part of a module.
            table = f" ({sizes[found[0]] / 1e6:,.2f} M)" if found[0] in (EMBEDDING, HEAD) else ""
            parts.append(f"{word}{table}")
    return ", ".join(parts)


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
    source = None
    if config.model.adapters is not None:
        source = BaseSource(
            name=config.base.name or "",
            files=(BaseFile(name=WEIGHTS_FILE, sha256=_ANY_SHA256),),
            rows=((0, config.model.vocabulary_size),),
        )
    key = Ed25519PrivateKey.generate()
    plan = opened(config.plan(blobs, 2e9, _ANY_SHA256[:16], source), key)
    return len(sign_manifest(plan, key))
