"""Files named by the SHA-256 of their content: tokenizer, router, shards, base model, states.

A reader that asks for a blob by its hash can trust the content, whatever the source. Several
threads and processes may use one store at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import IntegrityError
from .files import (
    TEMPORARY_SUFFIX,
    atomic_file,
    atomic_write,
    remove_stale_temporaries,
    sha256_of_file,
    storage_errors,
    sync_folder,
    try_lock,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Read at a time: a file is never in memory whole.
_COPY_BYTES = 2**20


def is_sha256(text: str) -> bool:
    """Return whether `text` is 64 lower-case hexadecimal digits."""
    return bool(_SHA256.fullmatch(text))


class SharedContent:
    """One copy on the disk of what several peers of one machine hold, `folder/ab/abcdef...`.

    Each has its own folder and knows nothing of the others. Beside them is a common folder, where
    every file is named by its digest; what a peer's folder and the common one both have is one
    file with two names (a hard link), or a copy where links are not possible. Files that are named
    by a digest are never written again. Any number of processes may use it.
    """

    def __init__(self, folder: Path) -> None:
        """Open the common folder, and delete in it what no peer has any more."""
        self.folder = Path(folder)
        with storage_errors(self.folder):
            (self.folder / "turns").mkdir(parents=True, exist_ok=True)
        self.prune()

    def path(self, digest: str) -> Path:
        """Return where the file of a digest lies or would lie."""
        return self.folder / digest[:2] / digest

    def take(self, digest: str, path: Path) -> bool:
        """Give a peer's folder the file of a digest as `path`; returns whether it is here."""
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _link(self.path(digest), path)
            return True
        return False

    def give(self, digest: str, path: Path) -> None:
        """Take a peer's complete file of a digest; if it is here, `path` becomes a name of it."""
        common = self.path(digest)
        with contextlib.suppress(OSError):
            common.parent.mkdir(exist_ok=True)
            try:
                os.link(path, common)
            except FileExistsError:
                if not common.samefile(path):
                    _link(common, path)

    def forget(self, digest: str) -> None:
        """Delete the common name of a file, which is damaged, or was removed by its last peer."""
        with contextlib.suppress(OSError):
            self.path(digest).unlink()

    def prune(self) -> None:
        """Delete the files that are in no peer's folder."""
        for folder in self.folder.iterdir():
            if folder.name == "turns" or not folder.is_dir():
                continue
            remove_stale_temporaries(folder)
            for file in folder.iterdir():
                with contextlib.suppress(OSError):
                    if not file.name.startswith(".") and file.stat().st_nlink == 1:
                        file.unlink()

    @contextlib.contextmanager
    def turn(self, digest: str) -> Iterator[bool]:
        """Let one peer at a time fetch a file; yields whether it is this one's turn.

        A caller without a turn looks again after a while: the file may be here then.
        """
        with storage_errors(self.folder), (self.folder / "turns" / digest).open("wb") as file:
            yield try_lock(file.fileno(), self.folder)


def _link(source: Path, target: Path) -> None:
    """Make `target` a name of the file `source`, in one step. Raises OSError."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    temporary = temporary.with_name(temporary.name + TEMPORARY_SUFFIX)
    os.link(source, temporary)
    try:
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


class BlobStore:
    """A folder of blobs, `folder/ab/abcdef...`; unfinished downloads lie in `partial/`."""

    def __init__(self, folder: Path, shared: SharedContent | None = None) -> None:
        """Open the folder; what other peers of this machine have `shared` is in it too."""
        self.folder = Path(folder)
        self.shared = shared
        self._partials = self.folder / "partial"
        with storage_errors(self.folder):
            self._partials.mkdir(parents=True, exist_ok=True)
        for subfolder in self.folder.iterdir():
            if subfolder.is_dir():
                remove_stale_temporaries(subfolder)

    def path(self, sha: str) -> Path:
        """Return where the blob lies or would lie. Raises ValueError when `sha` is no SHA-256."""
        if not is_sha256(sha):
            raise ValueError(f"not a SHA-256: {sha[:80]!r}")
        return self.folder / sha[:2] / sha

    def has(self, sha: str) -> bool:
        """Return whether the blob is here; its content is not read."""
        path = self.path(sha)
        return path.is_file() or (self.shared is not None and self.shared.take(sha, path))

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
            self._give(sha)
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

    def open(self, sha: str) -> BinaryIO:
        """Open the blob without checking its hash. Raises `IntegrityError` when it is not here."""
        path = self.require(sha)
        with storage_errors(self.folder):
            return path.open("rb")

    def require(self, sha: str) -> Path:
        """Return the blob's path. Raises `IntegrityError` when it is not here."""
        path = self.path(sha)
        if not self.has(sha):
            raise IntegrityError(f"blob {sha[:16]} is not in {self.folder}; fetch it again")
        return path

    def remove(self, sha: str) -> None:
        """Delete the blob and its partial download, if they are here."""
        with storage_errors(self.folder):
            if self.shared is not None:
                self.shared.forget(sha)
            self.path(sha).unlink(missing_ok=True)
            self.partial_path(sha).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all blobs, but no partial downloads. A store that files only pass through can
        hold what a killed process had just fetched."""
        with storage_errors(self.folder):
            for folder in self.folder.iterdir():
                if folder != self._partials:
                    shutil.rmtree(folder)

    def partial_path(self, sha: str) -> Path:
        """Return where a download of the blob is collected; it survives a restart."""
        self.path(sha)
        return self._partials / sha

    def partial_paths(self) -> list[Path]:
        """Return the files of all downloads that have begun."""
        with storage_errors(self.folder):
            return sorted(self._partials.iterdir())

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

    @property
    def total_bytes(self) -> int:
        """Bytes of all blobs and partial downloads."""
        total = 0
        for file in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size if file.is_file() else 0
        return total

    def _install(self, source: Path, target: Path) -> None:
        """Rename a complete file to its place, durably."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(source, target)
        sync_folder(target.parent)
        self._give(target.name)

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
        self._give(sha)

    def _give(self, sha: str) -> None:
        """Let other peers of this machine have a blob that has just come."""
        if self.shared is not None:
            self.shared.give(sha, self.path(sha))


def _same_device(first: Path, second: Path) -> bool:
    return first.stat().st_dev == second.stat().st_dev
