"""A run that begins with a Qwen3 or a SmolLM2 and its tokenizer.json, is trained, and goes back as
such a one."""

import io
import json
import runpy

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from dipaco.bootstrap.import_base import ImportedBase
from dipaco.bootstrap.plan.figures import plan_figures
from dipaco.bootstrap.plan_tables import show_figures
from dipaco.bootstrap.prepare_output import Display
from dipaco.bootstrap.run_config import load_run_config
from dipaco.inference import export_command
from dipaco.inference.sources import DiskSource, assemble_path
from dipaco.protocol.config import ModelFields
from dipaco.simulator import simulate_command as simulator_cli
from support.runs.foreign_base import HARD_TEXTS, make_foreign_base
from support.runs.prepared_run import CPU, on_cpu, prepare, write_run
from support.runs.routed_texts import route_texts

TOML = """
name = "foreign"
base = "base"
[data]
train = "train.jsonl"
[model]
sequence_length = 32
[router]
prefix_tokens = 8
"""


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def trained(tmp_path_factory, request):
    """The base, what one simulated round made of it, `trained`, and path 1 of that, `path`."""
    folder = tmp_path_factory.mktemp("foreign")
    make_foreign_base(folder / "base", request.param)
    file = write_run(folder, TOML)
    with (folder / "train.jsonl").open("a") as corpus:
        corpus.write(json.dumps({"text": "a page\x04 and\x13 words \x04" * 9}) + "\n")
    prepare(file, folder / "run", on_cpu())
    arguments = [str(folder / "run"), "--rounds", "1", "--steps-per-round", "2", "--json"]
    assert simulator_cli.main([*arguments, "--out", str(folder / "trained")]) == 0
    arguments = ["--state-dir", str(folder / "trained"), "--path", "1"]
    assert export_command.main([*arguments, "--out", str(folder / "path")]) == 0
    return folder


def test_what_the_base_cannot_write_is_said_once(tmp_path):
    make_foreign_base(tmp_path / "base", "smollm2")
    file, said = write_run(tmp_path, TOML), io.StringIO()
    with (tmp_path / "train.jsonl").open("a") as corpus:
        corpus.write(json.dumps({"text": "a page\x04 and\x13 words \x04" * 9}) + "\n")
    prepare(file, tmp_path / "run", on_cpu(Display(Console(file=said, width=200))))
    assert said.getvalue().count("27 characters were left out of the texts") == 1


def test_a_plan_says_which_part_is_the_base_s(trained):
    config = load_run_config(trained / "RUN.toml")
    figures, shown = plan_figures(config), io.StringIO()
    assert figures.base.rank is None
    assert figures.base.parameters == figures.path_parameters
    assert figures.base.in_tables == config.model.vocabulary_size * config.model.hidden_size
    show_figures(figures, Console(file=shown, width=400))
    assert "A path begins as the base 'base' and trains all of it: 0.0" in shown.getvalue()


def test_a_path_goes_back_to_its_family(trained):
    source = DiskSource(trained / "trained")
    theirs = AutoModelForCausalLM.from_pretrained(trained / "path").eval()
    auto = AutoTokenizer.from_pretrained(trained / "path")
    base = AutoTokenizer.from_pretrained(trained / "base")
    assert type(theirs) is type(AutoModelForCausalLM.from_pretrained(trained / "base"))
    ours = source.tokenizer()
    for text in HARD_TEXTS:
        ids = auto(text).input_ids
        assert ours.encode(text) == ids == base(text).input_ids
    tokens = torch.tensor([ours.encode("".join(HARD_TEXTS))[:32]])
    with torch.no_grad():
        expected = assemble_path(source, 1)(tokens)[..., : theirs.config.vocab_size]
        found = theirs(tokens).logits
    assert float((found - expected).abs().max()) < 1e-5
    chat = [{"role": "user", "content": "ba du"}]
    rendered = auto.apply_chat_template(chat, tokenize=False)
    assert rendered == "<|im_start|>user\nba du<|im_end|>\n"
    assert ours.encode_marked(rendered) == auto(rendered).input_ids


def test_what_a_base_says_of_itself_comes_back(trained):
    for name, keys in {
        "config.json": (
            "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
            "tie_word_embeddings", "rms_norm_eps", "head_dim",
        ),
        "generation_config.json": (
            "bos_token_id", "eos_token_id", "pad_token_id", "temperature", "do_sample",
            "suppress_tokens", "top_k",
        ),
        "tokenizer_config.json": ("bos_token", "pad_token", "unk_token", "chat_template"),
        "tokenizer.json": ("model", "post_processor", "pre_tokenizer", "decoder", "normalizer"),
    }.items():  # fmt: skip
        before, after = (json.loads((folder / name).read_text()) for folder in (trained / "base", trained / "path"))
        assert {k: after.get(k) for k in keys} == {k: before.get(k) for k in keys}, name
    files = [folder / "tokenizer.json" for folder in (trained / "base", trained / "path")]
    added = [json.loads(file.read_text())["added_tokens"] for file in files]
    names = [[token["content"] for token in tokens] for tokens in added]
    assert names[0] == names[1]


def test_an_exported_path_is_a_base_again(trained):
    source, base = DiskSource(trained / "trained"), ImportedBase(trained / "path")
    tokenizer = source.blob(source.plan.blobs.tokenizer)
    assert base.tokenizer == tokenizer
    model = source.plan.model
    assert base.agreed_model(ModelFields(sequence_length=32), "it") == model
    expected = dict(assemble_path(source, 1).named_parameters())
    for name, value in base.parameters().items():
        if value.shape[0] == model.vocabulary_size:
            assert torch.equal(expected[name][:-1], value[:-1])
        else:
            assert torch.equal(expected[name], value)


def test_the_router_of_an_export_sees_the_tokens_of_the_run(trained, tmp_path):
    out = tmp_path / "out"
    arguments = ["--state-dir", str(trained / "trained"), "--all"]
    assert export_command.main([*arguments, "--out", str(out)]) == 0
    router = runpy.run_path(str(out / "router" / "route.py"))["Router"]()
    texts = ["12 34 56 78 90 11", "the ship and sea a wind the ship", "if x: if x: if x:"]
    expected = route_texts(DiskSource(trained / "trained").document_router(CPU), texts).tolist()
    assert [router.path_of(text) for text in texts] == expected
