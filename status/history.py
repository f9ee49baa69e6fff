"""What a swarm was like, moment by moment, in one SQLite file that stays within a bound.

Moments are kept as they are for some hours and get sparser with age. The file belongs to one run.
It survives its writer being killed at any moment (a write-ahead log).
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco.base.errors import StorageError
from dipaco.base.files import home_folder

SCHEMA = 2
# "dpca": tells the file from those of other programs.
APPLICATION_ID = 0x64706361
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
# Of moments older than the first, one in every so many seconds is kept.
THINNED = ((6 * HOUR_S, 300.0), (2 * DAY_S, 1800.0), (30 * DAY_S, 6 * HOUR_S))
LONGEST_S = 2 * 365 * DAY_S
THIN_EVERY = 64
DEFAULT_BYTES = 256 * 2**20
# Of one moment, unpacked.
MOST_BYTES = 64 * 2**20
BUSY_S = 5.0

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE moments (
  time_ms INTEGER PRIMARY KEY, round INTEGER, peers INTEGER, training INTEGER, unserved INTEGER,
  tokens INTEGER, tokens_per_s REAL, loss REAL, problems INTEGER, kinds TEXT, body BLOB NOT NULL
);
"""
COLUMNS = (
    "time_ms", "round", "peers", "training", "unserved", "tokens", "tokens_per_s", "loss",
    "problems", "kinds",
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """From when to when there are moments, and how many."""

    begin_s: float
    end_s: float
    count: int


def default_history_file(run_id: str) -> Path:
    """Return where the history of a run is kept when no flag says otherwise."""
    base = os.environ.get("XDG_STATE_HOME") or str(home_folder() / ".local" / "state")
    return Path(base) / "dipaco" / f"{run_id}.history.sqlite"


def summary_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a moment that are drawn over time, by column."""
    loss = status["validation"]["loss"]
    return {
        "time_ms": round(status["time_s"] * 1000),
        "round": status["round"],
        "peers": len(status["peers"]),
        "training": sum(peer["state"] == "training" for peer in status["peers"]),
        "unserved": sum(path["state"] == "unserved" for path in status["paths"]),
        # Peers may claim what they like; the column holds 64 bits.
        "tokens": min(sum(path["tokens"] for path in status["paths"]), 2**63 - 1),
        "tokens_per_s": round(sum(peer["tokens_per_s"] for peer in status["peers"]), 1),
        "loss": None if loss is None else round(loss, 5),
        "problems": len(status["problems"]),
        "kinds": " ".join(dict.fromkeys(problem["kind"] for problem in status["problems"])),
    }


class History:
    """The moments of one run. Thread-safe; one process writes, any number may read."""

    def __init__(
        self,
        path: Path | None,
        run_id: str,
        *,
        most_bytes: int = DEFAULT_BYTES,
    ) -> None:
        """Open the file, or make it; None is a history in memory.

        Raises StorageError for a file of another run or another program, and for a damaged one.
        """
        self._most_bytes = most_bytes
        self._lock = threading.RLock()
        self._writes = 0
        self._connect(path, run_id)

    def begin_another(self, run_id: str) -> None:
        """Go on with the history of another run, in a file of its own beside this one."""
        with self._lock:
            self._file.close()
            path = self._path
            self._connect(path and path.with_name(f"{run_id}.history.sqlite"), run_id)

    def _connect(self, path: Path | None, run_id: str) -> None:
        self._path, self.run_id = path, run_id
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"--history {path}: {error}; give a writable file") from None
        try:
            with self._reading():
                self._open(run_id)
        except BaseException:
            self._file.close()
            raise

    def _open(self, run_id: str) -> None:
        (tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (program,) = self._file.execute("PRAGMA application_id").fetchone()
        if tables and program != APPLICATION_ID:
            raise StorageError(
                f"--history {self._path} is a database of another program; give another file"
            )
        self._file.execute("PRAGMA auto_vacuum=INCREMENTAL")
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")
        self._file.execute("PRAGMA journal_size_limit=4194304")
        if not tables:
            self._create(run_id)
        about = dict(self._file.execute("SELECT name, value FROM about"))
        if about.get("schema") != str(SCHEMA):
            raise StorageError(
                f"--history {self._path} has format {about.get('schema')}, this is {SCHEMA}; "
                "give another file, or the version of dipaco that wrote it"
            )
        if about.get("run") != run_id:
            raise StorageError(
                f"--history {self._path} is of run {about.get('run')}, not of {run_id}; "
                "give another file"
            )

    def _create(self, run_id: str) -> None:
        """Make the tables, all at once: a process that is killed here leaves an empty file."""
        with self._transaction():
            self._file.execute(f"PRAGMA application_id={APPLICATION_ID}")
            for statement in filter(str.strip, _TABLES.split(";")):
                self._file.execute(statement)
            about = {"schema": str(SCHEMA), "run": run_id}
            self._file.executemany("INSERT INTO about VALUES (?, ?)", about.items())

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    # -- writing

    def write(self, status: dict[str, Any]) -> None:
        """Keep a moment. Raises StorageError."""
        with self._reading():
            with self._transaction():
                values = [*summary_of(status).values(), pack(status)]
                marks = ", ".join("?" * len(values))
                self._file.execute(f"INSERT OR REPLACE INTO moments VALUES ({marks})", values)
            self._writes += 1
            if self._writes % THIN_EVERY == 0:
                self.thin(status["time_s"])
            elif self.bytes > self._most_bytes:
                self._shrink()

    def thin(self, now_s: float) -> None:
        """Drop moments that the age of others does not leave room for."""
        with self._reading():
            with self._transaction():
                ends = [age_s for age_s, _ in THINNED[1:]] + [LONGEST_S]
                for (age_s, every_s), end_s in zip(THINNED, ends, strict=True):
                    self._file.execute(
                        "DELETE FROM moments WHERE time_ms >= :begin AND time_ms < :end "
                        "AND time_ms NOT IN (SELECT min(time_ms) FROM moments "
                        "WHERE time_ms >= :begin AND time_ms < :end GROUP BY time_ms / :every)",
                        {
                            # Whole steps, so that the same moments stay the next time.
                            "begin": _whole(now_s - end_s, every_s),
                            "end": _whole(now_s - age_s, every_s),
                            "every": round(1000 * every_s),
                        },
                    )
                self._file.execute(
                    "DELETE FROM moments WHERE time_ms < ?", (round(1000 * (now_s - LONGEST_S)),)
                )
            self._shrink()

    def _shrink(self) -> None:
        """Drop moments until the file is within its bound: every second one of the largest.

        So no flood of strangers, which makes moments large, takes the time before it away.
        """
        while self.bytes > self._most_bytes:
            with self._transaction():
                rows = self._file.execute(
                    "SELECT time_ms, length(body) FROM moments ORDER BY time_ms DESC"
                ).fetchall()
                if len(rows) <= 1:
                    break
                half = sum(size for _, size in rows) / 2
                large = []
                # Those that take half of it; the newest one stays.
                for time_ms, size in sorted(rows[1:], key=lambda row: -row[1]):
                    if half > 0:
                        large.append((time_ms,))
                    half -= size
                self._file.executemany("DELETE FROM moments WHERE time_ms = ?", sorted(large)[::2])
        self._file.execute("PRAGMA incremental_vacuum").fetchall()

    @property
    def bytes(self) -> int:
        """What the moments take on disk, without the write-ahead log of a few MB."""
        pragmas = ("page_count", "freelist_count", "page_size")
        pages, free, size = (self._file.execute(f"PRAGMA {n}").fetchone()[0] for n in pragmas)
        return int((pages - free) * size)

    # -- reading

    def span(self) -> Span | None:
        """Return what there is; None when there is nothing."""
        with self._reading():
            begin, end, count = self._file.execute(
                "SELECT min(time_ms), max(time_ms), count(*) FROM moments"
            ).fetchone()
        return Span(begin / 1000, end / 1000, count) if count else None

    def at(self, time_s: float) -> dict[str, Any] | None:
        """Return the swarm as it was at a moment: the newest status that is not later.

        Before the first moment that is the first one. None when there is nothing that can be read.
        """
        with self._reading():
            rows = self._file.execute(
                "SELECT body FROM moments WHERE time_ms <= ? ORDER BY time_ms DESC LIMIT 3",
                (_ms(time_s),),
            ).fetchall()
            rows += self._file.execute(
                "SELECT body FROM moments WHERE time_ms > ? ORDER BY time_ms LIMIT 1",
                (_ms(time_s),),
            ).fetchall()
            for (body,) in rows:
                # One damaged moment must not hide the others.
                try:
                    return unpack(body)
                except SnapshotError:
                    continue
        return None

    def series(
        self, begin_s: float = -math.inf, end_s: float = math.inf, most: int = 1000
    ) -> dict[str, list[Any]]:
        """Return the figures of at most `most` moments, evenly chosen, by column.

        The last one is always among them.
        """
        with self._reading():
            rows = self._file.execute(
                f"SELECT {', '.join(COLUMNS)} FROM moments WHERE time_ms BETWEEN ? AND ? "
                "ORDER BY time_ms",
                (_ms(begin_s), _ms(end_s)),
            ).fetchall()
        chosen = [rows[i] for i in _evenly(len(rows), most)]
        columns = zip(*chosen, strict=True) if chosen else ([] for _ in COLUMNS)
        return {name: list(column) for name, column in zip(COLUMNS, columns, strict=True)}

    def moments(
        self, begin_s: float = -math.inf, end_s: float = math.inf, most: int = 200
    ) -> Iterator[dict[str, Any]]:
        """Yield whole statuses, oldest first, at most `most` of them, evenly chosen."""
        with self._reading():
            times = [
                time_ms
                for (time_ms,) in self._file.execute(
                    "SELECT time_ms FROM moments WHERE time_ms BETWEEN ? AND ? ORDER BY time_ms",
                    (_ms(begin_s), _ms(end_s)),
                )
            ]
        for index in _evenly(len(times), most):
            with self._reading():
                row = self._file.execute(
                    "SELECT body FROM moments WHERE time_ms = ?", (times[index],)
                ).fetchone()
                try:
                    status = unpack(row[0]) if row else None
                except SnapshotError:
                    status = None
            if status is not None:
                yield status

    # -- the file

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Hold the lock, and say in one line what is wrong with the file."""
        with self._lock:
            try:
                yield
            except sqlite3.DatabaseError as error:
                kind = "is locked by another program" if "locked" in str(error) else str(error)
                raise StorageError(
                    f"--history {self._path}: {kind}; free space, move the file away or give "
                    "another one"
                ) from None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back already after some errors, such as a full disk.
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise


class SnapshotError(Exception):
    """Bytes that no status was packed to."""


def pack(status: dict[str, Any]) -> bytes:
    """Return a status as few bytes."""
    return zlib.compress(json.dumps(status, separators=(",", ":")).encode(), 6)


def unpack(data: bytes) -> dict[str, Any]:
    """Return the status that was packed. Raises `SnapshotError` for any other bytes."""
    try:
        reader = zlib.decompressobj()
        status = json.loads(reader.decompress(data, MOST_BYTES))
    except (zlib.error, ValueError, RecursionError) as error:
        raise SnapshotError(str(error)) from None
    if not reader.eof or not isinstance(status, dict):
        raise SnapshotError("it is cut off, too large, or no status")
    return status


def _ms(time_s: float) -> int:
    return round(1000 * min(max(time_s, -1e15), 1e15))


def _whole(time_s: float, every_s: float) -> int:
    return round(1000 * every_s * math.floor(time_s / every_s))


def _evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` places, the last among them."""
    if count <= most:
        return list(range(count))
    return [((place + 1) * count) // most - 1 for place in range(most)]
