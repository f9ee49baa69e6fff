"""Reading compressed texts whole: all streams of a file, and an error for what is no stream.

Python's own readers of .xz and .bz2 take whatever follows the first stream and is no stream for
rubbish, and the usual reader of .zst stops silently where a file was cut.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

import zstandard

# At the greatest ratios this becomes some tens of MB.
_READ_BYTES = 2**13
# Of forum archives that were made with --long=31.
_MAX_ZSTD_WINDOW = 2**31


class _Decompressor(Protocol):
    """Decompresses one stream."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class _StreamReader(io.RawIOBase):
    """The content of the streams in a file, one after the other.

    With `padded` there may be zeros between and behind them. Reading raises EOFError where a stream
    was cut, and what the decompressor raises for what is none.
    """

    def __init__(
        self, file: BinaryIO, make: Callable[[], _Decompressor], *, padded: bool = False
    ) -> None:
        self._file = file
        self._make = make
        self._padded = padded
        self._stream: _Decompressor | None = None
        self._content = memoryview(b"")

    def readable(self) -> bool:
        """Return True: it can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer; 0 at the end of the last stream."""
        while not self._content:
            data = self._unused() or self._file.read(_READ_BYTES)
            if self._stream is None and self._padded:
                if data and not data.strip(b"\0"):
                    continue
                data = data.lstrip(b"\0")
            if not data:
                if self._stream is not None:
                    raise EOFError("the file ends within a compressed stream: it was cut")
                return 0
            if self._stream is None:
                self._stream = self._make()
            self._content = memoryview(self._stream.decompress(data))
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _unused(self) -> bytes:
        """Return what is behind a stream that has ended."""
        if self._stream is None or not self._stream.eof:
            return b""
        unused = self._stream.unused_data
        self._stream = None
        return unused

    def close(self) -> None:
        """Close the file too."""
        if not self.closed:
            self._file.close()
        super().close()


def decompressed(file: BinaryIO, begin: bytes) -> BinaryIO:
    """Return the content of a file, which `begin` is the first bytes of."""
    for mark, reader in _READERS.items():
        if begin.startswith(mark):
            return io.BufferedReader(reader(file))
    return file


def _streams(make: Callable[[], Any], *, padded: bool = False) -> Callable[[BinaryIO], Any]:
    return lambda file: _StreamReader(file, make, padded=padded)


# By the first bytes of a file.
_READERS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"\xfd7zXZ\0": _streams(lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padded=True),
    b"BZh": _streams(bz2.BZ2Decompressor),
    b"\x28\xb5\x2f\xfd": _streams(
        lambda: zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW).decompressobj()
    ),
}
