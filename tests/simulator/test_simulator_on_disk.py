"""A simulation that keeps its paths on disk: the same bits, whenever it is killed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_run import make_tiny_run

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.base.files import canonical_json
from dipaco.modules.config import GridConfig
from dipaco.modules.state import write_state
from dipaco.protocol.manifest import load_or_create_operator_key, sign_manifest
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator.dense import train_dense
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.report import RoundReport
from dipaco.simulator.settings import SimulatedPeer, SimulatorSettings
from dipaco.training.inner import InnerLoop

pytestmark = pytest.mark.usefixtures("one_thread")

UNSCORED = SimulatorSettings(validation_sequences=0)


def kept_in(folder: Path) -> SimulatorSettings:
    return SimulatorSettings(folder=folder)


@pytest.fixture(scope="module")
def straight(private_run: RunFolder) -> list[RoundReport]:
    """Two rounds of the private run in memory, never stopped."""
    torch.set_num_threads(1)
    return list(ReferenceSwarm(private_run).rounds(2))


def _stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> list[int]:
    """Make inner training end the process, as it were, in the middle; returns the steps done."""
    done: list[int] = []
    step = InnerLoop.step

    def counted(self: InnerLoop, tokens: torch.Tensor, path_step: int) -> float:
        if len(done) == steps:
            raise KeyboardInterrupt
        done.append(path_step)
        return step(self, tokens, path_step)

    monkeypatch.setattr(InnerLoop, "step", counted)
    return done


@pytest.mark.parametrize(
    ("run_name", "optimizer"),
    [("shared_run", "adamw"), ("private_run", "adamw"), ("private_run", "adamw8bit")],
)
def test_keeping_paths_on_disk_changes_no_bit(
    tmp_path: Path, run_name: str, optimizer: str, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(run_name)
    in_memory = SimulatorSettings(optimizer=optimizer)
    expected = list(ReferenceSwarm(run, settings=in_memory).rounds(2))
    settings = replace(in_memory, folder=tmp_path)
    swarm = ReferenceSwarm(run, settings=settings)
    for report, other in zip(expected, swarm.rounds(2), strict=True):
        assert other.as_dict() | {"seconds": 0} == report.as_dict() | {"seconds": 0}


def _add_rounds(swarm: ReferenceSwarm, reports: list[RoundReport]) -> None:
    while swarm.next_round < 2:
        reports.append(swarm.run_round())


# A round of the private run: levels end after 1, 2 and 4 of 4 steps; four paths.
@pytest.mark.parametrize("steps", [0, 3, 6, 15, 17, 22])
def test_a_simulation_on_disk_that_was_killed_repeats_one_segment_at_most(
    tmp_path: Path,
    private_run: RunFolder,
    straight: list[RoundReport],
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
) -> None:
    expected = straight
    reports: list[RoundReport] = []
    with monkeypatch.context() as patch:
        _stop_after(patch, steps)
        swarm = ReferenceSwarm(private_run, settings=kept_in(tmp_path))
        with pytest.raises(KeyboardInterrupt):
            _add_rounds(swarm, reports)
    with monkeypatch.context() as patch:
        done = _stop_after(patch, 1000)
        swarm = ReferenceSwarm(private_run, settings=kept_in(tmp_path))
        assert swarm.next_round == len(reports)
        _add_rounds(swarm, reports)
    assert steps + len(done) <= 2 * 4 * 4 + 1
    for report, other in zip(expected, reports, strict=True):
        assert other.as_dict() | {"seconds": 0} == report.as_dict() | {"seconds": 0}


def test_killed_between_two_outer_steps_of_a_boundary(
    tmp_path: Path, private_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = ReferenceSwarm(private_run).rounds(1)
    for boundary in (0, 1, 3, 6):
        commits: list[str] = []
        commit = ReferenceSwarm._step_module

        def counted(
            self: ReferenceSwarm,
            module: str,
            commits: list[str] = commits,
            commit=commit,
            boundary=boundary,
        ) -> None:
            if len(commits) == boundary:
                raise KeyboardInterrupt
            commits.append(module)
            commit(self, module)

        folder = tmp_path / str(boundary)
        with monkeypatch.context() as patch:
            patch.setattr(ReferenceSwarm, "_step_module", counted)
            with pytest.raises(KeyboardInterrupt):
                ReferenceSwarm(private_run, settings=kept_in(folder)).run_round()
        report = ReferenceSwarm(private_run, settings=kept_in(folder)).run_round()
        assert report.digests == expected.digests


def test_a_level_without_steps_stays_alone_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_tiny_run(tmp_path / "run", inner_steps=1)
    with monkeypatch.context() as patch:
        _stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            ReferenceSwarm(run, settings=kept_in(tmp_path / "live")).run_round()
    swarm = ReferenceSwarm(run, settings=kept_in(tmp_path / "live"))
    assert swarm.run_round().digests == ReferenceSwarm(run).run_round().digests


def _many_paths(folder: Path) -> RunFolder:
    """Return a run of the paper's 16x16 grid whose 256 paths have the shards of four in turns."""
    run = make_tiny_run(
        folder,
        inner_steps=1,
        rounds={"level_offsets": (1.0, 1.0)},
        hidden_size=16,
        head_count=2,
        block_count=3,
    )
    plan = run.plan()
    four = run.shard_index(plan)
    many = [four.paths[path % 4].model_copy(update={"path": path}) for path in range(256)]
    shards = four.model_copy(update={"paths": tuple(many)})
    shards_blob = run.blobs.add_bytes(canonical_json(shards.model_dump(mode="json")))
    grid = GridConfig(modules_per_level=(16, 16), private_blocks=(0,))
    rounds = plan.rounds.model_copy(update={"level_offsets": (1.0, 1.0, 1.0)})
    blobs = plan.blobs.model_copy(update={"shards": shards_blob})
    larger = plan.model_copy(update={"grid": grid, "rounds": rounds, "blobs": blobs})
    key = load_or_create_operator_key(folder / "operator.pem")
    run.manifest_path.write_bytes(sign_manifest(larger, key))
    return run


def test_256_paths(tmp_path: Path) -> None:
    run = _many_paths(tmp_path / "run")
    in_memory = ReferenceSwarm(run, settings=UNSCORED).run_round()
    on_disk = ReferenceSwarm(run, settings=replace(UNSCORED, folder=tmp_path / "live")).run_round()
    assert on_disk.digests == in_memory.digests
    assert len(on_disk.digests) == 16 + 16 + 256
    assert set(on_disk.versions.values()) == {1}
    assert len(list((tmp_path / "live" / "workers").glob("*.safetensors"))) == 256


def test_a_successor_run_starts_from_its_genesis_states(
    tmp_path: Path, private_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = ReferenceSwarm(private_run, settings=UNSCORED)
    trained.run_round()
    plan, run = private_run.plan(), RunFolder(tmp_path / "run")
    shutil.copytree(private_run.path / "blobs", run.path / "blobs")
    begun = {
        module: replace(state, version=0, progress={}) for module, state in trained.states.items()
    }
    for module, state in begun.items():
        write_state(state, tmp_path / module)
        assert run.blobs.add_file(tmp_path / module) == state.digest
    index = run.blobs.add_bytes(
        canonical_json({module: state.digest for module, state in begun.items()})
    )
    blobs = plan.blobs.model_copy(update={"genesis": index})
    successor = plan.model_copy(update={"blobs": blobs, "successor_of": plan.run_id})
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    run.manifest_path.write_bytes(sign_manifest(successor, key))
    read, original = [], run.blobs.read
    monkeypatch.setattr(run.blobs, "read", lambda sha256: read.append(sha256) or original(sha256))
    in_memory = ReferenceSwarm(run, settings=UNSCORED)
    assert read.count(index) == 1  # once for all modules, of which there may be thousands
    assert {m: s.digest for m, s in in_memory.states.items()} == {
        m: s.digest for m, s in begun.items()
    }
    settings = replace(UNSCORED, folder=tmp_path / "live")
    on_disk = ReferenceSwarm(run, settings=settings)
    assert on_disk.run_round().digests == in_memory.run_round().digests


def test_a_broken_worker_file_is_named(tmp_path: Path, shared_run: RunFolder) -> None:
    ReferenceSwarm(shared_run, settings=kept_in(tmp_path)).run_round()
    file = tmp_path / "workers" / "00002.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(IntegrityError, match=r"00002\.safetensors is broken"):
        ReferenceSwarm(shared_run, settings=kept_in(tmp_path))


def test_a_folder_of_another_simulation_is_refused(tmp_path: Path, shared_run: RunFolder) -> None:
    ReferenceSwarm(shared_run, settings=kept_in(tmp_path))
    with pytest.raises(ConfigurationError, match="peers"):
        ReferenceSwarm(shared_run, settings=kept_in(tmp_path), peers=[SimulatedPeer(0)])


def test_a_dense_training_that_was_killed_goes_on(
    tmp_path: Path, shared_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = train_dense(shared_run, 6)
    file = tmp_path / "dense.pt"
    with monkeypatch.context() as patch:
        _stop_after(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            train_dense(shared_run, 6, checkpoint=file, save_every_s=0.0)
    with monkeypatch.context() as patch:
        done = _stop_after(patch, 1000)
        resumed = train_dense(shared_run, 6, checkpoint=file)
    assert done == [4, 5]
    assert not file.exists()
    assert resumed.validation == straight.validation
    assert all(torch.equal(straight.parameters[n], p) for n, p in resumed.parameters.items())
