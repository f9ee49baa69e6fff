"""The index of a store: one SQLite database, which says what the files beside it are, and has what
is no file: the chains of the modules, and who is admitted.

What belongs together is written in one transaction. It is on the disk when that returns, and a
power cut leaves all of it or nothing. Several processes may use one index. Nothing is created
before something is written, so a folder can be read where nothing can be written. A damaged index
is set aside as `index.bad` at the next start, and a new one is filled with what the files tell.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import StorageError
from .files import file_system_of, storage_errors
from .waits import may_wait_for

logger = logging.getLogger("dipaco.base.index")

INDEX_FILE = "index.sqlite"
# Another process's transaction is waited for so long.
_BUSY_LIMIT_S = 20.0
# A larger index is not read whole at the start to see whether it is damaged.
_MAX_CHECKED_BYTES = 2**28
# In the file; it is made anew where it has another one.
_VERSION, _CONDEMNED = 1, 99
# With less room on the disk, SQLite cannot even begin.
_FULL_BYTES = 2**17
_SCHEMA = """
CREATE TABLE files(
    sha256 TEXT PRIMARY KEY, kind TEXT NOT NULL, module TEXT NOT NULL, round INTEGER NOT NULL,
    peer TEXT NOT NULL, bytes INTEGER NOT NULL, came_s REAL NOT NULL
);
CREATE TABLE states(
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, module TEXT NOT NULL,
    digest TEXT NOT NULL, version INTEGER NOT NULL, bytes INTEGER NOT NULL, step TEXT,
    weight INTEGER, round INTEGER, UNIQUE(owner, module, digest)
);
CREATE TABLE steps(
    id INTEGER PRIMARY KEY, name BLOB UNIQUE NOT NULL, module TEXT NOT NULL, parent BLOB NOT NULL,
    state BLOB NOT NULL, version INTEGER NOT NULL, weight INTEGER NOT NULL, round INTEGER NOT NULL,
    rows BLOB NOT NULL
);
CREATE TABLE told(
    owner TEXT, module TEXT, version INTEGER, step INTEGER NOT NULL,
    PRIMARY KEY(owner, module, version)
) WITHOUT ROWID;
CREATE TABLE admissions(peer TEXT PRIMARY KEY, admission BLOB NOT NULL) WITHOUT ROWID
"""
# What else than a file of its own a database may be short of.
_ERRNOS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EACCES,
}


class Index:
    """One index. Thread-safe; reading does not wait for what another thread writes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.fill: Callable[[sqlite3.Connection], None] = lambda made: None
        """Puts into an index that was made anew what the files beside it tell."""
        self._writing, self._reading = threading.RLock(), threading.RLock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        """Open beside what writes. A process that only reads opens the file for each question: so
        it keeps nobody from writing, changes nothing, and sees what others have written."""
        self._stand_in: sqlite3.Connection | None = None
        """What is read while there is no file: in memory, what the files beside it tell."""

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield what reads and writes in one transaction, and write it when the body has ended.

        One within another is a part of it. It waits for the disk. Raises `StorageError`, and has
        written nothing then.
        """
        may_wait_for("the disk")
        with self._writing, self._errors():
            writer = self._writer or self._open_to_write()
            if writer.in_transaction:
                yield writer
                return
            writer.execute("BEGIN IMMEDIATE")
            try:
                yield writer
                writer.execute("COMMIT")
            except BaseException:
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
                raise

    def read(self, question: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the answer to a question in SQL. Raises `StorageError`."""
        with self._reading, self._errors():
            if self._reader is not None:
                return self._reader.execute(question, values).fetchall()
            if self.file.exists():
                with contextlib.closing(_opened(self.file)) as reader:
                    return reader.execute(question, values).fetchall()
            if self._stand_in is None:
                self._stand_in = sqlite3.connect(":memory:", check_same_thread=False)
                _make_tables(self._stand_in)
                self.fill(self._stand_in)
            return self._stand_in.execute(question, values).fetchall()

    def condemn(self) -> None:
        """Have it made anew at the next start: what was read cannot have been written so."""
        with self.transaction() as writer:
            writer.execute(f"PRAGMA user_version = {_CONDEMNED}")

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._writing, self._reading:
            # What writes comes last: it leaves one file, with all in it.
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()
            self._writer = self._reader = None

    def _open_to_write(self) -> sqlite3.Connection:
        """Open the file, made anew if it is not there or damaged."""
        with storage_errors(self.file.parent):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self.file.exists() and not _is_whole(self.file):
                _set_aside(self.file)
        writer = _connect(self.file)
        try:
            writer.execute("BEGIN IMMEDIATE")
            if _version_of(writer) != _VERSION:
                _make_tables(writer)
                self.fill(writer)
            writer.execute("COMMIT")
            reader = _connect(self.file)
        except BaseException:
            writer.close()
            raise
        self._writer, self._reader = writer, reader
        return writer

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn an error of SQLite into a `StorageError` that says what to do about it."""
        try:
            yield
        except sqlite3.Error as error:
            code, folder = getattr(error, "sqlite_errorcode", 0) & 0xFF, self.file.parent
            with storage_errors(folder):
                number = _ERRNOS.get(code)
                if code == sqlite3.SQLITE_IOERR and _free_bytes(folder) < _FULL_BYTES:
                    number = errno.ENOSPC  # It does not say so of the memory that processes share.
                if number is not None:
                    raise OSError(number, str(error), str(self.file)) from error
            what = f"cannot use {self.file}: {error}; "
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
                kind = file_system_of(folder.resolve()) or "unknown"
                what += f"if no other program is using it, its file system ({kind}) cannot lock "
                what += "files: give a folder on a local disk with --cache-dir"
            elif code in (0, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                what += "a peer that starts there makes a new one"
            elif code == sqlite3.SQLITE_IOERR:
                what += "see dmesg for what is wrong with the disk, and whether you have a quota "
                what += "there; or give another folder with --cache-dir"
            else:
                what += "give another folder with --cache-dir"
            raise StorageError(what) from error


def _connect(file: Path) -> sqlite3.Connection:
    # Transactions are begun and ended by name, and locks of this module keep threads apart.
    connection = sqlite3.connect(
        file, timeout=_BUSY_LIMIT_S, isolation_level=None, check_same_thread=False
    )
    with contextlib.suppress(sqlite3.OperationalError):
        # Readers and the writer do not wait for each other. Where the file system has no memory
        # that processes share, SQLite keeps its older way, in which they do.
        connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _make_tables(connection: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def _version_of(connection: sqlite3.Connection) -> int:
    [[version]] = connection.execute("PRAGMA user_version")
    return int(version)


def _opened(file: Path, *, may_be_empty: bool = False) -> sqlite3.Connection:
    """Open an index to read it. Raises `sqlite3.DatabaseError`, also for another version."""
    # Where nobody is writing, SQLite need not make files for others to see that somebody reads,
    # which is impossible on a medium that cannot be written.
    how = "mode=ro" if Path(f"{file}-wal").exists() else "mode=ro&immutable=1"
    connection = sqlite3.connect(
        f"{file.absolute().as_uri()}?{how}", uri=True, timeout=_BUSY_LIMIT_S
    )
    try:
        if _version_of(connection) not in ((0, _VERSION) if may_be_empty else (_VERSION,)):
            raise sqlite3.DatabaseError("it is of another version")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_whole(file: Path) -> bool:
    """Tell whether an index is of this version, or has no tables yet, and is undamaged."""
    try:
        with contextlib.closing(_opened(file, may_be_empty=True)) as connection:
            [[page_bytes]] = connection.execute("PRAGMA page_size")
            size = file.stat().st_size
            if size % page_bytes or size > _MAX_CHECKED_BYTES:
                return not size % page_bytes
            return connection.execute("PRAGMA quick_check(1)").fetchall() == [("ok",)]
    except sqlite3.DatabaseError:
        return False


def _free_bytes(folder: Path) -> int:
    """Return the room on a folder's disk. Raises OSError."""
    return shutil.disk_usage(folder).free


def _set_aside(file: Path) -> None:
    """Give a damaged index another name. Raises OSError."""
    aside = file.with_suffix(".bad")
    for companion in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{file}{companion}", f"{aside}{companion}")
    logger.warning("%s was damaged and is made anew; the damaged one is %s now", file, aside.name)
