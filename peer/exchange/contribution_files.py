"""Files of contributions, own and others', by their hash: served to whoever gathers (design 4.2)."""

from __future__ import annotations

from pathlib import Path

from dipaco.dht.chain import Row


class ContributionFiles:
    """`folder/<module>/<round>.<peer>.<sha256>`; kept for three rounds. Thread-safe.

    :param most_bytes: of all files; the oldest rounds go first
    :param most_mail_bytes: of files that others have put here, all together
    """

    def __init__(
        self, folder: Path, *, most_bytes: int = 2**33, most_mail_bytes: int = 2**31
    ) -> None:
        raise NotImplementedError

    def add(self, row: Row, data: bytes) -> Path:
        """Store an own contribution, which `row` names. Raises `StorageError`."""
        raise NotImplementedError

    def install(self, row: Row, path: Path, *, is_mail: bool = False) -> Path:
        """Move a file here that was fetched or put, and whose hash was checked."""
        raise NotImplementedError

    def find(self, sha256: str) -> Path | None:
        """Return a file by its hash."""
        raise NotImplementedError

    def remove(self, sha256: str) -> None:
        """Remove a file: it is no contribution."""
        raise NotImplementedError

    def prune(self, module: str, round_index: int) -> None:
        """Remove the files of rounds of a module three or more before this one."""
        raise NotImplementedError
