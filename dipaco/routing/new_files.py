"""Files that one writer makes in a folder, from their beginning."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dipaco.base.files import storage_errors, sync


class NewFiles:
    """The files in a folder, which is emptied first.

    They are on the disk after `sync`. To wait for that after each piece would take days where a
    corpus goes to hundreds of files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}
        """Bytes of each file."""
        with storage_errors(folder):
            # Blobs may be the same files with other names: they are unlinked, never changed.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def append(self, name: str, data: bytes) -> None:
        """Write behind the end of a file, which is made if it is not there."""
        with storage_errors(self.folder), (self.folder / name).open("ab") as file:
            file.write(data)
        self.sizes[name] = self.sizes.get(name, 0) + len(data)

    def cut(self, name: str, size: int) -> None:
        """Cut a file off behind `size` bytes."""
        with storage_errors(self.folder):
            os.truncate(self.folder / name, size)
        self.sizes[name] = size

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        with storage_errors(self.folder):
            for name in self.sizes:
                with (self.folder / name).open("rb") as file:
                    sync(file.fileno())
