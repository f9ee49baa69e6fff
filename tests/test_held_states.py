"""What a process serves: the newest state of each module, from memory or from disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from dipaco.modules.errors import StorageError
from dipaco.modules.state import ModuleState, PathProgress, read_state
from dipaco.peer.exchange import held_states
from dipaco.peer.exchange.held_states import RECENT_S, HeldStates
from support.tiny_run import make_tiny_run


@pytest.fixture(scope="module")
def genesis(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModuleState]:
    run = make_tiny_run(tmp_path_factory.mktemp("held") / "run")
    return run.path, run.genesis_state(run.plan(), "L0.E0")


def advanced(state: ModuleState, rounds: int) -> ModuleState:
    return dataclasses.replace(
        state, version=rounds, progress={0: PathProgress(100 * rounds, rounds - 1)}
    )


def holder(path: Path) -> HeldStates:
    from dipaco.routing.run_folder import RunFolder

    run = RunFolder(path)
    return HeldStates(run.grid(run.plan()), run.states, run.blobs)


def test_a_slow_save_of_an_older_state_does_not_take_the_newer_ones_place(
    genesis: tuple[Path, ModuleState],
) -> None:
    held = holder(genesis[0])
    older, newer = advanced(genesis[1], 1), advanced(genesis[1], 2)
    held.hold(older)
    held.hold(newer)
    held.save(older)
    now = held.get("L0.E0")
    assert now is not None
    assert now.digest == newer.digest
    content = held.lookup(newer.digest)
    assert isinstance(content, bytes)
    assert read_state(content, newer.layout, newer.digest).version == 2
    assert isinstance(held.lookup(older.digest), Path)


def test_a_full_disk_keeps_the_state_in_memory(
    genesis: tuple[Path, ModuleState], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = holder(genesis[0])
    state = advanced(genesis[1], 9)

    def full(state: ModuleState) -> Path:
        raise StorageError("disk full")

    monkeypatch.setattr(held._store, "save", full)
    held.hold(state)
    held.save(state)
    assert isinstance(held.lookup(state.digest), bytes)


def test_what_was_announced_a_moment_ago_is_still_served(
    genesis: tuple[Path, ModuleState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of fixed steps can be shorter than reading an announcement and asking for it."""
    held, now = holder(genesis[0]), [0.0]
    held._monotonic = lambda: now[0]
    states = [advanced(genesis[1], version) for version in range(20, 26)]
    for state in states:
        held.hold(state)
        if state.version % 2 == 0:
            held.save(state)
    assert all(held.lookup(state.digest) is not None for state in states)
    now[0] = RECENT_S + 1.0
    held.hold(advanced(genesis[1], 30))
    # The store keeps the last two that were saved; of those in memory alone nothing is left.
    assert [held.lookup(state.digest) for state in states[1::2]] == [None] * 3
    monkeypatch.setattr(held_states, "RECENT_BYTES", states[0].byte_size)
    for version in (31, 32):
        held.hold(advanced(genesis[1], version))
    assert held.lookup(advanced(genesis[1], 31).digest) is None


def test_a_dropped_module_is_served_no_more_and_leaves_the_disk(
    genesis: tuple[Path, ModuleState],
) -> None:
    held = holder(genesis[0])
    held._monotonic = lambda: 0.0
    on_disk, in_memory = advanced(genesis[1], 40), advanced(genesis[1], 41)
    held.hold(on_disk)
    held.save(on_disk)
    held.hold(in_memory)
    held.drop("L0.E0")
    assert held.get("L0.E0") is None
    assert held.load("L0.E0") is None
    assert held.all() == ()
    assert held._store.find(on_disk.digest) is None
    assert holder(genesis[0]).load_from_disk() == ()
    held.drop("L0.E0")


def test_what_is_only_in_memory_is_written_on_leaving(genesis: tuple[Path, ModuleState]) -> None:
    held = holder(genesis[0])
    state = advanced(genesis[1], 50)
    held.hold(state)
    held.save_all()
    assert isinstance(held.lookup(state.digest), Path)
    assert held.load("L0.E0") is not None
    (found,) = holder(genesis[0]).load_from_disk()
    assert found == state.reference


def test_a_piece_of_a_state_is_the_same_from_memory_and_from_disk(
    genesis: tuple[Path, ModuleState],
) -> None:
    held = holder(genesis[0])
    state = advanced(genesis[1], 60)
    held.hold(state)
    size = state.reference.bytes
    from_memory = [held.read(state.digest, offset, 100) for offset in (0, 33, size - 100)]
    held.save(state)
    assert isinstance(held.lookup(state.digest), Path)
    assert [held.read(state.digest, offset, 100) for offset in (0, 33, size - 100)] == from_memory
    assert None not in from_memory
    assert held.read(state.digest, size - 99, 100) is None
    assert held.read("f" * 64, 0, 1) is None
