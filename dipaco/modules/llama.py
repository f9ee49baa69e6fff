"""A path as a checkpoint of Hugging Face (Llama, Qwen2, Qwen3), and such a one as a run's base.

The parameter names and the arithmetic are the same, so only the configuration is translated. A
Mistral has a Llama's. A window of attention does nothing to sequences that fit into it, so it is a
greatest length here. Of what a `config.json` may ask for, everything else that `PathModel` does not
do is refused by name.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from dipaco.base.errors import ConfigurationError, IntegrityError, StorageError
from dipaco.base.files import check_content
from dipaco.protocol.config import ModelConfig

from .canonical_file import read_header
from .foreign_model import FOREIGN_FAMILIES, foreign_values
from .layout import parameter_shapes
from .transformer import EMBEDDING, HEAD

_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Read as the family of ours whose arithmetic it has, and exported as that.
_MISTRAL = "mistral"
_READ_AS = {**{name: name for name in _FAMILIES}, _MISTRAL: "llama"}
_ARCHITECTURES = {**_FAMILIES, _MISTRAL: "MistralForCausalLM"}
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.model"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

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
    ("head_width", "head_dim", None),
)
# Where a model type has another default.
_TYPE_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    _MISTRAL: {"num_key_value_heads": 8, "max_position_embeddings": 131072},
}
# What transformers takes where a config.json names none.
_DEFAULT_WINDOW = 4096
_DEFAULT_WINDOW_LAYERS = 28
_DEFAULT_ROPE_THETA = 10_000.0
# Our name and that in config.json, of what stretches the rotary frequencies.
_SCALING_FIELDS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_sequence_length": "original_max_position_embeddings",
    },
}
# What other models of these names have, and the values with which a path does the same.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "n_routed_experts": (0, None),
    "clip_qkv": (None,),
    "logit_scale": (1, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "no_rope_layers": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}


def llama_config(model: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of the `config.json` of a path whose parameters are stored as `dtype`."""
    stored = str(dtype).removeprefix("torch.")
    if model.transformers_config is not None:
        kept: dict[str, Any] = json.loads(model.transformers_config)
        return {**kept, "vocab_size": model.vocabulary_size, "torch_dtype": stored, "dtype": stored}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        names = _SCALING_FIELDS[model.rope_scaling.kind]
        values = {theirs: getattr(model.rope_scaling, ours) for ours, theirs in names.items()}
        rope |= {"rope_type": model.rope_scaling.kind, **values}
    config = {
        "architectures": [_FAMILIES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": model.block_count,
        "num_attention_heads": model.head_count,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width_of_head,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        # Older versions of transformers read the one, newer ones the other.
        "rope_theta": model.rope_theta,
        "rope_parameters": rope,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.feed_forward_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tied_embedding,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": stored,
        "dtype": stored,
    }
    if model.rope_scaling is not None:
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if model.family != "llama":
        del config["mlp_bias"]
        config["use_sliding_window"] = False
    if model.family == "qwen2":
        del config["attention_bias"]
    return config


def read_llama_config(folder: Path) -> dict[str, Any]:
    """Return the values of a `ModelConfig` that the `config.json` in `folder` describes.

    Raises StorageError if there is none, ConfigurationError naming the field if it is of another
    architecture or asks for something that a path cannot do. Called when a base is imported.
    """
    file = folder / CONFIG_FILE
    config = read_config_file(folder)
    if str(config.get("model_type")) in FOREIGN_FAMILIES:
        return foreign_values(config, str(file))
    for field, value, wanted in _unsupported(config):
        raise ConfigurationError(
            f"{file}: {field} is {value!r:.200}, and only {wanted} can be imported; give another "
            f"checkpoint, or train a base of your own with [base]"
        )
    return _model_values(config, file)


def read_config_file(folder: Path) -> dict[str, Any]:
    """Return the `config.json` in `folder` as it is. Raises as `read_llama_config` does."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(
            f"{folder} is not a checkpoint: it has no {CONFIG_FILE}; give the folder of a Llama "
            f"model with {CONFIG_FILE} and {WEIGHTS_FILE}"
        ) from None
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{file} is not a JSON object")
    return config


def _model_values(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    model_type = config["model_type"]
    family = _READ_AS[model_type]
    for ours, theirs, default in _FIELDS:
        value = config.get(theirs, _TYPE_DEFAULTS[model_type].get(theirs, default))
        if value is ...:
            raise ConfigurationError(f"{file} lacks {theirs}; it must say how large the model is")
        values[ours] = value
    heads, width = values["head_count"], values["hidden_size"]
    head_width = values["head_width"]
    if isinstance(heads, int) and isinstance(head_width, int) and head_width * heads == width:
        values["head_width"] = None
    if (window := _window(config)) and isinstance(values["sequence_length"], int):
        values["sequence_length"] = min(values["sequence_length"], window)
    rope = _rope(config)
    values["family"] = family
    values["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", _DEFAULT_ROPE_THETA))
    # Biases that a type does not have are nothing, whatever its file says of them.
    may_have = model_type in ("llama", "qwen3")
    values["attention_bias"] = may_have and bool(config.get("attention_bias"))
    values["feed_forward_bias"] = model_type == "llama" and bool(config.get("mlp_bias"))
    kind = _rope_kind(rope)
    if kind != "default":
        names = _SCALING_FIELDS[kind]
        given = {ours: rope[theirs] for ours, theirs in names.items()}
        values["rope_scaling"] = {"kind": kind, **given}
    return values


def _unsupported(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield what a path does not do: the field, its value, and what would be allowed."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        families = (*_ARCHITECTURES, *FOREIGN_FAMILIES)
        yield "model_type", model_type, " or ".join(f"'{name}'" for name in families)
        return
    architecture = _ARCHITECTURES[model_type]
    architectures = config.get("architectures") or [architecture]
    if architectures != [architecture]:
        yield "architectures", architectures, f"['{architecture}']"
    for field, allowed in _ONLY.items():
        if config.get(field) not in allowed:
            yield field, config[field], json.dumps(allowed[0]).replace('"', "'")
    listed = config.get("layer_types") or []
    layers = set(map(str, listed if isinstance(listed, list) else [listed]))
    if layers - {"full_attention", "sliding_attention"}:
        yield "layer_types", sorted(layers), "'full_attention' or 'sliding_attention'"
    window = config.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        yield "sliding_window", window, "null or a number of tokens"
    rope = _rope(config)
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    names = _SCALING_FIELDS.get(_rope_kind(rope), {}).values()
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *names}
    if _rope_kind(rope) not in ("default", *_SCALING_FIELDS):
        kinds = ", ".join(f"'{kind}'" for kind in ("default", *_SCALING_FIELDS))
        yield field, rope, f"a rope_type of {kinds}"
    elif set(names) - set(rope) or set(rope) - known:
        yield field, rope, f"rope_type '{_rope_kind(rope)}' with {', '.join(names) or 'rope_theta'}"
    elif rope.get("partial_rotary_factor", 1) != 1:
        yield field, rope, "partial_rotary_factor 1"


def _window(config: Mapping[str, Any]) -> int | None:
    """Return to how many tokens some layer limits its attention, as transformers reads it."""
    window: int | None = config.get("sliding_window", _DEFAULT_WINDOW)
    match config["model_type"]:
        case "llama":
            return None
        case "mistral":
            return window
    if not config.get("use_sliding_window"):
        return None
    if layers := config.get("layer_types"):
        return window if "sliding_attention" in layers else None
    first, count = (
        config.get("max_window_layers", _DEFAULT_WINDOW_LAYERS),
        config["num_hidden_layers"],
    )
    is_beyond = isinstance(first, int) and isinstance(count, int) and first >= count
    return None if is_beyond else window


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `config.json` says of rotary positions: older ones in two fields, which win."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope if isinstance(rope, dict) else {"rope_type": rope}


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def llama_weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint: one, or those that its index names.

    Raises StorageError if there are none, IntegrityError if the index is wrong.
    """
    check_content(folder / WEIGHTS_FILE)
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
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise IntegrityError(f"{index} is broken: it maps no parameters to files") from None
    for name in sorted(map(str, names)):
        check_content(folder / Path(name).name)
        if Path(name).name != name or not (folder / name).is_file():
            raise IntegrityError(f"{index} names the file '{name}', which is not in {folder}")
    return tuple(folder / str(name) for name in sorted(map(str, names)))


def read_llama_parameters(folder: Path, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the parameters of a checkpoint, fp32 on the CPU, by name: all of `model`, no others.

    Raises as `iterate_llama_parameters`. Called when a base is imported.
    """
    return {n: t.to(torch.float32) for n, t in iterate_llama_parameters(folder, model)}


def check_llama_parameters(folder: Path, model: ModelConfig) -> None:
    """Check that a checkpoint has all parameters of `model`, no others, by what its files begin
    with: numbers are not read.

    Raises as `iterate_llama_parameters`.
    """
    wanted = parameter_shapes(model)
    with contextlib.ExitStack() as stack:
        found = _readers(folder, stack)
        if model.tied_embedding:
            found.pop(HEAD, None)
        _check_names(found, wanted, folder)
        for name, (file, reader) in sorted(found.items()):
            with _broken_file(file):
                shape = tuple(reader.get_slice(name).get_shape())
            _check_shape(name, shape, wanted[name], folder)


def stored_formats(folder: Path) -> set[str]:
    """Return the formats in which a checkpoint has its matrices, as safetensors names them.

    Raises IntegrityError for a file that is none, and StorageError as `llama_weight_files` does.
    """
    found: set[str] = set()
    with contextlib.ExitStack() as stack:
        for name, (file, reader) in _readers(folder, stack).items():
            with _broken_file(file):
                numbers = reader.get_slice(name)
                if len(numbers.get_shape()) > 1:
                    found.add(numbers.get_dtype())
    return found


def iterate_llama_parameters(
    folder: Path, model: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a checkpoint by name, sorted, in the format that it has: all of
    `model`, no others. One is read at a time.

    Raises IntegrityError naming the parameter if one is missing, unknown, of another shape, or
    not finite, and StorageError as `llama_weight_files` does.
    """
    wanted = parameter_shapes(model)
    with contextlib.ExitStack() as stack:
        found = _readers(folder, stack)
        head = found.pop(HEAD, None) if model.tied_embedding else None
        _check_names(found, wanted, folder)
        table = found[EMBEDDING]
        if head is not None and not torch.equal(_read(HEAD, head), _read(EMBEDDING, table)):
            raise IntegrityError(
                f"{folder} has a '{HEAD}' of its own, but its {CONFIG_FILE} says "
                f"tie_word_embeddings; correct one or the other"
            )
        for name in sorted(wanted):
            tensor = _read(name, found[name])
            _check_tensor(name, tensor, wanted[name], folder)
            yield name, tensor


_Reader = tuple[Path, Any]
_FETCH_AGAIN = "the checkpoint is not whole: fetch or save it again"


def _readers(folder: Path, stack: contextlib.ExitStack) -> dict[str, _Reader]:
    """Return where each parameter of a checkpoint is; its files are open as long as `stack`."""
    found: dict[str, _Reader] = {}
    for file in llama_weight_files(folder):
        with _broken_file(file):
            read_header(file)
            reader = stack.enter_context(safetensors.safe_open(file, framework="pt"))
            found |= dict.fromkeys(reader.keys(), (file, reader))
    # Checkpoints of older versions store what is computed from the configuration.
    return {n: at for n, at in found.items() if not n.endswith("rotary_emb.inv_freq")}


@contextlib.contextmanager
def _broken_file(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise IntegrityError(f"{file} cannot be read: {error}; {_FETCH_AGAIN}") from None
    except IntegrityError as error:
        raise IntegrityError(f"{error}; {_FETCH_AGAIN}") from None


def _read(name: str, place: _Reader) -> torch.Tensor:
    file, reader = place
    with _broken_file(file):
        tensor: torch.Tensor = reader.get_tensor(name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise IntegrityError(
            f"{file} has '{name}' as {tensor.dtype}; only float32, bfloat16 and float16 can be "
            f"imported"
        )
    return tensor


def _check_names(
    found: Mapping[str, _Reader], wanted: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    if missing := sorted(set(wanted) - set(found)):
        others = f" and {len(missing) - 1:,} others" if len(missing) > 1 else ""
        raise IntegrityError(
            f"{folder} lacks the parameter '{missing[0]}'{others}, which its {CONFIG_FILE} speaks "
            f"of; {_FETCH_AGAIN}"
        )
    for name in sorted(set(found) - set(wanted)):
        raise IntegrityError(
            f"{folder} has a parameter '{name}', which its {CONFIG_FILE} gives no place to"
        )


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], folder: Path) -> None:
    _check_shape(name, tuple(tensor.shape), shape, folder)
    if not bool(torch.isfinite(tensor).all()):
        raise IntegrityError(f"{folder} has numbers in '{name}' that are not finite")


def _check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...], folder: Path) -> None:
    if shape != wanted:
        raise IntegrityError(
            f"{folder} has '{name}' in shape {list(shape)}, but its {CONFIG_FILE} says "
            f"{list(wanted)}"
        )
