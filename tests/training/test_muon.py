"""Muon: which matrices it has, what a step does, what is kept, and going on bit for bit."""

import logging
import math
from pathlib import Path

import pytest
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.bootstrap.run_config import load_run_config
from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import InnerConfig, ModelConfig, parse_config
from dipaco.training.inner import InnerLoop
from dipaco.training.muon import Muon, is_for_muon, orthogonal
from support.runs.inner_loops import CPU, batch_of

MODEL = ModelConfig(
    vocabulary_size=64,
    block_count=2,
    hidden_size=16,
    head_count=2,
    sequence_length=16,
    tied_embedding=False,
    family="qwen2",
)
TINY = Path(__file__).parents[2] / "examples" / "tiny" / "RUN.toml"


def loop_of(adamw="adamw", **changes):
    values = {
        "optimizer": "muon",
        "learning_rate": 1e-2,
        "batch_sequences": 4,
        "fresh_state_warmup_steps": 5,
        **changes,
    }
    model = PathModel(MODEL)
    initialise(model, 0)
    return InnerLoop(model, InnerConfig(**values), CPU, optimizer=adamw)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_singular_values_become_about_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = matrix.clone()
    made = orthogonal(matrix)
    assert torch.equal(matrix, before)
    assert made.shape == shape
    assert made.dtype == torch.float32
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.5
    assert values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.dist(made, u @ vh) < 0.4 * math.sqrt(min(shape))


def test_nothing_comes_of_nothing():
    assert torch.equal(orthogonal(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_a_step_is_torch_muon_but_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    generator = torch.Generator().manual_seed(2)
    mine = torch.randn(12, 32, generator=generator).requires_grad_()
    theirs = mine.detach().clone().requires_grad_()
    ours = Muon([mine], lr=1e-2, weight_decay=0.1)
    reference = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        mine.grad = torch.randn(12, 32, generator=generator)
        theirs.grad = mine.grad.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_matrices_of_blocks_are_muons():
    loop = loop_of()
    muons = {id(p) for g in loop._optimizers["muon"].param_groups for p in g["params"]}
    found = {n for n, p in loop.model.named_parameters() if id(p) in muons}
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")
    parts += ("mlp.gate", "mlp.up", "mlp.down")
    assert found == {f"model.layers.{b}.{part}_proj.weight" for b in range(2) for part in parts}
    others = [p for g in loop._optimizers["optimizer"].param_groups for p in g["params"]]
    assert len(others) + len(muons) == len(list(loop.model.parameters()))
    assert set(loop_of(optimizer="adamw")._optimizers) == {"optimizer"}


def test_queries_keys_and_values_are_orthogonalised_apart():
    """However much smaller its gradient is, each moves as far as the others."""
    loop = loop_of(weight_decay=0.0, fresh_state_warmup_steps=0)
    attention = loop.model.model.layers[0].self_attn
    names = ("q_proj", "k_proj", "v_proj")
    before = [getattr(attention, name).weight.detach().clone() for name in names]
    loop.step(batch_of(), 0)
    for name, start in zip(names, before, strict=True):
        change = getattr(attention, name).weight.detach() - start
        scaled = change / (1e-2 * 0.2 * math.sqrt(max(change.shape)))
        values = torch.linalg.svdvals(scaled)
        assert values.max() < 1.3, name
        assert values.median() > 0.5, name


def test_matrices_follow_the_schedule_and_decay():
    """The first steps of a fresh state are shorter, and decay is that of the rate as it stands."""
    loop = loop_of(weight_decay=0.5)
    matrix = loop.model.model.layers[0].mlp.up_proj.weight
    start = matrix.detach().clone()
    tokens = batch_of()
    loop.step(tokens, 0)
    rate, longer = 1e-2 / 5, max(matrix.shape)
    assert {g["lr"] for o in loop._optimizers.values() for g in o.param_groups} == {rate}
    update = (start * (1 - rate * 0.5) - matrix.detach()) / (rate * 0.2 * math.sqrt(longer))
    assert torch.linalg.svdvals(update).max() < 1.3


def test_one_number_a_parameter_is_kept():
    loop = loop_of()
    loop.step(batch_of(), 0)
    kept = loop.state_dict()["muon"]["state"]
    matrices = [p for n, p in loop.model.named_parameters() if is_for_muon(n, p.shape)]
    assert [list(entry) for entry in kept.values()] == [["momentum"]] * len(matrices)
    assert sum(e["momentum"].nbytes for e in kept.values()) == sum(p.nbytes for p in matrices)


def test_a_state_of_the_other_optimizer_starts_afresh(caplog):
    muon, adamw = loop_of(), loop_of(optimizer="adamw")
    muon.step(batch_of(), 0)
    adamw.step(batch_of(), 0)
    broken = {**muon.state_dict(), "muon": {"state": {0: {}}, "param_groups": []}}
    for loop, state in (
        (loop_of(), adamw.state_dict()),
        (loop_of(optimizer="adamw"), muon.state_dict()),
        (loop_of("adamw8bit"), muon.state_dict()),
        (loop_of(), broken),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dipaco"):
            assert loop.load_state_dict(state) is False
        assert "starting afresh" in caplog.text
        loop.step(batch_of(), 0)


def test_the_optimizer_is_part_of_the_plan():
    assert InnerConfig().model_dump(mode="json")["optimizer"] == "muon"
    written = InnerConfig(optimizer="adamw").model_dump(mode="json")
    assert InnerConfig(**written).optimizer == "adamw"
    with pytest.raises(ConfigurationError, match=r"RUN: optimizer: .*'adamw' or 'muon'"):
        parse_config(InnerConfig, {"optimizer": "adam"}, "RUN")
    assert load_run_config(TINY).base_inner().optimizer == load_run_config(TINY).inner.optimizer
