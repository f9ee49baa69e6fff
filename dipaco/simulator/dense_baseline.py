"""The dense baseline: one path-sized model, or one adapter, trained on all shards together.

A swarm is measured against it. It has the same base model, inner optimizer and batch size, but no
routing, no modules and no outer steps, and is scored on the same held-out tokens. Its learning rate
falls to the end, because one machine does better with that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import InnerConfig
from dipaco.protocol.plan import RunPlan
from dipaco.routing.batches import batch_indices
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.token_files import even_sample
from dipaco.training.dense import train_steps
from dipaco.training.inner import InnerLoop
from dipaco.training.scoring import LossSum, sum_losses


@dataclass(frozen=True)
class DenseResult:
    """A trained dense model and how well it does."""

    parameters: dict[str, torch.Tensor]
    """fp32 on the CPU, by name."""
    steps: int
    train_loss: float | None
    """Loss of the last inner step, in nats a token."""
    validation: LossSum
    """Its loss on the held-out sequences of all paths."""


def train_dense(
    run: RunFolder,
    steps: int,
    *,
    device: torch.device | str = "cpu",
    optimizer: str = "adamw",
    learning_rate: float | None = None,
    validation_sequences: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> DenseResult:
    """Train what paths begin with for `steps` inner steps on all shards mixed, and score it.

    Batches are drawn uniformly from all training sequences, each once an epoch. For the rate see
    `baseline_inner`. `on_step` is called with the number of the step and its loss.
    `validation_sequences` is per path, as in `ReferenceSwarm`.
    """
    device = torch.device(device)
    plan = run.plan()
    model = run.path_model(plan, device)
    model.load_state_dict(run.first_parameters(plan))
    config = baseline_inner(plan.inner, steps, learning_rate)
    inner = InnerLoop(model, config, device, optimizer=optimizer)
    batches = MixedBatches(run, plan)
    loss = train_steps(inner, batches.batch, steps, on_step=on_step)
    return DenseResult(
        parameters={
            name: parameter.detach().to("cpu", torch.float32).clone()
            for name, parameter in model.named_parameters()
        },
        steps=steps,
        train_loss=loss,
        validation=score_dense(run, model, validation_sequences),
    )


def baseline_inner(
    inner: InnerConfig, steps: int, learning_rate: float | None = None
) -> InnerConfig:
    """Return the plan's inner optimizer with another peak rate, if one is given.

    Where the plan keeps its rate, the baseline's falls by a cosine that ends with `steps`.
    """
    decay_steps = inner.decay_steps or max(1, steps - inner.warmup_steps)
    changes = {"decay_steps": decay_steps, "learning_rate": learning_rate or inner.learning_rate}
    return inner.model_copy(update=changes)


def score_dense(
    run: RunFolder, model: PathModel, validation_sequences: int | None = None
) -> LossSum:
    """Score one model on the held-out sequences of all paths: the tokens a swarm is scored on."""
    plan = run.plan()
    prefix_tokens = plan.routing.prefix_tokens
    return LossSum.total(
        LossSum(
            *sum_losses(
                model,
                even_sample(run.validation_tokens(plan, path), validation_sequences),
                prefix_tokens,
            )
        )
        for path in range(run.grid(plan).path_count)
    )


class MixedBatches:
    """Batches drawn from all shards together: every sequence is equally likely."""

    def __init__(self, run: RunFolder, plan: RunPlan) -> None:
        path_count = run.grid(plan).path_count
        self._shards = [run.train_tokens(plan, path) for path in range(path_count)]
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        self._plan = plan
        # No path has this number, so the batches are not those of any path.
        self._stream = path_count

    def batch(self, step: int) -> torch.Tensor:
        """Return the tokens of a step, int64 [batch, T] on the CPU."""
        rows = batch_indices(
            self._plan.seed,
            self._stream,
            step,
            self._plan.inner.batch_sequences,
            int(self._ends[-1]),
        )
        shards = np.searchsorted(self._ends, rows, side="right")
        sequences = [
            self._shards[shard][row - (self._ends[shard - 1] if shard else 0)]
            for shard, row in zip(shards, rows, strict=True)
        ]
        return torch.from_numpy(np.stack(sequences).astype(np.int64))
