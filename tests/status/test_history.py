"""The figures of a swarm over time: what is written is read again, and the file stays small."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dipaco.base.errors import StorageError
from dipaco.status.curves import DAY_S, HOUR_S, MAX_POINTS, History, default_history_file

RUN, OTHER = "ab" * 8, "cd" * 8
START_S = 1.7e9


def status_of_moment(time_s, run=RUN, **values):
    """Return the least that a status has."""
    return {
        "time_s": time_s,
        "run": {"id": run},
        "paths": [{"path": 0, "tokens": 5}],
        "peers": [{"state": "training", "tokens_per_s": 2.0}],
        "validation": {"loss": None},
        **values,
    }


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "run.sqlite")


def test_each_run_has_figures_of_its_own(history):
    history.write(status_of_moment(START_S))
    history.write(status_of_moment(START_S + 60, validation={"loss": 1.5}))
    history.write(status_of_moment(START_S + 60, run=OTHER, peers=[]))
    assert history.series(RUN) == {
        "time_s": [START_S, START_S + 60],
        "training": [1, 1],
        "tokens": [5, 5],
        "tokens_per_s": [2.0, 2.0],
        "loss": [None, 1.5],
    }
    assert history.series(OTHER)["training"] == [0]
    assert history.series("ef" * 8)["training"] == []


def test_claims_beyond_all_measure_are_kept(history):
    paths = [{"path": path, "tokens": 2**53} for path in range(2048)]
    history.write(status_of_moment(START_S, paths=paths))
    assert history.series(RUN)["tokens"] == [2**63 - 1]


def test_of_many_rows_some_are_read_and_the_last_among_them(history):
    for step in range(3 * MAX_POINTS // 2):
        history.write(status_of_moment(START_S + step))
    times = history.series(RUN)["time_s"]
    assert (len(times), times[-1]) == (MAX_POINTS, START_S + 3 * MAX_POINTS // 2 - 1)


def test_it_survives_a_restart_and_a_kill(tmp_path):
    """A process is ended in the middle of a write: what was written before is there."""
    file = tmp_path / "run.sqlite"
    program = (
        "import json, os, signal, sys\n"
        "from pathlib import Path\n"
        "from dipaco.status.curves import History\n"
        "history = History(Path(sys.argv[1]))\n"
        "history.write(json.loads(sys.argv[2]))\n"
        "history._file.execute('BEGIN IMMEDIATE')\n"
        "history._file.execute('DELETE FROM figures')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(file), json.dumps(status_of_moment(START_S))], timeout=280, check=False
    )
    assert done.returncode == -9
    history = History(file)
    history.write(status_of_moment(START_S + 60))
    history.close()
    assert History(file).series(RUN)["time_s"] == [START_S, START_S + 60]


def test_what_is_no_history_is_refused(tmp_path):
    other, text = tmp_path / "other", tmp_path / "text"
    sqlite3.connect(other).execute("CREATE TABLE bookmarks (name)")
    with pytest.raises(StorageError, match="a database of another program or version"):
        History(other)
    text.write_text("to be or not to be, " * 100)
    with pytest.raises(StorageError, match="not a database.*move the file away"):
        History(text)
    with pytest.raises(StorageError, match="give a writable file"):
        History(tmp_path)


def test_it_gets_sparser_with_age(history):
    step_s, end_s = 120.0, START_S + 4 * DAY_S
    rows = [(RUN, START_S + n * step_s, 1, 5, 2.0, None) for n in range(int(4 * DAY_S / step_s))]
    history._file.execute("BEGIN")
    history._file.executemany("INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?)", rows)
    history._file.execute("COMMIT")
    history.write(status_of_moment(end_s - 3 * 365 * DAY_S))  # Too old to stay.
    history.thin(end_s)
    times = [time_s for (time_s,) in history._file.execute("SELECT time_s FROM figures")]
    young = [t for t in times if t > end_s - 6 * HOUR_S + 1800]
    middle = [t for t in times if end_s - 2 * DAY_S + 1800 < t < end_s - 6 * HOUR_S - 1800]
    old = [t for t in times if t < end_s - 2 * DAY_S - 1800]

    def gap(found):
        return (found[-1] - found[0]) / (len(found) - 1)

    assert gap(young) == step_s
    assert 290 < gap(middle) < 310
    assert 1790 < gap(old) < 1810
    # Thinning again takes nothing more away.
    history.thin(end_s)
    assert len(history.series(RUN)["time_s"]) == min(len(times), MAX_POINTS)


def test_where_it_is_kept(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/var/lib/state")
    assert default_history_file() == Path("/var/lib/state/dipaco/history.sqlite")
