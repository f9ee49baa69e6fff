"""A whole session: join, claim, train, average, move, leave. No network; the test moves the time.

The publisher, the trainer and the files are real; the DHT, the other peers and their averaging are
stand-ins. An inner step takes one second of swarm time, a wait as long as it may. Background work
is done at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dipaco.dht.records import Claim
from dipaco.dht.view import SwarmView
from dipaco.modules.codecs import CODECS
from dipaco.modules.errors import NetworkError
from dipaco.modules.outer import AveragingRule, Contribution, canonical_table, outer_step
from dipaco.modules.state import ModuleState, StateReference
from dipaco.peer import errands, outer_steps
from dipaco.peer import session as session_file
from dipaco.peer.averaging.averager import AveragingOutcome
from dipaco.peer.averaging.parts import AveragingFailed
from dipaco.peer.background import Background, BackgroundError
from dipaco.peer.exchange.held_states import HeldStates
from dipaco.peer.member.rounds import RoundSchedule
from dipaco.peer.owner.pauses import BY_COMMAND, Pauses, ask_to_pause, ask_to_resume
from dipaco.peer.publisher import PeerStatus, Publisher
from dipaco.peer.session import Session
from dipaco.peer.settings import PeerSettings
from dipaco.peer.trainer import PathTrainer
from dipaco.routing.run_folder import RunFolder
from support.fake_swarm import (
    ME,
    AtOnce,
    FakeCertifier,
    FakeDirectory,
    FakeEvents,
    FakeExchange,
    FakeFetcher,
    FakeTime,
    Impatient,
    claim,
    holding,
    peer_id,
    peer_record,
)
from support.tiny_run import make_tiny_run

START_S, DURATION_S = 1000.0, 12.0
A, B, C = (peer_id(n) for n in range(3))
WAIT_S = 30.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run by the clock: 2x2 paths, twelve inner steps a round as the test counts time."""
    return make_tiny_run(
        tmp_path_factory.mktemp("session") / "run",
        inner_steps=0,
        duration_s=DURATION_S,
        start_s=START_S,
        rounds={"dwell_rounds": 2},
    )


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


@pytest.fixture
def rig(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    """Make sessions whose background work is done at once, by a clock that the test moves."""
    for file in (session_file, errands, outer_steps):
        monkeypatch.setattr(file, "ThreadPoolExecutor", lambda *_, **__: AtOnce())

    def make(**settings: Any) -> Rig:
        made = Rig(run, tmp_path / "peer", **settings)
        clock = SimpleNamespace(time=lambda: made.time.now_s, monotonic=time.monotonic)
        monkeypatch.setattr(outer_steps, "time", clock)
        return made

    return make


def test_a_pause_frees_the_model_and_a_path_is_claimed_again(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    peer = rig(max_rounds=3, path=1)
    folder = tmp_path / "control"
    pauses = Pauses(folder)
    peer.session._pauses = pauses
    seen: list[tuple[str, bool]] = []

    def pause(ended: dict[str, Any]) -> None:
        if ended["round"] == 0:
            ask_to_pause(folder)

    def paused(values: dict[str, Any]) -> None:
        trainer = peer.session._trainer
        seen.append((values["reason"], hasattr(trainer, "model") or trainer.path is not None))
        ask_to_resume(folder)

    peer.events.actions |= {"round": pause, "paused": paused}
    peer.run()
    assert seen == [(BY_COMMAND, False)]
    assert [e["path"] for e in peer.events.of("paused")] == [1]
    begun = peer.events.of("training")
    assert [e["path"] for e in begun] == [1, 1]
    # What it had trained and its AdamW state are there again.
    assert begun[1]["path_step"] > 0
    assert begun[1]["resumed_optimizer"]
    assert peer.directory.peers[-1] is None
    assert "paused" in {record.state for record in peer.directory.peers if record is not None}


def everywhere_but(path: int) -> tuple[Claim, ...]:
    """Return claims of three peers on the other paths."""
    return tuple(
        claim(peer, other)
        for peer, other in zip((A, B, C), (p for p in range(4) if p != path), strict=True)
    )


def test_it_joins_trains_moves_and_leaves(rig: Callable[..., Rig]) -> None:
    peer = rig(max_rounds=4)
    peer.others(*everywhere_but(1))

    def c_dies_and_a_newcomer_shares_the_path(ended: dict[str, Any]) -> None:
        if ended["round"] == 0:
            peer.others(claim(A, 0), claim(B, 2), claim(C, 1))
            peer.publisher.refresh()

    peer.events.actions["round"] = c_dies_and_a_newcomer_shares_the_path
    peer.run()
    assert [e["path"] for e in peer.events.of("claimed")] == [1, 3]
    assert [(e["path"], e["round"]) for e in peer.events.of("training")] == [(1, 0), (3, 2)]
    assert [(e["from_path"], e["to_path"]) for e in peer.events.of("move")] == [(1, 3)]
    assert [(e["round"], e["path"]) for e in peer.events.of("round")] == [
        (0, 1),
        (1, 1),
        (2, 3),
        (3, 3),
    ]
    here, there = (peer.node.grid.modules_of_path(path) for path in (1, 3))
    commits = [(e["module"], e["round"], e["version"]) for e in peer.events.of("commit")]
    assert [c for c in commits if c[1] < 2] == [
        (module, r, r + 1) for r in (0, 1) for module in here
    ]
    assert {c[0] for c in commits if c[1] >= 2} == set(there)
    assert peer.events.of("carry_on") == []
    assert {len(e["group"]) for e in peer.events.of("commit")} == {2}
    # A shared module goes on where the other path left it.
    shared = next(module for module in here if module in there)
    assert [c[2] for c in commits if c[0] == shared] == [1, 2, 3, 4]
    assert set(there) <= set(peer.events.of("leaving")[0]["handed_over"])
    assert peer.directory.claims[-1] is None
    assert peer.directory.peers[-1] is None


def test_an_outer_round_alone_is_told_like_one_with_others(rig: Callable[..., Rig]) -> None:
    peer = rig(max_rounds=2, path=1)
    peer.run()
    commits = peer.events.of("commit")
    assert {len(e["group"]) for e in commits} == {1}
    begun = peer.events.of("outer_round")
    assert [(e["module"], e["round"]) for e in begun] == [
        (e["module"], e["round"]) for e in commits
    ]
    assert all(0.0 <= e["late_s"] < 10.0 for e in begun)
    assert all(0.0 <= e["seconds_after_boundary"] < 10.0 for e in commits)


def test_a_failed_average_is_carried_on_and_merged_later(rig: Callable[..., Rig]) -> None:
    peer = rig(max_rounds=2, path=1)
    peer.others(*everywhere_but(1))
    peer.pool.failures = [AveragingFailed("a member died") for _ in range(2)]
    peer.run()
    module = peer.pool.calls[0][0]
    assert [(e["module"], e["round"]) for e in peer.events.of("carry_on")] == [(module, 0)]
    commits = [
        (e["round"], e["version"]) for e in peer.events.of("commit") if e["module"] == module
    ]
    assert commits == [(1, 1)]
    rounds = [e["tokens"] for e in peer.events.of("outer_round") if e["module"] == module]
    assert rounds[1] > rounds[0]


def test_a_failed_move_goes_on_with_the_path_in_training(rig: Callable[..., Rig]) -> None:
    peer = rig(max_rounds=3)
    peer.others(*everywhere_but(1))
    blob = peer.node.fetcher.blob

    def path_3_gets_free(ended: dict[str, Any]) -> None:
        def unreachable(sha256: str, what: str = "", **options: Any) -> Path:
            raise NetworkError(f"nobody serves {what}")

        peer.node.fetcher.blob = unreachable
        peer.others(claim(A, 0), claim(B, 2), claim(C, 1))
        peer.publisher.refresh()

    peer.events.actions["round"] = path_3_gets_free
    peer.run()
    peer.node.fetcher.blob = blob
    assert [e["to_path"] for e in peer.events.of("move")] == [3]
    assert [e["path"] for e in peer.events.of("round")] == [1, 1, 1]
    assert [e["path"] for e in peer.events.of("training")] == [1]
    said = [c.path for c in peer.directory.claims if c is not None]
    assert said[-1] == 1


def test_who_is_stopped_withdraws_saves_and_hands_over(rig: Callable[..., Rig]) -> None:
    peer = rig(path=1)
    peer.others(*everywhere_but(1))
    peer.events.actions["round"] = lambda ended: peer.stopping.set()
    peer.run()
    assert len(peer.events.of("round")) == 1
    anchors = {e["module"]: e["digest"] for e in peer.events.of("commit")}
    assert peer.events.of("leaving") == [{"path": 1, "handed_over": sorted(anchors)}]
    assert {m: held.digest for m, held in peer.exchange.taken.items()} == anchors
    assert {stored.module for stored in peer.node.states.list()} >= set(anchors)
    assert peer.node.states.load_optimizer(1) is not None
    assert peer.directory.claims[-1] is None


def test_every_commit_is_certified(rig: Callable[..., Rig]) -> None:
    peer = rig(max_rounds=2, path=1)
    peer.others(*everywhere_but(1))
    peer.run()
    certified = {state.digest for state in peer.certifier.commits}
    assert certified == {e["digest"] for e in peer.events.of("commit")}
    assert len(certified) == 4


def test_a_state_that_others_made_is_put_under_the_own_work(rig: Callable[..., Rig]) -> None:
    """It wins by its contributors; an offer brings it to nobody who trains the module."""
    peer = rig(max_rounds=2, path=1)
    peer.others(*everywhere_but(1))
    run = peer.node.run_folder

    def others_commit(training: dict[str, Any]) -> None:
        genesis = run.genesis_state(peer.plan, "L0.E0")
        table = canonical_table([Contribution(0, other, 64) for other in (A, B, C)])
        state = outer_step(genesis, 1e-3 * genesis.parameters, table, peer.plan.outer, 0)
        certificate = peer.certifier.sign(state.reference, genesis.digest, table)
        peer.certifier.served = (certificate,)
        peer.node.fetcher.states[state.digest] = state
        peer.others(*everywhere_but(1), held=state.reference)
        peer.exchange.offer_handler(A, state.reference)
        peer.publisher.refresh()

    peer.events.actions["training"] = others_commit
    peer.events.actions["inner"] = lambda step: peer.publisher.refresh()
    peer.run()
    (adopted,) = peer.events.of("adopt")
    assert (adopted["module"], adopted["version"]) == ("L0.E0", 1)
    assert not adopted["own_work_merged"]
    # Own steps may have been quicker than the fetch; those after it go on from the others' state.
    kinds = [kind for kind, values in peer.events.events if values.get("module") == "L0.E0"]
    after = kinds[kinds.index("adopt") :].count("commit")
    versions = [e["version"] for e in peer.events.of("commit") if e["module"] == "L0.E0"]
    assert after > 0
    assert versions[-after:] == list(range(2, 2 + after))


def test_the_successor_is_moved_to_when_a_round_has_ended(rig: Callable[..., Rig]) -> None:
    peer = rig(path=1)
    peer.others(*everywhere_but(1))
    successor: Any = SimpleNamespace(run_id="b" * 64)

    class Watch:
        ready_run: str | None = None

        def take(self) -> Any:
            return successor

        def stop(self) -> None: ...

    watch: Any = Watch()
    peer.session._watch = watch

    def successor_is_ready(_: dict[str, Any]) -> None:
        watch.ready_run = successor.run_id

    peer.events.actions["inner"] = successor_is_ready
    peer.publisher.start(tuple)
    peer.publisher.refresh()
    assert peer.session.run() is successor
    assert len(peer.events.of("round")) == 1
    assert peer.events.of("leaving") == []
    assert peer.directory.claims[-1] is None


def test_what_ends_the_publisher_ends_the_session(rig: Callable[..., Rig]) -> None:
    peer = rig()
    peer.others(*everywhere_but(1))

    def break_the_directory(_: dict[str, Any]) -> None:
        peer.directory.error = KeyError("x")
        with pytest.raises(BackgroundError):
            peer.publisher.refresh()

    peer.events.actions["inner"] = break_the_directory
    with pytest.raises(BackgroundError, match="the publisher thread failed: KeyError: 'x'"):
        peer.run()
    assert len(peer.events.of("inner")) == 1
    # What a return needs is on the disk.
    assert {stored.module for stored in peer.node.states.list()} == {"L0.E0", "L1.E1"}
    assert peer.node.states.load_optimizer(1) is not None


def test_what_ends_the_keeper_ends_the_session(rig: Callable[..., Rig]) -> None:
    peer = rig()

    def fail(_: dict[str, Any]) -> None:
        def work() -> None:
            raise ValueError("a record that nobody foresaw")

        thread = peer.background.thread("keeper", work)
        thread.start()
        thread.join(WAIT_S)

    peer.events.actions["inner"] = fail
    with pytest.raises(BackgroundError, match="the keeper thread failed: ValueError: a record"):
        peer.run()
    assert len(peer.events.of("inner")) == 1


def test_a_save_that_fails_unforeseen_ends_the_session(rig: Callable[..., Rig]) -> None:
    peer = rig()
    peer.others(*everywhere_but(1))

    def save(state: ModuleState) -> None:
        raise RuntimeError("the disk vanished")

    peer.node.held.save = save
    peer.node.held.save_all = lambda: None
    with pytest.raises(BackgroundError, match="the saving thread failed: RuntimeError"):
        peer.run()
