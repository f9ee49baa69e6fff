"""Bases that transformers computes: the same logits, losses and gradients of adapters as there."""

import json
import subprocess
import sys

import pytest
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import sha256_of_file
from dipaco.inference.decoder import Decoder
from dipaco.modules.adapters import initial_adapters
from dipaco.modules.foreign_model import new_path
from dipaco.modules.frozen_file import open_base, write_base
from dipaco.modules.llama import read_llama_config
from dipaco.modules.memory import least_pass_bytes, pass_bytes
from dipaco.modules.transformer import token_losses
from dipaco.protocol.config import ModelConfig, parse_config
from support.runs.foreign_base import FOREIGN, make_foreign_base, random_model

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {name: (kind, config(**SMALL | own)) for name, (kind, config, own) in FOREIGN.items()}
TOKENS = torch.arange(60)[None] * 7 % 290 + 4
RANK = 4


def imported(folder, adapted=True, **more):
    values = read_llama_config(folder)
    values |= {"vocabulary_size": 301, "adds_padding": True}
    adapters = {"rank": RANK, "base_format": "float32"}
    config = parse_config(ModelConfig, values | {"adapters": adapters} | more, "it")
    file = folder / "base"
    write_base(folder, "float32", file)
    base = open_base(file, sha256_of_file(file), config)
    model = new_path(config if adapted else config.without_adapters, base).eval()
    if adapted:
        with torch.no_grad():
            for name, value in initial_adapters(config, 0).items():
                model.get_parameter(name).copy_(value)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, tmp_path):
    theirs = random_model(*MODELS[name])
    theirs.save_pretrained(tmp_path)
    expected = theirs(TOKENS).logits
    for adapted in (True, False):
        ours = imported(tmp_path, adapted)
        found = ours(TOKENS)
        assert float((found[..., :300] - expected).abs().max()) < 1e-4
        assert (found[..., 300:] == -torch.inf).all()


@pytest.mark.parametrize("name", MODELS)
def test_blocks_computed_twice_give_the_same_gradients(name, tmp_path):
    random_model(*MODELS[name]).save_pretrained(tmp_path)
    model = imported(tmp_path).train()
    gradients = []
    for model.recomputes in (False, True):
        model.zero_grad()
        token_losses(model, TOKENS).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert all(".lora_" in n for n in gradients[0])
    assert all(torch.equal(value, gradients[1][n]) for n, value in gradients[0].items())
    assert all(float(value.abs().max()) > 0 for n, value in gradients[0].items() if "lora_B" in n)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_token_after_the_other_is_the_whole_text_at_once(name, tmp_path):
    random_model(*MODELS[name]).save_pretrained(tmp_path)
    model = imported(tmp_path)
    whole = model(TOKENS)[0]
    decoder = Decoder([model])
    found = [decoder.read(TOKENS[0, :40].tolist())]
    found += [decoder.step(int(token)) for token in TOKENS[0, 40:]]
    assert torch.allclose(torch.stack(found), whole[39:].log_softmax(-1), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_documents_of_a_row_do_not_see_each_other(name, tmp_path):
    random_model(*MODELS[name]).save_pretrained(tmp_path)
    model = imported(tmp_path)
    seen = torch.ones(60, 60, dtype=torch.bool).tril()
    seen[30:, :30] = False
    other = TOKENS.clone()
    other[:, :30] = 9
    one, two = (model.hidden_states(tokens, seen[None, None])[:, 30:] for tokens in (TOKENS, other))
    assert torch.allclose(one, two, atol=1e-5)
    assert not torch.allclose(one, model.hidden_states(TOKENS)[:, 30:], atol=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_of_a_pass_is_known_before_it(name, tmp_path):
    random_model(*MODELS[name]).save_pretrained(tmp_path)
    config = imported(tmp_path).config
    assert pass_bytes(config) > least_pass_bytes(config) > 10_000


@pytest.mark.parametrize(("name", "longest"), [("gemma3", 60), ("phi3", 64), ("olmo2", 64)])
def test_a_sequence_is_no_longer_than_what_all_layers_see(name, longest, tmp_path):
    MODELS[name][1].save_pretrained(tmp_path)
    assert read_llama_config(tmp_path)["sequence_length"] == longest


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "llama4"},
        {"_attn_implementation": "kernels-community/flash-attn"},
        {"auto_map": {"AutoModelForCausalLM": "stranger/code--modeling.Model"}},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"rms_norm_eps": "small"},
    ],
)
def test_what_a_plan_says_of_a_base_fetches_and_runs_nothing(more, tmp_path):
    MODELS["olmo2"][1].save_pretrained(tmp_path)
    values = read_llama_config(tmp_path)
    values["transformers_config"] = json.dumps(json.loads(values["transformers_config"]) | more)
    config = parse_config(ModelConfig, values, "it")
    with pytest.raises(ConfigurationError, match="the plan"), torch.device("meta"):
        new_path(config)


def test_what_transformers_warns_of_in_a_config_is_told_to_nobody(tmp_path):
    make_foreign_base(tmp_path / "base", "phi3")  # Its config has a field that transformers would have otherwise.
    code = "import sys; from pathlib import Path; from dipaco.bootstrap.import_base import ImportedBase; "
    code += "from dipaco.modules.foreign_model import new_path; new_path(ImportedBase(Path(sys.argv[1])).model)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "base")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hidden_size": 10**7}, "the plan has hidden_size 32, and describes a base with hidden_size 10000000"),
        ({"head_dim": 10**9}, "the plan has head_width 16"),
        ({"intermediate_size": 10**400}, "the plan has feed_forward_size"),
        ({"num_key_value_heads": 0}, "the plan has kv_head_count"),
        ({"hidden_activation": "x"}, "the plan is refused by transformers: KeyError"),
        ({"pad_token_id": 10**7}, "the plan is refused by transformers: AssertionError"),
        ({"model_type": []}, "the plan describes no base that a run can have"),
    ],
)
def test_a_plan_whose_base_has_other_sizes_than_it_says_takes_no_memory(more, said, tmp_path):
    """Attack: sizes of a plan are bounded and have to fit, and 10^7 took 8 GB."""
    random_model(*MODELS["gemma3"]).save_pretrained(tmp_path)
    values = read_llama_config(tmp_path)
    values["transformers_config"] = json.dumps(json.loads(values["transformers_config"]) | more)
    with pytest.raises(ConfigurationError) as refusal:
        new_path(parse_config(ModelConfig, values, "it"))
    assert said in str(refusal.value)
    assert len(str(refusal.value)) < 600


def test_a_plan_that_describes_its_base_with_no_json_is_refused(tmp_path):
    random_model(*MODELS["gemma3"]).save_pretrained(tmp_path)
    for text in ("", "[" * 60_000, "[]", "{"):
        values = read_llama_config(tmp_path) | {"transformers_config": text}
        with pytest.raises(ConfigurationError, match="no JSON object"):
            new_path(parse_config(ModelConfig, values, "it"))
