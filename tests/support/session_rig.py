"""A session with stand-ins for the DHT, the other peers and their averaging; no network.

The publisher, the trainer and the files are real. An inner step takes one second of swarm time, a
wait as long as it may.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from dipaco.dht.records import Claim
from dipaco.dht.view import SwarmView
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import AveragingRule, Contribution, canonical_table
from dipaco.modules.state import StateReference
from dipaco.peer.averaging.averager import AveragingOutcome
from dipaco.peer.averaging.parts import AveragingFailed
from dipaco.peer.background import Background
from dipaco.peer.exchange.held_states import HeldStates
from dipaco.peer.member.rounds import RoundSchedule
from dipaco.peer.publisher import PeerStatus, Publisher
from dipaco.peer.session import Session
from dipaco.peer.settings import PeerSettings
from dipaco.peer.trainer import PathTrainer
from dipaco.routing.run_folder import RunFolder

from .fake_swarm import (
    ME,
    FakeCertifier,
    FakeDirectory,
    FakeEvents,
    FakeExchange,
    FakeFetcher,
    FakeTime,
    Impatient,
    holding,
    peer_id,
    peer_record,
)

START_S, DURATION_S = 1000.0, 12.0
A, B, C = (peer_id(n) for n in range(3))


class Averager:
    """Averages with one other peer that trained as much, or fails as the test says."""

    rule = AveragingRule(CODECS["none"])

    def __init__(self) -> None:
        self.failures: list[AveragingFailed] = []
        self.calls: list[tuple[str, int]] = []

    def for_level(self, level: str) -> Averager:
        return self

    def members_together(self, level: str) -> int:
        return 0

    def average(
        self,
        flat: torch.Tensor,
        *,
        contribution: Contribution,
        module: str,
        round_index: int,
        **_: Any,
    ) -> AveragingOutcome:
        self.calls.append((module, round_index))
        if self.failures:
            raise self.failures.pop(0)
        other = Contribution(contribution.path, A, contribution.tokens)
        return AveragingOutcome(flat.clone(), canonical_table([contribution, other]))


class Fetcher(FakeFetcher):
    """Everything that the run consists of is on this disk already."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__()
        self.run = run

    def blob(self, sha256: str, what: str = "", **_: Any) -> Path:
        return self.run.blobs.path(sha256)

    def use_blobs(self, hashes: Any) -> None: ...


class Exchange(FakeExchange):
    """The other peers: they take every state that is offered to them."""

    def __init__(self) -> None:
        self.taken: dict[str, StateReference] = {}
        self.held: HeldStates

    def offer(self, peer: str, state: StateReference, timeout_s: float) -> bool:
        self.taken[state.module] = state
        return True

    def holdings(self, peer: str, module: str, timeout_s: float = 1.0) -> StateReference | None:
        return self.taken.get(module)

    def sample(self, peer: str, sha256: str, offset: int, count: int) -> bytes | None:
        return self.held.read(sha256, offset, count)

    def hello(self, peer: str) -> None: ...

    def set_offer_handler(self, handler: Callable[[str, StateReference], bool]) -> None:
        self.offer_handler = handler


class Events(FakeEvents):
    """Moves the time with every inner step, and lets a test act at an event."""

    def __init__(self, clock: FakeTime) -> None:
        super().__init__()
        self._time = clock
        self.actions: dict[str, Callable[[dict[str, Any]], None]] = {}

    def emit(self, kind: str, **values: Any) -> None:
        super().emit(kind, **values)
        if kind == "inner":
            self._time.now_s += 1.0
        action = self.actions.get(kind)
        if action is not None:
            action(values)


class Rig:
    """A session and all that is around it."""

    def __init__(self, run: RunFolder, folder: Path, **settings: Any) -> None:
        self.plan = run.plan()
        grid = run.grid(self.plan)
        self.time = FakeTime(START_S + 1.0)
        self.directory: Any = FakeDirectory()
        self.events: Any = Events(self.time)
        self.exchange: Any = Exchange()
        self.pool: Any = Averager()
        self.background = Background()
        self.status = PeerStatus()
        self.stopping = Impatient()
        self.certifier: Any = FakeCertifier()
        states = RunFolder(folder).states
        schedule = RoundSchedule(self.plan.rounds, grid, START_S)
        bests = RunFolder(folder).best_parameters(grid)
        held = self.exchange.held = HeldStates(grid, states, run.blobs, bests)
        index = run.shard_index(self.plan)
        self.publisher = Publisher(
            self.directory,
            self.plan,
            grid,
            schedule,
            self.time.clock,
            held,
            run.blobs,
            self.status,
            me=ME,
            software="dipaco/test",
            manifest=b"manifest",
            exchange=self.exchange,
            background=self.background,
        )
        # It reads no requests and no manifests here.
        self.publisher.add_annex = lambda annex: None  # type: ignore[method-assign]
        self.node: Any = SimpleNamespace(
            me=ME,
            gate=None,
            is_in=lambda peer: True,
            plan=self.plan,
            grid=grid,
            schedule=schedule,
            clock=self.time.clock,
            run_folder=run,
            folder=folder,
            blobs=run.blobs,
            states=states,
            bests=bests,
            held=held,
            certifier=self.certifier,
            fetcher=Fetcher(run),
            exchange=self.exchange,
            earlier=None,
            load_shard_index=lambda: index,
            shard_sequences=lambda: {s.path: s.train_sequences for s in index.paths},
        )
        self.session = Session(
            PeerSettings(initial_peers=("/ip4/127.0.0.1",), cache_folder=folder, **settings),
            self.node,
            self.pool,
            lambda: PathTrainer(self.plan, grid, torch.device("cpu")),
            self.status,
            self.publisher,
            self.background,
            self.events,
            self.stopping,
        )
        self.session._shell.wait = self._wait  # type: ignore[method-assign]

    def _wait(self, seconds: float) -> None:
        self.time.now_s += seconds

    def others(self, *claims: Claim, held: StateReference | None = None) -> None:
        """Say who else is there and what they hold, for the peer to see."""
        self.directory.others = SwarmView(
            now_s=0.0,
            claims={other.peer_id: other for other in claims},
            peers={other.peer_id: peer_record(other.peer_id, "training") for other in claims},
            holdings={} if held is None else {held.module: (holding(A, held),)},
        )

    def run(self) -> None:
        self.publisher.start(tuple)
        self.publisher.refresh()
        assert self.session.run() is None
