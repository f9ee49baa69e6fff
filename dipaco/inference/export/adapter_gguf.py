"""A path of low-rank adapters as a GGUF file, which llama.cpp and Ollama load beside the base's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from dipaco.base.files import storage_errors
from dipaco.protocol.config import ModelConfig

from .adapter_peft import FACTOR_A, FACTOR_B, adapted, folded, rank_of
from .path_gguf import add_tensor, gguf_library, paired


def write_adapter_gguf(
    tensors: Mapping[str, torch.Tensor],
    alpha: float,
    model: ModelConfig,
    file: Path,
    *,
    stored: str,
    name: str,
) -> None:
    """Write a path's adapters to `file`. `stored` is one of `GGUF_TYPES`.

    The base's file must be of the same family. Raises ConfigurationError where the library is not
    installed, StorageError if the disk is full.
    """
    gguf = gguf_library()
    written = folded(tensors, alpha)
    writer = gguf.GGUFWriter(file, model.family)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank_of(written)))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model.family.upper()], model.block_count)
    for key in adapted(written):
        weight = key + ".weight"
        theirs = names.get_name(weight, try_suffixes=(".weight",))
        # Rows of the product are rows of B: they have the order of the base's in such a file.
        factors = {
            "a": written[key + FACTOR_A],
            "b": paired(weight, written[key + FACTOR_B], model),
        }
        for letter, values in factors.items():
            add_tensor(writer, gguf, f"{theirs}.lora_{letter}", values.numpy(), stored)
    with storage_errors(file.parent):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def adapter_modelfile(gguf_name: str) -> str:
    """Return a Modelfile for `ollama create` that puts the adapter on `base.gguf`, which the user
    puts beside it."""
    return f"FROM ./base.gguf\nADAPTER ./{gguf_name}\n"
