"""Dense pretraining of the base model, resumable to the bit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from dipaco.modules.config import InnerConfig, ModelConfig
from dipaco.modules.files import atomic_file
from dipaco.modules.inner import InnerLoop
from dipaco.modules.transformer import PathModel, initialise
from dipaco.routing.batches import BatchStream

logger = logging.getLogger(__name__)

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
    checkpoint: Path,
    inputs: str,
    initial: Mapping[str, torch.Tensor] | None = None,
    save_every_s: float = 60.0,
    progress: Callable[[int, float], None] | None = None,
) -> PathModel:
    """Train a model for `steps` on rows of tokens [N, T] and return it on the CPU.

    It starts from the parameters `initial`, or fresh without them.

    Every `save_every_s` seconds parameters and AdamW state are saved to `checkpoint`; a later call
    with the same `inputs` goes on from there and ends with the same bits as an uninterrupted one
    (on a CPU with the same number of threads; a GPU may sum in another order). `progress` gets
    the steps done and the loss of the last.
    """
    model = PathModel(model_config)
    if initial is None:
        initialise(model, seed)
    else:
        model.load_state_dict(initial)
    model.to(device)
    loop = InnerLoop(model, inner_config, device)
    first = _resume(checkpoint, inputs, model, loop)
    stream = BatchStream(
        rows, seed=seed, path=_BASE_STREAM, batch_sequences=inner_config.batch_sequences
    )
    model.train()
    saved_at = time.monotonic()
    for step in range(first, steps):
        loss = loop.step(stream.batch(step), step)
        if progress:
            progress(step + 1, loss)
        if time.monotonic() - saved_at >= save_every_s or step + 1 == steps:
            _save(checkpoint, inputs, step + 1, model, loop)
            saved_at = time.monotonic()
    return model.to("cpu").eval()


def base_model_bytes(model: PathModel) -> bytes:
    """Return the base model as a safetensors file: fp32, Hugging Face names, always the same bytes
    for the same parameters."""
    return parameters_bytes(dict(model.named_parameters()))


def parameters_bytes(parameters: Mapping[str, torch.Tensor]) -> bytes:
    """Return parameters by Hugging Face names as a base model's file."""
    plain = {
        name: parameter.detach().to("cpu", torch.float32).contiguous()
        for name, parameter in parameters.items()
    }
    return safetensors.torch.save(plain, metadata={"format": "pt"})


def _save(path: Path, inputs: str, step: int, model: PathModel, loop: InnerLoop) -> None:
    content: dict[str, Any] = {
        "inputs": inputs,
        "step": step,
        "model": dict(model.named_parameters()),
        "optimizer": loop.state_dict(),
    }
    with atomic_file(path) as file:
        torch.save(content, file)


def _resume(path: Path, inputs: str, model: PathModel, loop: InnerLoop) -> int:
    """Load a checkpoint of the same inputs and return the steps done, 0 if there is none."""
    if not path.exists():
        return 0
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["inputs"] != inputs:
            return 0
        step, parameters, optimizer = content["step"], content["model"], content["optimizer"]
    except Exception as error:  # pickle, zip and key errors alike: starting again is right
        logger.warning("%s cannot be used (%s); the base model is trained again", path, error)
        return 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    loop.load_state_dict(optimizer)
    return int(step)
