"""Files that only grow, and a note of how much of each counts: what survives a kill of a writer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dipaco.base.files import atomic_write, canonical_json, storage_errors, sync

PROGRESS_FILE = "progress.json"
# What is added counts once it is on the disk. To wait for that after each chunk would take days
# where a corpus goes to hundreds of files.
SAVE_EVERY_S = 10.0


class GrowingFiles:
    """The files in a folder that one writer adds to.

    A writer that was killed goes on with what was saved last; what came behind that is cut off.
    Files that are `finished` are never changed again, so others may link to them.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder, and begin anew if a file is shorter than was noted."""
        self.folder = folder
        self.note: dict[str, Any] = {}
        """What was saved beside the files; empty for a new folder."""
        self.finished = False
        self.sizes: dict[str, int] = {}
        """Bytes of each file."""
        self._unsaved: set[str] = set()
        self._saved_at = time.monotonic()
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            saved = read_progress(folder)
            if saved is not None and self._are_there(saved["sizes"]):
                self.note, self.sizes = saved["note"], saved["sizes"]
                self.finished = saved["finished"]
            for file in folder.iterdir():
                if file.name not in (*self.sizes, PROGRESS_FILE):
                    file.unlink()
            if not self.finished:
                for name, size in self.sizes.items():
                    os.truncate(folder / name, size)

    def _are_there(self, sizes: Mapping[str, int]) -> bool:
        files = ((self.folder / name, size) for name, size in sizes.items())
        return all(file.is_file() and file.stat().st_size >= size for file, size in files)

    def append(self, name: str, data: bytes) -> None:
        """Write behind the end of a file, which is made if it is not there."""
        assert not self.finished
        with storage_errors(self.folder), (self.folder / name).open("ab") as file:
            file.write(data)
        self.sizes[name] = self.sizes.get(name, 0) + len(data)
        self._unsaved.add(name)

    def cut(self, name: str, size: int) -> None:
        """Cut a file off behind `size` bytes."""
        assert not self.finished
        with storage_errors(self.folder):
            os.truncate(self.folder / name, size)
        self.sizes[name] = size
        self._unsaved.add(name)

    def save(self, note: Mapping[str, Any]) -> None:
        """Let what was added so far count, together with a note of what it is; seldom, because a
        disk takes its time."""
        if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self._save(note)

    def finish(self, note: Mapping[str, Any]) -> None:
        """Let all count that was added. Nothing can be added afterwards."""
        self.finished = True
        self._save(note)

    def _save(self, note: Mapping[str, Any]) -> None:
        with storage_errors(self.folder):
            for name in self._unsaved:
                with (self.folder / name).open("rb") as file:
                    sync(file.fileno())
        self._unsaved.clear()
        values = {"note": note, "sizes": self.sizes, "finished": self.finished}
        atomic_write(self.folder / PROGRESS_FILE, canonical_json(values))
        self._saved_at = time.monotonic()


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Return what was saved last in a folder of `GrowingFiles`; None if nothing was, or if that
    cannot be read."""
    try:
        values = json.loads((folder / PROGRESS_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    known = isinstance(values, dict) and values.keys() == {"note", "sizes", "finished"}
    return values if known else None
