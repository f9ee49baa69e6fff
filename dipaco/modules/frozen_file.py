"""The file of a frozen base: one safetensors file, the same bytes for the same base everywhere.

Its SHA-256, which is in the plan, is therefore the digest of the base as it is loaded. It is made
of a public checkpoint: tensors in sorted order, in the run's format, with a row of padding behind
those of embedding and head.
"""

from __future__ import annotations

import math
import threading
import weakref
from pathlib import Path

import safetensors
import torch
from torch.nn import functional as F

from dipaco.base.errors import IntegrityError
from dipaco.base.files import atomic_file, canonical_json, sha256_of_file, storage_errors
from dipaco.protocol.config import ModelConfig, parse_config

from .canonical_file import read_header
from .frozen_base import FILE_FORMATS, NF4_BYTES, FrozenBase
from .layout import parameter_shapes
from .llama import CONFIG_FILE, iterate_llama_parameters, read_llama_config, stored_formats
from .transformer import EMBEDDING, HEAD

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def base_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return what the base of a model with adapters consists of."""
    return parameter_shapes(model.without_adapters)


def base_parameter_count(model: ModelConfig) -> int:
    """Return how many parameters the base has."""
    return sum(math.prod(shape) for shape in base_shapes(model).values())


def frozen_bytes(model: ModelConfig, base_format: str) -> int:
    """Return what a base takes in memory in a format. Vectors, which are in fp32, are nothing."""
    in_blocks, outside = _split_parameter_count(model)
    each = FILE_FORMATS[base_format].itemsize
    return int((NF4_BYTES if base_format == "nf4" else each) * in_blocks + each * outside)


def _split_parameter_count(model: ModelConfig) -> tuple[int, int]:
    """Return how many parameters of the base are in blocks, and in embedding and head."""
    in_blocks = sum(math.prod(s) for n, s in base_shapes(model).items() if ".layers." in n)
    return in_blocks, base_parameter_count(model) - in_blocks


def base_file_bytes(model: ModelConfig) -> int:
    """Return the size of the file of a base, frozen or not, without its header."""
    dtype = FILE_FORMATS[model.adapters.base_format] if model.adapters else torch.float32
    return dtype.itemsize * base_parameter_count(model)


def write_base(folder: Path, base_format: str, file: Path) -> None:
    """Make the file of a base of the checkpoint in `folder`; one tensor is in memory at a time.

    Raises what `read_llama_config` and `iterate_llama_parameters` do, and StorageError.
    """
    stored = parse_config(ModelConfig, read_llama_config(folder), str(folder / CONFIG_FILE))
    dtype = FILE_FORMATS[base_format]
    with atomic_file(file) as out:
        out.write(_header(parameter_shapes(stored.with_padding), dtype))
        for name, tensor in iterate_llama_parameters(folder, stored):
            padded = with_padding(name, tensor).to(dtype)
            out.write(padded.contiguous().view(torch.uint8).numpy().data)


def rounded_from(folder: Path, base_format: str) -> str | None:
    """Return the format of a checkpoint whose numbers a base of this format does not all hold; None
    if there is none. Raises as `stored_formats`."""
    kept = _NAMES[FILE_FORMATS[base_format]]
    others = stored_formats(folder) - {kept} if kept != "F32" else set()
    return ", ".join(sorted(others)) or None


def _header(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in sorted(shapes):
        end = start + dtype.itemsize * math.prod(shapes[name])
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [start, end],
        }
        start = end
    encoded = canonical_json(header)
    # Numbers begin where a vector of a processor does: others are slower, and give other last bits.
    encoded += b" " * (-(8 + len(encoded)) % 64)
    return len(encoded).to_bytes(8, "little") + encoded


def with_padding(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter of a checkpoint as a run has it: with a row of padding, which nothing that
    is scored sees, behind those of the checkpoint's tokens."""
    return F.pad(tensor, (0, 0, 0, 1)) if name in (EMBEDDING, HEAD) else tensor


# Of the files that are open in this process, by path and SHA-256.
_open: weakref.WeakValueDictionary[tuple[Path, str, str], FrozenBase] = (
    weakref.WeakValueDictionary()
)
_lock = threading.Lock()


def open_base(file: Path, sha256: str, model: ModelConfig) -> FrozenBase:
    """Return the base in a file, mapped, on the CPU; one for all who open it in this process.

    Raises IntegrityError if the file has changed, or is not the base of `model`.
    """
    assert model.adapters is not None
    base_format = model.adapters.base_format
    key = (file.resolve(), sha256, base_format)
    with _lock:
        found = _open.get(key)
        if found is None:
            found = _open[key] = FrozenBase(_mapped(file, sha256, model), base_format)
    return found


def _mapped(file: Path, sha256: str, model: ModelConfig) -> dict[str, torch.Tensor]:
    assert model.adapters is not None
    with storage_errors(file.parent):
        digest = sha256_of_file(file)
    if digest != sha256:
        raise IntegrityError(
            f"{file} is not the base of this run: it has the SHA-256 {digest[:16]}..., not "
            f"{sha256[:16]}...; delete it so that it is fetched or made again"
        )
    read_header(file)
    try:
        with safetensors.safe_open(file, framework="pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in sorted(reader.keys())}
    except (OSError, safetensors.SafetensorError) as error:
        raise IntegrityError(f"the base {file} cannot be read: {error}") from None
    dtype, wanted = FILE_FORMATS[model.adapters.base_format], base_shapes(model)
    for name in sorted(set(wanted) ^ set(tensors)):
        what = "lacks" if name in wanted else "has an unknown"
        raise IntegrityError(f"the base {file} {what} '{name}'; it is not of this run's model")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name] or tensor.dtype != dtype:
            raise IntegrityError(
                f"the base {file} has '{name}' as {tensor.dtype} {list(tensor.shape)}, but this "
                f"run's model has {dtype} {list(wanted[name])}"
            )
    return tensors


def unfilled_base(model: ModelConfig) -> FrozenBase:
    """Return zeros in the place of a base: for estimates, and to measure how fast a model is."""
    assert model.adapters is not None
    dtype = FILE_FORMATS[model.adapters.base_format]
    tensors = {n: torch.zeros(shape, dtype=dtype) for n, shape in base_shapes(model).items()}
    return FrozenBase(tensors, model.adapters.base_format)
