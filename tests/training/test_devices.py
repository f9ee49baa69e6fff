"""Training on each device that is here: what it learns, and on a GPU that it keeps and hands on what a CPU does."""

import importlib.util
import math

import pytest
import torch

from dipaco.modules.compose import gather_module, scatter_module
from dipaco.modules.contributions import CODECS
from dipaco.modules.device import Fetched
from dipaco.modules.outer import OuterGradient, encode_in_place
from dipaco.protocol.config import GridConfig
from dipaco.protocol.grid import Grid
from dipaco.training.inner import InnerLoop
from dipaco.training.scoring import sum_losses
from support.runs.inner_loops import CPU, MODEL, batch_of, config_of, model_of

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GRID = Grid(MODEL, GridConfig(modules_per_level=(1,)))


def loop_on(name, kind="adamw", **config):
    device = torch.device(name)
    if kind == "adamw8bit" and not importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is not installed")
    return InnerLoop(
        model_of().to(device), config_of(**config), device, optimizer=kind, compile_model=device.type != "cpu"
    )


@needs_cuda
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_the_loss_goes_down(kind, matrices):
    loop = loop_on("cuda", kind, optimizer=matrices)
    losses = [loop.step(batch_of(), step) for step in range(30)]
    assert losses[-1] < 2.5
    assert all(p.dtype == torch.float32 for p in loop.model.parameters())


@needs_cuda
def test_losses_are_those_of_fp32_on_a_cpu():
    loop, reference = loop_on("cuda"), loop_on("cpu")
    # The loss of a step is told after the next where AdamW is fused, so the last ones are compared.
    for step in range(20):
        loop.step(batch_of(step % 4), step)
        reference.step(batch_of(step % 4), step)
    found, tokens = sum_losses(loop.model, batch_of(1), 0)
    expected, _ = sum_losses(reference.model, batch_of(1), 0)
    assert found / tokens == pytest.approx(expected / tokens, abs=0.05)


@needs_cuda
def test_a_kept_state_goes_on():
    loop, other = loop_on("cuda"), loop_on("cuda")
    for step in range(3):
        loop.step(batch_of(step), step)
    other.model.load_state_dict(loop.model.state_dict())
    assert other.load_state_dict(loop.state_dict())
    for step in range(3, 6):
        loop.step(batch_of(step), step)
        other.step(batch_of(step), step)
    ours, theirs = (sum_losses(each.model, batch_of(9), 0)[0] for each in (loop, other))
    # Sums of some kernels come in any order.
    assert ours == pytest.approx(theirs, rel=0.02)


@needs_cuda
def test_a_batch_that_is_not_finite_changes_nothing():
    loop = loop_on("cuda")
    loop.step(batch_of(), 0)
    before = gather_module(loop.model, GRID, "L0.E0")
    spoiled = loop.model.model.norm.weight.data.clone()
    loop.model.model.norm.weight.data.fill_(math.nan)
    loop.step(batch_of(1), 1)
    loop.model.model.norm.weight.data.copy_(spoiled)
    loop.state_dict()  # it waits for all steps
    assert torch.equal(gather_module(loop.model, GRID, "L0.E0"), before)
    assert loop.skipped_steps == 1


@needs_cuda
@pytest.mark.parametrize("codec", CODECS)
def test_a_contribution_has_the_bytes_that_the_same_numbers_have_on_a_cpu(codec):
    loop = loop_on("cuda")
    anchor = gather_module(loop.model, GRID, "L0.E0")
    for step in range(3):
        loop.step(batch_of(step), step)
    on_cpu = model_of()
    on_cpu.load_state_dict({k: v.to(CPU) for k, v in loop.model.state_dict().items()})
    files = [
        encode_in_place(OuterGradient(anchor, gather_module(model, GRID, "L0.E0")), CODECS[codec])
        for model in (loop.model, on_cpu)
    ]
    assert files[0] == files[1]
    # What comes back is what was sent, bit for bit.
    scatter_module(loop.model, GRID, "L0.E0", anchor)
    assert torch.equal(gather_module(loop.model, GRID, "L0.E0"), anchor)


@needs_cuda
@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_a_step_waits_for_nothing_that_the_gpu_was_given(matrices):
    loop = loop_on("cuda", optimizer=matrices)
    for step in range(3):
        loop.step(batch_of(step), step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 6):
            loop.step(batch_of(step), step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_was_fetched_is_what_was_computed():
    fetched = Fetched(torch.tensor([1.5, math.nan, 0.0]))
    first, second, third = fetched.read()
    assert (first, third) == (1.5, 0.0)
    assert math.isnan(second)
