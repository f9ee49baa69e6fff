"""A path as one GGUF file, which llama.cpp, Ollama and LM Studio open.

Names of tensors, keys and the quantisation are the library's (`gguf`, extra `gguf`). What is
decided here: which of llama.cpp's tokenizers gives the run's ids. What it cannot do is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sentencepiece import sentencepiece_model_pb2

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import storage_errors
from dipaco.modules.transformer import rotary_frequencies
from dipaco.protocol.config import ModelConfig
from dipaco.routing.tokens.tokenizer import Tokenizer
from dipaco.routing.tokens.tokenizer_json import JsonTokenizer
from dipaco.routing.tokens.tokenizer_kinds import is_json, read_tokenizer

from .checkpoint import without_padding
from .tokenizer_files import json_pieces

# Its classes are made at import, where no type checker sees them.
_sentencepiece_format: Any = sentencepiece_model_pb2
_Trainer = _sentencepiece_format.TrainerSpec

# By the name of --dtype.
GGUF_TYPES: Final = {"float32": "f32", "float16": "f16", "q8_0": "q8_0"}
_UNUSED = 5
_ROWS_OF_Q8 = 32
_OLLAMA_CONTEXT = 4096
# Defaults of the settings of the parts that cut a text before BPE.
_CUT_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "Split": {"pattern": None, "behavior": None, "invert": False},
    "Digits": {"individual_digits": False},
    "ByteLevel": {"add_prefix_space": True, "use_regex": True},
}
_Cut = list[dict[str, Any]]


def _split_and_bytes(digits: str) -> _Cut:
    """Return how Llama 3 and Qwen cut a text; they differ in what is done with digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%d| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ).replace("%d", digits)
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]


_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
# What llama.cpp calls a way of cutting. With that of Llama 3 a piece that is a word is taken
# whatever merges make of it (`ignore_merges`), with the others it is not.
_CUTS: Final[dict[str, _Cut]] = {
    "qwen2": _split_and_bytes(r"\p{N}"),
    "llama-bpe": _split_and_bytes(r"\p{N}{1,3}"),
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES],
    "gpt-2": [_BYTES],
}
_IGNORES_MERGES: Final = "llama-bpe"
# What a user of dipaco-serve or dipaco-export can do instead where llama.cpp cannot.
_ELSEWHERE: Final = "vLLM and transformers open what dipaco-export --format transformers writes"


def check_gguf(model: ModelConfig, tokenizer: bytes | None) -> None:
    """Refuse what llama.cpp cannot do with the same result, before anything is computed.

    Raises ConfigurationError, also where the library is not installed.
    """
    gguf_library()
    if (lack := lack_of_llama_cpp(model)) is not None:
        raise ConfigurationError(f"{lack}; {_ELSEWHERE}")
    if tokenizer is None:
        return
    if is_json(tokenizer):
        _cut_name(json_pieces(tokenizer).tokenizer)
        return
    proto = _sentencepiece_format.ModelProto.FromString(tokenizer)
    if proto.trainer_spec.model_type != _Trainer.BPE:
        raise ConfigurationError(
            "the SentencePiece tokenizer of the run is not BPE, and GGUF files are written of no "
            "other; give --format transformers"
        )


def lack_of_llama_cpp(model: ModelConfig) -> str | None:
    """Return what llama.cpp lacks to compute a model, or None if it lacks nothing."""
    if model.transformers_config is not None:
        return (
            "for a base of this family llama.cpp's own scripts make GGUF files of what "
            "dipaco-export writes: convert_hf_to_gguf.py with --format transformers, "
            "convert_lora_to_gguf.py with --format peft"
        )
    if model.family == "qwen3" and model.attention_bias:
        return "llama.cpp has no biases for the family qwen3 (attention_bias)"
    if model.family == "qwen2" and model.width_of_head * model.head_count != model.hidden_size:
        return "llama.cpp has no width of heads for the family qwen2 (head_width)"
    scaling = model.rope_scaling
    if model.family != "llama" and scaling is not None and scaling.kind == "llama3":
        return f"llama.cpp has no rope_scaling of kind llama3 for the family {model.family}"
    return None


def write_gguf(
    parameters: Iterable[tuple[str, torch.Tensor]],
    model: ModelConfig,
    tokenizer: bytes | None,
    file: Path,
    *,
    stored: str,
    name: str,
) -> None:
    """Write a path's parameters, by name, to `file`.

    A file without a tokenizer is for a program that gives tokens. `stored` is one of `GGUF_TYPES`:
    matrices have it, vectors are fp32. Raises what `check_gguf` does, StorageError if the disk is
    full.
    """
    gguf = gguf_library()
    check_gguf(model, tokenizer)
    # With its temporary file not all parameters are in memory at once.
    writer = gguf.GGUFWriter(file, model.family, use_temp_file=True)
    types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(gguf.LlamaFileType[types[stored]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_name(name)
    _add_model(writer, gguf, model)
    rows = model.without_padding.vocabulary_size
    _add_tokenizer(writer, rows, tokenizer)
    writer.add_vocab_size(rows)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model.family.upper()], model.block_count)
    for key, parameter in parameters:
        values = without_padding(key, parameter.detach(), model).to("cpu", torch.float32)
        array = paired(key, values, model).numpy()
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        add_tensor(writer, gguf, found, array, stored)
    with storage_errors(file.parent):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def gguf_name(run: str, path: int, stored: str) -> str:
    """Return the name of a path's file."""
    return f"{run}-path-{path}-{stored}.gguf"


def ollama_name(gguf_name: str) -> str:
    """Return what the model is called in Ollama: names there are in small letters."""
    return Path(gguf_name).stem.lower()


def modelfile(gguf_name: str, context: int, chat_template: bool) -> str:
    """Return a Modelfile for `ollama create`, with which it completes texts as dipaco does.

    What Ollama would do by itself, and dipaco does not, is named: the 0.9 of `top_p`, a penalty
    for repetitions, and another length of the `context`.
    """
    parameters = {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 1.0,
        "repeat_penalty": 1.0,
        # Ollama's own default, if the model has as many: memory grows with the number.
        "num_ctx": min(context, _OLLAMA_CONTEXT),
    }
    lines = [f"FROM ./{gguf_name}"]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    # Without a template of its own the prompt is the beginning of a text.
    return "\n".join(lines if chat_template else [*lines, 'TEMPLATE "{{ .Prompt }}"']) + "\n"


def gguf_library() -> Any:
    """Return the library. Raises ConfigurationError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ConfigurationError(
            "--format gguf needs the library gguf; install it with: pip install 'dipaco[gguf]'"
        ) from None
    return gguf


def _add_model(writer: Any, gguf: Any, model: ModelConfig) -> None:
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.block_count)
    writer.add_feed_forward_length(model.feed_forward)
    writer.add_head_count(model.head_count)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.width_of_head)
    writer.add_value_length(model.width_of_head)
    writer.add_rope_dimension_count(model.width_of_head)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.norm_epsilon)
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    elif scaling is not None:
        plain = model.model_copy(update={"rope_scaling": None})
        cpu = torch.device("cpu")
        slower = rotary_frequencies(plain, cpu) / rotary_frequencies(model, cpu)
        writer.add_tensor("rope_freqs.weight", slower.numpy().astype(np.float32))


def paired(name: str, values: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Order the rows of queries and keys as llama.cpp pairs them: it rotates neighbours in a Llama,
    halves in a Qwen."""
    heads = {"q_proj": model.head_count, "k_proj": model.kv_heads}
    kind = name.split(".")[-2]
    if model.family != "llama" or kind not in heads:
        return values.contiguous()
    split = values.view(heads[kind], 2, model.width_of_head // 2, *values.shape[1:])
    return split.transpose(1, 2).reshape(values.shape).contiguous()


def add_tensor(writer: Any, gguf: Any, name: str, array: np.ndarray, stored: str) -> None:
    if array.ndim < 2 or stored == "f32":
        writer.add_tensor(name, array)
    elif stored == "q8_0" and array.shape[-1] % _ROWS_OF_Q8 == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    else:
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if not np.isfinite(half).all():
            raise ConfigurationError(
                f"'{name}' has numbers that f16 cannot hold; give --dtype float32"
            )
        writer.add_tensor(name, half)


def _add_tokenizer(writer: Any, rows: int, tokenizer: bytes | None) -> None:
    """Write the tokenizer of an embedding with so many rows."""
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    elif is_json(tokenizer):
        _add_byte_level(writer, rows, json_pieces(tokenizer))
    else:
        _add_sentencepiece(writer, rows, tokenizer)


def _add_sentencepiece(writer: Any, rows: int, tokenizer: bytes) -> None:
    proto = _sentencepiece_format.ModelProto.FromString(tokenizer)
    # The kinds of pieces have the same numbers there.
    pieces = [(piece.piece, piece.score, int(piece.type)) for piece in proto.pieces]
    pieces += [(f"[PAD{number}]", -1e4, _UNUSED) for number in range(len(pieces), rows)]
    tokens, scores, types = map(list, zip(*pieces, strict=True))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_add_space_prefix(bool(proto.normalizer_spec.add_dummy_prefix))
    writer.add_remove_extra_whitespaces(bool(proto.normalizer_spec.remove_extra_whitespaces))
    _add_specials(writer, read_tokenizer(tokenizer), tokens)


def _add_byte_level(writer: Any, rows: int, pieces: JsonTokenizer) -> None:
    content = pieces.tokenizer
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [_UNUSED] * rows
    for token, number in content["model"]["vocab"].items():
        tokens[number], types[number] = token, 1
    for added in content["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    merges = content["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_cut_name(content))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_add_space_prefix(False)
    _add_specials(writer, pieces, tokens)
    ends = sorted(pieces.ends - {pieces.end})
    ends.sort(key=lambda number: number != pieces.origin.turn_end)
    # llama.cpp has room for two beside that of a text, and knows many others by their names.
    for add, number in zip((writer.add_eot_token_id, writer.add_eom_token_id), ends, strict=False):
        add(number)
    if pieces.chat_template is not None:
        writer.add_chat_template(pieces.chat_template)


def _add_specials(writer: Any, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Name unknown, begin, end and padding, and say whether a text begins with the begin token."""
    unknown, begin, end, padding = (
        tokens.index(name) if name in tokens else None for name in tokenizer.special_names
    )
    if tokenizer.begin:
        # llama.cpp puts one token in front of a text, and calls that the begin.
        begin = tokenizer.begin[0]
    named = {
        writer.add_unk_token_id: unknown, writer.add_bos_token_id: begin,
        writer.add_eos_token_id: end, writer.add_pad_token_id: padding,
    }  # fmt: skip
    for add, number in named.items():
        if number is not None:
            add(number)
    writer.add_add_bos_token(bool(tokenizer.begin))
    writer.add_add_eos_token(False)


def _cut_name(tokenizer: Mapping[str, Any]) -> str:
    """Return what llama.cpp calls the way in which this tokenizer cuts a text."""
    part = tokenizer.get("pre_tokenizer") or {}
    parts = part.get("pretokenizers", [part]) if part.get("type") == "Sequence" else [part]
    cut = [_cut_of(part) for part in parts]
    found = next((name for name, known in _CUTS.items() if known == cut), None)
    model = tokenizer["model"]
    ignores_merges = bool(model.get("ignore_merges"))
    is_known = model["type"] == "BPE" and ignores_merges == (found == _IGNORES_MERGES)
    if found is None or not is_known:
        shown = json.dumps(cut, ensure_ascii=False)
        raise ConfigurationError(
            f"llama.cpp has no tokenizer that cuts a text as this one does ({shown[:200]}); "
            f"{_ELSEWHERE}"
        )
    return found


def _cut_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part with all settings that change how it cuts a text."""
    kind = str(part.get("type"))
    return {"type": kind} | {k: part.get(k, v) for k, v in _CUT_DEFAULTS.get(kind, {}).items()}
