"""By whose documents a foreign state is judged, with a module that others have trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dipaco.modules.errors import NetworkError
from dipaco.modules.state import ModuleState, PathProgress, StateReference
from dipaco.peer.member.adoption import MAX_LOSS_INCREASE
from dipaco.peer.state_checks import (
    LATELY_ROUNDS,
    LEAST_PART,
    LOSS_CHECK_SEQUENCES,
    PathStates,
    StateChecks,
)
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


class OthersStates:
    """The modules of the other path as those who train it hold them, or as nobody gives them."""

    def __init__(self, states: Mapping[str, ModuleState]) -> None:
        self.states, self.is_served = states, True
        self.trained: set[int] = set()
        """The paths that others train."""
        self.asked: list[tuple[int, str]] = []

    def trainers(self, path: int) -> tuple[str, ...]:
        return ("Pa",) if path in self.trained else ()

    def find(self, path: int, module: str) -> ModuleState:
        self.asked.append((path, module))
        if not self.is_served:
            raise NetworkError("nobody gives it")
        return self.states[module]


class Newcomer:
    """Begins a path that nobody has trained, beside peers that train the other one."""

    def __init__(self, run: RunFolder, trained: Mapping[str, ModuleState]) -> None:
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
        self.others = OthersStates(trained)
        files: Any = self.files
        others: Any = self.others
        self.checks = StateChecks(files, others, self.trainer)

    def compare(self, state: ModuleState, *, is_rival: bool = False) -> Comparison:
        """Compare as a member has it done: again, once it was fetched again."""
        for _ in range(2):
            self.checks.prepare(state)
            found = self.checks.compare(state, self.own_rows, is_rival=is_rival)
            if not found.is_undecided:
                break
        assert not found.is_undecided
        return found


Trained = tuple[RunFolder, dict[str, ModuleState]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run, and its modules after some rounds of the other path alone."""
    folder: Path = tmp_path_factory.mktemp("run")
    run = make_tiny_run(
        folder, modules_per_level=(1, 2), inner_steps=15, hidden_size=64, feed_forward_size=128
    )
    swarm = ReferenceSwarm(run, peers=[SimulatedPeer(OTHER)])
    for _ in range(2):
        swarm.run_round()
    return run, {module: swarm.states[module] for module in run.grid(run.plan()).modules()}


@pytest.fixture
def newcomer(trained: Trained) -> Newcomer:
    return Newcomer(*trained)


@pytest.fixture
def state(trained: Trained) -> ModuleState:
    """The shared module as the other path has trained it."""
    return trained[1][SHARED]


def is_wrecked(found: Comparison, *, is_rival: bool = False) -> bool:
    """Tell what a member says of it, who does not know how long its steps are."""
    before, after, _, coasting_before, coasting_after, _ = found
    assert before is not None
    assert after is not None
    assert coasting_before is not None
    assert coasting_after is not None
    pairs = [(before, after), (coasting_before, coasting_after)]
    if is_rival:
        pairs = [(after, before) for before, after in pairs]
    return any(not bad <= good + MAX_LOSS_INCREASE for good, bad in pairs)


def with_progress(state: ModuleState, part: float, rounds_ago: int) -> ModuleState:
    """Return a state in whose table the path in training has had a part, so many rounds ago."""
    entry = state.progress[OTHER]
    own = PathProgress(int(part * entry.tokens), entry.last_round - rounds_ago)
    return replace(state, progress={OWN: own, OTHER: entry})


def test_a_state_of_other_paths_is_judged_by_their_documents(
    newcomer: Newcomer, state: ModuleState
) -> None:
    assert is_wrecked(newcomer.trainer.compare(SHARED, state, newcomer.own_rows))
    assert newcomer.checks.compare(state, newcomer.own_rows).is_undecided
    found = newcomer.compare(state)
    assert found.after is not None
    assert found.before is not None
    assert found.after < found.before - 1.0
    assert not is_wrecked(found)
    assert newcomer.files.asked == [OTHER]
    # It is scored beside its own modules.
    assert newcomer.others.asked == [(OTHER, "L1.E1")]


def test_so_is_the_anchor_that_a_path_begins_with(newcomer: Newcomer, state: ModuleState) -> None:
    """The genesis state is what it is compared with."""
    genesis = newcomer.trainer.anchor(SHARED)
    newcomer.trainer.adopt(SHARED, state, on_top=())
    found = newcomer.compare(genesis, is_rival=True)
    assert found.before is not None
    assert found.after is not None
    assert found.before < found.after - 1.0


@pytest.mark.parametrize("kind", ["noise", "no number", "momentum"])
@pytest.mark.parametrize("part", [0.0, 1.0])
def test_what_is_spoiled_is_so_by_any_documents(
    newcomer: Newcomer, state: ModuleState, kind: str, part: float
) -> None:
    """Whatever part in it the path in training has had."""
    noise = torch.randn(len(state.parameters), generator=torch.Generator().manual_seed(0))
    state = with_progress(state, part, 10)
    spoiled = {
        "noise": replace(state, parameters=state.parameters + noise),
        "no number": replace(state, parameters=state.parameters * math.nan),
        "momentum": replace(state, momentum=state.momentum * 1e3),
    }[kind]
    assert is_wrecked(newcomer.compare(spoiled))


@pytest.mark.parametrize(
    ("part", "rounds_ago", "asked"),
    [
        (LEAST_PART, LATELY_ROUNDS - 1, []),
        (LEAST_PART, LATELY_ROUNDS, [OTHER]),
        (0.9 * LEAST_PART, 0, [OTHER]),
    ],
)
def test_a_path_that_has_had_its_part_lately_judges_by_its_own(
    newcomer: Newcomer, state: ModuleState, part: float, rounds_ago: int, asked: list[int]
) -> None:
    state = with_progress(state, part, rounds_ago)
    assert is_wrecked(newcomer.compare(state)) == (not asked)
    assert newcomer.files.asked == asked


def test_a_path_that_was_away_is_content_with_what_fits_it(
    newcomer: Newcomer, state: ModuleState
) -> None:
    """Nothing is fetched for it, and a genesis state that is clearly worse raises no doubt."""
    genesis = newcomer.trainer.anchor(SHARED)
    away = replace(with_progress(state, 1.0, 10), parameters=genesis.parameters.clone())
    away = replace(away, momentum=torch.zeros_like(away.momentum))
    assert not is_wrecked(newcomer.compare(away))
    newcomer.trainer.adopt(SHARED, away, on_top=())
    worse = replace(genesis, parameters=state.parameters)
    assert not is_wrecked(newcomer.compare(worse, is_rival=True), is_rival=True)
    assert newcomer.files.asked == []


def test_an_anchor_is_not_given_up_on_the_word_of_one_path(
    newcomer: Newcomer, state: ModuleState
) -> None:
    """Although it is one that has trained it in the last round."""
    genesis = newcomer.trainer.anchor(SHARED)
    newcomer.trainer.adopt(SHARED, with_progress(state, 1.0, 0), on_top=())
    own = newcomer.trainer.compare(SHARED, genesis, newcomer.own_rows)
    assert is_wrecked(own, is_rival=True)
    assert not is_wrecked(newcomer.compare(genesis, is_rival=True), is_rival=True)
    noise = torch.randn(len(state.parameters), generator=torch.Generator().manual_seed(0))
    spoiled = replace(with_progress(state, 1.0, 0), parameters=state.parameters + noise)
    newcomer.trainer.adopt(SHARED, spoiled, on_top=())
    assert is_wrecked(newcomer.compare(genesis, is_rival=True), is_rival=True)


@pytest.mark.parametrize("missing", ["files", "others"])
def test_what_nobody_serves_leaves_the_own_documents(
    newcomer: Newcomer, state: ModuleState, missing: str
) -> None:
    stand_in: Files | OthersStates = getattr(newcomer, missing)
    stand_in.is_served = False
    assert is_wrecked(newcomer.compare(state))


def test_without_documents_nothing_is_said(newcomer: Newcomer, state: ModuleState) -> None:
    state = with_progress(state, 1.0, 0)
    assert newcomer.checks.compare(state, newcomer.own_rows[:0]) == Comparison()


def test_the_other_side_of_a_split_is_scored_with_its_own_modules(
    newcomer: Newcomer, state: ModuleState
) -> None:
    """Two sides trained the path apart: the modules of each fit each other."""
    genesis = newcomer.trainer.anchor("L1.E0")
    theirs = replace(genesis, parameters=0.5 * genesis.parameters)
    newcomer.others.trained, newcomer.others.states = {OWN}, {"L1.E0": theirs}
    state = with_progress(state, 1.0, 0)
    found = newcomer.compare(state)
    assert newcomer.others.asked == [(OWN, "L1.E0")]
    beside = {"L1.E0": theirs}
    rows = newcomer.own_rows[:LOSS_CHECK_SEQUENCES]
    assert found == newcomer.trainer.compare(SHARED, state, rows, OWN, beside)
    assert found != newcomer.trainer.compare(SHARED, state, rows)


class Peers:
    """Those who train the other path, of whom the first does not answer, and what is held here."""

    def __init__(self, state: ModuleState) -> None:
        self.held_here: ModuleState | None = None
        self._state = state

    @property
    def view(self) -> Any:
        peers = ("me", "silent", "empty", "holder")
        claims = [SimpleNamespace(peer_id=peer) for peer in peers]
        return SimpleNamespace(claimants=lambda path: claims if path == OTHER else claims[:1])

    def holdings(self, peer: str, module: str) -> StateReference | None:
        assert peer != "me"
        if peer == "silent":
            raise NetworkError("no answer")
        return self._state.reference if peer == "holder" else None

    def state(self, wanted: StateReference, holders: Sequence[str]) -> ModuleState:
        assert (wanted, tuple(holders)) == (self._state.reference, ("holder",))
        return self._state

    def load(self, module: str) -> ModuleState | None:
        return self.held_here


def test_states_of_another_path_come_from_who_else_trains_it_or_from_the_copy_here(
    state: ModuleState,
) -> None:
    peers: Any = Peers(state)
    states = PathStates("me", peers, peers, peers, peers)
    assert states.find(OTHER, SHARED) is state
    assert (states.trainers(OWN), states.trainers(OTHER)[0]) == ((), "silent")
    with pytest.raises(NetworkError, match=r"nobody else who trains path 0 gives its L0\.E0"):
        states.find(OWN, SHARED)
    peers.held_here = replace(state)
    assert states.find(OWN, SHARED) is peers.held_here
    assert states.find(OTHER, SHARED) is state
