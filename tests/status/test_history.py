"""The history of a swarm: what is written is read again, it stays small, and belongs to one run."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.big_swarm import big_records, spoiled_records, status_at

from dipaco.base.errors import StorageError
from dipaco.status.history import (
    DAY_S,
    HOUR_S,
    History,
    SnapshotError,
    default_history_file,
    pack,
    unpack,
)

RUN = "ab" * 8
START_S = 1.7e9
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=30), inner, max_size=4)
        | st.lists(st.fixed_dictionaries({"name": inner, "~": inner}), max_size=4)
    ),
    max_leaves=20,
)


def status_of_moment(time_s: float, **values: Any) -> dict[str, Any]:
    """Return the least that a status has."""
    return {
        "time_s": time_s,
        "round": int(time_s // 60),
        "paths": [{"path": 0, "state": "training", "tokens": 5}],
        "peers": [{"peer_id": "12D3KooW" + "x" * 44, "state": "training", "tokens_per_s": 2.0}],
        "validation": {"loss": 1.5},
        "problems": [],
        **values,
    }


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "run.sqlite", RUN)


@given(st.dictionaries(st.text(max_size=30), values, max_size=5))
def test_what_is_packed_is_unpacked(status: dict[str, Any]) -> None:
    assert unpack(pack(status)) == status


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(SnapshotError):
        unpack(data)


def test_a_write_that_fails_leaves_a_history_that_goes_on(history: History) -> None:
    history.write(status_of_moment(START_S))

    # SQLite rolls back by itself when the disk is full.
    def fail() -> None:
        with history._transaction():
            history._file.execute("ROLLBACK")
            raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        fail()
    history.write(status_of_moment(START_S + 60, mark="next"))
    found = history.at(START_S + 60)
    assert found is not None
    assert found["mark"] == "next"


def test_a_commit_that_fails_is_undone(history: History) -> None:
    file = history._file
    file.execute("PRAGMA foreign_keys=ON")
    file.execute("CREATE TABLE many (id INTEGER PRIMARY KEY)")
    file.execute("CREATE TABLE one (id REFERENCES many DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(sqlite3.IntegrityError), history._transaction():
        file.execute("INSERT INTO one VALUES (5)")
    history.write(status_of_moment(START_S))
    assert history.span() is not None


def test_claims_beyond_all_measure_are_kept(history: History) -> None:
    paths = [{"path": path, "state": "training", "tokens": 2**53} for path in range(2048)]
    history.write(status_of_moment(START_S, paths=paths))
    assert history.series()["tokens"] == [2**63 - 1]


def test_any_moment_is_read_as_it_was(history: History) -> None:
    for step in range(10):
        history.write(status_of_moment(START_S + 60 * step, mark=step))
    assert [history.at(START_S + t)["mark"] for t in (-5.0, 0.0, 59.9, 60.0, 1e6)] == [  # type: ignore[index]
        0,
        0,
        0,
        1,
        9,
    ]
    series = history.series()
    assert series["time_ms"] == [round(1000 * (START_S + 60 * step)) for step in range(10)]
    assert set(series["tokens"]) == {5}
    few = history.series(most=3)["time_ms"]
    assert (len(few), few[-1]) == (3, series["time_ms"][-1])
    assert [s["mark"] for s in history.moments(begin_s=START_S + 300, most=2)] == [6, 9]


def test_a_large_swarm_comes_back_whole(history: History) -> None:
    first, second = status_at(big_records(9)), status_at(spoiled_records(10))
    for status in (first, second):
        history.write(status)
    assert history.at(first["time_s"]) == first
    assert history.at(second["time_s"]) == second
    assert history.bytes < 200_000


def test_it_survives_a_restart_and_a_kill(tmp_path: Path) -> None:
    """A process is ended in the middle of a write: what was written before is there."""
    file = tmp_path / "run.sqlite"
    program = (
        "import json, os, signal, sys\n"
        "from pathlib import Path\n"
        "from dipaco.status.history import History\n"
        "history = History(Path(sys.argv[1]), sys.argv[2])\n"
        "history.write(json.loads(sys.argv[3]))\n"
        "history._file.execute('BEGIN IMMEDIATE')\n"
        "history._file.execute('DELETE FROM moments')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status = json.dumps(status_of_moment(START_S, mark="whole"))
    done = subprocess.run(
        [sys.executable, "-c", program, str(file), RUN, status],
        timeout=280,
        check=False,
    )
    assert done.returncode == -9
    history = History(file, RUN)
    assert history.at(START_S)["mark"] == "whole"  # type: ignore[index]
    history.write(status_of_moment(START_S + 60, mark="next"))
    history.close()
    assert History(file, RUN).at(START_S + 60)["mark"] == "next"  # type: ignore[index]


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.sqlite"
    History(file, RUN).close()
    with pytest.raises(StorageError, match=f"is of run {RUN}, not of {'cd' * 8}; give another"):
        History(file, "cd" * 8)


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    other, text, newer = (tmp_path / name for name in ("other", "text", "newer"))
    sqlite3.connect(other).execute("CREATE TABLE bookmarks (name)")
    with pytest.raises(StorageError, match="a database of another program"):
        History(other, RUN)
    text.write_text("to be or not to be, " * 100)
    with pytest.raises(StorageError, match="not a database.*move the file away"):
        History(text, RUN)
    History(newer, RUN).close()
    with sqlite3.connect(newer) as database:
        database.execute("UPDATE about SET value = '0' WHERE name = 'schema'")
    with pytest.raises(StorageError, match="has format 0, this is"):
        History(newer, RUN)
    with pytest.raises(StorageError, match="give a writable file"):
        History(tmp_path, RUN)


def test_a_damaged_moment_hides_no_other(history: History) -> None:
    for step in range(3):
        history.write(status_of_moment(START_S + step, mark=step))
    damaged = round(1000 * (START_S + 1))
    history._file.execute("UPDATE moments SET body = x'00' WHERE time_ms = ?", (damaged,))
    assert history.at(START_S + 1.5)["mark"] == 0  # type: ignore[index]
    assert [status["mark"] for status in history.moments()] == [0, 2]


def test_it_gets_sparser_with_age(history: History) -> None:
    step_s, end_s = 120.0, START_S + 4 * DAY_S
    count = int((end_s - START_S) / step_s)
    for step in range(count + 1):
        history.write(status_of_moment(START_S + step * step_s))
    history.thin(end_s)
    times = [ms / 1000 for ms in history.series(most=10**6)["time_ms"]]
    young = [t for t in times if t > end_s - 6 * HOUR_S + 1800]
    middle = [t for t in times if end_s - 2 * DAY_S + 1800 < t < end_s - 6 * HOUR_S - 1800]
    old = [t for t in times if t < end_s - 2 * DAY_S - 1800]

    def gap(found: list[float]) -> float:
        return (found[-1] - found[0]) / (len(found) - 1)

    assert gap(young) == step_s
    assert 290 < gap(middle) < 310
    assert 1790 < gap(old) < 1810
    # Thinning again takes nothing more away.
    history.thin(end_s)
    assert len(history.series(most=10**6)["time_ms"]) == len(times)


def test_it_stays_within_its_bound(tmp_path: Path) -> None:
    file, bound = tmp_path / "run.sqlite", 200_000
    history = History(file, RUN, most_bytes=bound)
    for step in range(100):
        # Strangers that come once each, under long names.
        peers = [
            {"peer_id": f"{step:06d}{n:038d}", "state": "training", "tokens_per_s": 1.0}
            for n in range(50)
        ]
        history.write(status_of_moment(START_S + 7200 * step, peers=peers))
        assert history.bytes <= bound
    span = history.span()
    assert span is not None
    assert span.end_s == START_S + 7200 * 99
    assert span.count > 5
    assert history.at(START_S + 7200 * 99)["peers"] == peers  # type: ignore[index]


def test_a_flood_takes_the_time_before_it_not_away(tmp_path: Path) -> None:
    bound = 200_000
    history = History(tmp_path / "run.sqlite", RUN, most_bytes=bound)
    for step in range(100):
        history.write(status_of_moment(START_S + step, mark=step))
    random = Random(0)
    for step in range(100, 400):
        # Within an hour, and no two strings of it are alike.
        peers = [
            {"peer_id": f"{random.getrandbits(256):x}", "state": "training", "tokens_per_s": 1.0}
            for _ in range(50)
        ]
        history.write(status_of_moment(START_S + step, peers=peers))
        assert history.bytes <= bound
    honest = list(history.moments(end_s=START_S + 99, most=100))
    assert len(honest) > 90


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/var/lib/state")
    assert default_history_file(RUN) == Path(f"/var/lib/state/dipaco/{RUN}.history.sqlite")
