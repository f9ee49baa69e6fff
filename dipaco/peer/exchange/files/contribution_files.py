"""Files of contributions, this peer's and others', served by their hashes to peers that gather.

See design 4.2, publish. A peer that cannot be called puts its file here. It is held for the others
while there is room; `base/kept_files.py` has the rule of what may go.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dipaco.base.errors import IntegrityError
from dipaco.base.files import atomic_write, spare_bytes, storage_errors
from dipaco.base.kept_files import Coming, KeptFiles
from dipaco.base.waits import BriefLock
from dipaco.modules.contributions import Data
from dipaco.protocol.chain.steps import MARK_BYTES, Row

# Files that were found to be contributions are remembered up to so many.
_MAX_REMEMBERED = 2**16


def check_is_of(row: Row, path: Path) -> None:
    """Raise `IntegrityError` when a file is not the one that a row names.

    It may have another length, or the mark at its beginning may be that of another row.
    """
    with storage_errors(path), path.open("rb") as file:
        size, mark = os.fstat(file.fileno()).st_size, file.read(MARK_BYTES)
    if size != row.bytes:
        raise IntegrityError(f"the file has {size} bytes, not {row.bytes}")
    if mark != row.mark:
        raise IntegrityError(f"the file was not made for this row of {row.peer}")


def mapped(path: Path) -> memoryview:
    """Return the bytes of a file without reading them; they stay there when it is removed. Raises
    `StorageError`."""
    try:
        with storage_errors(path), path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        return memoryview(b"")  # An empty file cannot be mapped.


class ContributionFiles:
    """The contributions among the files that a peer keeps. Thread-safe.

    Adding and removing files waits for the disk, and raises `StorageError`.
    """

    def __init__(self, kept: KeptFiles) -> None:
        self.kept = kept
        """Downloads come here too, and are then installed."""
        self._lock = BriefLock()
        self._checked: set[str] = set()
        """Files that decode, as this process has found out once."""
        self._coming: dict[str, Coming] = {}
        """What others put, by the row's name: another's row may name the same file, and takes
        nothing from it."""
        self._on_arrival: Callable[[str], None] = lambda sha256: None

    def listen(self, on_arrival: Callable[[str], None]) -> None:
        """Tell the hash of every file that comes, on the thread that brings it."""
        self._on_arrival = on_arrival

    # -- coming and going

    def add(self, row: Row, parts: Sequence[Data]) -> Path:
        """Store this peer's contribution, which `row` names."""
        path = self.kept.path(row.file)
        if self.kept.find(row.file) is None:
            atomic_write(path, parts)
        self.set_checked(row.file)
        return self._enter(row, path, is_mail=False)

    def install(self, row: Row, path: Path, *, is_mail: bool = False) -> Path:
        """Take in a file that was fetched or put, and whose hash was checked; it is moved.

        Raises `IntegrityError` when it is not the row's: nobody's file is kept for another's row,
        and none that is kept for its own is removed.
        """
        try:
            check_is_of(row, path)
        except IntegrityError:
            if path == self.kept.path(row.file):
                self.kept.remove_unless_entered(row.file)
            else:
                path.unlink(missing_ok=True)
            raise
        return self._enter(row, path, is_mail=is_mail)

    def _enter(self, row: Row, path: Path, *, is_mail: bool) -> Path:
        kept = self.kept.enter(
            row.file,
            "mail" if is_mail else "contribution",
            row.module,
            source=path,
            round_index=row.round_index,
            peer=row.peer,
        )
        self._on_arrival(row.file)
        return kept

    # -- looking

    def find(self, sha256: str) -> Path | None:
        """Return a file by its hash. It is read, the first time in this life."""
        return self.kept.find(sha256)

    def is_checked(self, sha256: str) -> bool:
        """Tell whether a file is here that was found to be a contribution."""
        return sha256 in self._checked and self.kept.has(sha256)

    def set_checked(self, sha256: str) -> None:
        """Remember that a file is a contribution."""
        with self._lock:
            if len(self._checked) >= _MAX_REMEMBERED:
                self._checked.clear()
            self._checked.add(sha256)

    # -- what others put here

    def promise(self, row: Row) -> bool:
        """Keep room for a file that a peer wants to put; false if there is none.

        `release` ends it.
        """
        wanted = Coming(row.peer, row.bytes)
        with self._lock:
            if row.name in self._coming or row.bytes > spare_bytes(self.kept.folder):
                return False
            coming = tuple(self._coming.values())
            self._coming[row.name] = wanted
        if self.kept.has_room(wanted, coming):
            return True
        self.release(row)
        return False

    def release(self, row: Row) -> None:
        """The file has come, or will not."""
        with self._lock:
            self._coming.pop(row.name, None)
