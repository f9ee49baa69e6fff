"""A run of any model size in seconds: random tokens for shards, a random base model.

Speed and memory do not depend on what the text says, so nothing is tokenized, routed or trained;
the tokenizer and the router in the run are real files of the right form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from support.runs.tiny_run import (
    TINY_VOCABULARY,
    sign_tiny_run,
    tiny_parameters,
    tiny_shard,
    tiny_tokenizer_bytes,
)

from dipaco.base.files import canonical_json
from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import (
    ContributionsConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RoundsConfig,
)
from dipaco.protocol.plan import RoutingPlan, RunBlobs, RunPlan, ShardIndex
from dipaco.routing.routers.kinds import KMeansRouter
from dipaco.routing.run_folder import RunFolder

FIRST_ORDINARY_TOKEN = 4


def make_synthetic_run(
    folder: Path,
    model: ModelConfig,
    *,
    modules_per_level: tuple[int, ...] = (2, 2),
    batch_sequences: int = 8,
    codec: str = "int4",
    start_s: float = 0.0,
    train_sequences: int = 512,
    validation_sequences: int = 16,
    seed: int = 0,
    **rounds: Any,
) -> RunFolder:
    """Write a run folder and return it opened; `rounds` are fields of `RoundsConfig`."""
    run = RunFolder(folder)
    run.path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    path_count = int(np.prod(modules_per_level))
    base = PathModel(model)
    initialise(base, seed)
    nothing, centroids = np.zeros(path_count), random.normal(size=(path_count, model.hidden_size))
    mean, scale = np.zeros(model.hidden_size), np.ones(model.hidden_size)
    plan = RunPlan(
        name="benchmark",
        seed=seed,
        start_s=start_s,
        model=model,
        grid=GridConfig(modules_per_level=modules_per_level),
        inner=InnerConfig(optimizer="adamw", batch_sequences=batch_sequences),
        outer=OuterConfig(),
        rounds=RoundsConfig(**rounds),
        contributions=ContributionsConfig(codec=codec),
        routing=RoutingPlan(kind="kmeans", prefix_tokens=4),
        blobs=RunBlobs(
            tokenizer=run.blobs.add_bytes(tiny_tokenizer_bytes(TINY_VOCABULARY)),
            router=run.blobs.add_bytes(KMeansRouter(mean, scale, centroids, nothing).to_bytes()),
            base=run.blobs.add_bytes(safetensors.torch.save(tiny_parameters(base))),
            shards=run.blobs.add_bytes(
                _shards(run, model, path_count, train_sequences, validation_sequences, random)
            ),
        ),
    )
    sign_tiny_run(run, plan)
    return run


def _shards(
    run: RunFolder,
    model: ModelConfig,
    path_count: int,
    train_sequences: int,
    validation_sequences: int,
    random: np.random.Generator,
) -> bytes:
    """Write the token files and return the shard index."""

    def rows(count: int) -> np.ndarray:
        shape = (count, model.sequence_length)
        return random.integers(FIRST_ORDINARY_TOKEN, model.vocabulary_size, size=shape)

    shards = tuple(
        tiny_shard(
            run, model, path, rows(train_sequences), rows(validation_sequences), train_sequences
        )
        for path in range(path_count)
    )
    index = ShardIndex(sequence_length=model.sequence_length, paths=shards)
    return canonical_json(index.model_dump(mode="json"))
