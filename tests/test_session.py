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
from dipaco.dht.records import Claim
from dipaco.modules.errors import NetworkError
from dipaco.modules.outer import Contribution, canonical_table, outer_step
from dipaco.modules.state import ModuleState
from dipaco.peer import errands, outer_steps
from dipaco.peer import session as session_file
from dipaco.peer.averaging.parts import AveragingFailed
from dipaco.peer.background import BackgroundError
from dipaco.peer.exchange.steps import step_name
from dipaco.peer.owner.pauses import BY_COMMAND, Pauses, ask_to_pause, ask_to_resume
from dipaco.routing.run_folder import RunFolder
from support.fake_swarm import (
    AtOnce,
    claim,
)
from support.session_rig import DURATION_S, START_S, A, B, C, Rig
from support.tiny_run import make_tiny_run

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
    assert peer.directory.peers[-1].has_left
    assert "paused" in {record.state for record in peer.directory.peers}


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
    assert peer.directory.peers[-1].has_left


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


def test_every_commit_is_certified_and_its_step_served(rig: Callable[..., Rig]) -> None:
    peer = rig(max_rounds=2, path=1)
    peer.others(*everywhere_but(1))
    peer.run()
    certified = {state.digest for state in peer.certifier.commits}
    assert certified == {e["digest"] for e in peer.events.of("commit")}
    assert len(certified) == 4
    newest = {e["module"]: e["digest"] for e in peer.events.of("commit")}
    assert all(peer.node.held.lookup(step_name(digest)) for digest in newest.values())


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
