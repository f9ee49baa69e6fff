"""Exports of whole paths are what `transformers` makes of them: the same logits, the same files."""

import json
import os
import re
import runpy
import shutil
import sys

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from dipaco.base.errors import ConfigurationError, StorageError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.inference import export_command
from dipaco.inference.export import whole_run
from dipaco.inference.export.checkpoint import save_tensors
from dipaco.inference.export.export_folder import whole_folder
from dipaco.inference.export.exporter import Exporter
from dipaco.inference.export.form import ExportForm
from dipaco.inference.export.model_card import model_card
from dipaco.inference.sources import DiskSource, SourceSettings, SwarmSource, assemble_path
from dipaco.routing.routers.simple_routers import LabelRouter
from dipaco.simulator import simulate_command as simulator_cli
from support.programs.processes import ran
from support.runs.foreign_base import make_foreign_base
from support.runs.routed_texts import route_texts
from support.runs.tiny_run import make_tiny_run, sign_tiny_run, tiny_documents
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


@torch.no_grad()
def logits_of(folder, tokens):
    return AutoModelForCausalLM.from_pretrained(folder).float().eval()(tokens).logits


def some_tokens(length=32):
    return torch.randint(0, 320, (3, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def check_path(source, path, folder):
    expected = assemble_path(source, path)(some_tokens())
    torch.testing.assert_close(logits_of(folder, some_tokens()), expected, atol=1e-5, rtol=1e-5)


# -- one path


def test_a_path_has_its_logits_and_the_same_bytes_each_time(trained, tmp_path):
    for name in ("a", "b"):
        assert run("--state-dir", trained, "--path", 2, "--out", tmp_path / name) == 0
    source = DiskSource(trained)
    check_path(source, 2, tmp_path / "a")
    note = json.loads((tmp_path / "a" / "dipaco.json").read_text())
    assert (note["run"], note["part"]) == (source.plan.run_id, 2)
    assert set(note["states"]) == set(source.grid.modules_of_path(2))
    files = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    assert "model.safetensors" in files
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_can_be_stored_in_half_the_bytes(trained, tmp_path, dtype):
    assert run("--state-dir", trained, "--path", 1, "--out", tmp_path / "out", "--dtype", dtype) == 0
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    expected = dict(assemble_path(DiskSource(trained), 1).named_parameters())
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, expected[name].to(getattr(torch, dtype)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == getattr(torch, dtype)


def test_numbers_that_half_precision_cannot_hold_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'w' has numbers that float16 cannot hold"):
        save_tensors([("w", torch.tensor([1e6]))], tmp_path / "file", torch.float16)


def test_of_a_swarm_only_the_modules_of_the_path_are_fetched(trained, tmp_path):
    reader = FakeReader(trained, tmp_path / "cache")
    with SwarmSource(reader) as source:
        Exporter(source, ExportForm()).write_path(1, tmp_path / "out")
        assert reader.fetched == list(source.grid.modules_of_path(1))
        assert "| trained | not known |" in model_card(source, ExportForm())
    assert run("--state-dir", trained, "--path", 1, "--out", tmp_path / "disk") == 0
    files = [tmp_path / folder / "model.safetensors" for folder in ("out", "disk")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_missing_is_named(trained, tmp_path, capsys):
    arguments = ["--state-dir", trained, "--out", tmp_path / "out"]
    assert run(*arguments, "--path", 4) == ConfigurationError.exit_code
    assert "paths 0 to 3" in capsys.readouterr().err
    assert run(*arguments, "--path", 1, "--format", "peft") == ConfigurationError.exit_code
    assert "run 'tiny' has no adapters" in capsys.readouterr().err
    prepared = trained.parent / "run"
    arguments = ["--state-dir", prepared, "--path", 1, "--out", tmp_path / "out"]
    assert run(*arguments) == StorageError.exit_code
    assert "there is no state of its module L0.E0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(*arguments, "--allow-genesis") == 0


# -- folders


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    folder, note = tmp_path / "out", {"format": "f", "run": "r", "part": 0}

    def fill_half():
        with whole_folder(folder, note) as staging:
            (staging / "file").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill_half()
    assert list(tmp_path.iterdir()) == []
    for text in ("one", "two"):
        with whole_folder(folder, note) as staging:
            (staging / text).write_text(text)
    assert {file.name for file in folder.iterdir()} == {"two", "dipaco.json"}
    assert list(tmp_path.iterdir()) == [folder]


def test_only_an_export_of_the_same_is_replaced(trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    arguments = ["--state-dir", trained, "--out", out]
    assert run(*arguments, "--path", 1) == 0
    assert run(*arguments, "--path", 1) == 0
    assert "was there already" in capsys.readouterr().out
    assert run(*arguments, "--path", 1, "--dtype", "bfloat16") == 0
    assert "was there already" not in capsys.readouterr().out
    for other in (["--path", 2], ["--all"]):
        assert run(*arguments, *other) == ConfigurationError.exit_code
        assert "holds an export of part 1, not" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    arguments = ["--state-dir", trained, "--path", 1, "--out"]
    assert run(*arguments, tmp_path / "other") == ConfigurationError.exit_code
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "other" / "thesis.txt").read_text() == "precious"
    monkeypatch.chdir(out)
    assert run(*arguments, ".") == ConfigurationError.exit_code
    assert "is the present folder, and cannot be replaced" in capsys.readouterr().err


def test_a_link_to_a_folder_is_filled_where_it_leads(trained, tmp_path):
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "path-0").symlink_to("large-disk")
    assert run("--state-dir", trained, "--path", 0, "--out", tmp_path / "path-0") == 0
    assert (tmp_path / "large-disk" / "model.safetensors").is_file()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["large-disk", "path-0"]


# -- a whole run


def test_a_run_is_exported_with_what_routes(trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    # What the base is called does not change that the paths are whole.
    arguments = ["--state-dir", trained, "--all", "--out", out, "--base-model", "OWNER/NAME"]
    assert run(*arguments) == 0
    assert re.match(r"4 paths as float32: .* to write, .* free in ", capsys.readouterr().err)
    card = (out / "README.md").read_text()
    for words in ("2 x 2, 4 paths", "the embedding", "in 2 rounds", "The run does not say where its texts come from"):
        assert words in card
    source = DiskSource(trained)
    for path in range(4):
        check_path(source, path, out / "paths" / f"{path:05d}")
    check_route(source, out)
    first = files_and_inodes(out)
    shards = [out / "paths" / f"{p:05d}" / "model-00001-of-00003.safetensors" for p in range(4)]
    assert shards[0].samefile(shards[1])
    assert not shards[1].samefile(shards[2])
    assert len({first[name] for name in first if "paths" in name}) == 8  # 2 + 2 shared, 4 of one path
    assert run(*arguments) == 0
    assert capsys.readouterr().err.count("was there already") == 4
    assert files_and_inodes(out) == first
    # A path that is written anew shares its modules with those that are there.
    shutil.rmtree(out / "paths" / "00003")
    assert run(*arguments) == 0
    assert len(set(files_and_inodes(out).values())) == len(set(first.values()))


def files_and_inodes(folder):
    files = [*folder.glob("paths/*/*.safetensors"), *folder.glob("router/base/*.safetensors")]
    return {str(file.relative_to(folder)): file.stat().st_ino for file in files}


def check_route(source, out):
    """What routes needs no dipaco, and finds what the run's own router does."""
    script = out / "router" / "route.py"
    assert "import dipaco" not in script.read_text()
    assert "from dipaco" not in script.read_text()
    router = runpy.run_path(str(script))["Router"]()
    texts = [*tiny_documents(4, 3, 9), "def f(x): </s><|im_end|>"]
    expected = route_texts(source.document_router(CPU), texts).tolist()
    assert [router.path_of(text) for text in texts] == expected
    assert len(set(expected)) > 1
    folder = out / "paths" / f"{expected[0]:05d}"
    assert router.folder_of(texts[0]) == folder
    done = ran(sys.executable, str(script), texts[0])
    assert (done.stdout, done.stderr) == (f"{folder}\n", "")


def test_a_router_of_labels_is_a_table(tmp_path):
    run_folder = make_tiny_run(tmp_path / "run")
    plan = run_folder.plan()
    router = LabelRouter(4, 0, {"law": 3, "code": 0})
    blobs = plan.blobs.model_copy(update={"router": run_folder.blobs.add_bytes(router.to_bytes())})
    routing = plan.routing.model_copy(update={"kind": "label"})
    sign_tiny_run(run_folder, plan.model_copy(update={"blobs": blobs, "routing": routing}))
    out = tmp_path / "out"
    assert run("--state-dir", tmp_path / "run", "--allow-genesis", "--all", "--out", out) == 0
    table = json.loads((out / "router" / "route.json").read_text())
    assert table["labels"] == {"law": "paths/00003", "code": "paths/00000"}
    assert {file.name for file in (out / "router").iterdir()} == {"route.json", "router.safetensors"}
    assert "`router/route.json` names the folder of each label" in (out / "README.md").read_text()


def test_newer_states_replace_older_ones(trained, tmp_path):
    out = tmp_path / "out"
    started = ["--state-dir", trained.parent / "run", "--allow-genesis"]
    assert run(*started, "--all", "--out", out) == 0
    assert run("--state-dir", trained, "--all", "--out", out) == 0
    check_path(DiskSource(trained), 3, out / "paths" / "00003")
    names = {str(file.relative_to(out)) for file in out.rglob("*")}
    assert run("--state-dir", trained, "--all", "--out", tmp_path / "fresh") == 0
    assert names == {str(file.relative_to(tmp_path / "fresh")) for file in (tmp_path / "fresh").rglob("*")}


def test_a_run_is_exported_around_a_path_that_was_exported_alone(trained, tmp_path):
    out = tmp_path / "out"
    assert run("--state-dir", trained, "--all", "--out", out) == 0
    for path in ("00000", "00001"):
        shutil.rmtree(out / "paths" / path)
    assert run("--state-dir", trained, "--path", "0", "--out", out / "paths" / "00000") == 0
    assert run("--state-dir", trained, "--all", "--out", out) == 0
    for path in (0, 1):
        check_path(DiskSource(trained), path, out / "paths" / f"{path:05d}")


def test_the_index_tells_the_bytes_of_all_tensors(tmp_path):
    """Also of tables from which the rows are cut that the run added to its base."""
    make_foreign_base(tmp_path / "base", "llama")
    make_tiny_run(tmp_path / "run", imported=ImportedBase(tmp_path / "base"))
    source = DiskSource(tmp_path / "run", SourceSettings(allow_genesis=True))
    assert not source.plan.model.tied_embedding
    Exporter(source, ExportForm()).write_path(0, tmp_path / "out", shares=True)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
    assert len(tensors["lm_head.weight"]) < source.plan.model.vocabulary_size
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_without_hard_links_shared_modules_are_copied(trained, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    source = DiskSource(trained)
    exporter = Exporter(source, ExportForm())
    for path in (0, 1):
        exporter.write_path(path, tmp_path / str(path), shares=True)
    check_path(source, 1, tmp_path / "1")


def test_a_disk_that_is_too_small_is_seen_before(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(whole_run, "spare_bytes", lambda folder: 1000)
    arguments = ["--state-dir", trained, "--all", "--out", tmp_path / "out"]
    assert run(*arguments) == StorageError.exit_code
    shown = capsys.readouterr().err
    assert "disk too small: the export needs" in shown
    assert "--dtype bfloat16" in shown
    assert not (tmp_path / "out").exists()


def test_sizes_are_foreseen(trained, tmp_path):
    assert run("--state-dir", trained, "--all", "--out", tmp_path) == 0
    files = {file.stat().st_ino: file.stat().st_size for file in tmp_path.rglob("*.safetensors")}
    foreseen = whole_run.export_bytes(Exporter(DiskSource(trained), ExportForm()))
    assert foreseen == pytest.approx(sum(files.values()), rel=0.4)
    assert foreseen <= sum(files.values())


# -- cards


def test_the_program_of_a_card_runs_as_it_stands(trained, tmp_path, capsys, monkeypatch):
    assert run("--state-dir", trained, "--all", "--out", tmp_path) == 0
    for folder in (tmp_path, tmp_path / "paths" / "00002"):
        program = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
        monkeypatch.chdir(folder)
        capsys.readouterr()
        exec(program, {})
        assert capsys.readouterr().out.startswith("<s>The city lies")


def test_the_card_says_whether_vllm_has_kernels_for_it(trained, tmp_path):
    with DiskSource(trained) as source:
        card = model_card(source, ExportForm(), path=0)
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
