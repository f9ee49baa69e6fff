"""The figures of a swarm over time and the names in it: what is written is read again, and the file
stays small."""

import itertools
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dipaco.base.errors import StorageError
from dipaco.status.history import DAY_S, HOUR_S, MAX_POINTS, History, default_file

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


def test_of_many_rows_some_are_read_evenly_over_time_and_the_last_among_them(history):
    # Hours that are old, and a day in which it was read every minute.
    moments = [*range(0, 300 * 3600, 3600), *range(300 * 3600, 324 * 3600, 60)]
    for moment in moments:
        history.write(status_of_moment(START_S + moment))
    times = history.series(RUN)["time_s"]
    assert 300 < len(times) <= MAX_POINTS
    assert times[-1] == START_S + moments[-1]
    gaps = [then - now for now, then in itertools.pairwise(times)]
    assert max(gaps) <= 2 * 3600


def test_it_survives_a_restart_and_a_kill(tmp_path):
    """A process is ended in the middle of a write: what was written before is there."""
    file = tmp_path / "run.sqlite"
    program = (
        "import json, os, signal, sys\n"
        "from pathlib import Path\n"
        "from dipaco.status.history import History\n"
        "history = History(Path(sys.argv[1]))\n"
        "history.write(json.loads(sys.argv[2]))\n"
        "history._rows.execute('BEGIN IMMEDIATE')\n"
        "history._rows.execute('DELETE FROM figures')\n"
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
    with pytest.raises(StorageError, match="of another program or version; move it away"):
        History(other)
    text.write_text("to be or not to be, " * 100)
    with pytest.raises(StorageError, match="not a database.*move the file away"):
        History(text)
    with pytest.raises(StorageError, match="cannot be kept"):
        History(tmp_path)


def test_of_hours_that_are_long_over_one_row_stays(history):
    end_s = START_S + 4 * DAY_S
    for moment in range(0, int(4 * DAY_S), 600):
        history.write(status_of_moment(START_S + moment))
    history.write(status_of_moment(START_S + 30, run=OTHER))
    for _ in range(2):  # The same ones stay the next time.
        history.thin(end_s)
        times = [t for (t,) in history._rows.execute("SELECT time_s FROM figures WHERE run = ?", (RUN,))]
        young = [t for t in times if t >= end_s - DAY_S]
        old = [t for t in times if t < end_s - DAY_S - HOUR_S]
        assert len(young) == DAY_S / 600
        assert len(old) == len({int(t // HOUR_S) for t in old})
        assert 71 <= len(old) <= 72
    assert history.series(OTHER)["time_s"] == [START_S + 30]


def test_a_peer_that_is_gone_keeps_its_last_name(history, tmp_path, monkeypatch):
    history.keep_names({"ann": ("old name", ""), "bob": ("", "red"), "eve": ("x", "y")})
    history.keep_names({"ann": ("new name", "blue")})
    # What its owner has taken back is forgotten.
    history.keep_names({"eve": ("", "")})
    last = {"ann": ("new name", "blue"), "bob": ("", "red")}
    assert History(tmp_path / "run.sqlite").names() == last
    # They are bounded, and those that were seen last stay.
    monkeypatch.setattr("dipaco.status.history.MAX_NAMES", 2)
    history.keep_names({"zoe": ("zoe", "")})
    assert len(history.names()) == 2
    assert "zoe" in history.names()


def test_where_it_is_kept(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/var/lib/state")
    assert default_file() == Path("/var/lib/state/dipaco/history.sqlite")
