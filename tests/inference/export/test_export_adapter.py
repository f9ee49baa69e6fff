"""Exports of a run with adapters: PEFT's folder, a file for llama.cpp, merged; and what routes."""

import importlib
import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dipaco.inference import export_command
from dipaco.inference.export.adapter_peft import written_rank
from dipaco.inference.export.rounding import Rounding, RoundingMeter
from dipaco.inference.export.router_files import linear_router
from dipaco.inference.sources import DiskSource, assemble_path
from dipaco.protocol.config import AdaptersConfig
from dipaco.routing.routers.discriminative import DiscriminativeRouter
from dipaco.routing.routers.kmeans import KMeansRouter
from dipaco.routing.routers.product_kmeans import ProductKMeansRouter
from dipaco.routing.routers.router import Prefixes
from support.programs.service import greedy_text, run_with_adapters
from support.runs.routed_texts import route_texts
from support.runs.tiny_run import tiny_documents

TEXT = "The city lies by the river."
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(*arguments):
    return export_command.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A public base, `base`, and in `out` a run that trained adapters over it for two rounds."""
    folder = tmp_path_factory.mktemp("adapters")
    run_with_adapters(folder, AdaptersConfig(rank=3, alpha=5, base_format="float32"))
    return folder


@torch.no_grad()
def check_logits(folder, path, model):
    """Compare the logits after each token of a text with the run's."""
    source = DiskSource(folder / "out")
    tokens = torch.tensor([source.tokenizer().beginning(TEXT)])
    expected = assemble_path(source, path)(tokens)[0]
    found = model.float().eval()(tokens).logits[0]
    rows = found.shape[1]
    torch.testing.assert_close(found, expected[:, :rows], atol=1e-4, rtol=1e-4)
    # And so has every token the same probability.
    chances = expected.softmax(-1)[:, :rows]
    torch.testing.assert_close(found.softmax(-1), chances, atol=1e-5, rtol=1e-4)


def test_a_folder_for_peft_puts_the_path_on_the_unchanged_base(folder, tmp_path, capsys):
    out = tmp_path / "path-2"
    assert run("--state-dir", folder / "out", "--path", 2, "--out", out) == 0
    assert "no repository" not in capsys.readouterr().err
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 8  # of rank 3, with zeros
    assert config["base_model_name_or_path"] == "OWNER/tiny"
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, out)
    assert len(safetensors.torch.load_file(out / "adapter_model.safetensors")) == 14 * base.config.num_hidden_layers
    check_logits(folder, 2, model)
    card = (out / "README.md").read_text()
    assert "PeftModel.from_pretrained" in card
    assert "base_model: OWNER/tiny" in card
    assert run("--state-dir", folder / "out", "--path", 2, "--out", out, "--base-model", "tiny") == 0
    assert "call their base 'tiny', which is no repository of the Hub" in capsys.readouterr().err


def test_a_file_for_llama_cpp_has_rows_where_the_base_has_them(folder, tmp_path):
    out = tmp_path / "path.gguf"
    arguments = ["--state-dir", folder / "out", "--path", 1, "--format", "gguf", "--out", out]
    assert run(*arguments) == 0
    reader = gguf.GGUFReader(out)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter"
    assert fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == "llama"
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    assert fields["adapter.lora.alpha"] == len(tensors["blk.0.attn_q.weight.lora_a"]) == 8
    source = DiskSource(folder / "out")
    model = assemble_path(source, 1)
    assert len(tensors) == 14 * source.plan.model.block_count
    half = source.plan.model.width_of_head // 2
    for theirs, part in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
        name = f"model.layers.1.{part}"
        a, b = (model.get_parameter(f"{name}.lora_{f}.weight").detach() for f in "AB")
        expected = (5 / 3 * b @ a).numpy()
        weight = f"blk.1.{theirs}.weight"
        found = tensors[f"{weight}.lora_b"] @ tensors[f"{weight}.lora_a"]
        assert np.abs(expected).max() > 1e-3
        rows = [0, half] if theirs == "attn_q" else [0, 1]
        np.testing.assert_allclose(found[:2], expected[rows], atol=1e-6)


def test_merged_it_is_a_plain_checkpoint_that_its_card_describes(folder, tmp_path):
    out = tmp_path / "merged"
    arguments = ["--state-dir", folder / "out", "--path", 3, "--format", "transformers", "--out", out]
    assert run(*arguments) == 0
    check_logits(folder, 3, AutoModelForCausalLM.from_pretrained(out))
    card = (out / "README.md").read_text()
    assert "merged into the base" in card
    numbers = sum(t.numel() for t in safetensors.torch.load_file(out / "model.safetensors").values())
    assert f"model of {numbers:,} parameters" in card
    # As SmolLM2's, this tokenizer puts nothing in front of a text, and reads names of tokens.
    assert DiskSource(folder / "out").tokenizer().begin == ()
    assert len(AutoTokenizer.from_pretrained(out)("a").input_ids) == 1
    assert "a text had in front of it what this tokenizer puts there" in card
    assert "are read as text, as in training" not in card


def test_what_rounding_loses_is_measured():
    name = "model.layers.0.mlp.up_proj.weight"
    base = {name: torch.ones(1, 2), "model.embed_tokens.weight": torch.ones(9, 2)}
    merged = {**base, name: torch.tensor([[1 + 2**-9, 1.5]])}
    meter = RoundingMeter(base, torch.bfloat16)
    assert dict(meter.passing(merged.items())) == merged
    found = meter.rounding()
    assert found.unchanged == 0.5
    assert abs(found.error - 2**-8) < 1e-5
    same = RoundingMeter(base, torch.bfloat16)
    assert len(dict(same.passing(base.items()))) == 2
    assert same.rounding() == Rounding(1.0, 0.0)


def test_everything_with_a_router_that_needs_no_dipaco(folder, tmp_path):
    out, base = tmp_path / "all", folder / "base"
    arguments = ["--state-dir", folder / "out", "--all", "--out", out, "--base-model", base]
    assert run(*arguments) == 0
    assert not (out / "router" / "base").exists()
    router = runpy.run_path(str(out / "router" / "route.py"))["Router"]()
    source = DiskSource(folder / "out")
    texts = [*tiny_documents(4, 5, 7), TEXT, "def f(x): <|im_end|>"]
    expected = route_texts(source.document_router(torch.device("cpu")), texts).tolist()
    assert [router.path_of(text) for text in texts] == expected
    assert len(set(expected)) > 1
    chosen = router.folder_of(texts[0])
    assert (chosen / "adapter_config.json").is_file()
    # Given again, nothing is written again.
    before = (chosen / "adapter_model.safetensors").stat().st_mtime_ns
    assert run(*arguments) == 0
    assert (chosen / "adapter_model.safetensors").stat().st_mtime_ns == before


def test_the_demo_of_adapters_opens_an_export_in_peft(folder, tmp_path, monkeypatch):
    out, base = tmp_path / "all", folder / "base"
    assert run("--state-dir", folder / "out", "--all", "--out", out, "--base-model", base) == 0
    monkeypatch.syspath_prepend(EXAMPLES)
    demo_adapters = importlib.import_module("demo_adapters")
    monkeypatch.setattr(demo_adapters, "PROMPT", TEXT)
    said = demo_adapters.opened_by_peft(SimpleNamespace(environment=os.environ), base, out)
    source = DiskSource(folder / "out")
    path = int(route_texts(source.document_router(torch.device("cpu")), [TEXT])[0])
    tokens = source.tokenizer().beginning(TEXT)
    # As many as a training sequence has room for.
    room = source.plan.model.sequence_length - len(tokens)
    assert said.startswith(TEXT + greedy_text(source, path, tokens, room))


@pytest.mark.parametrize("kind", ["kmeans", "product_kmeans", "discriminative"])
def test_routers_of_every_kind_that_sees_features_are_affine(kind):
    drawn = np.random.default_rng(0).normal
    mean, scale = drawn(size=6), np.exp(drawn(size=6))
    matrix, books, biases = drawn(size=(6, 6)), drawn(size=(2, 3, 3)), drawn(size=6)
    router = {
        "kmeans": KMeansRouter(mean, scale, matrix, biases),
        "product_kmeans": ProductKMeansRouter(mean, scale, [books[0][:2], books[1]], biases),
        "discriminative": DiscriminativeRouter(mean, scale, matrix, biases),
    }[kind]
    weight, bias = linear_router(router)
    features = drawn(size=(200, 6)) * 2
    expected = router.route(Prefixes(features=features))
    assert (np.argmax(features @ weight.T + bias, axis=1) == expected).all()
    assert len(set(expected)) > 4


def test_ranks_are_those_that_vllm_takes():
    assert [written_rank(rank) for rank in (1, 2, 8, 12, 16, 200, 513)] == [1, 8, 8, 16, 16, 256, 513]


@pytest.mark.parametrize("family", ["gemma3", "phi3"])
def test_a_base_that_transformers_computes_is_exported_as_others_are(family, tmp_path, capsys):
    adapters = AdaptersConfig(rank=8, base_format="float32")
    source = run_with_adapters(tmp_path, adapters, family)
    out = tmp_path / "all"
    assert run("--state-dir", source, "--all", "--out", out, "--base-model", tmp_path / "base") == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    check_logits(tmp_path, 1, peft.PeftModel.from_pretrained(base, out / "paths" / "00001"))
    merged = tmp_path / "merged"
    assert run("--state-dir", source, "--path", 1, "--format", "transformers", "--out", merged) == 0
    check_logits(tmp_path, 1, AutoModelForCausalLM.from_pretrained(merged))
    router = runpy.run_path(str(out / "router" / "route.py"))["Router"]()
    texts = tiny_documents(4, 3, 1)
    routed = route_texts(DiskSource(source).document_router(torch.device("cpu")), texts)
    assert [router.path_of(text) for text in texts] == routed.tolist()
    capsys.readouterr()
    assert run("--state-dir", source, "--path", 1, "--format", "gguf", "--out", tmp_path / "x.gguf") == 3
    assert "convert_lora_to_gguf.py" in capsys.readouterr().err
