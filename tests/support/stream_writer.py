"""A stream's writer in memory."""

from __future__ import annotations

from types import SimpleNamespace


class StreamWriter:
    """Keeps what is written to it, and whether it was closed or broken off."""

    def __init__(self) -> None:
        self.closed = False
        self.data = bytearray()
        self.transport = SimpleNamespace(abort=self.close)

    def write(self, data: bytes | memoryview) -> None:
        self.data += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
