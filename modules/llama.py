"""A path as a Llama checkpoint of Hugging Face, and such a checkpoint as the base of a run.

The parameter names and the arithmetic are the same, so only the configuration is translated. Of
what a `config.json` may ask for, everything that `PathModel` does not do is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from .config import BEGIN_TOKEN, END_TOKEN, PAD_TOKEN, ModelConfig
from .errors import ConfigurationError, IntegrityError, StorageError
from .grid import parameter_shapes
from .transformer import EMBEDDING, HEAD

ARCHITECTURE = "LlamaForCausalLM"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.model"

# Our name, the name in config.json, and what Llama has when that is left out (... is an error).
_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("vocabulary_size", "vocab_size", ...),
    ("block_count", "num_hidden_layers", ...),
    ("hidden_size", "hidden_size", ...),
    ("head_count", "num_attention_heads", ...),
    ("kv_head_count", "num_key_value_heads", None),
    ("feed_forward_size", "intermediate_size", ...),
    ("sequence_length", "max_position_embeddings", 2048),
    ("norm_epsilon", "rms_norm_eps", 1e-6),
    ("tied_embedding", "tie_word_embeddings", False),
)
_DEFAULT_ROPE_THETA = 10_000.0


def llama_config(model: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of the `config.json` of a path whose parameters are stored as `dtype`."""
    stored = str(dtype).removeprefix("torch.")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": model.block_count,
        "num_attention_heads": model.head_count,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.hidden_size // model.head_count,
        "hidden_act": "silu",
        "max_position_embeddings": model.sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        # Older versions of transformers read the one, newer ones the other.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tied_embedding,
        "bos_token_id": BEGIN_TOKEN,
        "eos_token_id": END_TOKEN,
        "pad_token_id": PAD_TOKEN,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": stored,
        "dtype": stored,
    }


def read_llama_config(folder: Path) -> dict[str, Any]:
    """Return the values of a `ModelConfig` that the `config.json` in `folder` describes.

    Raises StorageError if there is none, ConfigurationError naming the field if it is of another
    architecture or asks for something that a path cannot do. Called when a base is imported.
    """
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(
            f"{folder} is no checkpoint: it has no {CONFIG_FILE}; give the folder of a Llama "
            f"model with {CONFIG_FILE} and {WEIGHTS_FILE}"
        ) from None
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{file} is not a JSON object")
    for field, value, wanted in _unsupported(config):
        raise ConfigurationError(
            f"{file}: {field} is {value!r}, and only {wanted} can be imported; give another "
            f"checkpoint, or train a base of your own with [base]"
        )
    return {**_model_values(config, file), "rope_theta": _rope_theta(config)}


def _model_values(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    values = {}
    for ours, theirs, default in _FIELDS:
        value = config.get(theirs, default)
        if value is ...:
            raise ConfigurationError(f"{file} lacks {theirs}; it must say how large the model is")
        values[ours] = value
    return values


def _unsupported(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield what a path does not do: the field, its value, and what would be allowed."""
    if config.get("model_type") != "llama":
        yield "model_type", config.get("model_type"), "'llama'"
    architectures = config.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE]:
        yield "architectures", architectures, f"['{ARCHITECTURE}']"
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field):
            yield field, config[field], "false"
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        yield "hidden_act", config["hidden_act"], "'silu'"
    if config.get("rope_scaling") is not None:
        yield "rope_scaling", config["rope_scaling"], "null"
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or not _is_plain_rope(rope):
        yield "rope_parameters", rope, "rope_type 'default' with a rope_theta"
    if config.get("partial_rotary_factor", 1) != 1:
        yield "partial_rotary_factor", config["partial_rotary_factor"], "1"
    if config.get("quantization_config") is not None:
        yield "quantization_config", config["quantization_config"], "unquantised parameters"
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    head_width = config.get("head_dim")
    if head_width is not None and isinstance(heads, int) and head_width * heads != width:
        yield "head_dim", head_width, "hidden_size / num_attention_heads"


def _is_plain_rope(rope: Mapping[str, Any]) -> bool:
    known = {"rope_type", "rope_theta", "partial_rotary_factor"}
    return (
        rope.get("rope_type", "default") == "default"
        and rope.get("partial_rotary_factor", 1) == 1
        and set(rope) <= known
    )


def _rope_theta(config: Mapping[str, Any]) -> Any:
    rope = config.get("rope_parameters") or {}
    return rope.get("rope_theta", config.get("rope_theta", _DEFAULT_ROPE_THETA))


def llama_weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint: one, or those that its index names.

    Raises StorageError if there are none, IntegrityError if the index is wrong.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return (folder / WEIGHTS_FILE,)
    index = folder / INDEX_FILE
    if not index.is_file():
        raise StorageError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; other formats are not "
            f"read: save the model again with save_pretrained, which writes safetensors"
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise IntegrityError(f"{index} is broken: it maps no parameters to files") from None
    for name in sorted(map(str, names)):
        if Path(name).name != name or not (folder / name).is_file():
            raise IntegrityError(f"{index} names the file '{name}', which is not in {folder}")
    return tuple(folder / str(name) for name in sorted(map(str, names)))


def read_llama_parameters(folder: Path, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the parameters of a checkpoint, fp32 on the CPU, by name: all of `model`, no others.

    Raises IntegrityError naming the parameter if one is missing, unknown, of another shape, or
    not finite, and StorageError as `llama_weight_files` does. Called when a base is imported.
    """
    wanted = parameter_shapes(model)
    found: dict[str, torch.Tensor] = {}
    for file in llama_weight_files(folder):
        for name, tensor in _tensors(file):
            # Checkpoints of older versions store what is computed from the configuration.
            if name.endswith("rotary_emb.inv_freq"):
                continue
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise IntegrityError(
                    f"{file} has '{name}' as {tensor.dtype}; only float32, bfloat16 and float16 "
                    f"can be imported"
                )
            found[name] = tensor.to(torch.float32)
    head = found.pop(HEAD, None) if model.tied_embedding else None
    if head is not None and not torch.equal(head, found.get(EMBEDDING, torch.empty(0))):
        raise IntegrityError(
            f"{folder} has a '{HEAD}' of its own, but its {CONFIG_FILE} says "
            f"tie_word_embeddings; correct one or the other"
        )
    _check(found, wanted, folder)
    return found


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safetensors.safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - no mapping, although it has keys
                yield name, reader.get_tensor(name)
    except (OSError, safetensors.SafetensorError) as error:
        raise IntegrityError(f"{file} cannot be read: {error}") from None


def _check(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    for name in sorted(set(wanted) - set(found)):
        raise IntegrityError(f"{folder} lacks the parameter '{name}'")
    for name in sorted(set(found) - set(wanted)):
        raise IntegrityError(
            f"{folder} has a parameter '{name}', which its {CONFIG_FILE} gives no place to"
        )
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            raise IntegrityError(
                f"{folder} has '{name}' in shape {list(found[name].shape)}, but its "
                f"{CONFIG_FILE} says {list(shape)}"
            )
        if not bool(torch.isfinite(found[name]).all()):
            raise IntegrityError(f"{folder} has numbers in '{name}' that are not finite")
