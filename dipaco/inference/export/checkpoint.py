"""A checkpoint that `transformers` loads: an ordinary small Llama or Qwen, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from dipaco.base.errors import ConfigurationError, StorageError
from dipaco.base.files import storage_errors
from dipaco.modules.llama import CONFIG_FILE, INDEX_FILE, llama_config
from dipaco.modules.transformer import EMBEDDING, HEAD
from dipaco.protocol.config import ModelConfig

from .tokenizer_files import (
    generation_settings,
    json_bytes,
    special_numbers,
    tokenizer_files,
)

GENERATION_FILE = "generation_config.json"


def checkpoint_files(model: ModelConfig, tokenizer: bytes, dtype: torch.dtype) -> dict[str, bytes]:
    """Return the small files of a checkpoint, by name: configuration and tokenizer. Those of an
    imported base say what its own said."""
    config = llama_config(model.without_padding, dtype) | special_numbers(tokenizer)
    return {
        CONFIG_FILE: json_bytes(config),
        GENERATION_FILE: json_bytes(generation_settings(tokenizer)),
        **tokenizer_files(tokenizer, model.context),
    }


def without_padding(name: str, tensor: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Return a parameter as a checkpoint has it: without a row of padding that the run added."""
    rows = model.without_padding.vocabulary_size
    return tensor[:rows] if name in (EMBEDDING, HEAD) else tensor


def save_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], file: Path, dtype: torch.dtype
) -> None:
    """Write named tensors as a safetensors file: the same ones give the same bytes.

    Raises ConfigurationError if a number is too large for `dtype`, StorageError if the disk is
    full.
    """
    stored = {}
    for name, tensor in tensors:
        # Always a copy: parameters of a module are views of one tensor.
        converted = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if not bool(torch.isfinite(converted).all()):
            raise ConfigurationError(
                f"'{name}' has numbers that {str(dtype).removeprefix('torch.')} cannot hold; "
                f"export with --dtype bfloat16 or float32"
            )
        stored[name] = converted
    with storage_errors(file.parent):
        try:
            safetensors.torch.save_file(stored, file, metadata={"format": "pt"})
            # Some versions of safetensors write for the owner alone.
            file.chmod(file.parent.stat().st_mode & 0o666)
        except safetensors.SafetensorError as error:
            raise StorageError(
                f"cannot write {file}: {error}; free space, or give another --out"
            ) from None


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write which file of a checkpoint has each parameter, and how many bytes they are in all."""
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_bytes(json_bytes(content))
