"""What the exchange serves: content named by its SHA-256."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from dipaco.base.blocking import run_blocking

logger = logging.getLogger("dipaco.peer.exchange.files.content")


Parts = Sequence[bytes | memoryview]


class ContentSource(Protocol):
    """Finds content by its hash. Called on a thread of its own, so it may read the disk."""

    def lookup(self, sha256: str) -> Path | Parts | None:
        """Return a file or the parts that make it up, or None when it is not here.

        `sha256` is 64 lower-case hexadecimal digits. What is returned is never changed in place:
        a file may be replaced or deleted, not overwritten.
        """
        ...


class OpenContent:
    """An immutable snapshot of content: memory, or an open file that may since be unlinked."""

    def __init__(self, found: Path | Parts) -> None:
        self._parts: Parts = ()
        self._file: BinaryIO | None = None
        if not isinstance(found, Path):
            self._parts = found
            self.size_bytes = sum(len(part) for part in found)
        else:
            self._file = found.open("rb", buffering=0)
            self.size_bytes = os.fstat(self._file.fileno()).st_size

    async def read(self, offset: int, count: int) -> bytes | memoryview:
        """Return up to `count` bytes from `offset`; none only when the file was cut off."""
        if self._file is not None:
            return await run_blocking(os.pread, self._file.fileno(), count, offset)
        for part in self._parts:
            if offset < len(part):
                return memoryview(part)[offset : offset + count]
            offset -= len(part)
        return b""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


@contextlib.asynccontextmanager
async def opened(source: ContentSource | None, sha256: str) -> AsyncIterator[OpenContent | None]:
    """Yield the content with this hash, or None when it is not held here."""
    content = None if source is None else await run_blocking(_find, source, sha256)
    try:
        yield content
    finally:
        if content is not None:
            content.close()


def _find(source: ContentSource, sha256: str) -> OpenContent | None:
    try:
        found = source.lookup(sha256)
        return OpenContent(found) if found is not None else None
    except FileNotFoundError:
        return None
    except Exception as error:
        logger.warning("content %s cannot be served: %s", sha256[:12], error)
        logger.debug("lookup failed", exc_info=True)
        return None
