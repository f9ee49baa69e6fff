"""A run that begins with a Qwen3 and its tokenizer.json, is trained, and goes back as a Qwen3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_base import HARD_TEXTS, make_foreign_base
from support.prepared_run import CPU, quiet_display, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from dipaco.bootstrap.import_base import ImportedBase
from dipaco.bootstrap.prepare import prepare
from dipaco.inference import export_cli
from dipaco.inference.sources import DiskSource, assemble_path
from dipaco.modules.config import BEGIN_TOKEN
from dipaco.routing.tokenizer_json import JsonPieces
from dipaco.simulator import cli as simulator_cli

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the base, and of what one simulated round made of it."""
    folder = tmp_path_factory.mktemp("foreign")
    make_foreign_base(folder / "base", "qwen3")
    prepare(write_run(folder, TOML), folder / "run", device=CPU, display=quiet_display())
    arguments = [str(folder / "run"), "--rounds", "1", "--steps-per-round", "2", "--json"]
    assert simulator_cli.main([*arguments, "--out", str(folder / "trained")]) == 0
    return folder


def test_a_path_goes_back_to_its_family(trained: Path, tmp_path: Path) -> None:
    source = DiskSource(trained / "trained")
    arguments = ["--state-dir", str(trained / "trained"), "--path", "1"]
    assert export_cli.main([*arguments, "--out", str(tmp_path / "path")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "path").eval()
    auto = AutoTokenizer.from_pretrained(tmp_path / "path")
    base = AutoTokenizer.from_pretrained(trained / "base")
    assert type(theirs) is Qwen3ForCausalLM
    ours = source.tokenizer()
    pieces = JsonPieces(source.blob(source.plan.blobs.tokenizer), "it")
    order = torch.from_numpy(pieces.file_order(source.plan.model.vocabulary_size))
    for text in HARD_TEXTS:
        ids = auto(text).input_ids
        assert order[[BEGIN_TOKEN, *ours.encode(text)]].tolist() == ids
        assert ids[1:] == base(text).input_ids
    tokens = torch.tensor([[BEGIN_TOKEN, *ours.encode("".join(HARD_TEXTS))][:32]])
    with torch.no_grad():
        expected = assemble_path(source, 1)(tokens)
        found = theirs(order[tokens]).logits[..., order]
    assert float((found - expected).abs().max()) < 1e-5
    chat: list[dict[str, Any]] = [{"role": "user", "content": "ba du"}]
    rendered = auto.apply_chat_template(chat, tokenize=False)
    assert rendered == "<|im_start|>user\nba du<|im_end|>\n"
    assert order[ours.encode_marked(rendered)].tolist() == auto(rendered).input_ids[1:]
    generation = json.loads((tmp_path / "path" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == auto.eos_token_id == base.eos_token_id


def test_an_exported_path_is_a_base_again(trained: Path, tmp_path: Path) -> None:
    arguments = ["--state-dir", str(trained / "trained"), "--path", "1"]
    assert export_cli.main([*arguments, "--out", str(tmp_path / "path")]) == 0
    source, base = DiskSource(trained / "trained"), ImportedBase(tmp_path / "path")
    assert base.tokenizer == source.blob(source.plan.blobs.tokenizer)
    assert base.model == source.plan.model
    expected = dict(assemble_path(source, 1).named_parameters())
    assert all(torch.equal(expected[name], value) for name, value in base.parameters().items())


def test_the_router_of_an_export_sees_the_tokens_of_the_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = ["--state-dir", str(trained / "trained"), "--all"]
    assert export_cli.main([*arguments, "--out", str(out)]) == 0
    program = (out / "router" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(out)
    names: dict[str, Any] = {}
    exec(program, names)
    texts = ["12 34 56 78 90 11", "the ship and sea a wind the ship", "if x: if x: if x:"]
    expected = DiskSource(trained / "trained").document_router(CPU).route_texts(texts).tolist()
    assert [names["path_of"](text) for text in texts] == expected
