"""Checkpoints of Llama, SmolLM2, Qwen2 and Qwen3 shapes: the same logits here, there and back."""

import json

import pytest
import safetensors.torch
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dipaco.base.errors import ConfigurationError
from dipaco.modules.llama import llama_config, read_llama_config, read_llama_parameters
from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import ModelConfig, parse_config
from support.runs.foreign_base import random_model

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama-3": (LlamaForCausalLM, LlamaConfig(**SMALL, head_dim=12, rope_parameters=LLAMA3)),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LINEAR)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-2)),
    "smollm2": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True, rope_theta=130_000.0)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, head_dim=12, sliding_window=None)),
    "mistral-window": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=60)),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=61, max_window_layers=1),
    ),
    "qwen3-biases": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16, attention_bias=True)),
}
TOKENS = torch.arange(60)[None] * 7 % 300


def imported(folder):
    config = parse_config(ModelConfig, read_llama_config(folder), "it")
    model = PathModel(config).eval()
    model.load_state_dict(read_llama_parameters(folder, config))
    return model


def exported(model, folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config(model.config, torch.float32)))
    stored = {name: value.detach() for name, value in model.named_parameters()}
    safetensors.torch.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, tmp_path):
    theirs = random_model(*MODELS[name])
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = imported(tmp_path / "theirs")
    expected, found = theirs(TOKENS).logits, ours(TOKENS)
    assert float((found - expected).abs().max()) < 1e-5  # of logits up to 2.7
    back = exported(ours, tmp_path / "back")
    # A Mistral without a window is a Llama, and a path of it is exported as one.
    assert type(back) is (LlamaForCausalLM if "mistral" in name else type(theirs))
    assert torch.equal(back(TOKENS).logits, expected)
    assert imported(tmp_path / "back").config == ours.config


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (MistralConfig(**SMALL, sliding_window=None), 64),
        (MistralConfig(**SMALL, sliding_window=16), 16),
        # transformers' Mistral has a window whatever this key says.
        (MistralConfig(**SMALL, sliding_window=16, use_sliding_window=False), 16),
        (Qwen2Config(**SMALL, sliding_window=16, use_sliding_window=False), 64),
        (Qwen2Config(**SMALL, sliding_window=16, use_sliding_window=True, max_window_layers=1), 16),
        (Qwen2Config(**SMALL, sliding_window=16, use_sliding_window=True, max_window_layers=2), 64),
        (Qwen3Config(**SMALL, sliding_window=16, use_sliding_window=True, max_window_layers=0), 16),
        (LlamaConfig(**SMALL, sliding_window=16), 64),
    ],
)
def test_a_sequence_is_no_longer_than_a_window_that_reaches_a_layer(config, longest, tmp_path):
    config.save_pretrained(tmp_path)
    assert read_llama_config(tmp_path)["sequence_length"] == longest
    # So it is in files of older versions, which do not tell the layers one by one.
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in values.items() if name != "layer_types"}))
    assert read_llama_config(tmp_path)["sequence_length"] == longest


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_read_exactly(dtype, tmp_path):
    random_model(*MODELS["qwen3"]).to(dtype).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert float((imported(tmp_path)(TOKENS) - theirs(TOKENS).logits).abs().max()) < 1e-5


def test_a_new_model_begins_with_biases_of_zero_and_norms_of_one():
    model = PathModel(ModelConfig(hidden_size=16, family="qwen3", attention_bias=True))
    initialise(model, seed=0)
    values = dict(model.named_parameters())
    assert not values["model.layers.0.self_attn.o_proj.bias"].any()
    assert (values["model.layers.0.self_attn.q_norm.weight"] == 1).all()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"family": "qwen2", "attention_bias": True}, "family qwen2 has its own biases"),
        ({"family": "qwen3", "feed_forward_bias": True}, "family qwen3 has no feed_forward_bias"),
        ({"head_width": 7}, "must be even"),
        (
            {"rope_scaling": {"kind": "llama3", "factor": 2, "high_frequency_factor": 1}},
            "must be greater than low_frequency_factor",
        ),
    ],
)
def test_settings_that_no_family_has_are_refused(values, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_config(ModelConfig, values, "it")
