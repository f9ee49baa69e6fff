"""A swarm that is gone, told from the event logs of its peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dipaco.dht.manifest import SignedManifest
from dipaco.dht.status.event_logs import MOST_STATES_OF_A_MODULE, EventLogs, Replayed
from dipaco.dht.status.log_files import MOST_LINE_BYTES, Reading, events_of_file
from dipaco.modules.errors import RunSelectionError, StorageError
from dipaco.peer.reporting.events import EventLog
from support.make_plan import make_plan
from support.swarm_views import digest_of, peer_name

PLAN = make_plan(duration_s=100.0)
MODULES = {path: (f"L0.E{path // 2}", f"L1.E{path % 2}") for path in range(4)}
START_S = PLAN.start_s
ADOPTED = {
    "event": "adopt", "module": "L0.E1", "version": 3, "tokens": 1920, "own_work_merged": False
}  # fmt: skip


class Clock:
    """The time that events get."""

    now_s = START_S

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("dipaco.peer.reporting.events.time", found)
    return found


def write_logs(folder: Path, clock: Clock, *, rounds: int = 6, killed_in: int = 3) -> list[Path]:
    """Write what four peers log, each on a path of its own; the last is killed in a round."""
    files = [folder / f"peer{number}.jsonl" for number in range(4)]
    logs = [EventLog(file) for file in files]
    for number, log in enumerate(logs):
        log.begin_run(
            SignedManifest(PLAN, "0" * 16, b""),
            peer_name(number),
            name=f"peer {number}",
            software="dipaco/test",
            device="cpu x1",
        )
        log.emit("claimed", path=number, reason="unserved")
        log.emit("reachable", how="direct", addresses=["/ip4/203.0.113.5/tcp/31337"])
    for round_index in range(rounds):
        for step in range(20):
            clock.now_s = START_S + 100 * round_index + 5 * step
            for number, log in enumerate(logs):
                if number == 3 and (round_index, step) >= (killed_in, 10):
                    continue
                if step == 0 and round_index == 0:
                    log.emit(
                        "training",
                        path=number,
                        path_step=0,
                        round=0,
                        modules=dict.fromkeys(MODULES[number], 0),
                        resumed_optimizer=False,
                    )
                log.emit(
                    "inner", path=number, path_step=step, loss=2.0, tokens_per_s=64.0, seconds=5.0
                )
                if step == 19:
                    end_round(log, number, round_index)
    for log in logs:
        log.close()
    return files


def end_round(log: EventLog, number: int, round_index: int) -> None:
    """Let a peer commit what it trains."""
    digests = {}
    for module in MODULES[number]:
        digests[module] = digest_of(module, round_index + 1)
        log.emit("outer_round", module=module, round=round_index, tokens=320, late_s=0.0)
        log.emit(
            "commit",
            module=module,
            round=round_index,
            version=round_index + 1,
            digest=digests[module],
            tokens=640 * (round_index + 1),
            group=[],
            paths=[number],
            expected=2,
            attempt=0,
            seconds_after_boundary=0.1,
            seconds=0.1,
        )
    log.emit("validation", path=number, round=round_index, loss=2.0, tokens=100)
    log.emit("round", round=round_index, path=number, path_step=20, loss=2.0, digests=digests)


def moments(places: list[Path], run: str | None = None) -> dict[float, dict[str, Any]]:
    """Return the statuses by seconds since the start."""
    return {s["time_s"] - START_S: s for s in EventLogs.open(places, run).statuses()}


def test_a_kill_is_seen_in_the_logs(tmp_path: Path, clock: Clock) -> None:
    write_logs(tmp_path, clock)
    found = moments([tmp_path])
    times = sorted(found)
    before = found[max(t for t in times if t < 340)]
    after = found[max(t for t in times if t < 560)]
    assert [peer["name"] for peer in before["peers"]] == [f"peer {n}" for n in range(4)]
    assert [path["state"] for path in before["paths"]] == ["training"] * 4
    assert before["round"] == 3
    assert before["healthy"], before["problems"]
    assert {m["module"]: (m["version"], len(m["holders"])) for m in before["modules"]} == {
        f"L{level}.E{n}": (3, 2) for level in range(2) for n in range(2)
    }
    assert before["paths"][1]["tokens"] == 3 * 320
    assert before["paths"][1]["validation_loss"] == 2.0
    assert before["peers"][0]["tokens_per_s"] == 64.0
    assert [peer["name"] for peer in after["peers"]] == [f"peer {n}" for n in range(3)]
    assert after["paths"][3]["state"] == "unserved"
    assert [path["last_round"] for path in after["paths"]] == [4, 4, 4, 2]
    assert times[-1] == 595


def test_lines_that_no_peer_writes_are_counted_and_named(tmp_path: Path, clock: Clock) -> None:
    files = write_logs(tmp_path, clock, rounds=2)
    good = files[0].read_text().splitlines()
    bad = [
        "not json",
        "[1, 2]",
        '{"event": "inner"}',
        json.dumps({"event": "claimed", "time_s": START_S + 1, "path": 77}),
        json.dumps({"event": "commit", "time_s": START_S + 1, "module": "L9.E9", "round": 0}),
        json.dumps({"event": "inner", "time_s": START_S + 1}),
        "[" * 100_000,
    ]
    files[0].write_text("\n".join([bad[0], *good, *bad[1:]]))
    with files[1].open("a") as file:
        file.write('{"event": "commit", "time_s": 11')
    logs = EventLogs.open([tmp_path], None)
    assert [len(status["peers"]) for status in logs.statuses()][-1] == 4
    said = [str(unread) for unread in logs.unread.values() if unread.count]
    assert said[0] == (
        f"{files[0]}: 7 lines are not understood, the first is line 1: it is not JSON"
    )
    assert said[1].startswith(f"{files[1]}: 1 line is not understood, the first is line ")
    assert len(said) == 2


def test_what_a_peer_does_besides_is_followed(tmp_path: Path, clock: Clock) -> None:
    write_logs(tmp_path, clock, rounds=3)
    with (tmp_path / "peer0.jsonl").open("a") as file:
        for event in (
            {"event": "paused", "path": 0, "reason": "hours"},
            {"event": "kept", "module": "L0.E1", "version": 3},
        ):
            file.write(json.dumps({"time_s": START_S + 298, **event}) + "\n")
    with (tmp_path / "peer1.jsonl").open("a") as file:
        for event in (
            {"event": "move", "from_path": 1, "to_path": 2, "reason": "worse served"},
            {**ADOPTED, "digest": digest_of("L0.E1", 3)},
        ):  # fmt: skip
            file.write(json.dumps({"time_s": START_S + 298, **event}) + "\n")
    with (tmp_path / "peer2.jsonl").open("a") as file:
        left = {"event": "leaving", "time_s": START_S + 299, "path": 2, "handed_over": []}
        file.write(json.dumps(left) + "\n")
    with (tmp_path / "peer3.jsonl").open("a") as file:
        waits = {"event": "waiting", "time_s": START_S + 298, "what": "L0: have 1, need 2"}
        file.write(json.dumps(waits) + "\n")
    end = list(moments([tmp_path]).values())[-1]
    assert [(p["name"], p["state"], p["path"], p["waits_for"]) for p in end["peers"]] == [
        ("peer 0", "paused", None, ""),
        ("peer 1", "joining", 2, ""),
        ("peer 3", "training", 3, "L0: have 1, need 2"),
    ]
    assert {n[-3:] for n in end["modules"][1]["holders"]} == {peer_name(n)[-3:] for n in (0, 1, 3)}


def test_what_cannot_be_replayed_is_one_line(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(StorageError, match="there is no such file or folder"):
        EventLogs.open([tmp_path / "none"], None)
    with pytest.raises(StorageError, match="no event log in it"):
        EventLogs.open([tmp_path], None)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(RunSelectionError, match="none of 1 files says which run it is of"):
        EventLogs.open([tmp_path], None)
    (tmp_path / "old.jsonl").write_text('{"event": "inner", "time_s": 5}\n')
    with pytest.raises(RunSelectionError, match="1 of 2 files hold events, but none says which"):
        EventLogs.open([tmp_path], None)
    (tmp_path / "other.json").unlink()
    write_logs(tmp_path, clock, rounds=1)
    other = make_plan(duration_s=50.0)
    log = EventLog(tmp_path / "other.jsonl")
    manifest = SignedManifest(other, "0" * 16, b"")
    log.begin_run(manifest, peer_name(9), name="", software="dipaco/test", device="cpu")
    log.close()
    with pytest.raises(RunSelectionError, match="choose one with --run"):
        EventLogs.open([tmp_path], None)
    assert EventLogs.open([tmp_path], PLAN.run_id[:6]).plan == PLAN


def test_a_span_of_months_is_a_bounded_number_of_moments(tmp_path: Path, clock: Clock) -> None:
    write_logs(tmp_path, clock, rounds=2)
    with (tmp_path / "peer0.jsonl").open("a") as file:
        file.write(json.dumps({"event": "waiting", "time_s": START_S + 1e7, "what": "x"}) + "\n")
    logs = EventLogs.open([tmp_path], None)
    assert sum(1 for _ in logs.statuses(50)) <= 51


def test_a_log_goes_on_after_a_kill_in_the_middle_of_a_line(tmp_path: Path, clock: Clock) -> None:
    write_logs(tmp_path, clock, rounds=2)
    file = tmp_path / "peer0.jsonl"
    for cut in (b'{"event": "inner", "time_s": 17', b"\0" * 4096):
        with file.open("ab") as opened:
            opened.write(cut)
        log = EventLog(file)
        clock.now_s += 1
        log.begin_run(
            SignedManifest(PLAN, "0" * 16, b""),
            peer_name(0),
            name="again",
            software="dipaco/test",
            device="cpu",
        )
        log.close()
    logs = EventLogs.open([tmp_path], None)
    assert {peer["name"] for peer in logs.last_status()["peers"]} >= {"again"}
    # The two halves of lines, and nothing that was written after them.
    assert logs.unread[file].count == 2


def test_logs_whose_times_overlap_are_played_in_the_order_of_the_times(
    tmp_path: Path, clock: Clock
) -> None:
    files = write_logs(tmp_path, clock, rounds=4, killed_in=9)
    whole = list(moments([tmp_path]).values())
    # One peer began the third round with a new file, and the name sorts before the first.
    lines = files[0].read_text().splitlines(keepends=True)
    half = len(lines) // 2
    files[0].write_text("".join(lines[:half]))
    (tmp_path / "a-later.log").write_text(lines[0] + "".join(lines[half:]))
    # The copy of its 'run' event is older than what it follows: it is played first.
    assert list(moments([tmp_path]).values()) == whole


def test_other_files_and_kinds_of_events_harm_nobody(tmp_path: Path, clock: Clock) -> None:
    files = write_logs(tmp_path, clock, rounds=2)
    whole = moments([tmp_path])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "zeros.log").write_bytes(bytes(3 * MOST_LINE_BYTES))
    (tmp_path / "text.log").write_text("Nov 22 10:00:00 host sshd: session opened\n" * 3)
    (tmp_path / "picture.json").write_bytes(bytes(range(256)) * 16)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "not-a-log.txt").write_text("x\n")
    lines = files[1].read_text().splitlines(keepends=True)
    news = [{**json.loads(line), "event": "of_a_later_version", "much": [1]} for line in lines]
    told = [
        text
        for line, new in zip(lines, news, strict=True)
        for text in (line, json.dumps(new) + "\n")
    ]
    files[1].write_text("".join(told))
    logs = EventLogs.open([tmp_path], None)
    assert {s["time_s"] - START_S: s for s in logs.statuses()} == whole
    said = {file.name: str(unread) for file, unread in logs.unread.items() if unread.count}
    assert said.keys() == {"zeros.log", "text.log", "picture.json"}
    # A line without an end is one line, however long.
    assert "1 line is not understood, the first is line 1: it is longer" in said["zeros.log"]
    assert "3 lines are not understood, the first is line 1: it is not JSON" in said["text.log"]


def test_memory_and_progress_of_long_logs(tmp_path: Path, clock: Clock) -> None:
    """What is remembered does not grow with the logs, and how far it is is told in bytes."""
    [file, *_] = write_logs(tmp_path, clock, rounds=1)
    with file.open("a") as opened:
        for version in range(2, 3000):
            digest = digest_of("L0.E0", version)
            event = {
                **ADOPTED, "event": "adopt", "module": "L0.E0", "version": version, "digest": digest
            }  # fmt: skip
            opened.write(json.dumps({**event, "time_s": START_S + 100 + version}) + "\n")
    told: list[tuple[float, float]] = []
    logs = EventLogs.open([file], None, lambda done, total: told.append((done, total)))
    assert told == [(0, file.stat().st_size)]
    with file.open("a") as opened:
        opened.write((json.dumps({"event": "x", "time_s": START_S}) + " " * 10**6 + "\n") * 5)
    told.clear()
    logs.last_status(lambda done, total: told.append((done, total)))
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] > 5 * 10**6
    swarm = Replayed(PLAN, "0" * 16)
    for _, line, event in events_of_file(file, None, {}, Reading([file], lambda *_: None)):
        swarm.take(peer_name(0), event)
        assert line
    remembered = swarm._states._of_module["L0.E0"]
    assert len(remembered) == len(swarm._states._module_of) - 1 == MOST_STATES_OF_A_MODULE
