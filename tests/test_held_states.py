"""What a process serves: the newest state of each module, from memory or from disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from dipaco.modules.errors import StorageError
from dipaco.modules.state import ModuleState, PathProgress, read_state
from dipaco.peer.exchange.held_states import HeldStates
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
    held.hold(older, save=False)
    held.hold(newer, save=False)
    held.hold(older, save=True)
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
    held.hold(state, save=True)
    assert isinstance(held.lookup(state.digest), bytes)
