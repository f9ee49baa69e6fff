"""By whose documents a foreign state is judged, with a module that others have trained."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dipaco.modules.errors import NetworkError
from dipaco.modules.state import ModuleState, PathProgress
from dipaco.peer.member.adoption import MAX_LOSS_INCREASE
from dipaco.peer.state_checks import LEAST_PART, StateChecks
from dipaco.peer.trainer import Comparison, PathTrainer
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.settings import SimulatedPeer
from support.tiny_run import make_tiny_run

SHARED, OWN, OTHER = "L0.E0", 0, 1


class Files:
    """The held-out rows of every path, or of none."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.is_served = run, True
        self.asked: list[int] = []

    def held_out_rows(self, path: int, timeout_s: float) -> torch.Tensor:
        self.asked.append(path)
        if not self.is_served:
            raise NetworkError("nobody has it")
        return torch.from_numpy(self.run.validation_tokens(self.run.plan(), path).astype("int64"))


class Newcomer:
    """Begins a path that nobody has trained, beside peers that train the other one."""

    def __init__(self, run: RunFolder) -> None:
        plan = run.plan()
        grid = run.grid(plan)
        self.trainer = PathTrainer(plan, grid, torch.device("cpu"))
        states = {module: run.genesis_state(plan, module) for module in grid.modules_of_path(OWN)}
        tokens = run.train_tokens(plan, OWN)
        stream = BatchStream(tokens, seed=0, path=OWN, batch_sequences=2)
        self.trainer.start_path(OWN, states, stream)
        self.files = Files(run)
        self.own_rows = self.files.held_out_rows(OWN, 1.0)
        self.files.asked.clear()
        files: Any = self.files
        self.checks = StateChecks(files, self.trainer)

    def compare(self, state: ModuleState) -> Comparison:
        self.checks.prepare(state)
        return self.checks.compare(SHARED, state, self.own_rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, ModuleState]:
    """A run, and its shared module after some rounds of the other path alone."""
    folder: Path = tmp_path_factory.mktemp("run")
    run = make_tiny_run(
        folder, modules_per_level=(1, 2), inner_steps=15, hidden_size=64, feed_forward_size=128
    )
    swarm = ReferenceSwarm(run, peers=[SimulatedPeer(OTHER)])
    for _ in range(2):
        swarm.run_round()
    return run, swarm.states[SHARED]


@pytest.fixture
def newcomer(trained: tuple[RunFolder, ModuleState]) -> Newcomer:
    return Newcomer(trained[0])


def is_wrecked(found: Comparison) -> bool:
    """Tell what a member says of it, who does not know how long its steps are."""
    before, after, _, coasting_before, coasting_after = found
    assert before is not None
    assert after is not None
    assert coasting_before is not None
    assert coasting_after is not None
    pairs = ((before, after), (coasting_before, coasting_after))
    return any(not bad <= good + MAX_LOSS_INCREASE for good, bad in pairs)


def test_a_state_of_other_paths_is_judged_by_their_documents(
    newcomer: Newcomer, trained: tuple[RunFolder, ModuleState]
) -> None:
    state = trained[1]
    assert is_wrecked(newcomer.trainer.compare(SHARED, state, newcomer.own_rows))
    found = newcomer.compare(state)
    assert found.after is not None
    assert found.before is not None
    assert found.after < found.before - 1.0
    assert not is_wrecked(found)
    assert newcomer.files.asked == [OTHER]


def test_so_is_the_anchor_that_a_path_begins_with(
    newcomer: Newcomer, trained: tuple[RunFolder, ModuleState]
) -> None:
    """The genesis state is what it is compared with."""
    genesis = newcomer.trainer.anchor(SHARED)
    newcomer.trainer.adopt(SHARED, trained[1], on_top=())
    found = newcomer.compare(genesis)
    assert found.before is not None
    assert found.after is not None
    assert found.before < found.after - 1.0


@pytest.mark.parametrize("kind", ["noise", "no number", "momentum"])
def test_what_is_spoiled_is_so_by_any_documents(
    newcomer: Newcomer, trained: tuple[RunFolder, ModuleState], kind: str
) -> None:
    state = trained[1]
    noise = torch.randn(len(state.parameters), generator=torch.Generator().manual_seed(0))
    spoiled = {
        "noise": replace(state, parameters=state.parameters + noise),
        "no number": replace(state, parameters=state.parameters * math.nan),
        "momentum": replace(state, momentum=state.momentum * 1e3),
    }[kind]
    assert is_wrecked(newcomer.compare(spoiled))


def test_a_path_with_a_part_in_the_anchor_is_judged_by_its_own(
    newcomer: Newcomer, trained: tuple[RunFolder, ModuleState]
) -> None:
    """What the other state says of itself is not asked."""
    for part, asked in ((LEAST_PART, []), (0.9 * LEAST_PART, [OTHER])):
        progress = {OWN: PathProgress(int(1000 * part), 0), OTHER: PathProgress(1000, 0)}
        anchor = replace(trained[1], progress=progress)
        newcomer.trainer.adopt(SHARED, anchor, on_top=())
        newcomer.compare(trained[1])
        assert newcomer.files.asked == asked


def test_documents_that_nobody_serves_leave_the_own_ones(
    newcomer: Newcomer, trained: tuple[RunFolder, ModuleState]
) -> None:
    newcomer.files.is_served = False
    assert is_wrecked(newcomer.compare(trained[1]))
    assert newcomer.checks.compare(SHARED, trained[1], newcomer.own_rows[:0]) == Comparison()
