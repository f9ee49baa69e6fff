"""How long a run takes at the speed of a device, which is stated or measured."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import torch

from dipaco.bootstrap.run_config import RunConfig
from dipaco.modules.foreign_model import new_path
from dipaco.modules.frozen_file import unfilled_base
from dipaco.modules.transformer import PathModel, initialise
from dipaco.training.inner import InnerLoop

# Tokens of a step that is measured, at most, and for how long it is repeated.
MEASURED_TOKENS = 8192
MEASURED_S = 3.0


@dataclass(frozen=True)
class Times:
    """Seconds, with all devices alike; what waits for others or for the line is not in them."""

    tokens_per_s: float
    """The speed of one device that trains a path."""
    base_s: float
    """The base model, in `prepare`; tokenising and routing come on top."""
    round_s: float
    steps_per_round: int
    """Inner steps of one peer."""
    schedule_s: float | None
    """Until all paths are at the end of their learning rate's cosine; None without one."""
    corpus_s: float | None
    """Until as many tokens are trained as the shards have; None if that is not given."""


def plan_times(
    config: RunConfig, tokens_per_s: float, peers: int, paths: int, corpus_tokens: int | None
) -> Times:
    """Compute the times of a run in which `peers` train `tokens_per_s` each."""
    length, steps = config.model.sequence_length, config.rounds.inner_steps
    step_s = config.inner.batch_sequences * length / tokens_per_s
    decay, shards = config.inner.decay_steps, (corpus_tokens or 0) * config.router.train_paths
    return Times(
        tokens_per_s=tokens_per_s,
        base_s=config.base.steps * config.base.batch_sequences * length / tokens_per_s,
        round_s=steps * step_s or config.rounds.duration_s,
        steps_per_round=steps or int(config.rounds.duration_s / step_s),
        schedule_s=decay * step_s * paths / peers if decay else None,
        corpus_s=shards / (peers * tokens_per_s) if shards else None,
    )


def measured_tokens_per_s(config: RunConfig, device: torch.device) -> float:
    """Train a path of random parameters on `device` for some seconds, in batches of the run or
    smaller ones, and count the fastest: other work slows the others down.

    Raises ConfigurationError when not even one sequence fits in memory.
    """
    length = config.model.sequence_length
    if config.model.adapters is None:
        model = PathModel(config.model)
        initialise(model, 0)
    else:
        model = new_path(config.model, unfilled_base(config.model).on(device))
    loop = InnerLoop(model.to(device), config.inner, device)
    sequences = min(config.inner.batch_sequences, max(1, MEASURED_TOKENS // length))
    tokens = torch.randint(config.model.vocabulary_size, (sequences, length))
    ends_s, fastest_s = time.monotonic() + MEASURED_S, math.inf
    for step in itertools.count():
        began_s = time.monotonic()
        loop.step(tokens, 0)
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        if step:  # The first one sets things up.
            fastest_s = min(fastest_s, time.monotonic() - began_s)
            if time.monotonic() > ends_s:
                break
    return tokens.numel() / fastest_s
