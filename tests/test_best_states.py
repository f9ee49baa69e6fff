"""Which states the inference tools take: the best of a path when they are what they claim."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dipaco.dht.view import PathService
from dipaco.inference.sources import DiskSource, SourceSettings, SwarmSource, assemble_path
from dipaco.modules.best_parameters import BestParameters, BestReference, best_parameters_of
from dipaco.modules.compose import load_path
from dipaco.modules.errors import NetworkError, StorageError
from dipaco.modules.evaluate import LossSum, sum_losses
from dipaco.modules.state import ModuleState, PathProgress
from dipaco.modules.transformer import PathModel
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.token_files import early_stopping_rows
from support.tiny_run import TINY_PREFIX_TOKENS, make_tiny_run

PATH = 1


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_tiny_run(
        tmp_path_factory.mktemp("prepared"),
        modules_per_level=(1, 2),
        documents_per_path=3,
        private_blocks=(1,),
    )


@pytest.fixture
def run(prepared: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the run that a test may write to."""
    return RunFolder(shutil.copytree(prepared.path, tmp_path / "run"))


@pytest.fixture(scope="module")
def best(prepared: RunFolder) -> BestParameters:
    """The genesis as somebody's best states, with its true loss."""
    run = prepared
    plan = run.plan()
    grid = run.grid(plan)
    base = run.base_parameters(plan)
    states = {m: run.genesis_state(plan, m, base) for m in grid.modules_of_path(PATH)}
    model = PathModel(plan.model)
    unchecked = best_parameters_of(grid, PATH, 3, LossSum(1.0, 1), states)
    unchecked.load_into(model)
    rows = early_stopping_rows(run.validation_tokens(plan, PATH), plan.rounds)
    true = LossSum(*sum_losses(model, rows, TINY_PREFIX_TOKENS))
    return best_parameters_of(grid, PATH, 3, true, states)


def newest_of(run: RunFolder, last_round: int, noise: float = 0.0) -> dict[str, ModuleState]:
    """Return states of the path's modules as of a round: the genesis, with noise if asked for."""
    plan = run.plan()
    base = run.base_parameters(plan)
    generator = torch.Generator().manual_seed(0)
    states = {}
    for module in run.grid(plan).modules_of_path(PATH):
        state = run.genesis_state(plan, module, base)
        drawn = torch.randn(state.parameters.shape, generator=generator)
        states[module] = replace(
            state,
            version=1,
            parameters=state.parameters + noise * drawn,
            progress={PATH: PathProgress(tokens=1, last_round=last_round)},
        )
    return states


def commit(run: RunFolder, states: dict[str, ModuleState]) -> None:
    for state in states.values():
        run.states.save(state)


def poor_best(run: RunFolder) -> BestParameters:
    """Best states, with their true loss, that are worse than the genesis."""
    plan = run.plan()
    states = newest_of(run, 3, noise=0.1)
    model = PathModel(plan.model)
    best_parameters_of(run.grid(plan), PATH, 3, LossSum(1.0, 1), states).load_into(model)
    rows = early_stopping_rows(run.validation_tokens(plan, PATH), plan.rounds)
    true = LossSum(*sum_losses(model, rows, TINY_PREFIX_TOKENS))
    return best_parameters_of(run.grid(plan), PATH, 3, true, states)


def lie(best: BestParameters) -> BestParameters:
    true = best.held_out_loss
    return replace(best, held_out_loss=LossSum(true.nll / 2, true.tokens))


def hold(run: RunFolder, best: BestParameters) -> Path:
    store = run.best_parameters(run.grid(run.plan()))
    store.hold(best)
    return store.file(best.path)


def test_best_states_are_used_where_they_are_and_nothing_else_is_needed(
    run: RunFolder, best: BestParameters
) -> None:
    hold(run, best)
    source = DiskSource(run.path)
    assert source.best_round(PATH) == 3
    assert source.missing_modules(PATH) == ()
    model = assemble_path(source, PATH)
    for name, view in best.layout.views(best.parameters).items():
        assert torch.equal(model.get_parameter(name).detach(), view)
    assert source.best_round(0) is None
    with pytest.raises(StorageError, match="no state of its module"):
        assemble_path(source, 0)


def test_the_newest_states_can_be_asked_for(run: RunFolder, best: BestParameters) -> None:
    hold(run, best)
    source = DiskSource(run.path, SourceSettings(current=True))
    assert source.best_round(PATH) is None
    assert source.missing_modules(PATH) == ("L0.E0", "L1.E1", "P1")


def test_a_false_claim_on_disk_is_not_used(
    run: RunFolder, best: BestParameters, caplog: pytest.LogCaptureFixture
) -> None:
    file = hold(run, lie(best))
    source = DiskSource(run.path)
    assert source.best_round(PATH) is None
    assert "claim a held-out loss" in caplog.text
    assert source.missing_modules(PATH) != ()
    file.write_bytes(file.read_bytes()[:-4])
    damaged = DiskSource(run.path)
    assert damaged.best_path(PATH) is None
    assert len([r for r in caplog.records if "not used" in r.message]) == 2


@pytest.mark.parametrize(("last_round", "is_used"), [(5, True), (3, False)])
def test_later_states_that_nobody_scored_are_used_if_they_are_better(
    run: RunFolder, last_round: int, is_used: bool
) -> None:
    """Trainers do not score the rounds in which they end."""
    hold(run, poor_best(run))
    newest = newest_of(run, last_round)
    commit(run, newest)
    source = DiskSource(run.path)
    assert source.best_round(PATH) == (None if is_used else 3)
    assert len(source.digests(PATH)) == (len(newest) if is_used else 1)
    if is_used:
        model, untrained = assemble_path(source, PATH), PathModel(run.plan().model)
        load_path(untrained, source.grid, PATH, newest)
        for one, other in zip(model.parameters(), untrained.parameters(), strict=True):
            assert torch.equal(one, other)


def test_later_states_that_are_worse_are_not_used(run: RunFolder, best: BestParameters) -> None:
    hold(run, best)
    commit(run, newest_of(run, 5, noise=0.1))
    source = DiskSource(run.path)
    assert source.best_round(PATH) == 3
    source.look_again()
    assert source.best_round(PATH) == 3


def test_what_cannot_be_checked_is_used_as_it_is(run: RunFolder, best: BestParameters) -> None:
    hold(run, lie(best))
    plan = run.plan()
    shard = run.shard_index(plan).paths[PATH]
    run.blobs.remove(shard.validation_sha256)
    assert DiskSource(run.path).best_round(PATH) == 3


class Swarm:
    """A client's answers without a swarm."""

    def __init__(self, run: RunFolder, folder: Path, served: list[BestParameters]) -> None:
        self.plan = run.plan()
        self.folder = folder
        self.served = {best.sha256: best for best in served}
        self.notices = [b.reference for b in served]
        self.progress: dict[int, PathService] = {}
        self.newest: dict[str, ModuleState] = {}
        self._run = run

    def view(self) -> Any:
        return SimpleNamespace(bests={PATH: self.notices}, progress=self.progress)

    def fetch_best_path(self, path: int, sha256: str) -> BestParameters:
        if sha256 not in self.served:
            raise NetworkError("nobody has it")
        return self.served[sha256]

    def fetch_blob(self, sha256: str) -> Path:
        return self._run.blobs.require(sha256)

    def winning_state(self, module: str) -> ModuleState | None:
        return self.newest.get(module)

    def close(self) -> None:
        pass


@pytest.fixture
def cache(run: RunFolder, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(run.manifest_path.read_bytes())
    return folder


def test_a_swarms_false_claims_are_passed_over(
    run: RunFolder, best: BestParameters, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client: Any = Swarm(run, cache, [lie(best), best])
    client.notices.insert(0, BestReference(PATH, 1, LossSum(1.0, 1), "0" * 64))
    source = SwarmSource(client)
    found = source.best_path(PATH)
    assert found is not None
    assert found.sha256 == best.sha256
    assert caplog.text.count("claim a held-out loss") == 1
    # A later call with the same folder fetches nothing.
    client.served.clear()
    assert SwarmSource(client).best_round(PATH) == 3


def test_a_swarm_of_liars_gives_the_newest_states(
    run: RunFolder, best: BestParameters, cache: Path
) -> None:
    client: Any = Swarm(run, cache, [lie(best)])
    source = SwarmSource(client)
    assert source.best_round(PATH) is None
    with pytest.raises(NetworkError, match="no state of its module"):
        assemble_path(source, PATH)
    assert not (cache / "best").exists()


@pytest.mark.parametrize("is_scored", [False, True])
def test_a_swarms_newest_states_are_scored_where_no_trainer_did(
    run: RunFolder, cache: Path, is_scored: bool
) -> None:
    client: Any = Swarm(run, cache, [poor_best(run)])
    client.newest = newest_of(run, 5)
    # Somebody who scored them would have named them, had they been better.
    client.progress = {PATH: PathService(5, 1, 1.0, 1 if is_scored else 0, 1.0)}
    assert SwarmSource(client).best_round(PATH) == (3 if is_scored else None)
