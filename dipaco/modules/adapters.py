"""Low-rank adapters (design 4.13, adapters): their first values, and what they make of a weight."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from dipaco.protocol.config import ModelConfig

from .layout import parameter_shapes

_LORA_A, _LORA_B = "lora_A", "lora_B"


def initial_adapters(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return what every path begins with, fp32 by name: A drawn uniformly as PEFT does, B zero.

    Each parameter has a generator of its own, so modules of a level begin alike. Numbers have 24
    bits and one rounding, so they are the same on every machine.
    """
    return {
        name: torch.zeros(shape) if _LORA_B in name else _drawn(name, shape, seed)
        for name, shape in parameter_shapes(model).items()
    }


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return numbers between plus and minus the root of 1 / inputs."""
    own = hashlib.sha256(f"{seed} {name}".encode()).digest()
    raw = np.random.PCG64(int.from_bytes(own[:16], "little")).random_raw(math.prod(shape))
    whole = (raw >> np.uint64(40)).astype(np.int64) - 2**23
    bound = np.float32(1 / math.sqrt(shape[1]))
    numbers = (whole / 2**23).astype(np.float32) * bound
    return torch.from_numpy(numbers).reshape(shape)
