"""The keeper: it fetches what is assigned to this peer, and leaves alone what failed lately."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from dipaco.dht.view import SwarmView
from dipaco.modules.config import RoundsConfig
from dipaco.modules.grid import Grid
from dipaco.modules.state import StateReference
from dipaco.peer.background import Background, BackgroundError
from dipaco.peer.keeper import RETRY_AFTER_S, Keeper
from support.fake_swarm import (
    ME,
    FakeFetcher,
    FakeSwarm,
    claim,
    held_state,
    holding,
    peer_id,
    peer_record,
)
from support.make_plan import make_plan

TRAINER, OTHER = peer_id(1), peer_id(2)
MODULE = "L0.E0"
WAIT_S = 30.0


class Peer:
    """A keeper that is assigned everything: only it and the trainers are there."""

    def __init__(self, own_modules: tuple[str, ...] = ()) -> None:
        plan = make_plan(rounds=RoundsConfig(copies=3, replication_every_rounds=2))
        self.swarm, self.fetcher = FakeSwarm(), FakeFetcher()
        self.held: dict[str, StateReference] = {}
        self.kept: list[tuple[str, int]] = []
        self.background = Background()
        self.now_s = 0.0
        states: Any = SimpleNamespace(get=self.held.get, hold=self._hold)
        self.keeper = Keeper(
            plan,
            Grid(plan.model, plan.grid),
            self.swarm,
            self.fetcher,
            states,
            me=ME,
            own_modules=lambda: own_modules,
            background=self.background,
            on_kept=lambda module, version: self.kept.append((module, version)),
            monotonic=lambda: self.now_s,
        )

    def _hold(self, state: Any, *, save: bool) -> None:
        assert save
        self.held[state.reference.module] = state.reference

    def announce(self, *states: StateReference, served: bool = True) -> None:
        """Let the trainer announce states, and serve them."""
        self.swarm.view = SwarmView(
            now_s=0.0,
            claims={TRAINER: claim(TRAINER, 0)},
            peers={ME: peer_record(ME), TRAINER: peer_record(TRAINER, "training")},
            holdings={state.module: (holding(TRAINER, state),) for state in states},
        )
        for state in states if served else ():
            self.serve(state)

    def serve(self, state: StateReference) -> None:
        stored: Any = SimpleNamespace(reference=state)
        self.fetcher.states[state.digest] = stored


def test_it_fetches_what_is_assigned_and_announces_it() -> None:
    peer, state = Peer(), held_state(MODULE, version=3, digest="a")
    peer.announce(state)
    peer.keeper.keep()
    assert peer.held == {MODULE: state}
    assert peer.kept == [(MODULE, 3)]
    assert peer.swarm.announced == 1
    peer.keeper.keep()
    assert peer.fetcher.asked == [state.digest]


def test_a_new_state_is_fetched_every_few_rounds_only() -> None:
    peer = Peer()
    digests = []
    for version in (3, 4, 5):
        state = held_state(MODULE, tokens=64 * version, version=version, digest=str(version))
        digests.append(state.digest)
        peer.announce(state)
        peer.keeper.keep()
    assert peer.fetcher.asked == [digests[0], digests[2]]


def test_what_failed_lately_is_skipped() -> None:
    peer, state = Peer(), held_state(MODULE, digest="a")
    peer.announce(state, served=False)
    peer.keeper.keep()
    peer.keeper.keep()
    assert peer.fetcher.asked == [state.digest]
    peer.serve(state)
    peer.now_s += RETRY_AFTER_S + 1
    peer.keeper.keep()
    assert peer.held == {MODULE: state}


def test_a_module_in_training_here_is_not_copied() -> None:
    peer = Peer(own_modules=(MODULE,))
    peer.announce(held_state(MODULE))
    peer.keeper.keep()
    assert peer.fetcher.asked == []


def test_an_offer_is_fetched_from_who_made_it() -> None:
    peer, state = Peer(), held_state(MODULE, version=2, digest="b")
    peer.serve(state)
    assert peer.keeper.accept_offer(OTHER, state)
    assert not peer.keeper.accept_offer(OTHER, held_state("L7.E7"))
    peer.keeper.keep()
    assert peer.held == {MODULE: state}
    lighter = held_state(MODULE, tokens=1, digest="c")
    assert not peer.keeper.accept_offer(OTHER, lighter)


def test_one_blob_a_turn() -> None:
    peer = Peer()
    peer.announce()
    hashes = tuple(str(n) * 64 for n in range(3))
    peer.fetcher.run_blobs, peer.fetcher.served_blobs = hashes, set(hashes[1:])
    peer.keeper.keep()
    assert peer.fetcher.blobs_here == {hashes[1]}
    peer.keeper.keep()
    assert peer.fetcher.blobs_here == set(hashes[1:])
    assert peer.fetcher.asked == list(hashes)


def test_an_unforeseen_exception_on_its_thread_is_not_silent() -> None:
    peer, failed = Peer(), threading.Event()
    peer.background.on_failure(failed.set)
    peer.fetcher.failure = KeyError("x")
    peer.announce(held_state(MODULE))
    peer.keeper.start()
    assert peer.keeper.accept_offer(OTHER, held_state(MODULE))
    assert failed.wait(WAIT_S)
    with pytest.raises(BackgroundError, match="the keeper thread failed: KeyError: 'x'"):
        peer.background.check()
    peer.keeper.stop()
