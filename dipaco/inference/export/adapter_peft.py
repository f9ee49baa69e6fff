"""A path of low-rank adapters as PEFT and vLLM take it, and what merging it into its base loses.

A path's tensors are named as in the model, `NAME.lora_A.weight` [r, in] and `NAME.lora_B.weight`
[out, r]; what they add to the linear map NAME is `alpha / r * B A`. In files the factor is part of
B, so that alpha equals r: some tools read no other number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch

from dipaco.base.errors import ConfigurationError, StorageError
from dipaco.base.files import storage_errors
from dipaco.modules.frozen_base import Weight

from .tokenizer_files import json_bytes

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"
# The ranks that vLLM takes; the first one that is not smaller is what is written.
_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# PEFT's wrapper, and the wrapper of the model that it wraps.
_PEFT_PREFIX = "base_model.model."

Tensors = Mapping[str, torch.Tensor]
_Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Rounding:
    """What is lost where merged weights are rounded to the format of the base."""

    unchanged: float
    """Share of the weights of blocks that are what they were in the base."""
    error: float
    """Norm of what rounding adds, as a share of the norm of what the adapters add."""


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
    content = {_PEFT_PREFIX + name: _stored(value, name, dtype) for name, value in written.items()}
    with storage_errors(folder):
        _save(content, folder / ADAPTER_WEIGHTS)
        (folder / ADAPTER_CONFIG).write_bytes(json_bytes(_peft_config(written, base)))


class RoundingMeter:
    """Measures what is lost where sums of base and adapters are stored as `dtype`."""

    def __init__(self, base: Mapping[str, Weight], dtype: torch.dtype) -> None:
        self._base, self._dtype = base, dtype
        self._weights = self._unchanged = 0
        self._added = self._lost = 0.0

    def passing(self, merged: Iterable[_Named]) -> Iterator[_Named]:
        """Yield the sums, fp32 with their names, and look at them meanwhile."""
        for name, whole in merged:
            if whole.ndim > 1 and ".layers." in name:
                self._look(self._base[name].to(torch.float32), whole)
            yield name, whole

    def _look(self, before: torch.Tensor, whole: torch.Tensor) -> None:
        stored = whole.to(self._dtype).float()
        self._weights += whole.numel()
        self._unchanged += int((stored == before).sum())
        self._added += float((whole - before).square().sum(dtype=torch.float64))
        self._lost += float((stored - whole).square().sum(dtype=torch.float64))

    def rounding(self) -> Rounding:
        """Return what was lost in all that passed."""
        error = math.sqrt(self._lost / self._added) if self._added else 0.0
        return Rounding(self._unchanged / max(1, self._weights), error)


def _factors(tensors: Tensors, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (tensors[name + end].detach().to("cpu", torch.float32) for end in (FACTOR_A, FACTOR_B))
    return a, b


def _peft_config(written: Tensors, base: str) -> dict[str, Any]:
    rank = rank_of(written)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted(written)}),
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }


def _stored(value: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    stored = value.to(dtype).contiguous()
    if not bool(torch.isfinite(stored).all()):
        raise ConfigurationError(
            f"'{name}' has numbers that {str(dtype).removeprefix('torch.')} cannot hold; export "
            f"with --dtype bfloat16 or float32"
        )
    return stored


def _save(content: dict[str, torch.Tensor], file: Path) -> None:
    try:
        safetensors.torch.save_file(content, file, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise StorageError(
            f"cannot write {file}: {error}; free space, or give another --out"
        ) from None
    # Some versions of safetensors write for the owner alone.
    file.chmod(file.parent.stat().st_mode & 0o666)
