"""The kit for a GPU that is to be had for ten minutes: its scripts, and its parts on the CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KIT = BENCHMARKS / "gpu_kit"

sys.path.insert(0, str(BENCHMARKS))
import roofline  # noqa: E402
from gpu_kit import out_of_memory, paper_path, same_code, table  # noqa: E402
from gpu_kit.common import Part  # noqa: E402
from gpu_kit.profiled import profiled  # noqa: E402
from parts import cards  # noqa: E402
from parts.cards import card_of, flops_per_token, path_parameters  # noqa: E402

from dipaco.modules.transformer import PathModel  # noqa: E402


@pytest.fixture
def part(tmp_path, monkeypatch):
    # A rehearsal has graphs traced without code; what it sets is put back.
    monkeypatch.setattr(torch, "compile", torch.compile)
    return Part("a part", tmp_path / "part.json", rehearses=True)


@pytest.mark.parametrize("script", ["collect.sh", "run.sh"])
def test_scripts_are_sound(script):
    subprocess.run(["bash", "-n", str(KIT / script)], check=True, timeout=30)
    assert os.access(KIT / script, os.X_OK)


def test_every_part_that_the_script_runs_is_there():
    script = (KIT / "run.sh").read_text()
    named = re.search(r'^all="(.*)"$', script, re.MULTILINE)
    assert named is not None
    parts = named[1].split()
    limits = script[script.index("limit_s=(") :]
    assert set(re.findall(r"\[([a-z_]+)\]=", limits[: limits.index(")")])) == set(parts)
    assert all((KIT / f"{part}.py").exists() for part in parts)


def test_a_part_that_is_not_there_is_an_error():
    done = subprocess.run([str(KIT / "run.sh"), "nothing"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert "there is no part 'nothing'; there are: paper_path" in done.stderr


def names_in(file):
    return {line for line in file.read_text().splitlines() if line and not line.startswith("#")}


def locked_in(name):
    lock = BENCHMARKS.parent / "requirements" / name
    return set(re.findall(r"^([a-z0-9._-]+)==", lock.read_text(), re.MULTILINE))


def test_whatever_the_project_needs_is_collected_or_brought():
    lacking, brought = names_in(KIT / "lacking.txt"), names_in(KIT / "brought.txt")
    assert lacking <= locked_in("dev.lock")
    assert not locked_in("dipaco.lock") - lacking - brought
    assert not lacking & brought


def test_another_checkout_is_noticed(tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder / "modules").mkdir(parents=True)
        (tmp_path / folder / "modules" / "grid.py").write_text("same\n")
    assert same_code.differing(tmp_path / "one", tmp_path / "other") == []
    (tmp_path / "one" / "modules" / "grid.py").write_text("changed\n")
    (tmp_path / "other" / "modules" / "new.py").write_text("")
    found = same_code.differing(tmp_path / "one", tmp_path / "other")
    assert found == ["modules/grid.py", "modules/new.py"]
    shutil.rmtree(tmp_path / "other")


def test_the_file_of_a_part_is_whole_after_each_measure(part, tmp_path):
    part.note("first", {"tokens_per_s": 12345.6, "inside": {"a|b": 1}})
    with part.measuring("second"):
        raise RuntimeError("it broke")
    found = json.loads((tmp_path / "part.json").read_text())
    assert found["measures"]["first"]["tokens_per_s"] == 12345.6
    assert "it broke" in found["failed"]["second"]
    page = table.page(tmp_path)
    assert "| first | tokens_per_s 12,346; inside a/b 1 |" in page
    assert "| second | FAILED: RuntimeError: it broke |" in page
    assert part.conclude() == 1


def test_a_path_and_a_plain_loop_are_timed(part):
    loop = paper_path.path_loop(part, 2, compiled=False)
    ours = paper_path.path_figures(part, loop, 2, 0.0)
    theirs = paper_path.nano_figures(part, 2, 0.0)
    for found in (ours, theirs):
        assert found["steps"] == 3
        assert found["tokens_per_s"] * found["step_s"] == pytest.approx(2 * 64)
        assert found["at_once"] == 2
    batch = paper_path.random_batch(part.model, 2, 0)
    assert profiled(lambda: loop.step(batch, 9))["copies"]


def test_memory_that_runs_out_is_survived_in_a_rehearsal(tmp_path, monkeypatch, part):
    monkeypatch.setattr(out_of_memory, "begin", lambda name, text: part)
    assert out_of_memory.main() == 0, (tmp_path / "part.json").read_text()


def test_without_a_gpu_a_part_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gpu_kit.unit_tests", "--json", str(tmp_path / "part.json")],
        cwd=BENCHMARKS,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no CUDA device" in done.stderr


def test_a_roofline_counts_what_a_pass_computes():
    model = cards.TINY_PATH
    work = roofline.work_of(model, 2)
    tokens = 2 * model.sequence_length
    products = sum(o.flops for o in work.eager if o.kind in ("products", "head"))
    matrices = [p for p in PathModel(model).parameters() if p.ndim == 2]
    assert products == 6 * sum(p.numel() for p in matrices) * tokens
    attention = sum(o.flops for o in work.eager if o.kind == "attention")
    whole = 12 * model.block_count * model.hidden_size * model.sequence_length * tokens
    assert whole / 2 < attention < whole
    eager, fused = (sum(o.bytes for o in operations) for operations in (work.eager, work.fused))
    assert 0 < work.wide_bytes < fused < eager


def test_the_150m_path_counts_its_operations():
    parameters = path_parameters(cards.PATH_150M)
    assert 140e6 < parameters < 160e6
    attention = 12 * 12 * 896 * 1024
    assert flops_per_token(cards.PATH_150M) == 6 * parameters + attention


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10", 125.0),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("NVIDIA GeForce RTX 4090 D", 147.0),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 3060", 25.5),
        ("NVIDIA GeForce RTX 3060 Ti", 32.4),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peaks_of_cards(name, tflops):
    assert (found.tflops if (found := card_of(name)) else None) == tflops
