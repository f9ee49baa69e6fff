"""Mirrors: folders anywhere that fsspec reaches, which hold blobs under their SHA-256.

A run's plan may name some (`RunPlan.mirrors`). They are asked after the peers and trusted as
little: the content has to have its hash.
"""

from __future__ import annotations

from typing import BinaryIO

import fsspec

from .loop_thread import run_blocking
from .transfer import ContentAbsent, ContentStream, OffsetBeyondEnd


class MirrorSource:
    """One mirror as a source of `transfer.download`."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self.name = f"mirror {self._address}"

    async def open(self, sha256: str, offset: int) -> ContentStream:
        """Open the mirror's file; blocks a thread, not the loop."""
        return await run_blocking(self._open, sha256, offset)

    def _open(self, sha256: str, offset: int) -> ContentStream:
        system, path = fsspec.core.url_to_fs(f"{self._address}/{sha256}")
        try:
            total_bytes = system.size(path)
            if total_bytes is None:
                raise OSError("the mirror does not tell the size of its files")
            if offset > total_bytes:
                raise OffsetBeyondEnd
            file = system.open(path, "rb")
        except FileNotFoundError:
            raise ContentAbsent from None
        file.seek(offset)
        return _MirrorStream(file, int(total_bytes))


class _MirrorStream:
    """An open file of a mirror."""

    def __init__(self, file: BinaryIO, total_bytes: int) -> None:
        self._file = file
        self.total_bytes = total_bytes

    async def read(self, count: int) -> bytes:
        """Return up to `count` bytes."""
        return await run_blocking(self._file.read, count)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
