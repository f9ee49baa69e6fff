"""Taking over a heavier state: believed when the held-out loss bears it, or when outvoted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dipaco.dht.view import SwarmView
from dipaco.modules.errors import NetworkError
from dipaco.modules.state import ModuleState, PathProgress, StateReference
from dipaco.peer.adoption import PATIENCE_ROUNDS, Adoptions
from dipaco.peer.trainer import PathTrainer
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from support.fake_swarm import (
    ME,
    AtOnce,
    FakeEvents,
    FakeFetcher,
    FakeSwarm,
    claim,
    holding,
    peer_id,
)

PATH = 0
OTHERS = tuple(peer_id(n) for n in range(3))
LATER_S = 10_000.0


class Peer:
    """A peer with a real trainer on one path, and the round that the swarm is in."""

    def __init__(self, run: RunFolder) -> None:
        self.plan = run.plan()
        grid = run.grid(self.plan)
        self.module = grid.modules_of_path(PATH)[0]
        self.trainer = PathTrainer(self.plan, grid, torch.device("cpu"))
        states = {m: run.genesis_state(self.plan, m) for m in grid.modules_of_path(PATH)}
        stream = BatchStream(
            run.train_tokens(self.plan, PATH), seed=0, path=PATH, batch_sequences=2
        )
        self.trainer.start_path(PATH, states, stream)
        self.swarm, self.fetcher, self.events = FakeSwarm(), FakeFetcher(), FakeEvents()
        self.held: list[ModuleState] = []
        self.answers: dict[str, StateReference | None] = {}
        self.round, self.now_s = 0, LATER_S
        log: Any = self.events
        self.adoptions = Adoptions(
            self.plan,
            grid,
            self.swarm,
            self.fetcher,
            self.trainer,
            log,
            me=ME,
            ask=self._ask,
            round_now=lambda: self.round,
            executor=AtOnce(),
            wake=threading.Event(),
            hold=self.held.append,
        )
        rows = run.validation_tokens(self.plan, PATH)
        self.adoptions.validation = torch.from_numpy(rows.astype("int64"))

    def _ask(self, peer: str, module: str) -> StateReference | None:
        if peer not in self.answers:
            raise NetworkError("no answer")
        return self.answers[peer]

    def state(self, change: Callable[[torch.Tensor], torch.Tensor], tokens: int = 64) -> Any:
        """Return a successor of the anchor with `tokens` behind it, served by others."""
        anchor = self.trainer.anchor(self.module)
        state = ModuleState(
            self.module,
            1,
            change(anchor.parameters.clone()),
            anchor.momentum,
            {1: PathProgress(tokens, 0)},
            anchor.layout,
        )
        self.fetcher.states[state.digest] = state
        return state

    def announce(self, state: ModuleState, *holders: str) -> None:
        """Let `holders`, who train the path too, announce a state."""
        self.swarm.view = SwarmView(
            now_s=LATER_S,
            claims={peer: claim(peer, PATH) for peer in OTHERS},
            holdings={self.module: tuple(holding(peer, state.reference) for peer in holders)},
        )

    def turn(self) -> None:
        """Look again, a while after the last time."""
        self.now_s += 1000.0
        self.adoptions.catch_up(self.now_s, ())
        self.adoptions.finish(())

    @property
    def anchor(self) -> ModuleState:
        return self.trainer.anchor(self.module)


def nudged(parameters: torch.Tensor) -> torch.Tensor:
    return parameters + 1e-4


def wrecked(parameters: torch.Tensor) -> torch.Tensor:
    return 50.0 * torch.randn(len(parameters), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def peer(shared_run: RunFolder) -> Peer:
    return Peer(shared_run)


def test_a_heavier_state_is_adopted_under_the_own_work(peer: Peer) -> None:
    peer.trainer.inner_step()
    trained = peer.trainer.unmerged_tokens(peer.module)
    state = peer.state(nudged)
    peer.announce(state, OTHERS[0])
    peer.turn()
    assert peer.anchor.digest == state.digest
    assert peer.trainer.unmerged_tokens(peer.module) == trained > 0
    assert peer.held == [state]
    assert [e["own_work_merged"] for e in peer.events.of("adopt")] == [False]
    peer.turn()
    assert peer.fetcher.asked == [state.digest]


def test_it_waits_while_its_level_averages(peer: Peer) -> None:
    state = peer.state(nudged)
    peer.announce(state, OTHERS[0])
    level = peer.trainer.grid.level_of(peer.module)
    peer.adoptions.catch_up(LATER_S, ())
    peer.adoptions.finish((level,))
    assert peer.anchor.version == 0
    peer.adoptions.finish(())
    assert peer.anchor.digest == state.digest


def test_one_that_wrecks_the_held_out_loss_is_refused_for_good(peer: Peer) -> None:
    before = peer.anchor.digest
    state = peer.state(wrecked)
    peer.announce(state, OTHERS[0])
    peer.turn()
    assert peer.anchor.digest == before
    assert peer.held == []
    peer.turn()
    assert peer.fetcher.asked == [state.digest]


def test_one_that_most_trainers_hold_is_taken_whatever_the_loss_says(peer: Peer) -> None:
    state = peer.state(wrecked)
    peer.announce(state, *OTHERS[:2])
    peer.turn()
    assert peer.anchor.digest == state.digest


def test_a_peer_left_behind_for_rounds_insists_no_more(peer: Peer) -> None:
    state = peer.state(wrecked)
    peer.announce(state, OTHERS[0])
    peer.round = PATIENCE_ROUNDS
    peer.turn()
    assert peer.anchor.digest == state.digest


def test_a_lighter_state_changes_nothing(peer: Peer) -> None:
    heavy, light = peer.state(nudged, tokens=128), peer.state(lambda p: p - 1e-4, tokens=64)
    peer.announce(heavy, OTHERS[0])
    peer.turn()
    peer.announce(light, OTHERS[1])
    peer.turn()
    assert peer.anchor.digest == heavy.digest
    assert light.digest not in peer.fetcher.asked


def test_a_state_that_nobody_serves_is_left_alone_for_a_while(peer: Peer) -> None:
    state = peer.state(nudged)
    peer.fetcher.states.clear()
    peer.announce(state, OTHERS[0])
    peer.turn()
    peer.turn()
    assert peer.fetcher.asked == [state.digest]
    assert peer.anchor.version == 0


def test_others_are_asked_what_they_hold(peer: Peer) -> None:
    state = peer.state(nudged)
    same, ahead = OTHERS[:2]
    peer.answers = {same: None, ahead: state.reference}
    answers = peer.adoptions.ask_others(peer.module, peer.anchor, frozenset(OTHERS))
    assert answers.alive == {same, ahead}
    assert answers.committed is not None
    assert (answers.committed.state, answers.committed.holders) == (state.reference, (ahead,))
    peer.answers = {same: None}
    assert peer.adoptions.ask_others(peer.module, peer.anchor, frozenset(OTHERS)).committed is None
