"""Files of contributions, own and others', by their hash: served to peers that gather.

See design 4.2, publish. A peer that cannot be called puts its file here. It is held for the others
while there is room.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import IntegrityError
from dipaco.base.files import (
    TEMPORARY_SUFFIX,
    atomic_write,
    sha256_of_file,
    spare_bytes,
    storage_errors,
)
from dipaco.modules.contributions import Data
from dipaco.protocol.chain import MARK_BYTES, Row

KEPT_ROUNDS = 3
MAX_CONTRIBUTIONS_BYTES = 2**33
# What one peer puts here: a file of each module of its path, for a few rounds; and what all do.
MAIL_FILES_OF_A_PEER, MAIL_FILES = 128, 8192
# Of files in the folder whose bytes are still coming.
PUT_PREFIX = ".put-"
_NAME = re.compile(r"(?P<round>\d+)\.(?P<peer>\w+)\.(?P<sha256>[0-9a-f]{64})")


def check_is_of(row: Row, path: Path) -> None:
    """Raise `IntegrityError` when a file is not the one that a row names: of another length, or
    made for another row, which the mark at its beginning tells."""
    with storage_errors(path), path.open("rb") as file:
        size, mark = os.fstat(file.fileno()).st_size, file.read(MARK_BYTES)
    if size != row.bytes:
        raise IntegrityError(f"the file has {size} bytes, not {row.bytes}")
    if mark != row.mark:
        raise IntegrityError(f"the file was not made for this row of {row.peer}")


@dataclass
class _File:
    path: Path
    module: str
    round_index: int
    peer: str
    size_bytes: int
    came_s: float
    is_mail: bool = False
    is_checked: bool = False
    is_whole: bool = True
    """Its hash was compared since it was written. Of an earlier life's, which may have ended with
    the machine's power, nobody knows."""


class ContributionFiles:
    """`folder/<module>/<round>.<peer>.<sha256>`; kept for three rounds. Thread-safe.

    :param max_bytes: of all files; the oldest rounds go first. Half of it is for what others put
        here, in at most `MAIL_FILES` files, and a sixteenth, in at most `MAIL_FILES_OF_A_PEER`, for
        what one of them does.
    :param kept_s: the seconds of three rounds: what was put here longer ago makes room for others
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = MAX_CONTRIBUTIONS_BYTES,
        kept_s: float = math.inf,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take up what an earlier life left. Raises `StorageError`."""
        self.folder, self.max_bytes = folder, max_bytes
        self._kept_s, self._monotonic = kept_s, monotonic
        self.has_contributed: Callable[[str], bool] = lambda peer: False
        """Tells whether a peer contributed lately; its files have room before those of others."""
        self._lock = threading.RLock()
        self._files: dict[str, _File] = {}
        self._promised: dict[str, Row] = {}
        """By the row's name: another's row may name the same file, and takes nothing from it."""
        self._on_arrival: Callable[[str], None] = lambda sha256: None
        self.incoming = BlobStore(folder / "incoming")
        self.incoming.clear()
        """Where downloads are collected."""
        with storage_errors(folder):
            for unfinished in folder.glob(f"{PUT_PREFIX}*"):
                unfinished.unlink(missing_ok=True)
            for path in sorted(folder.glob("*/*.*")):
                self._take_up(path)

    def _take_up(self, path: Path) -> None:
        found = _NAME.fullmatch(path.name)
        if found is not None:
            self._files[found["sha256"]] = _File(
                path,
                path.parent.name,
                int(found["round"]),
                found["peer"],
                path.stat().st_size,
                self._monotonic(),
                is_mail=True,  # Or not: nobody knows any more.
                is_whole=False,
            )
        elif path.name.endswith(TEMPORARY_SUFFIX):
            path.unlink(missing_ok=True)  # Its writer is gone: the folder is of one process.

    def listen(self, on_arrival: Callable[[str], None]) -> None:
        """Tell the hash of every file that comes, on the thread that brings it."""
        self._on_arrival = on_arrival

    # -- coming and going

    def add(self, row: Row, parts: Sequence[Data]) -> Path:
        """Store an own contribution, which `row` names. Raises `StorageError`."""
        path = self._path(row)
        if self.find(row.file) != path:
            atomic_write(path, parts)
        return self._note(row, path, is_checked=True)

    def install(self, row: Row, path: Path, *, is_mail: bool = False) -> Path:
        """Move a file here that was fetched or put, and whose hash was checked.

        Raises `IntegrityError` when it is not the row's: nobody's file is kept for another's row.
        """
        try:
            check_is_of(row, path)
        except IntegrityError:
            path.unlink(missing_ok=True)
            raise
        target = self._path(row)
        with storage_errors(self.folder):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
        return self._note(row, target, is_mail=is_mail)

    def _path(self, row: Row) -> Path:
        return self.folder / row.module / f"{row.round_index:010d}.{row.peer}.{row.file}"

    def _note(
        self, row: Row, path: Path, *, is_mail: bool = False, is_checked: bool = False
    ) -> Path:
        with self._lock:
            known, round_index = self._files.get(row.file), row.round_index
            if known is not None and not known.is_whole and known.path != path:
                self.remove(row.file)
                known = None
            if known is not None:
                is_checked |= known.is_checked
                round_index = max(round_index, known.round_index)
                if known.path != path:
                    # The same bytes under another name: the later round counts.
                    stays, goes = path, known.path
                    if known.round_index >= row.round_index:
                        stays, goes = known.path, path
                    goes.unlink(missing_ok=True)
                    path = stays
            self._files[row.file] = _File(
                path,
                row.module,
                round_index,
                row.peer,
                row.bytes,
                self._monotonic(),
                is_mail,
                is_checked,
            )
            self._make_room(row.file)
        self._on_arrival(row.file)
        return path

    def _make_room(self, newest: str) -> None:
        """Remove the oldest rounds until the rest fits."""
        total = sum(file.size_bytes for file in self._files.values())
        order = sorted(self._files, key=lambda name: self._files[name].round_index)
        for name in order:
            if total <= self.max_bytes:
                return
            if name != newest:
                total -= self._files[name].size_bytes
                self.remove(name)

    def remove(self, sha256: str) -> None:
        """Remove a file: it is no contribution."""
        with self._lock:
            found = self._files.pop(sha256, None)
            if found is not None:
                with contextlib.suppress(OSError):
                    found.path.unlink(missing_ok=True)

    def prune(self, module: str, round_index: int) -> None:
        """Remove the files of rounds of a module three or more before this one."""
        with self._lock:
            old = [
                name
                for name, file in self._files.items()
                if file.module == module and file.round_index <= round_index - KEPT_ROUNDS
            ]
            for name in old:
                self.remove(name)

    # -- looking

    def find(self, sha256: str) -> Path | None:
        """Return a file by its hash. Reads it, the first time, if an earlier life left it."""
        while True:
            with self._lock:
                found = self._files.get(sha256)
            if found is None or found.is_whole:
                return None if found is None else found.path
            is_whole = False
            with contextlib.suppress(OSError):
                is_whole = sha256_of_file(found.path) == sha256
            with self._lock:
                if is_whole:
                    found.is_whole = True
                elif self._files.get(sha256) is found:  # It may have come anew meanwhile.
                    self.remove(sha256)

    def is_checked(self, sha256: str) -> bool:
        """Tell whether a file is here that was found to be a contribution."""
        with self._lock:
            found = self._files.get(sha256)
            return found is not None and found.is_checked

    def set_checked(self, sha256: str) -> None:
        """Remember that a file is a contribution."""
        with self._lock:
            if sha256 in self._files:
                self._files[sha256].is_checked = True

    # -- what others put here

    def promise(self, row: Row) -> bool:
        """Keep room for a file that somebody wants to put; false if there is none. `release` ends
        it."""
        with self._lock:
            if row.name in self._promised or row.bytes > spare_bytes(self.folder):
                return False
            own = {name: file for name, file in self._mail().items() if file.peer == row.peer}
            coming = [other for other in self._promised.values() if other.peer == row.peer]
            has_room = self._make_room_for(
                row, own, coming, MAIL_FILES_OF_A_PEER, self.max_bytes // 16
            ) and self._make_room_for(
                row, self._mail(), [*self._promised.values()], MAIL_FILES, self.max_bytes // 2
            )
            if has_room:
                self._promised[row.name] = row
            return has_room

    def _mail(self) -> dict[str, _File]:
        return {name: file for name, file in self._files.items() if file.is_mail}

    def _make_room_for(
        self,
        row: Row,
        mail: Mapping[str, _File],
        coming: Sequence[Row],
        most_files: int,
        most_bytes: int,
    ) -> bool:
        """Tell whether a file has room beside `mail` and what is `coming`.

        If there is none, files that have been here for longer than files are kept are removed, the
        oldest first. For a peer that contributed lately, files of peers that did not are removed
        too, the newest first.
        """
        files = 1 + len(mail) + len(coming) - most_files
        size = row.bytes + sum(f.size_bytes for f in mail.values()) - most_bytes
        size += sum(other.bytes for other in coming)
        if files <= 0 and size <= 0:
            return True
        oldest_s = self._monotonic() - self._kept_s
        going = [name for name, file in mail.items() if file.came_s < oldest_s]
        if self.has_contributed(row.peer):
            others = [name for name, f in mail.items() if not self.has_contributed(f.peer)]
            going += [name for name in reversed(others) if name not in going]
        for name in going:
            if files <= 0 and size <= 0:
                break
            files, size = files - 1, size - mail[name].size_bytes
            self.remove(name)
        return files <= 0 and size <= 0

    def release(self, row: Row) -> None:
        """The file has come, or will not."""
        with self._lock:
            self._promised.pop(row.name, None)
