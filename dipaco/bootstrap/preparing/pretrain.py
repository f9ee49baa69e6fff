"""The base model of a run: dense pretraining, and the file that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import safetensors.torch
import torch

from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import InnerConfig, ModelConfig
from dipaco.routing.batches import BatchStream
from dipaco.training.dense import SavedTraining, train_steps
from dipaco.training.inner import InnerLoop

# Base pretraining has a stream of its own: no path has this number.
_BASE_STREAM = 2**32 - 1


def pretrain(
    model_config: ModelConfig,
    inner_config: InnerConfig,
    rows: np.ndarray,
    steps: int,
    *,
    seed: int,
    device: torch.device,
    saved: SavedTraining,
    initial: Mapping[str, torch.Tensor] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> PathModel:
    """Train a model for `steps` on rows of tokens [N, T] and return it on the CPU.

    It starts from the parameters `initial`, or fresh without them; see `train_steps`.
    """
    model = PathModel(model_config)
    if initial is None:
        initialise(model, seed)
    else:
        model.load_state_dict(initial)
    stream = BatchStream(
        rows, seed=seed, path=_BASE_STREAM, batch_sequences=inner_config.batch_sequences
    )
    inner = InnerLoop(model.to(device), inner_config, device)
    train_steps(inner, stream.batch, steps, saved=saved, on_step=on_step)
    return model.to("cpu").eval()


def parameters_bytes(parameters: Mapping[str, torch.Tensor]) -> bytes:
    """Return parameters by Hugging Face names as a base model's file: fp32, always the same bytes
    for the same parameters."""
    plain = {
        name: parameter.detach().to("cpu", torch.float32).contiguous()
        for name, parameter in parameters.items()
    }
    return safetensors.torch.save(plain, metadata={"format": "pt"})
