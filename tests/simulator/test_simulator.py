"""The simulator: determinism, the independence of its shortcuts, and agreement with the peers."""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import canonical_json
from dipaco.modules import device
from dipaco.modules.compose import load_path
from dipaco.modules.contributions import CODECS
from dipaco.modules.layout import layout_of
from dipaco.modules.state import write_state
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import InnerConfig
from dipaco.protocol.manifest import load_or_create_operator_key, sign_manifest
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator.dense_baseline import MixedBatches, baseline_inner, score_dense, train_dense
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.simulated_peers import SimulatedPeer, SimulatorSettings
from dipaco.training.inner import InnerLoop, learning_rate_at
from dipaco.training.scoring import LossSum, sum_losses
from support.runs.tiny_run import TINY_PREFIX_TOKENS, make_tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")

UNSCORED = SimulatorSettings(validation_sequences=0)


def last_report(swarm, rounds):
    return list(swarm.rounds(rounds))[-1]


def test_a_tiny_run_is_the_same_every_time(tmp_path, shared_run):
    again = make_tiny_run(tmp_path / "again")
    assert again.plan().admission_scope == shared_run.plan().admission_scope
    other = make_tiny_run(tmp_path / "other", seed=1)
    assert other.plan().admission_scope != shared_run.plan().admission_scope


@pytest.mark.parametrize("run_name", ["shared_run", "private_run"])
def test_digests_are_deterministic(run_name, request):
    run = request.getfixturevalue(run_name)
    first, second = (list(ReferenceSwarm(run).rounds(2)) for _ in range(2))
    assert [r.digests for r in first] == [r.digests for r in second]
    assert set(first[0].digests) == set(run.grid(run.plan()).modules())
    assert len({*first[0].digests.values(), *first[1].digests.values()}) == 2 * len(first[0].digests)


def test_a_run_by_the_clock_is_simulated_in_fp32_too(tmp_path, monkeypatch):
    """Its peers may train in bf16; a simulation is to have the same bits on every processor."""
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: True)
    run = make_tiny_run(tmp_path / "run", inner_steps=0)
    swarm = ReferenceSwarm(run, steps_per_round=2, settings=UNSCORED)
    assert {trainer.inner.dtype for trainer in swarm.trainers.values()} == {torch.float32}


def test_scoring_does_not_disturb_training(shared_run):
    unscored = ReferenceSwarm(shared_run, settings=UNSCORED)
    report = last_report(unscored, 2)
    assert report.digests == last_report(ReferenceSwarm(shared_run), 2).digests
    assert report.validation.perplexity is None


def test_an_independent_implementation_agrees(tmp_path):
    """One round of 2x2, all levels at the end, written out with PyTorch's own Nesterov."""
    run = make_tiny_run(
        tmp_path / "run",
        codec="float32",
        contributions={"shorten": False},
        inner_steps=3,
        rounds={"level_offsets": (1.0, 1.0)},
    )
    plan = run.plan()
    base = run.base_parameters(plan)
    shards = [shard.train_sequences for shard in run.shard_index(plan).paths]
    trained = []
    for path in range(4):
        model = run.base_model(plan)
        inner = InnerLoop(model, plan.inner, torch.device("cpu"))
        stream = BatchStream(run.train_tokens(plan, path), seed=0, path=path, batch_sequences=2)
        for step in range(3):
            inner.step(stream.batch(step), step)
        trained.append({name: p.detach().clone() for name, p in model.named_parameters()})

    swarm = ReferenceSwarm(run)
    swarm.run_round()
    for module, paths in {"L0.E0": (0, 1), "L0.E1": (2, 3), "L1.E0": (0, 2), "L1.E1": (1, 3)}.items():
        names = layout_of(swarm.grid, module).names
        parameters = [torch.nn.Parameter(base[name].clone()) for name in names]
        total = sum(shards[path] for path in paths)
        for name, parameter in zip(names, parameters, strict=True):
            parameter.grad = 2**0.5 * sum((shards[path] / total) * (base[name] - trained[path][name]) for path in paths)
        outer = {"lr": plan.outer.learning_rate, "momentum": plan.outer.momentum}
        torch.optim.SGD(parameters, **outer, nesterov=True).step()
        views = layout_of(swarm.grid, module).views(swarm.states[module].parameters)
        for name, parameter in zip(names, parameters, strict=True):
            torch.testing.assert_close(views[name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_replicas_share_a_path_but_no_batches(shared_run):
    swarm = ReferenceSwarm(shared_run, peers=[SimulatedPeer(1), SimulatedPeer(1, replica=1)])
    report = last_report(swarm, 1)
    # A path is in its schedule where one of its peers is, however many train it.
    assert [path.step for path in report.paths] == [4]
    assert swarm.states["L1.E1"].progress[1].tokens == 4 * 2 * 32
    trainers = swarm.trainers.values()
    gradients = [trainer.snapshot("L0.E0").outer_gradient()[:] for trainer in trainers]
    assert report.digests != last_report(ReferenceSwarm(shared_run, peers=[SimulatedPeer(1)]), 1).digests
    # Offset 0.5: since its boundary each replica has trained on, on other sequences.
    assert not torch.equal(gradients[0], gradients[1])


def test_replicas_of_a_path_read_each_row_once(shared_run, monkeypatch):
    """Four replicas with orders of their own would read 67 % of an epoch, and the rest again."""
    places, batch = [], BatchStream.batch
    monkeypatch.setattr(BatchStream, "batch", lambda stream, place: places.append(place) or batch(stream, place))
    swarm = ReferenceSwarm(shared_run, peers=[SimulatedPeer(1, number) for number in range(4)])
    for _ in range(3):
        swarm.run_round()
    assert sorted(places) == list(range(3 * 4 * swarm.plan.rounds.inner_steps))


def test_untrained_paths_keep_their_states(private_run):
    swarm = ReferenceSwarm(private_run, peers=[SimulatedPeer(0)])
    before = swarm.report()
    after = last_report(swarm, 1)
    changed = {m for m in after.digests if after.digests[m] != before.digests[m]}
    assert changed == {"L0.E0", "L1.E0", "P0"}
    assert [path.path for path in after.paths] == [0]


def test_the_number_of_the_first_round_stands_in_the_states(shared_run):
    swarm = ReferenceSwarm(shared_run, first_round=7)
    assert last_report(swarm, 1).round_index == 7
    assert swarm.states["L0.E0"].progress[0].last_round == 7
    from_zero = ReferenceSwarm(shared_run)
    from_zero.run_round()
    assert torch.equal(from_zero.states["L0.E0"].parameters, swarm.states["L0.E0"].parameters)
    assert from_zero.states["L0.E0"].digest != swarm.states["L0.E0"].digest


@pytest.mark.parametrize(("offsets", "first", "second"), [((0.5, 1.0), (2, 4), (6, 8)), ((0.75, 0.25), (3, 1), (7, 3))])
def test_levels_step_in_the_middle_of_a_round(tmp_path, offsets, first, second):
    run = make_tiny_run(tmp_path / "run", rounds={"level_offsets": offsets})
    swarm = ReferenceSwarm(run, settings=UNSCORED)
    for expected in (first, second):
        report = swarm.run_round()
        counted = [swarm.states[m].progress[0].tokens // (2 * 32) for m in ("L0.E0", "L1.E0")]
        # A path grows by no more than twice what its first, short, round brought.
        assert tuple(counted) == expected
    assert {path.step for path in report.paths} == {8}


def test_a_level_without_new_steps_is_left_alone(tmp_path):
    run = make_tiny_run(tmp_path / "run", inner_steps=1)
    swarm = ReferenceSwarm(run, settings=UNSCORED)
    assert swarm.run_round().versions == {"L0.E0": 0, "L0.E1": 0, "L1.E0": 1, "L1.E1": 1}
    assert swarm.run_round().versions == {"L0.E0": 1, "L0.E1": 1, "L1.E0": 2, "L1.E1": 2}


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_trains_with_bits_of_its_own(tmp_path, codec):
    run = make_tiny_run(tmp_path / "run", codec=codec, outer={"momentum": 0.0})
    exact = make_tiny_run(tmp_path / "exact", codec="float32", outer={"momentum": 0.0})
    swarm = ReferenceSwarm(run)
    before, report = swarm.report().validation, last_report(swarm, 3)
    assert report.validation.nll < before.nll
    others = last_report(ReferenceSwarm(exact, settings=UNSCORED), 3).digests
    assert (report.digests == others) == (codec == "float32")


def test_validation_is_of_the_anchors_and_weighs_tokens_alike(shared_run):
    swarm = ReferenceSwarm(shared_run)
    before = swarm.report().validation
    report = last_report(swarm, 3)
    plan, scores = swarm.plan, []
    model = PathModel(plan.model)
    for path in range(4):
        load_path(model, swarm.grid, path, swarm.states)
        rows = shared_run.validation_tokens(plan, path)
        scores.append(LossSum(*sum_losses(model, rows, TINY_PREFIX_TOKENS)))
    assert [path.validation for path in report.paths] == scores
    assert report.validation == LossSum.total(scores)
    perplexity = report.validation.perplexity
    assert perplexity < 0.7 * (before.perplexity or 0)


def test_scores():
    assert LossSum().perplexity is None
    assert LossSum(1e9, 1).perplexity is None
    total = LossSum.total([LossSum(1.0, 1), LossSum(2.0, 3)])
    assert total == LossSum(3.0, 4)
    assert total.perplexity == pytest.approx(np.exp(0.75))


def test_states_from_elsewhere_continue_the_schedule(shared_run):
    first = ReferenceSwarm(shared_run)
    first.run_round()
    later = ReferenceSwarm(shared_run, states=first.states, first_round=1)
    assert [trainer.path_step for trainer in later.trainers.values()] == [4] * 4
    assert last_report(later, 1).versions == dict.fromkeys(first.states, 2)


@pytest.mark.parametrize(
    "peers",
    [
        [],
        [SimulatedPeer(4)],
        [SimulatedPeer(1), SimulatedPeer(1)],
        [SimulatedPeer(1, 0, "a"), SimulatedPeer(2, 0, "a")],
    ],
)
def test_impossible_peers_are_refused(shared_run, peers):
    with pytest.raises(ConfigurationError):
        ReferenceSwarm(shared_run, peers=peers)


def test_a_successor_run_starts_from_its_genesis_states(tmp_path, private_run, monkeypatch):
    trained = ReferenceSwarm(private_run, settings=UNSCORED)
    trained.run_round()
    plan, run = private_run.plan(), RunFolder(tmp_path / "run")
    shutil.copytree(private_run.path / "blobs", run.path / "blobs")
    begun = {module: replace(state, version=0, progress={}) for module, state in trained.states.items()}
    for module, state in begun.items():
        write_state(state, tmp_path / module)
        assert run.blobs.add_file(tmp_path / module) == state.digest
    index = run.blobs.add_bytes(canonical_json({module: state.digest for module, state in begun.items()}))
    blobs = plan.blobs.model_copy(update={"genesis": index})
    successor = plan.model_copy(update={"blobs": blobs, "successor_of": plan.run_id})
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    run.manifest_path.write_bytes(sign_manifest(successor, key))
    read, original = [], run.blobs.read
    monkeypatch.setattr(run.blobs, "read", lambda sha256: read.append(sha256) or original(sha256))
    swarm = ReferenceSwarm(run, settings=UNSCORED)
    assert read.count(index) == 1  # once for all modules, of which there may be thousands
    assert {m: s.digest for m, s in swarm.states.items()} == {m: s.digest for m, s in begun.items()}


# Dense baseline


def test_the_dense_baseline_sees_every_sequence_once_an_epoch(tmp_path):
    run = make_tiny_run(tmp_path / "run", documents_per_path=5, inner={"batch_sequences": 1})
    plan = run.plan()
    shards = [run.train_tokens(plan, path) for path in range(4)]
    expected = Counter(row.tobytes() for shard in shards for row in shard.astype(np.int64))
    batches = MixedBatches(run, plan)
    seen = Counter(batches.batch(step).numpy().tobytes() for step in range(sum(map(len, shards))))
    assert seen == expected


def test_the_dense_baseline_learns_and_is_scored_on_the_same_tokens(shared_run):
    before = ReferenceSwarm(shared_run).report().validation
    steps = []
    result = train_dense(shared_run, 12, on_step=lambda step, loss: steps.append(step))
    assert steps == list(range(12))
    assert result.validation.tokens == before.tokens
    assert result.validation.nll < 0.98 * before.nll
    assert train_dense(shared_run, 0).validation.nll == pytest.approx(before.nll, rel=1e-6)
    again = train_dense(shared_run, 12)
    assert all(torch.equal(result.parameters[n], p) for n, p in again.parameters.items())
    model = PathModel(shared_run.plan().model)
    model.load_state_dict(result.parameters)
    assert score_dense(shared_run, model) == result.validation
    other = train_dense(shared_run, 12, learning_rate=1e-3)
    assert other.validation != result.validation


def test_the_rate_of_the_dense_baseline_falls_to_its_end_unless_the_plan_says_how():
    kept = InnerConfig(learning_rate=3e-3, warmup_steps=4)
    fallen = baseline_inner(kept, 20)
    rates = [learning_rate_at(fallen, step) for step in (3, 4, 12, 20)]
    assert rates == pytest.approx([3e-3, 3e-3, 1.65e-3, 3e-4])
    assert learning_rate_at(baseline_inner(kept, 20, 8e-3), 4) == pytest.approx(8e-3)
    planned = InnerConfig(decay_steps=100)
    assert baseline_inner(planned, 20) == planned
