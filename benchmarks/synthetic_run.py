"""A run of any model size in seconds: random tokens for shards, a random base model.

Speed and memory do not depend on what the text says, so nothing is tokenized, routed or trained;
the tokenizer and the router in the run are real files of the right form.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import common  # noqa: F401  It makes the helpers of the tests importable.
import numpy as np
import safetensors.torch
from dipaco.modules.config import (
    AveragingConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
)
from dipaco.modules.transformer import PathModel, initialise
from dipaco.routing.plan import (
    PathShard,
    RoutingPlan,
    RunBlobs,
    RunPlan,
    ShardIndex,
    canonical_json,
)
from dipaco.routing.routers import KMeansRouter
from dipaco.routing.run_directory import RunDirectory
from dipaco.routing.token_files import token_dtype
from dipaco.routing.tokenizer import train_tokenizer
from tiny_run import TINY_VOCABULARY, sign_tiny_run, tiny_documents

FIRST_ORDINARY_TOKEN = 4


def make_synthetic_run(
    directory: Path,
    model: ModelConfig,
    *,
    modules_per_level: tuple[int, ...] = (2, 2),
    batch_sequences: int = 8,
    codec: str = "float16",
    start_s: float = 0.0,
    train_sequences: int = 512,
    validation_sequences: int = 16,
    seed: int = 0,
    **rounds: Any,
) -> RunDirectory:
    """Write a run directory and return it opened; `rounds` are fields of `RoundsConfig`."""
    run = RunDirectory(directory)
    run.path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    path_count = int(np.prod(modules_per_level))
    base = PathModel(model)
    initialise(base, seed)
    features = random.normal(size=(8 * path_count, model.hidden_size))
    plan = RunPlan(
        name="benchmark",
        seed=seed,
        start_s=start_s,
        model=model,
        grid=GridConfig(modules_per_level=modules_per_level),
        inner=InnerConfig(batch_sequences=batch_sequences),
        outer=OuterConfig(),
        rounds=RoundsConfig(**rounds),
        averaging=AveragingConfig(codec=codec),
        routing=RoutingPlan(kind="kmeans", prefix_tokens=4),
        blobs=RunBlobs(
            tokenizer=run.blobs.add_bytes(_tokenizer_bytes(directory)),
            router=run.blobs.add_bytes(KMeansRouter.fit(features, path_count).to_bytes()),
            base=run.blobs.add_bytes(
                safetensors.torch.save({n: p.detach() for n, p in base.named_parameters()})
            ),
            shards=run.blobs.add_bytes(
                _shards(run, model, path_count, train_sequences, validation_sequences, random)
            ),
        ),
    )
    sign_tiny_run(run, plan)
    return run


def _shards(
    run: RunDirectory,
    model: ModelConfig,
    path_count: int,
    train_sequences: int,
    validation_sequences: int,
    random: np.random.Generator,
) -> bytes:
    """Write the token files and return the shard index."""

    def rows(count: int) -> str:
        shape = (count, model.sequence_length)
        tokens = random.integers(FIRST_ORDINARY_TOKEN, model.vocabulary_size, size=shape)
        return run.blobs.add_bytes(tokens.astype(token_dtype(model.vocabulary_size)).tobytes())

    shards = tuple(
        PathShard(
            path=path,
            train_sha256=rows(train_sequences),
            train_sequences=train_sequences,
            train_documents=train_sequences,
            validation_sha256=rows(validation_sequences),
            validation_sequences=validation_sequences,
        )
        for path in range(path_count)
    )
    index = ShardIndex(sequence_length=model.sequence_length, paths=shards)
    return canonical_json(index.model_dump(mode="json"))


@functools.lru_cache(maxsize=1)
def _tokenizer_bytes(directory: Path) -> bytes:
    output = directory / "tokenizer.model"
    train_tokenizer(
        tiny_documents(8, 6, seed=0), TINY_VOCABULARY, output, character_limit=100_000, seed=0
    )
    return output.read_bytes()
