"""A recording played again gives the same actions, and says where it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dipaco.modules.config import GridConfig
from dipaco.modules.errors import IntegrityError
from dipaco.peer.member.events import Event
from dipaco.peer.member.recording import RecordFile, play
from support.calm_world import CalmPeer, CalmWorld
from support.make_plan import make_plan


def record(folder: Path, peer: CalmPeer) -> tuple[RecordFile, Path]:
    """Record all that goes in and out of a peer's member."""
    path = folder / "record.jsonl"
    known = peer.member.known
    file = RecordFile(path, known.settings, known.plan, (), ())
    handle = peer.member.handle

    def recorded(event: Event, now_s: float) -> list:  # type: ignore[type-arg]
        actions = handle(event, now_s)
        file.record(now_s, event, actions)
        return actions

    peer.member.handle = recorded  # type: ignore[method-assign]
    return file, path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    world = CalmWorld(make_plan(duration_s=20.0, grid=GridConfig(modules_per_level=(2, 2))))
    one, two = world.add(["Pa", "Pb"])
    file, path = record(tmp_path, one)
    with file:
        world.run(45.0)
        world.add(["Pc"])
        world.run(30.0)
        two.alive = False
        world.run(45.0)
    return path


def test_a_recording_gives_the_same_actions(recording: Path) -> None:
    played = play(recording)
    assert played.difference is None
    assert played.calls > 300


def test_a_difference_is_found(recording: Path) -> None:
    lines = recording.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"kind":"take_snapshot"' in line)
    call = json.loads(lines[number])
    call["actions"] = []
    lines[number] = json.dumps(call)
    recording.write_text("\n".join(lines) + "\n")
    difference = play(recording).difference
    assert difference is not None
    assert difference.line == number + 1
    assert difference.recorded == ()


def test_a_last_line_that_was_cut_off_is_left_out(recording: Path) -> None:
    whole = recording.read_bytes()
    recording.write_bytes(whole[:-20])
    assert play(recording).difference is None


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"format": "something else"}\n')
    with pytest.raises(IntegrityError, match="line 1"):
        play(path)
