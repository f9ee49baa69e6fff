"""Early stopping: the best states of a path are kept, in a simulation and in a peer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dipaco.dht.records import Claim
from dipaco.dht.view import SwarmView
from dipaco.modules.best_parameters import (
    BestParameters,
    BestParametersStore,
    best_parameters_of,
    read_best_parameters,
)
from dipaco.modules.config import BEGIN_TOKEN, PAD_TOKEN, RoundsConfig
from dipaco.modules.errors import NetworkError
from dipaco.modules.evaluate import LossSum, sum_losses
from dipaco.modules.files import canonical_json
from dipaco.modules.plan import RunPlan, ShardIndex
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.peer.early_stopping import PATIENCE_ROUNDS, EarlyStopping
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.token_files import are_shared, early_stopping_rows, reported_rows
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.settings import SimulatorSettings
from support.tiny_run import TINY_PREFIX_TOKENS, make_tiny_run, sign_tiny_run

ME, OTHER = "Qm" + "a" * 44, "Qm" + "b" * 44
ROUNDS = 5


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose paths soon know their few documents by heart."""
    return make_tiny_run(
        tmp_path_factory.mktemp("run"),
        modules_per_level=(1, 2),
        private_blocks=(1,),
        documents_per_path=3,
        inner_steps=6,
        inner={"learning_rate": 0.04},
        rounds={"validation_sequences": 3},
    )


# -- which rows choose


def rows_of(documents: list[int]) -> np.ndarray:
    """Return rows of documents with so many windows each; row n holds n behind its first token."""
    rows = np.full((sum(documents), 8), 9)
    rows[:, 1] = np.arange(len(rows))
    starts = np.cumsum([0, *documents[:-1]])
    rows[starts, 0] = BEGIN_TOKEN
    return rows


def test_shared_rows_are_the_same_and_separate_ones_of_other_documents() -> None:
    rows = rows_of([2, 1, 3, 1, 1])
    shared = RoundsConfig(validation_sequences=100)
    assert np.array_equal(early_stopping_rows(rows, shared), rows)
    assert np.array_equal(reported_rows(rows, shared, None), rows)
    separate = RoundsConfig(validation_sequences=100, early_stopping_split="separate")
    assert reported_rows(rows, separate, None)[:, 1].tolist() == [2, 6]
    assert early_stopping_rows(rows, separate)[:, 1].tolist() == [0, 1, 3, 4, 5, 7]
    few = RoundsConfig(validation_sequences=2, early_stopping_split="separate")
    assert early_stopping_rows(rows, few)[:, 1].tolist() == [0, 7]
    off = RoundsConfig(early_stopping=False, early_stopping_split="separate")
    assert np.array_equal(reported_rows(rows, off, None), rows)
    assert len(early_stopping_rows(rows[:0], separate)) == 0


def test_rows_behind_the_empty_row_choose_whatever_the_setting() -> None:
    documents, held_back = rows_of([2, 1, 3]), rows_of([1, 2]) + 100
    held_back[[0, 1], 0] = BEGIN_TOKEN
    empty = np.full((1, 8), PAD_TOKEN)
    rows = np.concatenate([documents, empty, held_back])
    for split in ("shared", "separate"):
        rounds = RoundsConfig(validation_sequences=100, early_stopping_split=split)
        assert np.array_equal(reported_rows(rows, rounds, None), documents)
        assert np.array_equal(early_stopping_rows(rows, rounds), held_back)
        assert not are_shared(rows, rounds)
    none = np.concatenate([documents, empty])
    assert len(early_stopping_rows(none, RoundsConfig())) == 0
    off = RoundsConfig(early_stopping=False)
    assert np.array_equal(reported_rows(rows, off, None), documents)


# -- the simulator


def test_rows_of_the_shard_choose_and_rows_of_validation_report(
    tmp_path: Path, overfitted: RunFolder
) -> None:
    """A run with held-back documents keeps what is best on them, and reports on the others."""
    run, plan = with_held_back(overfitted, tmp_path / "run")
    swarm = ReferenceSwarm(run)
    model = PathModel(plan.model)

    def scored(path: int, held_back: bool) -> float:
        states = {m: swarm.states[m] for m in swarm.grid.modules_of_path(path)}
        best_parameters_of(swarm.grid, path, 0, LossSum(1.0, 1), states).load_into(model)
        rows = run.validation_tokens(plan, path)
        end = int(np.flatnonzero(rows[:, 0] == PAD_TOKEN)[0])
        part = rows[end + 1 :] if held_back else rows[:end]
        return LossSum(*sum_losses(model, part, TINY_PREFIX_TOKENS)).loss or 0.0

    chosen: dict[int, list[float]] = {0: [], 1: []}
    for report in swarm.rounds(ROUNDS):
        for path in report.paths:
            chosen[path.path].append(scored(path.path, held_back=True))
            assert path.validation.loss == scored(path.path, held_back=False)
            assert path.best is not None
            assert path.best.chosen.loss == min(chosen[path.path])
            if path.best.round_index == report.round_index:
                assert path.best.validation == path.validation


def with_held_back(source: RunFolder, folder: Path) -> tuple[RunFolder, RunPlan]:
    """Copy a run, with an empty row and the other path's held-out rows behind each path's own."""
    shutil.copytree(source.path, folder)
    run = RunFolder(folder)
    plan = run.plan()
    rows = [run.validation_tokens(plan, path) for path in range(2)]
    shards = []
    for shard in run.shard_index(plan).paths:
        empty = np.full((1, plan.model.sequence_length), PAD_TOKEN)
        joined = np.concatenate([rows[shard.path], empty, rows[1 - shard.path]])
        data = joined.astype(rows[0].dtype).tobytes()
        update = {
            "validation_sha256": run.blobs.add_bytes(data),
            "validation_sequences": len(joined),
        }
        shards.append(shard.model_copy(update=update))
    index = ShardIndex(sequence_length=plan.model.sequence_length, paths=tuple(shards))
    sha256 = run.blobs.add_bytes(canonical_json(index.model_dump(mode="json")))
    blobs = plan.blobs.model_copy(update={"shards": sha256})
    rounds = plan.rounds.model_copy(update={"validation_sequences": 1000})
    plan = plan.model_copy(update={"blobs": blobs, "rounds": rounds})
    sign_tiny_run(run, plan)
    return run, plan


def test_the_simulator_keeps_the_least_loss_of_every_path(overfitted: RunFolder) -> None:
    swarm = ReferenceSwarm(overfitted)
    swarm.report()
    seen: dict[int, list[float]] = {0: [], 1: []}
    plan = swarm.plan
    model = PathModel(plan.model)
    for report in swarm.rounds(ROUNDS):
        for path in report.paths:
            states = {m: swarm.states[m] for m in swarm.grid.modules_of_path(path.path)}
            best_parameters_of(swarm.grid, path.path, 0, LossSum(1.0, 1), states).load_into(model)
            rows = early_stopping_rows(overfitted.validation_tokens(plan, path.path), plan.rounds)
            nll, tokens = sum_losses(model, rows, TINY_PREFIX_TOKENS)
            seen[path.path].append(nll / tokens)
            assert path.best is not None
            assert path.best.chosen.loss == min(seen[path.path])
            assert path.best.round_index == int(np.argmin(seen[path.path]))
    for path, losses in seen.items():
        best = swarm.best.load(path)
        assert best is not None
        assert best.round_index == int(np.argmin(losses)) < ROUNDS - 1, "it should overfit"
        best.load_into(model)
        rows = overfitted.validation_tokens(plan, path)
        found = LossSum(*sum_losses(model, rows, TINY_PREFIX_TOKENS))
        assert found == report.paths[path].best.validation  # type: ignore[union-attr]
        assert found.loss < report.paths[path].validation.loss  # type: ignore[operator]
    assert report.best_validation.perplexity < report.validation.perplexity  # type: ignore[operator]
    assert report.as_dict()["best_validation"]["tokens"] == report.validation.tokens


def test_a_resumed_simulation_keeps_its_best(tmp_path: Path, overfitted: RunFolder) -> None:
    whole = ReferenceSwarm(overfitted)
    last = list(whole.rounds(ROUNDS))[-1]
    begun = ReferenceSwarm(overfitted, settings=SimulatorSettings(best_folder=tmp_path))
    list(begun.rounds(3))
    begun.best.commit()
    states = dict(begun.states)
    begun.run_round()
    pending = [file.name for file in tmp_path.glob("*.pending")]
    # Killed here. What was found behind the checkpoint is found again.
    resumed = ReferenceSwarm(
        overfitted,
        states=states,
        first_round=3,
        settings=SimulatorSettings(best_folder=tmp_path),
    )
    assert not list(tmp_path.glob("*.pending"))
    for path in resumed.report().paths:
        known = begun.report().paths[path.path].best
        assert known is not None
        if f"P{path.path:05d}.pending" not in pending:
            assert path.best == known
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["P00000.safetensors", "P00001.safetensors"]
    for path in range(2):
        kept = read_best_parameters(tmp_path / files[path], resumed.grid, path=path)
        best = last.paths[path].best
        assert best is not None
        if best.round_index < 3:
            expected = whole.best.load(path)
            assert expected is not None
            assert kept.sha256 == expected.sha256


def test_early_stopping_can_be_off(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path / "run", rounds={"early_stopping": False})
    swarm = ReferenceSwarm(run, settings=SimulatorSettings(best_folder=tmp_path / "best"))
    report = swarm.run_round()
    assert {path.best for path in report.paths} == {None}
    assert report.best_validation == report.validation
    assert not (tmp_path / "best").exists()


# -- a peer


class Peer:
    """A session's surroundings for `EarlyStopping`: a real trainer's arithmetic, no network."""

    def __init__(self, run: RunFolder, folder: Path) -> None:
        self.plan = run.plan()
        self.grid = run.grid(self.plan)
        self.me = ME
        self.bests = BestParametersStore(folder, self.grid)
        self.fetcher = self
        self.served: dict[str, BestParameters] = {}
        self.fetches: list[str] = []
        self.path: int | None = 1
        self.states: dict[str, ModuleState] = {}
        self.view = SwarmView(now_s=0.0)
        self.events: list[dict[str, Any]] = []
        self._model = PathModel(self.plan.model)

    def anchors(self) -> dict[str, ModuleState]:
        return self.states

    def loss_of_best(self, best: BestParameters, tokens: torch.Tensor, skip: int) -> LossSum:
        best.load_into(self._model)
        return LossSum(*sum_losses(self._model, tokens, skip))

    def best_path(self, path: int, sha256: str) -> BestParameters:
        self.fetches.append(sha256)
        if sha256 not in self.served:
            raise NetworkError("nobody has it")
        return self.served[sha256]

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"event": kind, **fields})

    def announced(self, *bests: BestParameters, lead: str | None = None) -> None:
        """Let the view show these best states, and who trains the path since longest."""
        claims = {}
        if lead is not None:
            claims[lead] = Claim(peer_id=lead, path=1, state="training", since_s=0.0, round=0)
        notices = tuple(b.reference for b in bests)
        self.view = SwarmView(now_s=0.0, claims=claims, bests={1: notices})


@pytest.fixture
def peer(tmp_path: Path, overfitted: RunFolder) -> Peer:
    return Peer(overfitted, tmp_path / "best")


@pytest.fixture
def rows(overfitted: RunFolder) -> torch.Tensor:
    plan = overfitted.plan()
    chosen = early_stopping_rows(overfitted.validation_tokens(plan, 1), plan.rounds)
    return torch.from_numpy(chosen.astype(np.int64))


@pytest.fixture(scope="module")
def history(overfitted: RunFolder) -> list[dict[str, ModuleState]]:
    """The states of all modules after each round."""
    swarm = ReferenceSwarm(overfitted, settings=SimulatorSettings(validation_sequences=0))
    states = []
    for _ in range(ROUNDS):
        swarm.run_round()
        states.append(dict(swarm.states))
    return states


def started(peer: Peer, rows: torch.Tensor) -> EarlyStopping:
    node: Any = SimpleNamespace(
        plan=peer.plan, grid=peer.grid, me=peer.me, bests=peer.bests, fetcher=peer
    )
    any_peer: Any = peer
    stopping = EarlyStopping(node, any_peer, any_peer, any_peer)
    stopping.begin_path(rows)
    return stopping


def best_of(
    peer: Peer, round_index: int, states: dict[str, ModuleState], rows: Any
) -> BestParameters:
    """Return the best path that these states make, with their true loss."""
    best = best_parameters_of(peer.grid, 1, round_index, LossSum(1.0, 1), states)
    true = peer.loss_of_best(best, rows, TINY_PREFIX_TOKENS)
    return best_parameters_of(peer.grid, 1, round_index, true, states)


def end_round(
    stopping: EarlyStopping, peer: Peer, best: BestParameters, states: dict[str, ModuleState]
) -> None:
    """Let a round end with these committed states, and everything in the background finish."""
    if stopping._found is not None:
        wait([stopping._found[1]])
    peer.states = states
    stopping.consider(best.round_index, best.held_out_loss)
    stopping.finish(20.0)


def test_a_peer_keeps_what_the_simulator_keeps(
    overfitted: RunFolder,
    peer: Peer,
    rows: torch.Tensor,
    history: list[dict[str, ModuleState]],
) -> None:
    stopping = started(peer, rows)
    for number, states in enumerate(history):
        end_round(stopping, peer, best_of(peer, number, states, rows), states)
    swarm = ReferenceSwarm(overfitted)
    list(swarm.rounds(ROUNDS))
    expected = swarm.best.load(1)
    assert expected is not None
    assert stopping.best is not None
    assert stopping.best.sha256 == expected.sha256
    assert peer.bests.find(expected.sha256) is not None
    assert len(list(peer.bests.folder.iterdir())) == 1, "one best a path"
    assert [event["event"] for event in peer.events] == ["best_path"] * len(peer.events)
    assert not peer.fetches
    stopping.stop()


def test_taking_a_path_over_goes_on_from_the_best_so_far(
    peer: Peer, rows: torch.Tensor, history: list[dict[str, ModuleState]]
) -> None:
    bests = [best_of(peer, number, states, rows) for number, states in enumerate(history)]
    losses = [best.held_out_loss.nll for best in bests]
    best = bests[losses.index(min(losses))]
    worse = [n for n, loss in enumerate(losses) if n > best.round_index and loss > min(losses)]
    peer.served = {best.sha256: best}
    peer.announced(best)
    stopping = started(peer, rows)
    end_round(stopping, peer, bests[worse[0]], history[worse[0]])
    assert stopping.best is not None
    assert stopping.best.sha256 == best.sha256
    assert peer.fetches == [best.sha256]
    # In its next life it finds it on its own disk.
    again = started(peer, rows)
    peer.bests.load_from_disk()
    again.begin_path(rows)
    end_round(again, peer, bests[worse[-1]], history[worse[-1]])
    assert again.best == stopping.best
    assert peer.fetches == [best.sha256] * 1
    stopping.stop()
    again.stop()


def lie(best: BestParameters) -> BestParameters:
    true = best.held_out_loss
    return replace(best, held_out_loss=LossSum(true.nll / 2, true.tokens))


def of_the_future(best: BestParameters) -> BestParameters:
    return replace(best, round_index=10**6)


def of_other_rows(best: BestParameters) -> BestParameters:
    true = best.held_out_loss
    return replace(best, held_out_loss=LossSum(true.nll / 2, true.tokens // 2))


@pytest.mark.parametrize("forge", [lie, of_the_future, of_other_rows])
def test_a_claim_that_does_not_hold_is_refused_once(
    peer: Peer,
    rows: torch.Tensor,
    history: list[dict[str, ModuleState]],
    forge: Callable[[BestParameters], BestParameters],
    caplog: pytest.LogCaptureFixture,
) -> None:
    true = [best_of(peer, number, states, rows) for number, states in enumerate(history[:2])]
    forged = forge(true[0])
    peer.served = {forged.sha256: forged}
    peer.announced(forged)
    stopping = started(peer, rows)
    for number in range(2):
        end_round(stopping, peer, true[number], history[number])
    assert "refused" in caplog.text
    assert peer.fetches == [forged.sha256]
    assert stopping.best is not None
    expected = min(true, key=lambda b: b.held_out_loss.nll)
    assert stopping.best.sha256 in {t.sha256 for t in true}
    assert stopping.best.held_out_loss.nll >= expected.held_out_loss.nll
    stopping.stop()


def test_what_nobody_serves_does_not_hold_up_a_path(
    peer: Peer, rows: torch.Tensor, history: list[dict[str, ModuleState]]
) -> None:
    best = best_of(peer, 0, history[0], rows)
    gone = lie(best)
    peer.announced(gone)
    stopping = started(peer, rows)
    end_round(stopping, peer, best, history[0])
    assert stopping.best is not None
    assert stopping.best.sha256 == best.sha256
    stopping.stop()


def test_a_replica_that_becomes_the_lead_goes_on_from_the_leads_best(
    peer: Peer, rows: torch.Tensor, history: list[dict[str, ModuleState]]
) -> None:
    bests = [best_of(peer, number, states, rows) for number, states in enumerate(history)]
    best = min(bests, key=lambda b: b.held_out_loss.nll)
    peer.served = {best.sha256: best}
    peer.announced(best, lead=OTHER)
    stopping = started(peer, rows)
    end_round(stopping, peer, bests[-2], history[-2])
    assert not peer.fetches
    peer.announced(best, lead=ME)
    end_round(stopping, peer, bests[-1], history[-1])
    assert stopping.best is None, "it waits for what claims to be better"
    end_round(stopping, peer, bests[-1], history[-1])
    assert stopping.best is not None
    assert stopping.best.sha256 == best.sha256
    stopping.stop()


def test_somebody_who_claims_and_never_serves_costs_a_path_few_rounds(
    peer: Peer, rows: torch.Tensor, history: list[dict[str, ModuleState]]
) -> None:
    best = best_of(peer, 0, history[0], rows)
    peer.announced(lie(best))
    stopping = started(peer, rows)
    assert stopping._found is not None
    never: Future[BestParameters] = Future()
    stopping._found = stopping._found[0], never
    peer.states = history[0]
    for number in range(PATIENCE_ROUNDS + 1):
        assert stopping.finish(20.0) is None
        stopping.consider(number, best.held_out_loss)
    held = stopping.finish(20.0)
    assert held is not None
    assert held.round_index == PATIENCE_ROUNDS
    stopping.stop()


def test_only_the_lead_of_a_path_keeps_its_best(
    peer: Peer, rows: torch.Tensor, history: list[dict[str, ModuleState]]
) -> None:
    best = best_of(peer, 0, history[0], rows)
    peer.announced(lie(best), lead=OTHER)
    stopping = started(peer, rows)
    end_round(stopping, peer, best, history[0])
    assert stopping.best is None
    assert not peer.fetches
    peer.announced(lead=ME)
    end_round(stopping, peer, best_of(peer, 1, history[1], rows), history[1])
    assert stopping.best is not None
    stopping.stop()
