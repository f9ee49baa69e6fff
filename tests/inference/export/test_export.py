"""Exports are what `transformers` makes of them: the same logits, the same files."""

import json
import os
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from dipaco.base.errors import ConfigurationError, StorageError
from dipaco.inference import export_command
from dipaco.inference.export import whole_run
from dipaco.inference.export.form import ExportForm
from dipaco.inference.export.model_card import CardNotes, model_card
from dipaco.inference.export.path_exporter import Exporter, checkpoint_files, save_parameters, whole_folder
from dipaco.inference.sources import DiskSource, SwarmSource, assemble_path
from dipaco.modules.transformer import PathModel, initialise
from dipaco.simulator import cli as simulator_cli
from support.runs.routed_texts import route_texts
from support.runs.tiny_run import make_tiny_run, tiny_documents
from support.swarms.fake_reader import FakeReader

CPU = torch.device("cpu")


def run(*arguments):
    return export_command.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A simulated run of four paths with private parameters, two rounds."""
    folder = tmp_path_factory.mktemp("export")
    make_tiny_run(folder / "run", private_embedding=True, inner={"learning_rate": 0.02})
    arguments = [str(folder / "run"), "--rounds", "2", "--out", str(folder / "out")]
    assert simulator_cli.main([*arguments, "--json"]) == 0
    return folder / "out"


def logits_of(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return torch.as_tensor(model(tokens).logits)


def some_tokens(vocabulary_size, length):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary_size, (3, length), generator=generator)


def lively(model):
    """Make weights so large that every one of them matters to the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(8.0)
            else:
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
    return model


# -- models


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tied_embedding": False, "head_count": 4, "kv_head_count": 2},
        {"rope_theta": 500.0, "norm_epsilon": 1e-2, "feed_forward_size": 48},
    ],
    ids=["tied", "untied, grouped-query", "theta, epsilon"],
)
def test_logits_are_those_of_transformers(tmp_path, model):
    plan = make_tiny_run(tmp_path / "run", **model).plan()
    ours = PathModel(plan.model)
    initialise(ours, 3)
    lively(ours)
    source = DiskSource(tmp_path / "run")
    files = checkpoint_files(plan.model, source.blob(plan.blobs.tokenizer), torch.float32)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    save_parameters(ours.named_parameters(), tmp_path, torch.float32)
    tokens = some_tokens(plan.model.vocabulary_size, plan.model.sequence_length)
    with torch.no_grad():
        expected = ours(tokens)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(tmp_path, tokens), expected, atol=2e-4, rtol=1e-4)


def test_a_trained_path_is_exported(trained, tmp_path):
    assert run("--state-dir", trained, "--path", 2, "--out", tmp_path / "out") == 0
    source = DiskSource(trained)
    tokens = some_tokens(source.plan.model.vocabulary_size, 32)
    with torch.no_grad():
        expected = assemble_path(source, 2)(tokens)
    torch.testing.assert_close(logits_of(tmp_path / "out", tokens), expected, atol=1e-5, rtol=1e-5)
    note = json.loads((tmp_path / "out" / "dipaco.json").read_text())
    assert (note["run"], note["path"]) == (source.plan.run_id, 2)
    assert set(note["states"]) == set(source.grid.modules_of_path(2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_can_be_stored_in_half_the_bytes(trained, tmp_path, dtype):
    for name in ("float32", dtype):
        out = tmp_path / name
        assert run("--state-dir", trained, "--path", 1, "--out", out, "--dtype", name) == 0
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("float32", dtype)]
    assert sizes[1] < 0.6 * sizes[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    tokens = some_tokens(320, 32)
    torch.testing.assert_close(
        logits_of(tmp_path / dtype, tokens), logits_of(tmp_path / "float32", tokens),
        atol=0.02, rtol=0.02,
    )  # fmt: skip


def test_numbers_that_half_precision_cannot_hold_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'w' has numbers that float16 cannot hold"):
        save_parameters([("w", torch.tensor([1e6]))], tmp_path, torch.float16)


def test_the_same_states_give_the_same_bytes(trained, tmp_path):
    for name in ("a", "b"):
        assert run("--state-dir", trained, "--path", 0, "--out", tmp_path / name) == 0
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert "model.safetensors" in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_of_a_swarm_only_the_modules_of_the_path_are_fetched(trained, tmp_path):
    reader = FakeReader(trained, tmp_path / "cache")
    with SwarmSource(reader) as source:
        Exporter(source, ExportForm()).write_path(1, tmp_path / "out")
        assert reader.fetched == list(source.grid.modules_of_path(1))
        card = model_card(source, CardNotes(), ExportForm())
    assert "| trained | not known |" in card
    arguments = ["--state-dir", trained, "--path", 1, "--out", tmp_path / "disk"]
    assert run(*arguments) == 0
    files = [tmp_path / folder / "model.safetensors" for folder in ("out", "disk")]
    assert files[0].read_bytes() == files[1].read_bytes()


# -- tokenizers


# -- folders


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "out"

    def fill_half():
        with whole_folder(folder) as staging:
            (staging / "file").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill_half()
    assert list(tmp_path.iterdir()) == []
    for text in ("one", "two"):
        with whole_folder(folder) as staging:
            (staging / text).write_text(text)
    assert [file.name for file in folder.iterdir()] == ["two"]
    assert list(tmp_path.iterdir()) == [folder]


def test_only_an_export_of_the_same_is_replaced(trained, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--state-dir", trained, "--out", out]
    assert run(*arguments, "--path", 1) == 0
    assert run(*arguments, "--path", 1) == 0
    assert "was there already" in capsys.readouterr().out
    assert run(*arguments, "--path", 2) == ConfigurationError.exit_code
    assert "holds an export of path 1, not 2" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    arguments = ["--state-dir", trained, "--path", 1, "--out", tmp_path / "other"]
    assert run(*arguments) == ConfigurationError.exit_code
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "other" / "thesis.txt").read_text() == "precious"


def test_what_is_missing_is_named(trained, tmp_path, capsys):
    arguments = ["--state-dir", trained, "--out", tmp_path / "out"]
    assert run(*arguments, "--path", 4) == ConfigurationError.exit_code
    assert "paths 0 to 3" in capsys.readouterr().err
    prepared = trained.parent / "run"
    arguments = ["--state-dir", prepared, "--path", 1, "--out", tmp_path / "out"]
    assert run(*arguments) == StorageError.exit_code
    assert "there is no state of its module L0.E0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(*arguments, "--allow-genesis") == 0


# -- a whole run


def report_of(trained):
    row = {"perplexity": 12.345, "tokens": 100, "documents": 3, "base_perplexity": 20.0}
    paths = [{"path": path, **row, "perplexity": 10.25 + path} for path in range(4)]
    run_id = DiskSource(trained).plan.run_id
    return {"run": run_id, **row, "paths": paths, "labels": {"prose": row}}


def test_a_run_is_exported(trained, tmp_path, capsys, monkeypatch):
    (tmp_path / "eval.json").write_text(json.dumps(report_of(trained)))
    (tmp_path / "DATA.md").write_text("Made up for a test.\n")
    out = tmp_path / "out"
    arguments = [
        "--state-dir", trained, "--all", "--out", out, "--eval-json", tmp_path / "eval.json",
        "--licence", "apache-2.0", "--attribution", tmp_path / "DATA.md",
    ]  # fmt: skip
    assert run(*arguments) == 0
    shown = capsys.readouterr().err
    assert shown.startswith("4 paths of ")
    assert "free in" in shown.splitlines()[0]
    card = (out / "README.md").read_text()
    for words in ("12.35", "20.00", "13.25", "apache-2.0", "Made up for a test.", "2 x 2, 4 paths",
                  "the embedding", "in 2 rounds", "| prose | 12.35 | 100 |"):  # fmt: skip
        assert words in card
    figures = json.loads((out / "router" / "routing.json").read_text())
    assert sum(row["share"] for row in figures["paths"]) == pytest.approx(1)
    source = DiskSource(trained)
    tokens = some_tokens(320, 32)
    for path in range(4):
        with torch.no_grad():
            expected = assemble_path(source, path)(tokens)
        folder = out / "paths" / f"{path:05d}"
        torch.testing.assert_close(logits_of(folder, tokens), expected, atol=1e-5, rtol=1e-5)
    check_router_readme(source, out, monkeypatch)
    assert run(*arguments) == 0
    assert capsys.readouterr().err.count("was there already") == 4


def check_router_readme(source, out, monkeypatch):
    """Run the program in the README as its reader would."""
    readme = (out / "router" / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(out)
    names = {}
    exec(program, names)
    texts = tiny_documents(4, 3, 9)
    expected = route_texts(source.document_router(CPU), texts).tolist()
    assert [names["path_of"](text) for text in texts] == expected
    assert len(set(expected)) > 1


def test_modules_that_paths_share_are_stored_once(trained, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("--state-dir", trained, "--all", "--out", out) == 0
    assert "shared modules stored once" in capsys.readouterr().err
    shards = [out / "paths" / f"{p:05d}" / "model-00001-of-00003.safetensors" for p in range(4)]
    assert shards[0].samefile(shards[1])
    assert not shards[1].samefile(shards[2])
    assert len(list((out / "modules").iterdir())) == 4
    source = DiskSource(trained)
    tokens = some_tokens(320, 32)
    with torch.no_grad():
        expected = assemble_path(source, 3)(tokens)
    found = logits_of(out / "paths" / "00003", tokens)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def files_and_inodes(folder):
    files = (*folder.glob("paths/*/*.safetensors"), *folder.glob("modules/*"))
    return {str(file.relative_to(folder)): file.stat().st_ino for file in files}


def test_a_second_export_of_a_run_changes_nothing(trained, tmp_path):
    arguments = ["--state-dir", trained, "--all", "--out", tmp_path]
    assert run(*arguments) == 0
    first = files_and_inodes(tmp_path)
    assert run(*arguments) == 0
    assert files_and_inodes(tmp_path) == first
    # A path that is written anew shares its modules with those that are there.
    shutil.rmtree(tmp_path / "paths" / "00003")
    assert run(*arguments) == 0
    again = files_and_inodes(tmp_path)
    shared = {name for name in first if "00003-of" not in name}
    assert again.keys() == first.keys()
    assert {name: again[name] for name in shared} == {name: first[name] for name in shared}


def test_another_tokenizer_flag_is_another_export(trained, tmp_path):
    arguments = ["--state-dir", trained, "--path", 1, "--out", tmp_path / "out"]
    assert run(*arguments, "--tokenizer", "sentencepiece") == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert run(*arguments) == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_without_hard_links_shared_modules_are_copied(trained, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    source = DiskSource(trained)
    exporter = Exporter(source, ExportForm(), share_in=tmp_path / "modules")
    exporter.write_path(1, tmp_path / "out")
    assert logits_of(tmp_path / "out", some_tokens(320, 8)).isfinite().all()


def test_a_disk_that_is_too_small_is_seen_before(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(whole_run, "_free_bytes", lambda folder: 2**26 + 1000)
    arguments = ["--state-dir", trained, "--all", "--out", tmp_path / "out"]
    assert run(*arguments) == StorageError.exit_code
    shown = capsys.readouterr().err
    assert "disk too small: the export needs" in shown
    assert "--dtype bfloat16" in shown
    assert not (tmp_path / "out").exists()


def test_sizes_are_foreseen(trained, tmp_path):
    assert run("--state-dir", trained, "--all", "--out", tmp_path) == 0
    files = {file.stat().st_ino: file.stat().st_size for file in tmp_path.rglob("*.safetensors")}
    foreseen = whole_run.export_bytes(DiskSource(trained).grid, torch.float32, shared=True)
    assert foreseen == pytest.approx(sum(files.values()), rel=0.4)
    assert foreseen <= sum(files.values())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "is not what 'dipaco-eval --json' prints"),
        ("[1]", "is not what 'dipaco-eval --json' prints"),
        ("\udcff", "is not what 'dipaco-eval --json' prints"),
        ('{"run": "0123", "perplexity": 3.5, "paths": []}', "is of the run 0123"),
    ],
)
def test_figures_of_something_else_are_refused(trained, tmp_path, capsys, content, words):
    (tmp_path / "eval.json").write_text(content, errors="surrogateescape")
    arguments = ["--state-dir", trained, "--all", "--out", tmp_path / "out"]
    found = run(*arguments, "--eval-json", tmp_path / "eval.json")
    assert found == ConfigurationError.exit_code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_labels_are_read_in_the_card_as_they_are(trained):
    """A bar would begin another cell, a line break end the table."""
    figures = report_of(trained)
    row = figures["labels"]["prose"]
    figures["labels"] = dict.fromkeys(("a|b", "c\r\n---\nd", "`e\\`", "\x1bf", "x_y"), row)
    with DiskSource(trained) as source:
        card = model_card(source, CardNotes(), ExportForm(), evaluation=figures)
    table = card[card.index("| documents |") :].split("\n\n")[0].splitlines()
    named = [line.removesuffix(" | 12.35 | 100 |") for line in table[2:]]
    assert named == [r"| a\|b", "| c  --- d", r"| \`e\\\`", "| ?f", "| x_y"]
    results = ModelCard(card).data.eval_results
    assert results is not None
    assert [one.dataset_config for one in results[1:]] == ["a|b", "c  --- d", "`e\\`", "?f", "x_y"]


def test_a_card_without_figures_says_so(trained, tmp_path):
    assert run("--state-dir", trained, "--all", "--out", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "No evaluation was given" in card
    assert "was not told where the texts come from" in card


def test_the_card_says_whether_vllm_has_kernels_for_it(trained, tmp_path):
    with DiskSource(trained) as source:
        card = model_card(source, CardNotes(), ExportForm(), path=0)
    assert "vLLM has no kernels for heads of 8 numbers" in card
    make_tiny_run(tmp_path / "run", hidden_size=64, head_count=2)
    options = ["--state-dir", tmp_path / "run", "--allow-genesis"]
    assert run(*options, "--path", 1, "--out", tmp_path / "out") == 0
    assert "`vllm serve .`" in (tmp_path / "out" / "README.md").read_text()
    # What vLLM reads of a checkpoint's configuration.
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["head_dim"], config["hidden_act"]) == (32, "silu")
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
