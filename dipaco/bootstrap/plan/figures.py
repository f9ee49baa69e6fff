"""What a RUN.toml means in parameters, bytes and memory, computed before anything is made.

What a peer needs is computed where peers compute it (`dipaco.peer.check.needs`). Only the first
document of the data is read.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dipaco.bootstrap.run_config import RunConfig
from dipaco.modules.contributions import CODECS
from dipaco.modules.frozen_base import FILE_FORMATS
from dipaco.modules.frozen_file import base_file_bytes, frozen_bytes
from dipaco.modules.layout import ModuleLayout, layout_of, parameter_counts, parameter_shapes
from dipaco.modules.transformer import EMBEDDING, HEAD
from dipaco.peer.check.needs import (
    device_bytes,
    disk_bytes,
    grid_of,
    main_memory_bytes,
    paths_per_module,
    state_bytes,
    written_bytes,
)
from dipaco.protocol.chain.steps import MAX_ROWS
from dipaco.protocol.grid import Grid
from dipaco.routing.tokens.token_files import token_dtype

from .traffic import DHT, FILES, MESSAGES, RECEIVED, SENT, Crowd, LevelLoad, swarm_traffic

CALLED, NOT_CALLED = "can be called", "cannot be called"


@dataclass(frozen=True)
class LevelFigures:
    """The modules of a level and what a round of one moves. Private modules are the level "P"."""

    level: str
    modules: int
    paths_per_module: int
    trainers: int
    """The peers that are expected to train one module."""
    rows: int
    """The rows that one step takes in."""
    parameters: int
    """How many one module of the level has."""
    state_bytes: int
    """Parameters and momentum, with the header, at most."""
    holds: str
    """Which parameters of a path: blocks, embedding, head."""
    file_bytes: dict[str, int]
    """The size of one contribution, by codec."""
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
    """The rate when that is spread over a round."""
    line_share: float
    """The part of the slowest line that it takes."""
    publish_s: float
    """Seconds until the largest contribution has gone to all other trainers on that line. They
    fetch it at the same time, so nearly as long until the first one has it."""
    in_time: bool
    """Whether the slowest line carries a round's bytes within a round, and a contribution to all
    other trainers before the step is made."""


@dataclass(frozen=True)
class BaseFigures:
    """The base that a run begins with: frozen below adapters, or trained as a whole."""

    name: str
    parameters: int
    in_tables: int
    """The parameters in its embedding and head, which grow with the vocabulary."""
    rank: int | None
    """The rank of the adapters; None without adapters."""
    memory_bytes: dict[str, int]
    """The memory that it takes below adapters, by format."""


@dataclass(frozen=True)
class PlanFigures:
    """The figures of a run, for a peer that trains one path."""

    name: str
    paths: int
    peers: int
    path_parameters: int
    base: BaseFigures | None
    """The checkpoint that it begins with, if there is one."""
    total_parameters: int
    shared_parameters: int
    private_parameters: int
    """The parameters of one path."""
    levels: tuple[LevelFigures, ...]
    tokens_per_step: int
    tokens_per_round: int | None
    """The tokens of one path in a round; None when a round has as many steps as fit."""
    line_mbit_per_s: float
    gather_s: float
    """Seconds after a boundary at which a step is made with what is there."""
    codec: str
    """The codec of the run."""
    codecs: dict[str, CodecFigures]
    moved_bytes: int
    """Bytes in a round with the run's codec: sent, and as much received."""
    round_mbit_per_s: float
    requests: int
    """The requests of a peer to others in a round: rows told, files and steps fetched."""
    crowd: Crowd
    traffic: dict[str, dict[str, dict[str, int]]]
    """Bytes that a peer moves in a round of such a swarm, with the run's codec: by whether it can
    be called, by direction, by what it is."""
    join_bytes: int
    """What a newcomer fetches: base model and states, without its shard."""
    shard_bytes: int | None
    """Token file of a path on average; None when the tokens of the corpus are not given."""
    disk_bytes: dict[str, int]
    written_bytes: dict[str, int]
    """What a peer writes to its disk in a day."""
    device_bytes: dict[str, int]
    """Memory of the GPU, or of whatever trains the path."""
    main_memory_bytes: dict[str, int]

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
        """The same, in bytes per parameter of a path."""
        return self.main_memory_total_bytes / self.path_parameters

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            **asdict(self),
            "disk_total_bytes": self.disk_total_bytes,
            "device_total_bytes": self.device_total_bytes,
            "main_memory_total_bytes": self.main_memory_total_bytes,
            "main_memory_a_parameter": round(self.main_memory_a_parameter, 2),
        }


def plan_figures(
    config: RunConfig,
    corpus_tokens: int | None = None,
    *,
    peers: int | None = None,
    line_mbit_per_s: float = 20.0,
    chats: bool = False,
) -> PlanFigures:
    """Compute the figures of a run with so many peers (default: one for each path), of which the
    slowest has this line. `corpus_tokens` are those of its training documents, which may be
    `chats`.

    Raises ConfigurationError when the grid is impossible.
    """
    grid = grid_of(config)
    counts = parameter_counts(grid)
    peers = peers or grid.path_count
    levels = tuple(_level(config, grid, level, peers) for level in grid.level_names)
    states = sum(level.state_bytes for level in levels)
    shard = _shard_bytes(config, grid, corpus_tokens, chats=chats)
    steps = config.rounds.inner_steps
    tokens_per_step = config.inner.batch_sequences * config.model.sequence_length
    moved = sum(level.moved_bytes[config.contributions.codec] for level in levels)
    crowd = Crowd(peers)
    return PlanFigures(
        name=config.name,
        paths=grid.path_count,
        peers=peers,
        path_parameters=counts["path"],
        base=_base(config),
        total_parameters=counts["total"],
        shared_parameters=counts["shared"],
        private_parameters=counts["private"],
        levels=levels,
        tokens_per_step=tokens_per_step,
        tokens_per_round=steps * tokens_per_step if steps else None,
        line_mbit_per_s=line_mbit_per_s,
        gather_s=config.rounds.gather_limit_s,
        codec=config.contributions.codec,
        codecs={name: _codec(config, levels, name, line_mbit_per_s) for name in CODECS},
        moved_bytes=moved,
        round_mbit_per_s=round(8e-6 * moved / config.rounds.duration_s, 3),
        requests=sum(_requests(level, config.rounds.copies, peers) for level in levels),
        crowd=crowd,
        traffic=_traffic(config, grid, levels, crowd),
        join_bytes=base_file_bytes(config.model) + states,
        shard_bytes=shard,
        disk_bytes=disk_bytes(config, grid, shard or 0),
        written_bytes=written_bytes(config, grid),
        device_bytes=device_bytes(config, counts["path"]),
        main_memory_bytes=main_memory_bytes(config, grid, counts["path"]),
    )


def _base(config: RunConfig) -> BaseFigures | None:
    model, adapters = config.model, config.model.adapters
    if config.base.checkpoint is None and adapters is None:
        return None
    shapes = parameter_shapes(model.without_adapters)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return BaseFigures(
        name=config.base.name or "the base of the run before",
        parameters=sum(sizes.values()),
        in_tables=sizes[EMBEDDING] + sizes.get(HEAD, 0),
        rank=adapters.rank if adapters else None,
        memory_bytes={n: frozen_bytes(model, n) for n in FILE_FORMATS} if adapters else {},
    )


def _traffic(
    config: RunConfig, grid: Grid, levels: tuple[LevelFigures, ...], crowd: Crowd
) -> dict[str, dict[str, dict[str, int]]]:
    codec = config.contributions.codec
    loads = [
        LevelLoad(one.modules, one.paths_per_module / grid.path_count, one.file_bytes[codec])
        for one in levels
    ]
    moved = swarm_traffic(loads, grid.path_count, config.rounds, crowd)
    parts = (("files", FILES), ("messages", MESSAGES), ("dht", DHT))
    return {
        peer: {
            way: {part: round(float(traffic[row, column])) for part, column in parts}
            for way, row in (("sent_bytes", SENT), ("received_bytes", RECEIVED))
        }
        for peer, traffic in ((CALLED, moved.called), (NOT_CALLED, moved.trains_closed))
    }


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
        file_bytes=files,
        moved_bytes={name: others * count for name, count in files.items()},
    )


def _codec(
    config: RunConfig, levels: tuple[LevelFigures, ...], name: str, line_mbit_per_s: float
) -> CodecFigures:
    moved = sum(level.moved_bytes[name] for level in levels)
    parameters = sum(level.parameters for level in levels)
    rate = 8e-6 * moved / config.rounds.duration_s
    published = max(max(1, level.trainers - 1) * level.file_bytes[name] for level in levels)
    publish_s = 8e-6 * published / line_mbit_per_s
    share = rate / line_mbit_per_s
    return CodecFigures(
        bytes_a_parameter=round(sum(level.file_bytes[name] for level in levels) / parameters, 3),
        moved_bytes=moved,
        mbit_per_s=round(rate, 3),
        line_share=round(share, 4),
        publish_s=round(publish_s, 1),
        in_time=share <= 1 and publish_s <= config.rounds.gather_limit_s,
    )


def _requests(level: LevelFigures, copies: int, peers: int) -> int:
    """Return what a trainer asks of others in a round of a module: it tells its row to each, and
    fetches their files; the one that proposes tells the step to all."""
    others = max(level.trainers, min(copies, peers)) - 1
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


def _shard_bytes(
    config: RunConfig, grid: Grid, corpus_tokens: int | None, *, chats: bool
) -> int | None:
    if corpus_tokens is None:
        return None
    # A token of a chat says, too, whether it is learned.
    size = token_dtype(config.model.vocabulary_size, marked=chats).itemsize
    return corpus_tokens * config.router.train_paths * size // grid.path_count
