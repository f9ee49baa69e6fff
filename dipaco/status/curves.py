"""What the curves of the page are drawn from, kept in one small SQLite file.

Figures are kept as they were read for some hours and get sparser with age, so the file stays below
a few MB. Each run has rows of its own. The file survives its writer being killed at any moment.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dipaco.base.errors import StorageError
from dipaco.base.files import folder_variable, home_folder

# "dpc" and the version of the table: tells the file from those of other programs and versions.
APPLICATION_ID = 0x64706303
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
# Of figures older than the first, one row in every so many seconds is kept.
THINNED = ((6 * HOUR_S, 300.0), (2 * DAY_S, 1800.0), (30 * DAY_S, 6 * HOUR_S))
LONGEST_S = 2 * 365 * DAY_S
THIN_EVERY = 64
MAX_POINTS = 500
BUSY_S = 5.0
COLUMNS = ("time_s", "training", "tokens", "tokens_per_s", "loss")
_TABLE = """
CREATE TABLE IF NOT EXISTS figures (
  run TEXT, time_s REAL, training INTEGER, tokens INTEGER, tokens_per_s REAL, loss REAL,
  PRIMARY KEY (run, time_s)
) WITHOUT ROWID
"""


def default_history_file() -> Path:
    """Return where the figures are kept when no flag says otherwise."""
    base = folder_variable("XDG_STATE_HOME") or str(home_folder() / ".local" / "state")
    return Path(base) / "dipaco" / "history.sqlite"


def figures_of(status: Mapping[str, Any]) -> dict[str, Any]:
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
    """The figures of runs over time. One thread at a time; several processes may have one file."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, or make it; None is a history in memory.

        Raises StorageError for a file of another program and for a damaged one.
        """
        self._path = path
        self._writes = 0
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            # Each statement is a transaction of its own.
            self._file = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"--history {path}: {error}; give a writable file") from None
        try:
            with self._explained():
                self._prepare()
        except BaseException:
            self._file.close()
            raise

    def _prepare(self) -> None:
        (tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (program,) = self._file.execute("PRAGMA application_id").fetchone()
        if tables and program != APPLICATION_ID:
            raise StorageError(
                f"--history {self._path} is a database of another program or version; give "
                "another file"
            )
        self._file.execute(f"PRAGMA application_id={APPLICATION_ID}")
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")
        self._file.execute(_TABLE)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, status: Mapping[str, Any]) -> None:
        """Keep the figures of a status. Raises StorageError."""
        values = {"run": status["run"]["id"], **figures_of(status)}
        marks = ", ".join(f":{name}" for name in values)
        with self._explained():
            self._file.execute(f"INSERT OR REPLACE INTO figures VALUES ({marks})", values)
            self._writes += 1
        if self._writes % THIN_EVERY == 0:
            self.thin(status["time_s"])

    def thin(self, now_s: float) -> None:
        """Drop what is too old, or too close to what is kept. Raises StorageError."""
        ends = [age_s for age_s, _ in THINNED[1:]] + [LONGEST_S]
        with self._explained():
            for (age_s, every_s), end_s in zip(THINNED, ends, strict=True):
                # Of whole steps the first row stays, so that the same rows stay the next time.
                self._file.execute(
                    "DELETE FROM figures WHERE time_s >= :begin AND time_s < :end "
                    "AND (run, time_s) NOT IN (SELECT run, min(time_s) FROM figures "
                    "WHERE time_s >= :begin AND time_s < :end "
                    "GROUP BY run, CAST(time_s / :every AS INTEGER))",
                    {
                        "begin": (now_s - end_s) // every_s * every_s,
                        "end": (now_s - age_s) // every_s * every_s,
                        "every": every_s,
                    },
                )
            self._file.execute("DELETE FROM figures WHERE time_s < ?", (now_s - LONGEST_S,))

    def series(self, run: str) -> dict[str, list[Any]]:
        """Return the figures of a run, oldest first, by column: at most MAX_POINTS rows, evenly
        chosen, the last among them. Raises StorageError."""
        with self._explained():
            rows = self._file.execute(
                f"SELECT {', '.join(COLUMNS)} FROM figures WHERE run = ? ORDER BY time_s", (run,)
            ).fetchall()
        points = min(len(rows), MAX_POINTS)
        chosen = [rows[(place + 1) * len(rows) // points - 1] for place in range(points)]
        return {name: [row[i] for row in chosen] for i, name in enumerate(COLUMNS)}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in one line what is wrong with the file."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            kind = "is locked by another program" if "locked" in str(error) else str(error)
            raise StorageError(
                f"--history {self._path}: {kind}; free space, move the file away or give another "
                "one"
            ) from None
