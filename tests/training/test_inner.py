"""The inner loop: schedule, AdamW, micro-batches, memory, and going on bit for bit."""

import contextlib
import importlib
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dipaco.base.errors import ConfigurationError
from dipaco.modules import device, transformer
from dipaco.modules.compose import gather_module, scatter_module
from dipaco.protocol.config import PAD_TOKEN, GridConfig
from dipaco.protocol.grid import Grid
from dipaco.training import inner, muon
from dipaco.training.inner import InnerLoop, learning_rate_at
from dipaco.training.optimizer_states import load_optimizer, write_optimizer
from support.runs.inner_loops import CPU, MODEL, batch_of, config_of, flat, loop_of, model_of

# Schedule


def test_warmup_peak_cosine_and_floor():
    config = config_of(learning_rate=1.0, warmup_steps=4, decay_steps=10, floor_ratio=0.2)
    rates = [learning_rate_at(config, step) for step in range(30)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.6)  # half way down
    assert rates[14:] == pytest.approx([0.2] * 16)


def test_without_decay_the_peak_stays():
    assert learning_rate_at(config_of(learning_rate=0.5), 10**9) == 0.5


def test_a_fresh_state_warms_up_on_top_of_the_schedule():
    config = config_of(learning_rate=1.0, fresh_state_warmup_steps=4)
    assert [learning_rate_at(config, 100, fresh) for fresh in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate_at(config, 100, None) == 1.0


@given(st.integers(0, 50), st.integers(0, 50), st.floats(0, 1), st.integers(0, 200), st.integers(0, 99))
def test_rate_is_positive_and_never_above_the_peak(warmup, decay, floor, step, fresh):
    config = config_of(learning_rate=1.0, warmup_steps=warmup, decay_steps=decay, floor_ratio=floor)
    rate = learning_rate_at(config, step, fresh)
    assert 0 <= rate <= 1
    if decay and step >= warmup:
        assert rate >= floor - 1e-12


# One step


def test_a_step_is_adamw_on_the_mean_loss():
    """Against torch's AdamW and a loss written out here."""
    model, reference = model_of(), model_of()
    config = config_of(optimizer="adamw", weight_decay=0.1, gradient_clip=0.05)
    loop = InnerLoop(model, config, CPU)
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    norms = [p for p in reference.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.99)
    )
    for step in range(3):
        tokens = batch_of(step)
        loss = F.cross_entropy(reference(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert loop.step(tokens, step) == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(flat(model), flat(reference), rtol=1e-5, atol=1e-6)


def test_norms_do_not_decay():
    loop = loop_of(weight_decay=0.5)
    decay = {
        id(p): group["weight_decay"]
        for optimizer in loop._optimizers.values()
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for name, parameter in loop.model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.5), name


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_micro_batches_change_rounding_only(matrices):
    tokens = batch_of()
    tokens[1, 3:] = PAD_TOKEN  # rows with fewer targets must not count for more
    results = []
    for size in (None, 4, 3, 2, 1, 100):
        loop = InnerLoop(model_of(), config_of(optimizer=matrices), CPU, micro_batch_size=size)
        losses = [loop.step(tokens, step) for step in range(3)]
        results.append((losses, flat(loop.model)))
    for losses, parameters in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-5)
        torch.testing.assert_close(parameters, results[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_in_pieces_change_rounding_only(tied, monkeypatch):
    model = MODEL.model_copy(update={"tied_embedding": tied})
    whole = loop_of(model_of(model))
    losses = [whole.step(batch_of(step), step) for step in range(3)]
    monkeypatch.setattr(transformer, "LOGITS_AT_ONCE", 64 * 9)
    pieces = loop_of(model_of(model))
    assert [pieces.step(batch_of(s), s) for s in range(3)] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(flat(pieces.model), flat(whole.model), rtol=1e-4, atol=1e-5)


def test_an_unknown_optimizer():
    with pytest.raises(ConfigurationError, match="'adamw4bit' is unknown; did you mean adamw8bit"):
        loop_of(optimizer="adamw4bit")


def test_a_batch_of_padding_is_a_mistake():
    with pytest.raises(ValueError, match="at least one token"):
        loop_of().step(torch.full((4, 16), PAD_TOKEN), 0)


# Numbers that are not finite


def test_a_step_that_is_not_finite_changes_nothing(caplog):
    loop = loop_of()
    loop.step(batch_of(), 0)
    before, kept = flat(loop.model), loop.model.model.norm.weight.detach().clone()
    with torch.no_grad():
        loop.model.model.norm.weight.fill_(float("nan"))
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        for step in range(1, 6):
            assert loop.step(batch_of(), step) != loop.step(batch_of(), step)  # nan
    assert loop.skipped_steps == 10
    assert len(caplog.records) == 4  # 1, 2, 4, 8
    with torch.no_grad():
        loop.model.model.norm.weight.copy_(kept)
    assert torch.equal(flat(loop.model), before)
    assert loop.steps_since_fresh == 1
    assert loop.step(batch_of(), 6) < 5


# Without waiting


@pytest.fixture
def without_bf16(monkeypatch):
    """A fused AdamW is all that is different where it need not be exact."""
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: False)


def test_losses_are_read_a_step_late(without_bf16):
    loop, reference = loop_of(exact=False), loop_of()
    expected = [reference.step(batch_of(step), step) for step in range(5)]
    losses = [loop.step(batch_of(step), step) for step in range(5)]
    assert losses == pytest.approx([expected[0], *expected[:4]], rel=1e-5)
    torch.testing.assert_close(flat(loop.model), flat(reference.model), rtol=1e-4, atol=1e-5)


def test_a_loss_is_of_the_path_that_was_trained(without_bf16):
    """Also where losses are read late, and the loop goes on with another path."""
    loop = loop_of(exact=False)
    other = batch_of(7)
    expected = loop_of().step(other, 0)
    start = loop.model.state_dict()
    kept = {name: value.clone() for name, value in start.items()}
    for step in range(20):
        loop.step(batch_of(), step)
    kept_optimizer = loop.state_dict()
    loop.reset()
    loop.model.load_state_dict(kept)
    assert loop.step(other, 0) == pytest.approx(expected, rel=1e-5)
    loop.load_state_dict(kept_optimizer)
    loop.model.load_state_dict(kept)
    assert loop.step(other, 0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
@pytest.mark.parametrize("number_format", [torch.bfloat16, torch.float16])
def test_a_step_reads_nothing_of_the_device(matrices, number_format, monkeypatch):
    """A tensor of the device "meta" has no values: a step that reads one fails."""
    for module in (device, muon):
        monkeypatch.setattr(module, "number_format", lambda device: number_format)
    monkeypatch.setattr(inner, "autocast_for", lambda *_: contextlib.nullcontext())
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_, **__: None)
    meta = torch.device("meta")
    loop = InnerLoop(model_of().to(meta), config_of(optimizer=matrices), meta, micro_batch_size=2)
    loop._newest_loss = 4.0  # As after a first step, whose loss was read.
    assert loop.step(batch_of(), 0) == 4.0
    with pytest.raises(RuntimeError, match="meta"):
        loop.step(batch_of(), 1)


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_the_optimizer_leaves_an_update_out(matrices, without_bf16, caplog):
    loop = InnerLoop(model_of(), config_of(optimizer=matrices), CPU, exact=False)
    loop.step(batch_of(), 0)
    loop.step(batch_of(), 1)
    before, kept = flat(loop.model), loop.state_dict()
    damaged = loop.model.model.norm.weight
    good = damaged.detach().clone()
    with torch.no_grad():
        damaged.fill_(float("nan"))
    loop.step(batch_of(), 2)
    with torch.no_grad():
        damaged.copy_(good)
    assert torch.equal(flat(loop.model), before)
    assert caplog.text == ""
    after = loop.state_dict()
    assert "step 2 left out" in caplog.text
    assert (loop.skipped_steps, after["steps_since_fresh"]) == (1, kept["steps_since_fresh"])
    for part in loop._optimizers:
        for index, entry in kept[part]["state"].items():
            for name, value in entry.items():
                assert torch.equal(value, after[part]["state"][index][name]), name
    assert math.isfinite(loop.step(batch_of(), 3) + loop.step(batch_of(), 4))


# Number formats


@pytest.fixture
def fp16(monkeypatch):
    """The CPU as a card without bf16."""
    monkeypatch.setattr(device, "number_format", lambda device: torch.float16)


def test_a_card_without_bf16_trains_with_scaled_losses(fp16):
    loop = loop_of()
    losses = [loop.step(batch_of(), step) for step in range(30)]
    assert losses[0] == pytest.approx(4.16, abs=0.1)
    assert losses[-1] < 2.5
    assert loop.state_dict()["scaler"]["scale"] == 2.0**16


def test_bf16_trains_alike(monkeypatch):
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: True)
    loop, reference = loop_of(exact=False), loop_of()
    losses = [loop.step(batch_of(), step) for step in range(30)]
    expected = [reference.step(batch_of(), step) for step in range(3)]
    assert losses[1:4] == pytest.approx(expected, rel=1e-2)
    assert losses[-1] < 2.5
    assert all(p.dtype == torch.float32 for p in loop.model.parameters())


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
@pytest.mark.parametrize("exact", [True, False])
def test_a_scale_that_is_too_large_costs_a_step_and_no_warning(exact, matrices, fp16, without_bf16, caplog):
    loop = InnerLoop(model_of(), config_of(optimizer=matrices), CPU, exact=exact)
    kept = loop.state_dict()
    loop.load_state_dict({**kept, "scaler": {**kept["scaler"], "scale": 2.0**40}})
    before = flat(loop.model)
    assert loop.step(batch_of(), 0) == pytest.approx(4.16, abs=0.1)
    assert torch.equal(flat(loop.model), before)
    assert loop.state_dict()["scaler"]["scale"] == 2.0**39
    assert (loop.steps_since_fresh, loop.skipped_steps, caplog.text) == (0, 0, "")
    for step in range(1, 40):
        loop.step(batch_of(), step)
    assert loop.steps_since_fresh > 10


def test_the_scale_is_kept_bit_for_bit(fp16):
    loop, other = loop_of(), loop_of()
    scale = {**loop.state_dict()["scaler"], "scale": 2.0**12, "growth_interval": 2}
    loop.load_state_dict({**loop.state_dict(), "scaler": scale})
    for step in range(3):
        loop.step(batch_of(step), step)
    other.model.load_state_dict(loop.model.state_dict())
    assert other.load_state_dict(loop.state_dict())
    for step in range(3, 7):
        assert loop.step(batch_of(step), step) == other.step(batch_of(step), step)
    assert loop.state_dict()["scaler"] == other.state_dict()["scaler"]
    assert loop.state_dict()["scaler"]["scale"] > 2.0**12
    assert torch.equal(flat(loop.model), flat(other.model))


# Keeping and resuming


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_kept_state_goes_on_bit_for_bit(optimizer, matrices, tmp_path):
    # 8-bit states are only used for tensors of at least 4,096 elements.
    wide = MODEL.model_copy(update={"hidden_size": 64})
    config = config_of(optimizer=matrices, fresh_state_warmup_steps=5)

    def made():
        return InnerLoop(model_of(wide), config, torch.device("cpu"), optimizer=optimizer)

    loop = made()
    for step in range(3):
        loop.step(batch_of(step), step)
    write_optimizer(tmp_path, 0, loop.state_dict())()
    other = made()
    other.step(batch_of(99), 0)  # its own state must be forgotten
    other.model.load_state_dict(loop.model.state_dict())
    kept = load_optimizer(tmp_path, 0)
    assert other.load_state_dict(kept)
    for step in range(3, 7):
        assert loop.step(batch_of(step), step) == other.step(batch_of(step), step)
    assert torch.equal(flat(loop.model), flat(other.model))
    assert loop.steps_since_fresh == other.steps_since_fresh == 7


@pytest.mark.parametrize("exact", [True, False])
def test_a_state_kept_on_another_device_goes_on_with_this_one_s_steps(exact, without_bf16, caplog):
    """In a run with fixed steps AdamW is fused on a GPU, and not on a CPU."""
    there = InnerLoop(model_of(), config_of(weight_decay=0.5), CPU, exact=not exact)
    there.step(batch_of(), 0)
    here = InnerLoop(model_of(), config_of(), CPU, exact=exact)
    settings = [{**g, "params": None} for g in here._optimizers["optimizer"].param_groups]
    assert here.load_state_dict(there.state_dict())
    now = [{**g, "params": None} for g in here._optimizers["optimizer"].param_groups]
    assert now == settings
    damaged = here.model.model.norm.weight
    with torch.no_grad():
        damaged.fill_(float("nan"))
    here.step(batch_of(), 1)
    here.state_dict()  # reads what is late
    assert here.skipped_steps == 1
    with torch.no_grad():
        damaged.fill_(1.0)
    assert math.isfinite(here.step(batch_of(), 2) + here.step(batch_of(), 3))
    assert here.skipped_steps == 1


def test_a_kept_state_is_a_copy():
    loop = loop_of()
    loop.step(batch_of(), 0)
    kept = loop.state_dict()
    moment = kept["optimizer"]["state"][0]["exp_avg"]
    before = moment.clone()
    loop.step(batch_of(1), 1)
    assert torch.equal(moment, before)
    loop.load_state_dict(kept)
    loop.step(batch_of(2), 2)
    assert torch.equal(moment, before)


def test_two_paths_in_one_model_equal_two_models():
    grid = Grid(MODEL, GridConfig(modules_per_level=(1,)))
    alone = [loop_of(), loop_of()]
    for number, loop in enumerate(alone):
        for step in range(4):
            loop.step(batch_of(10 * number + step), step)
    shared = loop_of()
    start = gather_module(shared.model, grid, "L0.E0")
    kept = [(start, None), (start, None)]
    for half in range(2):
        for number in range(2):
            parameters, state = kept[number]
            scatter_module(shared.model, grid, "L0.E0", parameters)
            if state is None:
                shared.reset()
            else:
                shared.load_state_dict(state)
            for step in range(2 * half, 2 * half + 2):
                shared.step(batch_of(10 * number + step), step)
            kept[number] = (gather_module(shared.model, grid, "L0.E0"), shared.state_dict())
    for (parameters, _), loop in zip(kept, alone, strict=True):
        assert torch.equal(parameters, gather_module(loop.model, grid, "L0.E0"))


def test_reset_warms_up_anew():
    loop = loop_of(fresh_state_warmup_steps=4)
    rates = []
    for step in range(6):
        if step == 3:
            loop.reset()
        loop.step(batch_of(), step)
        rates.append(loop._optimizers["optimizer"].param_groups[0]["lr"])
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.0025, 0.005, 0.0075])


def test_a_state_that_does_not_fit_starts_afresh(caplog):
    trained = loop_of()
    trained.step(batch_of(), 0)
    kept = trained.state_dict()
    narrow = MODEL.model_copy(update={"hidden_size": 8})
    short = MODEL.model_copy(update={"block_count": 1})
    for loop, state in (
        (loop_of(optimizer="adamw8bit"), kept),
        (loop_of(model_of(narrow)), kept),
        (loop_of(model_of(short)), kept),
        (loop_of(), {}),
        (loop_of(), {**kept, "steps_since_fresh": None}),
        (loop_of(), {**kept, "optimizer": {"state": {0: {}}, "param_groups": []}}),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dipaco"):
            assert loop.load_state_dict(state) is False
        assert "starting afresh" in caplog.text
        assert loop.steps_since_fresh == 0
        loop.step(batch_of(), 0)
