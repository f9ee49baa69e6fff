"""Reading compressed texts whole: all streams of a file, and an error for what is no stream.

Python's own readers of .xz and .bz2 take whatever follows the first stream and is no stream for
rubbish, and the usual reader of .zst stops silently where a file was cut.
"""

from __future__ import annotations

import bz2
import io
import lzma
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

import fsspec.compression
import zstandard

# At the greatest ratios this becomes some tens of MB.
_READ_BYTES = 2**13
# Of forum archives that were made with --long=31.
_GREATEST_ZSTD_WINDOW = 2**31


class Decompressor(Protocol):
    """Decompresses one stream."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class StreamReader(io.RawIOBase):
    """The content of the streams in a file, one after the other.

    With `padded` there may be zeros between and behind them. Reading raises EOFError where a stream
    was cut, and what the decompressor raises for what is none.
    """

    def __init__(
        self, file: BinaryIO, make: Callable[[], Decompressor], *, padded: bool = False
    ) -> None:
        self._file = file
        self._make = make
        self._padded = padded
        self._stream: Decompressor | None = None
        self._content = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
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


def read_compressed_whole() -> None:
    """Have fsspec, with which `datasets` opens files, read the streams of a file as here."""

    def register(name: str, suffix: str, make: Callable[[], Any], *, padded: bool = False) -> None:
        def opened(file: BinaryIO, mode: str = "rb", **_: Any) -> io.BufferedReader:
            return io.BufferedReader(StreamReader(file, make, padded=padded))

        fsspec.compression.register_compression(name, opened, suffix, force=True)

    zstd = zstandard.ZstdDecompressor(max_window_size=_GREATEST_ZSTD_WINDOW)
    register("xz", "xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padded=True)
    register("bz2", "bz2", bz2.BZ2Decompressor)
    register("zstd", "zst", zstd.decompressobj)
