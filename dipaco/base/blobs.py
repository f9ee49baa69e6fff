"""Files named by the SHA-256 of their content: tokenizer, router, shards, base model, states.

A reader that asks for a blob by its hash can trust the content, whatever the source. Several
threads and processes may use one store at once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

from .errors import IntegrityError
from .files import (
    atomic_file,
    atomic_write,
    remove_stale_temporaries,
    sha256_of_file,
    storage_errors,
    sync,
    sync_folder,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Read at a time: a file is never in memory whole.
_COPY_BYTES = 2**20


def is_sha256(text: str) -> bool:
    """Return whether `text` is 64 lower-case hexadecimal digits."""
    return bool(_SHA256.fullmatch(text))


class BlobStore:
    """A folder of blobs, `folder/ab/abcdef...`; unfinished downloads lie in `partial/`. Nothing is
    made in it before something is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._partials = self.folder / "partial"

    def tidy(self) -> None:
        """Make the folder, and remove what killed processes left unfinished, but no downloads.

        Raises `StorageError`.
        """
        with storage_errors(self.folder):
            self._partials.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder, *self.folder.iterdir()):
                if folder.is_dir():
                    remove_stale_temporaries(folder)

    def path(self, sha: str) -> Path:
        """Return where the blob lies or would lie. Raises ValueError when `sha` is no SHA-256."""
        if not is_sha256(sha):
            raise ValueError(f"not a SHA-256: {sha[:80]!r}")
        return self.folder / sha[:2] / sha

    def has(self, sha: str) -> bool:
        """Return whether the blob is here; its content is not read."""
        return self.path(sha).is_file()

    def verify(self, sha: str) -> bool:
        """Read the blob and return whether it is here and has its hash."""
        path = self.path(sha)
        with storage_errors(self.folder):
            return self.has(sha) and sha256_of_file(path) == sha

    def add_bytes(self, content: bytes) -> str:
        """Store `content` and return its SHA-256. Raises `StorageError` when the disk is full."""
        sha = hashlib.sha256(content).hexdigest()
        if not self.has(sha):
            atomic_write(self.path(sha), content)
        return sha

    def add_file(self, path: Path, move: bool = False) -> str:
        """Store a file's content, moving the file if asked, and return its SHA-256."""
        path = Path(path)
        with storage_errors(path.parent):
            sha = sha256_of_file(path)
        target = self.path(sha)
        if path.resolve() == target.resolve():
            return sha
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.has(sha):
                if move:
                    path.unlink()
            elif move and _same_device(path, self.folder):
                self._install(path, target)
            else:
                self._copy(path, sha)
                if move:
                    path.unlink()
        return sha

    def read(self, sha: str) -> bytes:
        """Return the blob's content, checked. Raises `IntegrityError` if absent or damaged."""
        path = self.require(sha)
        with storage_errors(self.folder):
            content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha:
            raise IntegrityError(
                f"{path} is damaged: its content does not have its hash; delete it so that it is "
                f"fetched again"
            )
        return content

    def require(self, sha: str) -> Path:
        """Return the blob's path. Raises `IntegrityError` when it is not here."""
        path = self.path(sha)
        if not self.has(sha):
            raise IntegrityError(f"blob {sha[:16]} is not in {self.folder}; fetch it again")
        return path

    def remove(self, sha: str) -> None:
        """Delete the blob and its partial download, if they are here."""
        with storage_errors(self.folder):
            self.path(sha).unlink(missing_ok=True)
            self.partial_path(sha).unlink(missing_ok=True)

    def partial_path(self, sha: str) -> Path:
        """Return where a download of the blob is collected; it survives a restart."""
        self.path(sha)
        return self._partials / sha

    def partial_paths(self) -> list[Path]:
        """Return the files of all downloads that have begun."""
        with storage_errors(self.folder):
            return sorted(self._partials.iterdir()) if self._partials.is_dir() else []

    def commit_partial(self, sha: str) -> Path:
        """Make a finished download the blob, or remove it and raise `IntegrityError`.

        The partial file must have its full length.
        """
        partial = self.partial_path(sha)
        with storage_errors(self.folder):
            if not partial.is_file():
                raise IntegrityError(f"no download of blob {sha[:16]} has begun")
            found = sha256_of_file(partial)
            if found != sha:
                partial.unlink(missing_ok=True)
                raise IntegrityError(f"blob {sha[:16]} arrived with the hash {found[:16]}")
            self._install(partial, self.path(sha))
        return self.path(sha)

    def _install(self, source: Path, target: Path) -> None:
        """Rename a complete file to its place, durably."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as handle:
            sync(handle.fileno())
        os.replace(source, target)
        sync_folder(target.parent)

    def _copy(self, source: Path, sha: str) -> None:
        """Copy a file to its place, hashing what is written: it may change meanwhile."""
        hasher = hashlib.sha256()
        with source.open("rb") as reader, atomic_file(self.path(sha)) as writer:
            while chunk := reader.read(_COPY_BYTES):
                hasher.update(chunk)
                writer.write(chunk)
            if hasher.hexdigest() != sha:
                raise IntegrityError(f"{source} changed while it was being copied")
        shutil.copymode(source, self.path(sha))


def _same_device(first: Path, second: Path) -> bool:
    return first.stat().st_dev == second.stat().st_dev
