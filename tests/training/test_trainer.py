"""Snapshots and adoption under a path in training: what goes on top, and what does not."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.modules import device, outer
from dipaco.modules.compose import gather_module, lent_parameters
from dipaco.modules.contributions import CHUNK_VALUES, CODECS, pieces
from dipaco.modules.state import PathProgress
from dipaco.peer.check import needs
from dipaco.routing.batches import BatchStream
from dipaco.training.trainer import PathTrainer
from support.runs.tiny_run import make_tiny_run

PATH, MODULE, OTHER = 1, "L0.E0", "L1.E1"
LIMIT_S = 60.0


@pytest.fixture
def inner_steps():
    return 4


@pytest.fixture
def trainer(tmp_path, inner_steps):
    run = make_tiny_run(tmp_path / "run", inner_steps=inner_steps)
    plan, grid = run.plan(), run.grid(run.plan())
    made = PathTrainer(plan, grid, torch.device("cpu"))
    base = run.base_parameters(plan)
    states = {module: run.genesis_state(plan, module, base) for module in (MODULE, OTHER)}
    stream = BatchStream(
        run.train_tokens(plan, PATH), seed=plan.seed, path=PATH, batch_sequences=plan.inner.batch_sequences
    )
    made.start_path(PATH, states, stream)
    return made


@pytest.mark.parametrize(("inner_steps", "expected"), [(0, torch.bfloat16), (4, torch.float32)])
def test_a_cpu_with_bf16_trains_in_it_unless_all_must_have_the_same_bits(inner_steps, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: True)
    plan = make_tiny_run(tmp_path / "run", inner_steps=inner_steps).plan()
    assert PathTrainer(plan, needs.grid_of(plan), torch.device("cpu")).inner.dtype == expected


def local(trainer, module=MODULE):
    return gather_module(trainer.model, trainer.grid, module)


def following(state, shift, tokens=0, replicas=1):
    """Return a next state, `shift` away, with so many more tokens of each of the path's peers in it."""
    before = state.progress.get(PATH, PathProgress(0, 0, 0, 0))
    return replace(
        state,
        version=state.version + 1,
        parameters=state.parameters + shift,
        progress={PATH: PathProgress(before.tokens + tokens, 0, before.steps + 1, before.read + replicas * tokens)},
    )


def test_without_steps_in_between_local_becomes_the_new_anchor_exactly(trainer):
    trainer.inner_step()
    snapshot = trainer.snapshot(MODULE)
    state = following(snapshot.anchor, 0.123, snapshot.tokens)
    trainer.adopt(MODULE, state)
    assert torch.equal(local(trainer), state.parameters)
    assert trainer.anchor(MODULE) is state
    assert trainer.path_step == 1


def test_what_was_trained_since_the_snapshot_goes_on_top(trainer):
    trainer.inner_step()
    snapshot = trainer.snapshot(MODULE)
    trainer.inner_step()
    trained = local(trainer) - snapshot.local
    state = following(snapshot.anchor, -0.5)
    trainer.adopt(MODULE, state)
    assert torch.allclose(local(trainer) - state.parameters, trained, atol=1e-6)
    after = trainer.snapshot(MODULE)
    assert after.tokens == trainer.tokens_per_step
    assert torch.allclose(after.outer_gradient()[:], -trained, atol=1e-6)


def test_a_round_without_a_step_leaves_all_work_to_the_next_contribution(trainer):
    anchor = trainer.anchor(MODULE)
    trainer.inner_step()
    trainer.snapshot(MODULE)
    trainer.inner_step()
    whole = trainer.snapshot(MODULE)
    assert whole.tokens == 2 * trainer.tokens_per_step
    assert torch.equal(whole.outer_gradient()[:], anchor.parameters - local(trainer))


def test_a_second_state_without_a_snapshot_goes_under_the_same_work(trainer):
    trainer.inner_step()
    first = following(trainer.snapshot(MODULE).anchor, 0.1)
    trainer.inner_step()
    trainer.adopt(MODULE, first)
    on_top = local(trainer) - first.parameters
    second = following(first, 0.2)
    trainer.adopt(MODULE, second)
    assert torch.allclose(local(trainer) - second.parameters, on_top, atol=1e-6)
    assert trainer.snapshot(MODULE).tokens == trainer.tokens_per_step


def test_the_path_step_follows_what_replicas_trained(trainer):
    trainer.inner_step()
    snapshot = trainer.snapshot(MODULE)
    trainer.adopt(MODULE, following(snapshot.anchor, 0.0, 7 * trainer.tokens_per_step))
    assert trainer.path_step == 7


def places_of(trainer, steps, monkeypatch):
    found, batch = [], BatchStream.batch
    with monkeypatch.context() as patched:
        patched.setattr(BatchStream, "batch", lambda stream, place: found.append(place) or batch(stream, place))
        for _ in range(steps):
            trainer.inner_step()
    return found


@pytest.mark.parametrize("inner_steps", [0])
def test_replicas_read_side_by_side_in_rounds_of_the_clock(trainer, monkeypatch):
    tokens, first = trainer.tokens_per_step, trainer.anchor(OTHER)
    # Nobody has counted yet.
    assert places_of(trainer, 2, monkeypatch) == [0, 1]
    # Three peers trained two steps each. The module at the other end of its round says nothing new.
    trainer.snapshot(OTHER)
    assert places_of(trainer, 1, monkeypatch) == [2]
    trainer.adopt(OTHER, following(first, 0.0, 2 * tokens, replicas=3))
    trainer.adopt(MODULE, following(trainer.anchor(MODULE), 0.0, 5 * tokens, replicas=3))
    assert places_of(trainer, 1, monkeypatch) == [7]
    trainer.replica = 2
    assert places_of(trainer, 2, monkeypatch) == [6 + 2 * 2 + 2, 6 + 2 * 2 + 3]
    # A batch after which the parameters were no numbers does not come again.
    trainer.discard(OTHER)
    assert places_of(trainer, 1, monkeypatch) == [6 + 2 * 2 + 4]


def test_what_the_encoding_loses_stays_once(trainer):
    """Also where a round brought no step: its contribution is in the next one as a whole."""
    codec = CODECS["sign"]
    trainer.inner_step()
    trainer.snapshot(MODULE).encode(codec)
    snapshot = trainer.snapshot(MODULE)  # No step came.
    anchor, trained = snapshot.anchor.parameters, snapshot.local.clone()
    assert torch.equal(trained, local(trainer))
    data = snapshot.encode(codec)
    told = anchor - codec.decode(data, anchor.numel())
    stepped = following(snapshot.anchor, 0.1)
    trainer.adopt(MODULE, stepped)
    assert torch.equal(local(trainer), stepped.parameters + (trained - told))


def test_a_state_that_comes_while_a_contribution_is_encoded_waits_for_the_whole_of_it(trainer, monkeypatch):
    """Half of the snapshot as its file says and half as trained would be neither."""
    codec, is_halfway, goes_on = CODECS["sign"], threading.Event(), threading.Event()

    def decode(data, values, begin, end):
        if begin:
            is_halfway.set()
            assert goes_on.wait(LIMIT_S)
        return codec.decode(data, values, begin, end)

    slow = SimpleNamespace(encode=codec.encode, decode=decode)
    monkeypatch.setattr(outer, "pieces", lambda values: pieces(values, CHUNK_VALUES))
    trainer.inner_step()
    snapshot, trained = trainer.snapshot(MODULE), local(trainer)
    state = following(snapshot.anchor, 0.1)
    encoding = threading.Thread(target=snapshot.encode, args=(slow,))
    adopting = threading.Thread(target=trainer.adopt, args=(MODULE, state))
    encoding.start()
    assert is_halfway.wait(LIMIT_S)
    adopting.start()
    adopting.join(0.3)  # It would be done by now if it did not wait.
    goes_on.set()
    for thread in (encoding, adopting):
        thread.join(LIMIT_S)
    assert torch.equal(local(trainer), state.parameters + (trained - snapshot.local))


def test_numbers_that_are_none_go_with_all_that_stood_on_them(trainer):
    anchor = trainer.anchor(MODULE)
    trainer.inner_step()
    with torch.no_grad():
        next(iter(trainer.model.parameters())).fill_(float("nan"))
    trainer.snapshot(MODULE)
    trainer.discard(MODULE)
    assert torch.equal(local(trainer), anchor.parameters)
    assert trainer.snapshot(MODULE).tokens == 0


def test_scoring_restores_local_parameters_bit_for_bit(trainer):
    trainer.inner_step()
    before = {module: local(trainer, module) for module in (MODULE, OTHER)}
    rows = torch.ones(2, trainer.plan.model.sequence_length, dtype=torch.int64)
    found = trainer.loss_of(PATH, trainer.anchors(), rows)
    assert found.loss is not None
    for module, flat in before.items():
        assert torch.equal(local(trainer, module), flat)


def test_copies_that_do_not_fit_are_tried_again_and_then_said(trainer, monkeypatch):
    rows = torch.ones(2, trainer.plan.model.sequence_length, dtype=torch.int64)
    expected, original = trainer.loss_of(PATH, trainer.anchors(), rows), lent_parameters
    failures = 1

    def lent(*arguments):
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*arguments)

    monkeypatch.setattr("dipaco.training.trainer.lent_parameters", lent)
    assert trainer.loss_of(PATH, trainer.anchors(), rows) == expected
    failures = 100
    with pytest.raises(ConfigurationError, match="scoring: .* does not fit in the memory"):
        trainer.loss_of(PATH, trainer.anchors(), rows)
    failures = 0
    assert trainer.loss_of(PATH, trainer.anchors(), rows) == expected
