"""A path of low-rank adapters as PEFT and vLLM take it.

A path's tensors are named as in the model, `NAME.lora_A.weight` [r, in] and `NAME.lora_B.weight`
[out, r]; what they add to the linear map NAME is `alpha / r * B A`. In files the factor is part of
B, so that alpha equals r: some tools read no other number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from .checkpoint import save_tensors
from .tokenizer_files import json_bytes

_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"
# The ranks that vLLM takes; the first one that is not smaller is what is written.
_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# PEFT's wrapper, and the wrapper of the model that it wraps.
_PEFT_PREFIX = "base_model.model."

Tensors = Mapping[str, torch.Tensor]


def folded(tensors: Tensors, alpha: float) -> dict[str, torch.Tensor]:
    """Return a path's tensors with the factor in B, of a rank that vLLM takes: what is added is
    zero, so the product is the same."""
    result = {}
    for name in adapted(tensors):
        a, b = _factors(tensors, name)
        rank = a.shape[0]
        more = written_rank(rank) - rank
        result[name + FACTOR_A] = torch.nn.functional.pad(a, (0, 0, 0, more))
        result[name + FACTOR_B] = torch.nn.functional.pad(b * (alpha / rank), (0, more))
    return result


def written_rank(rank: int) -> int:
    """Return the rank that adapters of a `rank` have in files."""
    return next((one for one in _RANKS if one >= rank), rank)


def adapted(tensors: Tensors) -> list[str]:
    """Return the linear maps that a path's tensors change, as in the model, without `.weight`."""
    return sorted(name.removesuffix(FACTOR_A) for name in tensors if name.endswith(FACTOR_A))


def rank_of(tensors: Tensors) -> int:
    """Return the rank of a path's adapters, the same everywhere."""
    return next(len(value) for name, value in sorted(tensors.items()) if name.endswith(FACTOR_A))


def write_peft(tensors: Tensors, alpha: float, base: str, folder: Path, dtype: torch.dtype) -> None:
    """Write a path's adapters to `folder` as PEFT and vLLM read them, stored as `dtype`.

    `base` is the name of the base model: of the Hub, or a folder. Raises StorageError if the disk
    is full.
    """
    written = folded(tensors, alpha)
    named = ((_PEFT_PREFIX + name, value) for name, value in written.items())
    save_tensors(named, folder / _ADAPTER_WEIGHTS, dtype)
    rank = rank_of(written)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted(written)}),
    }
    (folder / _ADAPTER_CONFIG).write_bytes(json_bytes(config))


def _factors(tensors: Tensors, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (tensors[name + end].detach().to("cpu", torch.float32) for end in (FACTOR_A, FACTOR_B))
    return a, b
