"""The unfinished file of a download: kept over failures and restarts, owned by one at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Self

from dipaco.base.blobs import BlobStore
from dipaco.base.files import storage_errors, try_lock

# Parts of files that nobody sent whole, which are kept for another attempt.
MAX_UNFINISHED = 16


class PartialFile:
    """A download's file, locked against other threads and processes while it is open.

    Raises `StorageError` when the disk is full or cannot be written. All methods block.
    """

    def __init__(self, blobs: BlobStore, sha256: str) -> None:
        self._blobs = blobs
        self._sha256 = sha256
        self._descriptor = -1
        self._lock = threading.Lock()
        self.size_bytes = 0

    def try_open(self) -> bool:
        """Open the file and return True, or False while somebody else downloads it."""
        path = self._blobs.partial_path(self._sha256)
        with self._lock, storage_errors(self._blobs.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            # It may not be the file of this name: its owner finished between open and lock.
            if not try_lock(descriptor, path.parent) or not _is_file_at(descriptor, path):
                os.close(descriptor)
                return False
            self._close()
            self._descriptor = descriptor
            self.size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
            return True

    def append(self, data: bytes | bytearray) -> None:
        """Write at the end."""
        with self._lock, storage_errors(self._blobs.folder):
            if self._descriptor < 0:
                return  # closed by a cancelled download
            view = memoryview(data)
            try:
                while view:
                    written = os.pwrite(self._descriptor, view, self.size_bytes)
                    self.size_bytes += written
                    view = view[written:]
            except OSError:
                # A full disk must not stay full of what cannot be finished.
                os.ftruncate(self._descriptor, 0)
                self.size_bytes = 0
                raise

    def clear(self) -> None:
        """Forget everything that was received."""
        with self._lock, storage_errors(self._blobs.folder):
            if self._descriptor >= 0:
                os.ftruncate(self._descriptor, 0)
            self.size_bytes = 0

    def commit(self) -> Path:
        """Check the hash and make the file a blob. Raises `IntegrityError` and is empty then."""
        return self._blobs.commit_partial(self._sha256)

    def close(self) -> None:
        """Close the file and let others have it; an empty one is removed."""
        with self._lock:
            if self._descriptor >= 0 and self.size_bytes == 0:
                path = self._blobs.partial_path(self._sha256)
                with contextlib.suppress(OSError):
                    if _is_file_at(self._descriptor, path):
                        path.unlink()
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def prune_partial_files(blobs: BlobStore, keep: int) -> None:
    """Remove the oldest unfinished downloads except `keep`, unless another process works on them.

    Others can announce content that does not exist, and what had come of it would stay for ever.
    """
    files: list[tuple[float, Path]] = []
    for path in blobs.partial_paths():
        with contextlib.suppress(OSError):
            files.append((path.stat().st_mtime, path))
    for _, path in sorted(files)[: max(0, len(files) - keep)]:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if try_lock(descriptor, path.parent) and _is_file_at(descriptor, path):
                    path.unlink()
            finally:
                os.close(descriptor)


def _is_file_at(descriptor: int, path: Path) -> bool:
    """Tell whether the open file is still the one under this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
