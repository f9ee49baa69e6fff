"""What this machine has seen of runs, in one small SQLite file: figures for the curves, and names.

All figures of the last day are kept, and one of each hour before that, so the file stays below a
few MB. Each run has its own figures. A peer that has left keeps its last name here, so that its
work is credited to it. The file survives if its writer is killed at any moment.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dipaco.base.errors import StorageError
from dipaco.base.files import folder_variable, home_folder

# "dpc" and the version of the table: tells the file from those of other programs and versions.
_APPLICATION_ID = 0x64706303
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
_THIN_EVERY = 64
MAX_POINTS = 500
# Another process that has the file open may write for so long.
_BUSY_S = 5.0
# The names of so many contributors are kept, of those that were seen last.
MAX_NAMES = 20_000
COLUMNS = ("time_s", "training", "tokens", "tokens_per_s", "loss")
_TABLES = """
CREATE TABLE IF NOT EXISTS figures (
  run TEXT, time_s REAL, training INTEGER, tokens INTEGER, tokens_per_s REAL, loss REAL,
  PRIMARY KEY (run, time_s)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS names (
  peer TEXT PRIMARY KEY, name TEXT, team TEXT, seen_s REAL
) WITHOUT ROWID
"""
# The first row of an hour stays, so the same rows stay the next time.
_THIN = """
DELETE FROM figures WHERE time_s < :young AND (run, time_s) NOT IN (
  SELECT run, min(time_s) FROM figures WHERE time_s < :young
  GROUP BY run, CAST(time_s / 3600 AS INTEGER)
)
"""
# The last row of each step of time.
_SERIES = """
SELECT max(time_s), training, tokens, tokens_per_s, loss FROM figures WHERE run = :run
GROUP BY CAST((time_s - :first) / :step AS INTEGER) ORDER BY 1
"""


def default_file() -> Path:
    """Return where the figures are kept."""
    base = folder_variable("XDG_STATE_HOME") or str(home_folder() / ".local" / "state")
    return Path(base) / "dipaco" / "history.sqlite"


def _figures_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a status that are drawn over time, by column."""
    loss = status["validation"]["loss"]
    return {
        "time_s": status["time_s"],
        "training": sum(peer["state"] == "training" for peer in status["peers"]),
        # Peers may claim what they like; the column holds 64 bits.
        "tokens": min(sum(path["tokens"] for path in status["paths"]), 2**63 - 1),
        "tokens_per_s": round(sum(peer["tokens_per_s"] for peer in status["peers"]), 1),
        "loss": None if loss is None else round(loss, 5),
    }


class History:
    """Figures of runs over time, and names. Thread-safe; several processes may use one file."""

    def __init__(self, file: Path | None) -> None:
        """Open the file, or make it; None keeps everything in memory.

        Raises StorageError for a file of another program and for a damaged one.
        """
        self._file, self._writes, self._lock = file, 0, threading.RLock()
        with self._explained():
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            # Each statement is a transaction of its own.
            self._rows = sqlite3.connect(
                file or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
        with self._explained():
            (tables,) = self._rows.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (program,) = self._rows.execute("PRAGMA application_id").fetchone()
            if tables and program != _APPLICATION_ID:
                raise StorageError(f"{file} is of another program or version; move it away")
            self._rows.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            self._rows.execute("PRAGMA journal_mode=WAL")
            self._rows.execute("PRAGMA synchronous=NORMAL")
            self._rows.executescript(_TABLES)

    def close(self) -> None:
        """Close the file."""
        self._rows.close()

    def write(self, status: Mapping[str, Any]) -> None:
        """Keep the figures of a status. Raises StorageError."""
        values = {"run": status["run"]["id"], **_figures_of(status)}
        marks = ", ".join(f":{name}" for name in values)
        with self._explained():
            self._rows.execute(f"INSERT OR REPLACE INTO figures VALUES ({marks})", values)
            self._writes += 1
            if self._writes % _THIN_EVERY == 0:
                self.thin(status["time_s"])

    def thin(self, now_s: float) -> None:
        """Drop all rows but the first of each hour that is over a day old."""
        self._rows.execute(_THIN, {"young": (now_s - DAY_S) // HOUR_S * HOUR_S})

    def series(self, run: str) -> dict[str, list[Any]]:
        """Return the figures of a run, oldest first, by column: at most MAX_POINTS moments, evenly
        spaced, and the last one among them. Raises StorageError."""
        with self._explained():
            count, first, last = self._rows.execute(
                "SELECT count(*), min(time_s), max(time_s) FROM figures WHERE run = ?", (run,)
            ).fetchone()
            step_s = (last - first) / (MAX_POINTS - 1) if count > MAX_POINTS else 1e-6
            rows = self._rows.execute(_SERIES, {"run": run, "first": first, "step": step_s})
            found = rows.fetchall()
        return {name: [row[place] for row in found] for place, name in enumerate(COLUMNS)}

    def keep_names(self, said: Mapping[str, tuple[str, str]]) -> None:
        """Keep the name and the team that each peer says now. Raises StorageError."""
        now_s = time.time()
        rows = [(peer, *words, now_s) for peer, words in said.items() if any(words)]
        with self._explained(), self._rows:  # All of it is written, or nothing.
            self._rows.execute("BEGIN")
            self._rows.executemany("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", rows)
            # A name that its owner has taken back is forgotten.
            nameless = [(peer,) for peer, words in said.items() if not any(words)]
            self._rows.executemany("DELETE FROM names WHERE peer = ?", nameless)
            self._rows.execute(
                "DELETE FROM names WHERE peer IN"
                " (SELECT peer FROM names ORDER BY seen_s DESC, peer LIMIT -1 OFFSET ?)",
                (MAX_NAMES,),
            )

    def names(self) -> dict[str, tuple[str, str]]:
        """Return the last name and team of each peer that had one. Raises StorageError."""
        with self._explained():
            found = self._rows.execute("SELECT peer, name, team FROM names").fetchall()
        return {peer: (name, team) for peer, name, team in found}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Let one thread in at a time, and say in one line what is wrong with the file."""
        try:
            with self._lock:
                yield
        except (OSError, sqlite3.Error) as error:
            raise StorageError(
                f"the curves in {self._file} cannot be kept: {error}; free space, or move the file "
                "away (XDG_STATE_HOME names another folder)"
            ) from None
