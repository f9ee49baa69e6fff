"""A run with adapters is used as any other: scored, continued, served, over one base."""

import json
import shutil

import pytest
import torch

from dipaco.base.errors import StorageError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.inference import evaluate_command, generate_command
from dipaco.inference.sources import DiskSource, SourceSettings, assemble_path
from dipaco.modules.layout import layout_of
from dipaco.modules.state import genesis_state
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import AdaptersConfig
from dipaco.protocol.grid import Grid
from dipaco.routing.run_folder import RunFolder
from support.programs.service import trained_run
from support.runs.foreign_base import make_foreign_base
from support.runs.tiny_run import make_tiny_run, tiny_documents

ADAPTERS = AdaptersConfig(rank=4)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    make_foreign_base(folder / "checkpoint", "smollm2")
    return trained_run(
        folder,
        *("--dense-steps", "16"),
        rounds=4,
        modules_per_level=(1, 4),
        imported=ImportedBase(folder / "checkpoint"),
        adapters=ADAPTERS,
        inner={"learning_rate": 1e-2},
    )


def test_paths_are_better_than_the_base(out, tmp_path, capsys):
    texts = tmp_path / "held_out.jsonl"
    texts.write_text("\n".join(json.dumps({"text": t}) for t in tiny_documents(4, 6, 1_000_003)))
    arguments = ["--state-dir", str(out), "--data", str(texts), "--json", "--mix", "2"]
    arguments += ["--baseline", str(out / "dense.safetensors")]
    assert evaluate_command.main(arguments) == 0
    trained = json.loads(capsys.readouterr().out)
    for module in ("L0.E0", "L1.E0", "L1.E1", "L1.E2", "L1.E3"):
        assert RunFolder(out).states.digests(module)
    assert trained["perplexity"] < 0.9 * trained["base_perplexity"]
    assert trained["mixed_perplexity"] < 0.9 * trained["base_perplexity"]
    assert trained["baseline_perplexity"] < trained["base_perplexity"]


@pytest.mark.parametrize("more", [[], ["--mix", "2"], ["--choose", "3"]])
def test_the_command_goes_on_with_a_text(out, capsys, more):
    arguments = ["bada", "--state-dir", str(out), "--max-tokens", "8", "--temperature", "0"]
    assert generate_command.main([*arguments, *more]) == 0
    assert capsys.readouterr().out.startswith("bada")


def test_states_of_another_model_are_refused(out, tmp_path, capsys, caplog):
    run = RunFolder(out)
    plan = run.plan()
    wider = plan.model.model_copy(update={"adapters": AdaptersConfig(rank=8)})
    grid = Grid(wider, plan.grid)
    parameters = {n: torch.zeros(p.shape) for n, p in PathModel(wider).named_parameters()}
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(run.manifest_path.read_bytes())
    (folder / "blobs").symlink_to(out / "blobs")
    for module in grid.modules():
        RunFolder(folder).states.save(genesis_state(module, layout_of(grid, module), parameters))
    with pytest.raises(StorageError, match="no state of its module L0.E0"):
        assemble_path(DiskSource(folder, SourceSettings()), 0)
    name = "model.layers.0.mlp.down_proj.lora_A.weight"
    assert f"describes 'momentum/{name}' otherwise" in caplog.text
    assert "another model" in caplog.text
    # Each module is complained of once, though a folder that a peer writes is read again.
    modules = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert len(modules) == len(set(modules))


def test_states_of_another_run_of_the_same_shape_are_not_used(out, tmp_path):
    """Nothing in them tells adapters of one run from those of another."""
    other = make_tiny_run(
        tmp_path / "other",
        modules_per_level=(1, 4),
        imported=ImportedBase(out.parent / "checkpoint"),
        adapters=ADAPTERS,
    )
    shutil.copytree(out / "store", other.path / "store")
    with pytest.raises(StorageError, match="no state of its module L0.E0; .*other/store"):
        assemble_path(DiskSource(other.path, SourceSettings()), 0)
