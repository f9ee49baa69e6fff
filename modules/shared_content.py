"""One copy on the disk of what several peers of one machine hold.

Peers that train on one machine, one for each GPU, fetch and keep much of the same: the blobs of the
run, and states of modules that they share. Each has its own folder and knows nothing of the others.
Beside them is a common folder, in which every file is named by its digest; what a peer's folder and
the common one both have is one file with two names (a hard link). Files that are named by a digest
are never written again, so nobody can change what another has.

Where links are not possible (another file system), everything goes on with copies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from .files import TEMPORARY_SUFFIX, remove_stale_temporaries, storage_errors


class SharedContent:
    """`folder/ab/abcdef...`; any number of processes may use it."""

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

        Whoever has no turn looks again after a while: the file may be here then.
        """
        with storage_errors(self.folder), (self.folder / "turns" / digest).open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def _link(source: Path, target: Path) -> None:
    """Make `target` a name of the file `source`, in one step. Raises OSError."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    temporary = temporary.with_name(temporary.name + TEMPORARY_SUFFIX)
    os.link(source, temporary)
    try:
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
