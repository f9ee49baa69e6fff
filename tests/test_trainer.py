"""Commits and foreign states under a path in training: no work is lost, and none is there twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dipaco.modules.compose import gather_module
from dipaco.modules.state import ModuleState, PathProgress
from dipaco.peer.trainer import PathTrainer, Snapshot
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder

PATH = 0


class Peer:
    """A real trainer on one path."""

    def __init__(self, run: RunFolder) -> None:
        plan = run.plan()
        self.grid = run.grid(plan)
        self.module = self.grid.modules_of_path(PATH)[0]
        self.trainer = PathTrainer(plan, self.grid, torch.device("cpu"))
        states = {m: run.genesis_state(plan, m) for m in self.grid.modules_of_path(PATH)}
        tokens = run.train_tokens(plan, PATH)
        self.trainer.start_path(
            PATH, states, BatchStream(tokens, seed=0, path=PATH, batch_sequences=2)
        )

    @property
    def local(self) -> torch.Tensor:
        return gather_module(self.trainer.model, self.grid, self.module)

    @property
    def on_top(self) -> torch.Tensor:
        """The work on top of the anchor."""
        return self.local - self.trainer.anchor(self.module).parameters

    @property
    def tokens(self) -> int:
        return self.trainer.unmerged_tokens(self.module)

    def state(self, shift: float, version: int = 1) -> ModuleState:
        """Return a state that others made, somewhere beside the anchor."""
        anchor = self.trainer.anchor(self.module)
        return ModuleState(
            self.module,
            version,
            anchor.parameters + shift,
            anchor.momentum,
            {1: PathProgress(64, version - 1)},
            anchor.layout,
        )

    def train(self, round_index: int) -> Snapshot:
        self.trainer.inner_step()
        return self.trainer.snapshot(self.module, round_index)

    def commit(self, round_index: int) -> torch.Tensor:
        """Train and commit; returns the contribution."""
        snapshot = self.train(round_index)
        self.trainer.commit(snapshot, self.state(1e-3, round_index + 1))
        return snapshot.local - snapshot.anchor.parameters


@pytest.fixture
def peer(shared_run: RunFolder) -> Peer:
    return Peer(shared_run)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=1e-6)


def test_a_commit_without_steps_in_between_leaves_exactly_the_new_anchor(peer: Peer) -> None:
    peer.commit(0)
    assert torch.equal(peer.local, peer.trainer.anchor(peer.module).parameters)
    assert peer.tokens == 0


def test_steps_taken_during_the_round_stay_on_top(peer: Peer) -> None:
    snapshot = peer.train(0)
    peer.trainer.inner_step()
    later = peer.local - snapshot.local
    peer.trainer.commit(snapshot, peer.state(1e-3))
    assert close(peer.on_top, later)
    assert peer.tokens == peer.trainer.tokens_per_step


def test_a_foreign_state_is_put_under_all_unmerged_work(peer: Peer) -> None:
    peer.train(0)
    peer.trainer.inner_step()
    work, tokens = peer.on_top, peer.tokens
    peer.trainer.adopt(peer.module, peer.state(1e-3), on_top=(0,))
    assert close(peer.on_top, work)
    assert peer.tokens == tokens == 2 * peer.trainer.tokens_per_step


def test_what_a_foreign_state_contains_is_not_put_on_it(peer: Peer) -> None:
    merged = peer.train(0)
    peer.trainer.inner_step()
    later = peer.local - merged.local
    peer.trainer.adopt(peer.module, peer.state(1e-3), on_top=())
    assert close(peer.on_top, later)
    assert peer.tokens == peer.trainer.tokens_per_step


def test_parts_that_were_merged_are_put_back_and_taken_away_again(peer: Peer) -> None:
    peer.commit(0)
    lacking = peer.commit(1) + peer.commit(2)
    peer.train(3)
    work = peer.on_top
    peer.trainer.adopt(peer.module, peer.state(1e-3), on_top=(1, 2, 3))
    assert close(peer.on_top, work + lacking)
    assert peer.tokens == 3 * peer.trainer.tokens_per_step
    peer.trainer.adopt(peer.module, peer.state(-1e-3), on_top=(3,))
    assert close(peer.on_top, work)
    assert peer.tokens == peer.trainer.tokens_per_step


def test_a_cut_that_is_undone_leaves_the_work_where_it_is(peer: Peer) -> None:
    peer.train(0)
    work, tokens = peer.on_top, peer.tokens
    peer.trainer.undo_cut(peer.module, 0)
    assert torch.equal(peer.on_top, work)
    assert peer.tokens == tokens
    second = peer.train(1)
    assert second.tokens == 2 * peer.trainer.tokens_per_step
    peer.trainer.adopt(peer.module, peer.state(1e-3), on_top=())
    assert close(peer.on_top, torch.zeros_like(work))


def test_parts_are_joined_and_dropped(peer: Peer) -> None:
    first, second, third = peer.commit(0), peer.commit(1), peer.commit(2)
    peer.trainer.join_parts(peer.module, 0, 1)
    peer.trainer.drop_part(peer.module, 2)
    peer.trainer.adopt(peer.module, peer.state(1e-3), on_top=(1,))
    assert close(peer.on_top, first + second)
    assert not close(peer.on_top, first + second + third)
    assert peer.tokens == 2 * peer.trainer.tokens_per_step


def test_old_work_is_shortened(peer: Peer) -> None:
    peer.train(0)
    peer.trainer.inner_step()
    work = peer.on_top
    peer.trainer.adopt(peer.module, peer.state(1e-3), on_top=(0,), weight=0.5)
    assert close(peer.on_top, 0.5 * work)


def test_discarded_work_is_gone(peer: Peer) -> None:
    peer.train(0)
    peer.trainer.discard(peer.module)
    assert torch.equal(peer.local, peer.trainer.anchor(peer.module).parameters)
    assert peer.tokens == 0


def test_how_far_a_state_is_away_is_told_in_steps_of_the_usual_length(peer: Peer) -> None:
    far = peer.state(4e-3)
    assert peer.trainer.steps_apart(peer.module, far) is None
    peer.commit(0)
    peer.commit(1)
    for shift, steps in ((0.0, 0.0), (1e-3, 1.0), (4e-3, 4.0)):
        found = peer.trainer.steps_apart(peer.module, peer.state(shift))
        assert found == pytest.approx(steps, abs=0.01)


def test_what_a_momentum_does_to_the_loss_is_seen_before_a_step_is_taken(peer: Peer) -> None:
    """The parameters are the anchor's; only the next step would show what was swallowed."""
    peer.commit(0)
    state = peer.state(0.0)
    direction = torch.randn(len(state.momentum), generator=torch.Generator().manual_seed(0))
    loaded = replace(state, momentum=1e3 * direction)
    rows = torch.arange(4 * 32).view(4, 32) % peer.trainer.plan.model.vocabulary_size
    found = peer.trainer.compare(peer.module, loaded, rows)
    assert found.after == found.before
    assert found.coasting_before is not None
    assert found.coasting_after is not None
    assert found.coasting_after > found.coasting_before + 1.0
    assert torch.equal(peer.local, peer.trainer.anchor(peer.module).parameters)


def test_a_momentum_out_of_all_proportion_is_far_away(peer: Peer) -> None:
    peer.commit(0)
    state = peer.state(0.0)
    loaded = replace(state, momentum=torch.ones_like(state.parameters))
    found = peer.trainer.steps_apart(peer.module, loaded)
    outer = peer.trainer.plan.outer
    assert found == pytest.approx(outer.learning_rate * outer.momentum**2 * 1e3, rel=0.01)
