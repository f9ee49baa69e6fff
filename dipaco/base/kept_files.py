"""What a peer keeps of its rounds, states and contributions: one folder of files named by their
hashes, and an index.

A file has its name only when it is whole and on the disk, and only then is it in the index. What a
killed process left outside of the index is removed at the next start. Whether a file is here is
asked of the disk; what it is, of the index. Several processes may use one folder.

What may go, and nothing else does:

1. a state that is no longer one of the last two of its module that a peer of this machine saved (a
   small one half a minute later), or that was fetched and not saved in ten minutes;
2. a contribution that is three rounds or more older than the newest step of its module;
3. where contributions take more than `max_bytes`, those of the oldest rounds;
4. for what a peer wants to put here, what others put here longer ago than three rounds, and, if
   that peer contributed lately, what was put here by peers that did not;
5. of downloads that were never finished, all but the latest.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from .blobs import BlobStore
from .errors import StorageError
from .files import sha256_of_file, storage_errors
from .index import INDEX_FILE, Index

KEPT_STATES, KEPT_ROUNDS = 2, 3
# A peer that read an announcement asks for that state, and rounds can be shorter than that.
_REPLACED_S, SMALL_BYTES = 30.0, 2**25
# A state that was fetched is looked at, and taken or not, within a round.
_FETCHED_S = 600.0
MAX_CONTRIBUTIONS_BYTES = 2**33
# What one peer puts here: a file of each module of its path, for a few rounds; and what all do.
# All have half of the room at most, and one of them a sixteenth.
MAIL_FILES_OF_A_PEER, MAIL_FILES = 128, 8192
# A file that is no older may be about to be written down.
_JUST_WRITTEN_S = 60.0
# Files that were found whole in this life are remembered up to so many.
_REMEMBERED = 2**16

Kind = Literal["state", "fetched", "contribution", "mail"]
"""`fetched`: a state that nobody has saved. `mail`: a contribution that another peer put here."""


class SavedState(NamedTuple):
    """A state as it was saved, and the step that it is after, if that is known."""

    digest: str
    version: int
    size_bytes: int
    step: str | None = None
    weight: int | None = None
    round_index: int | None = None


class Coming(NamedTuple):
    """A file that somebody puts here, or wants to."""

    peer: str
    size_bytes: int


class KeptFiles(BlobStore):
    """`folder/ab/abcdef...` and `folder/index.sqlite`. Thread-safe.

    All that changes something waits for the disk and raises `StorageError`.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        super().__init__(folder)
        self.index = Index(self.folder / INDEX_FILE)
        self.max_bytes = MAX_CONTRIBUTIONS_BYTES
        """The greatest sum of all contributions."""
        self.kept_s = math.inf
        """The seconds of three rounds."""
        self.has_contributed: Callable[[str], bool] = lambda peer: False
        """Tells whether a peer contributed lately; its files have room before those of others."""
        self._now = now
        self._whole: set[str] = set()

    def tidy(self) -> None:
        """Make files and index agree; called before the folder is used to keep something."""
        super().tidy()
        with self.index.transaction() as writer:
            here = {file.name: file for file in self.folder.glob("??/[!.]*")}
            known = {sha256 for (sha256,) in writer.execute("SELECT sha256 FROM files")}
            for name in here.keys() - known:
                _remove_old(here[name])
            gone = [(sha256,) for sha256 in known - here.keys()]
            writer.executemany("DELETE FROM files WHERE sha256 = ?", gone)
            writer.executemany("DELETE FROM states WHERE digest = ?", gone)
            # A clock that was set back makes nothing young for ever.
            writer.execute("UPDATE files SET came_s = min(came_s, ?)", (self._now(),))
            self._prune_states(writer)

    def find(self, sha256: str) -> Path | None:
        """Return a file, None if it is not here. It is read, the first time in this life: one that
        a disk has damaged is removed, and as good as never here."""
        path = self.path(sha256)
        if not path.is_file():
            return None
        if sha256 not in self._whole:
            with contextlib.suppress(OSError):
                if sha256_of_file(path) != sha256:
                    self.remove(sha256)
                    return None
            self._remember(sha256)
        return path

    def _remember(self, sha256: str) -> None:
        if len(self._whole) >= _REMEMBERED:
            self._whole.clear()
        self._whole.add(sha256)

    def enter(
        self,
        sha256: str,
        kind: Kind,
        module: str,
        *,
        source: Path | None = None,
        round_index: int = 0,
        peer: str = "",
    ) -> Path:
        """Write down what a file is, whose bytes are known to be right; return it.

        It is here, or comes from `source`, and is moved.
        """
        path = self.path(sha256)
        if source is not None and source != path:
            with storage_errors(self.folder):
                self._install(source, path)
        with self.index.transaction() as writer, storage_errors(self.folder):
            try:
                size_bytes = path.stat().st_size
            except FileNotFoundError:
                raise StorageError(f"{path} is not here any more") from None
            row = (sha256, kind, module, round_index, peer, size_bytes, self._now())
            writer.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            if kind in ("contribution", "mail"):
                self._make_room(writer, sha256)
            else:
                self._prune_states(writer)
        self._remember(sha256)
        return path

    def remove(self, sha256: str) -> None:
        """Remove a file: it is not what it should be."""
        with self.index.transaction() as writer, storage_errors(self.folder):
            self._remove(writer, sha256)

    def remove_unless_entered(self, sha256: str) -> None:
        """Remove a file that was fetched for nothing, unless it is written down what it is."""
        with self.index.transaction() as writer, storage_errors(self.folder):
            if not writer.execute("SELECT 1 FROM files WHERE sha256 = ?", (sha256,)).fetchone():
                self._remove(writer, sha256)

    def _remove(self, writer: sqlite3.Connection, sha256: str) -> None:
        # The file first: where power fails in between, the next start finds its line without it.
        self.path(sha256).unlink(missing_ok=True)
        self._whole.discard(sha256)
        writer.execute("DELETE FROM files WHERE sha256 = ?", (sha256,))
        writer.execute("DELETE FROM states WHERE digest = ?", (sha256,))

    # -- states

    def save_state(self, owner: str, module: str, state: SavedState) -> bool:
        """Write down that a file is the last good state of a module, as one of this machine's peers
        has it; returns whether it is here."""
        with self.index.transaction() as writer:
            if not self.has(state.digest):
                return False
            writer.execute(
                "DELETE FROM states WHERE owner = ? AND module = ? AND digest = ?",
                (owner, module, state.digest),
            )
            self._keep_only(writer, owner, module, KEPT_STATES - 1)
            writer.execute(
                "INSERT INTO states(owner, module, digest, version, bytes, step, weight, round)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (owner, module, *state),
            )
            self.enter(state.digest, "state", module)
            return True

    def forget_states(self, owner: str, module: str) -> None:
        """Remove the states of a module that a peer has saved, but what others have saved too."""
        with self.index.transaction() as writer:
            self._keep_only(writer, owner, module, 0)
            writer.execute(
                "UPDATE files SET came_s = 0 WHERE kind = 'state' AND module = ?", (module,)
            )
            self._prune_states(writer)

    def saved_states(self, module: str, owner: str | None = None) -> list[SavedState]:
        """Return the states of a module that a peer of this machine has saved, or any of them, the
        latest first."""
        return [
            SavedState(*found)
            for found in self.index.read(
                "SELECT digest, version, bytes, step, weight, round FROM states"
                " WHERE module = ?1 AND (owner = ?2 OR ?2 IS NULL) ORDER BY number DESC",
                (module, owner),
            )
        ]

    def _keep_only(self, writer: sqlite3.Connection, owner: str, module: str, count: int) -> None:
        """Take back that a peer has saved states of a module, but the last `count` that are here.

        Those of nobody, "", count as older ones.
        """
        saved = writer.execute(
            "SELECT number, digest FROM states WHERE module = ? AND owner IN ('', ?)"
            " ORDER BY owner = '', number DESC",
            (module, owner),
        ).fetchall()
        here = [number for number, digest in saved if self.has(digest)][:count]
        older = [(number, digest) for number, digest in saved if number not in here]
        writer.executemany("DELETE FROM states WHERE number = ?", [(n,) for n, _ in older])
        writer.executemany(
            "UPDATE files SET came_s = ? WHERE sha256 = ?", [(self._now(), d) for _, d in older]
        )

    def _prune_states(self, writer: sqlite3.Connection) -> None:
        """Remove states by rule 1."""
        now_s = self._now()
        gone = writer.execute(
            "SELECT sha256 FROM files WHERE sha256 NOT IN (SELECT digest FROM states) AND"
            " (kind = 'state' AND (bytes > ? OR came_s < ?) OR kind = 'fetched' AND came_s < ?)",
            (SMALL_BYTES, now_s - _REPLACED_S, now_s - _FETCHED_S),
        ).fetchall()
        for (sha256,) in gone:
            self._remove(writer, sha256)

    # -- contributions

    def prune(self, module: str, round_index: int) -> None:
        """Rule 2, once a step of a round was taken."""
        question = (
            "SELECT sha256 FROM files"
            " WHERE kind IN ('contribution', 'mail') AND module = ? AND round <= ?"
        )
        values = (module, round_index - KEPT_ROUNDS)
        if self.index.read(question, values):
            with self.index.transaction() as writer:
                for (sha256,) in writer.execute(question, values).fetchall():
                    self._remove(writer, sha256)

    def _make_room(self, writer: sqlite3.Connection, newest: str) -> None:
        """Remove the oldest contributions by rule 3, but not `newest`."""
        files = writer.execute(
            "SELECT sha256, bytes FROM files WHERE kind IN ('contribution', 'mail')"
            " ORDER BY round, came_s, rowid"
        ).fetchall()
        excess = sum(size_bytes for _, size_bytes in files) - self.max_bytes
        for sha256, size_bytes in files:
            if excess <= 0:
                return
            if sha256 != newest:
                excess -= size_bytes
                self._remove(writer, sha256)

    def has_room(self, wanted: Coming, coming: Sequence[Coming]) -> bool:
        """Tell whether a peer may put a file here, beside those that are coming already. Rule 4."""
        own = [other for other in coming if other.peer == wanted.peer]
        with self.index.transaction() as writer:
            return self._make_room_for(
                writer, wanted, own, MAIL_FILES_OF_A_PEER, self.max_bytes // 16, wanted.peer
            ) and self._make_room_for(writer, wanted, coming, MAIL_FILES, self.max_bytes // 2)

    def _make_room_for(
        self,
        writer: sqlite3.Connection,
        wanted: Coming,
        coming: Sequence[Coming],
        most_files: int,
        most_bytes: int,
        of_peer: str | None = None,
    ) -> bool:
        mail = writer.execute(
            "SELECT sha256, peer, bytes, came_s FROM files"
            " WHERE kind = 'mail' AND (peer = ?1 OR ?1 IS NULL) ORDER BY came_s, rowid",
            (of_peer,),
        ).fetchall()
        files = 1 + len(mail) + len(coming) - most_files
        excess = sum(size for _, _, size, _ in mail) + sum(one.size_bytes for one in coming)
        excess += wanted.size_bytes - most_bytes
        if files <= 0 and excess <= 0:
            return True
        oldest_s = self._now() - self.kept_s
        going = [file for file in mail if file[3] < oldest_s]
        if self.has_contributed(wanted.peer):
            others = [file for file in mail if not self.has_contributed(file[1])]
            going += [file for file in reversed(others) if file not in going]
        for sha256, _, size_bytes, _ in going:
            if files <= 0 and excess <= 0:
                break
            files, excess = files - 1, excess - size_bytes
            self._remove(writer, sha256)
        return files <= 0 and excess <= 0


def _remove_old(file: Path) -> None:
    """Remove a file that is not in the index. A young one may be about to be: another process has
    just written it."""
    with contextlib.suppress(OSError):
        if time.time() - file.stat().st_mtime > _JUST_WRITTEN_S:
            file.unlink()
