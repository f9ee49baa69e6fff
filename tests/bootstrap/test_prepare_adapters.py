"""Preparing a run that trains adapters over a public model: what it has by default, and what is
refused."""

import io
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import ConfigurationError, DipacoError, IntegrityError
from dipaco.base.files import sha256_of_file
from dipaco.bootstrap import bootstrap_command
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.bootstrap.plan.figures import plan_figures
from dipaco.bootstrap.plan_tables import show_figures
from dipaco.bootstrap.prepare_output import Display
from dipaco.bootstrap.preparing.predecessor import open_predecessor
from dipaco.bootstrap.run_config import load_run_config
from dipaco.modules.base_source import seems_in_hub_cache, take_base_from_hub_cache
from dipaco.modules.layout import parameter_shapes
from dipaco.modules.transformer import PathModel
from dipaco.peer.exchange.fetching import ContentFetcher
from dipaco.routing.run_folder import RunFolder
from support.runs.foreign_base import make_foreign_base
from support.runs.prepared_run import on_cpu, prepare, write_run

TOML = """
name = "adapted"
base = "OWNER/tiny"
[adapters]
rank = 4
[data]
train = "train.jsonl"
[model]
sequence_length = 32
[router]
prefix_tokens = 8
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub with a checkpoint; returns its folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--OWNER--tiny" / "snapshots" / "1"
    make_foreign_base(folder, "smollm2")
    return folder


def prepared(folder, toml=TOML):
    plan = prepare(write_run(folder, toml), folder / "out", on_cpu())
    return RunFolder(folder / "out"), plan


def test_a_run_with_adapters_over_a_base_of_the_hub(hub, tmp_path):
    run, plan = prepared(tmp_path)
    assert plan.grid.modules_per_level == (2, 2)
    assert (plan.inner.optimizer, plan.inner.learning_rate, plan.inner.weight_decay) == (
        "adamw", 1e-3, 0.0,
    )  # fmt: skip
    assert (plan.outer.learning_rate, plan.outer.momentum) == (1.0, 0.0)
    assert plan.base_source.name == "OWNER/tiny"
    assert plan.model.adapters.scale == 2.0
    # It begins with the base as it is in the checkpoint, in bf16.
    whole = PathModel(plan.model.without_adapters)
    whole.load_state_dict({n: p.bfloat16().float() for n, p in ImportedBase(hub).parameters().items()})
    tokens = torch.arange(4, 36)[None]
    with torch.no_grad():
        assert torch.equal(run.base_model(plan)(tokens), whole(tokens))
    assert prepared(tmp_path)[1] == plan


def test_the_name_of_a_folder_is_a_plain_word_in_the_plan(tmp_path):
    make_foreign_base(tmp_path / "my base (2)", "smollm2")
    assert prepared(tmp_path, TOML.replace("OWNER/tiny", "my base (2)"))[1].base_source.name == ("my-base-2")


def test_a_base_that_transformers_computes_is_never_trained_as_a_whole(tmp_path):
    make_foreign_base(tmp_path / "base", "olmo2")
    toml = TOML.replace("OWNER/tiny", "base")
    assert prepared(tmp_path, toml)[1].model.family == "transformers"
    with pytest.raises(ConfigurationError, match=r"write a table \[adapters\]"):
        load_run_config(write_run(tmp_path, toml.replace("[adapters]\nrank = 4\n", "")))


@pytest.mark.parametrize(
    ("stored", "kept", "said"),
    [
        (torch.float32, "bf16", "stored in F32, and the run's base is that rounded to bf16"),
        (torch.float16, "bf16", "stored in F16, and the run's base is that rounded to bf16"),
        (torch.float16, "fp16", None),
        (torch.bfloat16, "nf4", None),
        (torch.float16, "float32", None),
    ],
)
def test_a_base_that_is_rounded_is_said_to_be(stored, kept, said, tmp_path):
    stored_as(tmp_path / "base", stored)
    toml = TOML.replace("OWNER/tiny", "base").replace("rank = 4", f'rank = 4\nbase_format = "{kept}"')
    console = Console(file=io.StringIO(), width=120)
    prepare(write_run(tmp_path, toml), tmp_path / "out", on_cpu(Display(console)))
    shown = console.file.getvalue()
    assert (said in shown) if said else ("is stored in" not in shown)


def stored_as(folder, dtype):
    """Make a base whose checkpoint is stored in a format; return its model."""
    model = make_foreign_base(folder, "smollm2").to(dtype)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(folder)
    return model


def test_the_base_in_fp16_is_that_of_the_checkpoint(tmp_path):
    model = stored_as(tmp_path / "base", torch.float16)
    toml = TOML.replace("OWNER/tiny", "base").replace("rank = 4", 'rank = 4\nbase_format = "fp16"')
    run, plan = prepared(tmp_path, toml)
    base = run.base_model(plan)
    kept = base.base.weights["model.embed_tokens.weight"]
    assert kept.dtype == torch.float16
    assert torch.equal(kept[: plan.model.padding_token], model.model.embed_tokens.weight)


def test_a_checkpoint_is_trained_further_at_a_rate_that_is_said(tmp_path):
    make_foreign_base(tmp_path / "base", "smollm2")
    toml = 'name = "x"\n[data]\ntrain = "train.jsonl"\n[base]\ncheckpoint = "base"\nsteps = 5\n'
    with pytest.raises(ConfigurationError, match=r"write learning_rate under \[base\], such as 4e-4"):
        load_run_config(write_run(tmp_path, toml))
    config = load_run_config(write_run(tmp_path, toml + "learning_rate = 4e-4\n"))
    assert config.base_inner().learning_rate == 4e-4


def test_a_revision_of_which_the_cache_has_only_a_part_is_passed_over(hub, tmp_path):
    # As AutoConfig leaves it behind when a newer revision is there.
    newer = hub.with_name("2")
    newer.mkdir()
    shutil.copy(hub / "config.json", newer)
    os.utime(hub, (0, 0))
    config = load_run_config(write_run(tmp_path, TOML))
    assert config.base.checkpoint == hub
    for file in hub.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigurationError, match="not whole .* hf download OWNER/tiny") as found:
        load_run_config(write_run(tmp_path, TOML))
    assert "\n" not in str(found.value)


def test_whoever_has_the_checkpoint_makes_the_base(hub, tmp_path):
    _, plan = prepared(tmp_path)
    said = []
    blobs = BlobStore(tmp_path / "here")
    assert take_base_from_hub_cache(plan, blobs, said.append)
    assert blobs.verify(plan.blobs.base)
    assert seems_in_hub_cache(plan.base_source)
    elsewhere = plan.base_source.model_copy(update={"name": "OWNER/other"})
    assert not seems_in_hub_cache(elsewhere)
    # Another revision is not used, and said so in a line.
    weights = sorted(hub.glob("*.safetensors"))[0]
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    other = BlobStore(tmp_path / "there")
    assert not take_base_from_hub_cache(plan, other, said.append)
    assert "another revision of OWNER/tiny than this run has: not used" in said[-1]
    assert not other.has(plan.blobs.base)


@pytest.mark.parametrize("is_there", [True, False])
def test_states_that_need_the_base_at_once_look_for_it_once(hub, tmp_path, monkeypatch, is_there):
    run, plan = prepared(tmp_path)
    base = plan.blobs.base
    content = run.blobs.read(base)
    if not is_there:
        weights = sorted(hub.glob("*.safetensors"))[0]
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")

    def hash_slowly(path):
        time.sleep(0.2)
        return sha256_of_file(path)

    monkeypatch.setattr("dipaco.modules.base_source.sha256_of_file", hash_slowly)
    blobs, said, asked = BlobStore(tmp_path / "here"), [], []

    def get(sha256, *_, **__):
        asked.append(sha256)
        return Path(blobs.path(blobs.add_bytes(content)))

    directory = SimpleNamespace(find_blob_holders=lambda sha256: ())
    exchange = SimpleNamespace(get=get)
    fetcher = ContentFetcher(directory, exchange, blobs, blobs, plan, run.grid(plan), say=said.append)
    with ThreadPoolExecutor(4) as threads:
        for path in threads.map(fetcher.blob, [base] * 4):
            assert path.read_bytes() == content
    assert len(said) == 1
    assert bool(asked) is not is_there


def test_a_changed_base_is_refused(hub, tmp_path, capsys):
    _, plan = prepared(tmp_path)
    run = RunFolder(shutil.copytree(tmp_path / "out", tmp_path / "copy"))
    file = run.blobs.path(plan.blobs.base)
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match="is not the base of this run"):
        run.path_model(plan)
    # Nor is it served: newcomers would fetch it again and again.
    assert bootstrap_command.main(["serve", str(tmp_path / "copy")]) == IntegrityError.exit_code
    assert f"error: {file} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adapters", "rate"),
    [("rank = 4", 1e-3), ("rank = 16", 1e-3), ("rank = 64", 2.5e-4), ("rank = 64\nalpha = 16", 1e-3)],
)
def test_a_large_alpha_has_a_smaller_rate(hub, tmp_path, adapters, rate):
    """What is added to the base moves by the rate times alpha."""
    toml = TOML.replace("rank = 4", adapters)
    assert load_run_config(write_run(tmp_path, toml)).inner.learning_rate == pytest.approx(rate)
    chosen = f"{toml}\n[inner]\nlearning_rate = 0.002\n"
    assert load_run_config(write_run(tmp_path, chosen)).inner.learning_rate == 0.002


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rank = 4", "rank = 0", "adapters.rank: Input should be greater than or equal to 1"),
        ("rank = 4", 'rank = "16"', r"adapters.rank: .* \(got '16'\)"),
        ("rank = 4", "rank = 2026-01-01", r"adapters.rank: .* \(got '2026-01-01'\)"),
        ("rank = 4", "rnk = 4", "unknown key 'adapters.rnk'; did you mean 'rank'"),
        ("rank = 4", 'base_format = "int3"', "adapters.base_format"),
        ('base = "OWNER/tiny"', "", r"\[adapters\] need a base"),
        ('base = "OWNER/tiny"', 'base = {checkpoint = "OWNER/tiny", name = "a b"}', "base.name"),
        ('base = "OWNER/tiny"', 'base = "OWNER/other"', "fetch it with: hf download OWNER/other"),
        ("[model]", "[[model]]", r"model: it is a table, \[model\] \(got \[.*"),
        ("[adapters]", "[model.adapters]", r"model.adapters: write them as a table \[adapters\]"),
        ("[router]", "[grid]\nprivate_head = true\n[router]", "grid.private_head is not for"),
        ("[router]", '[inner]\noptimizer = "muon"\n[router]', "'muon' is not for adapters"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(hub, tmp_path, old, new, words):
    with pytest.raises(ConfigurationError, match=words) as found:
        load_run_config(write_run(tmp_path, TOML.replace(old, new)))
    assert "\n" not in str(found.value)


def test_a_base_that_lacks_layers_is_refused(hub, tmp_path):
    file, layers = hub / "config.json", '"num_hidden_layers": '
    file.write_text(file.read_text().replace(f"{layers}2", f"{layers}3"))
    with pytest.raises(DipacoError, match=r"lacks the parameter 'model.layers.2"):
        load_run_config(write_run(tmp_path, TOML))


def test_plan_says_what_the_base_takes(hub, tmp_path):
    config = load_run_config(write_run(tmp_path, TOML))
    figures = plan_figures(config)
    base = figures.base
    imported = ImportedBase(hub)
    parameters = sum(p.numel() for p in imported.parameters().values())
    assert (base.name, base.parameters) == ("OWNER/tiny", parameters)
    assert base.memory_bytes["float32"] == 2 * base.memory_bytes["bf16"] == 4 * parameters
    assert base.memory_bytes["nf4"] < base.memory_bytes["bf16"]
    assert figures.path_parameters == sum(math.prod(shape) for shape in parameter_shapes(config.model).values())
    assert figures.disk_bytes["base model"] == 2 * parameters
    assert figures.device_bytes["frozen base"] == base.memory_bytes["bf16"]
    assert figures.device_bytes["gradients"] == 4 * figures.path_parameters
    console = Console(file=io.StringIO(), width=200)
    show_figures(figures, console)
    shown = console.file.getvalue()
    assert "Adapters of rank 4 over OWNER/tiny, which is frozen" in shown


def test_plan_knows_a_pass_over_a_base_in_4_bits(hub, tmp_path):
    config = load_run_config(write_run(tmp_path, TOML))
    in_4_bits = TOML.replace("rank = 4", 'rank = 4\nbase_format = "nf4"')
    assert in_4_bits != TOML
    smaller = plan_figures(load_run_config(write_run(tmp_path, in_4_bits)))
    whole, name = plan_figures(config), "pass of one sequence, about"
    assert smaller.device_bytes[name] == whole.device_bytes[name]
    assert smaller.device_bytes["frozen base"] < whole.device_bytes["frozen base"]


def test_a_successor_has_the_same_base(hub, tmp_path):
    run, plan = prepared(tmp_path)
    new_toml = TOML.replace('base = "OWNER/tiny"\n', "").replace("[adapters]\nrank = 4\n", "")
    file = write_run(tmp_path, f"{new_toml}[grid]\nmodules_per_level = [2, 4]\n")
    new = prepare(
        file, tmp_path / "new", on_cpu(start_in_s=60.0),
        predecessor=open_predecessor(run.path, allow_genesis=True),
    )  # fmt: skip
    assert new.model.adapters == plan.model.adapters
    assert (new.blobs.base, new.base_source) == (plan.blobs.base, plan.base_source)
    assert (new.inner, new.outer) == (plan.inner, plan.outer)
    first = run.genesis_state(plan, "L0.E0")
    then = RunFolder(tmp_path / "new").genesis_state(new, "L0.E1")
    assert torch.equal(first.parameters, then.parameters)
    other = write_run(tmp_path, TOML.replace('base = "OWNER/tiny"\n', "").replace("= 4", "= 8"))
    with pytest.raises(ConfigurationError, match=r"\[adapters\] differ from those of the run"):
        load_run_config(other, plan.model)
