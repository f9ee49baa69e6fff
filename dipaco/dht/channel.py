"""Requests to a DHT process, and its answers, over one connection.

A frame is a length and a pickle. Both processes are this peer's own, one forked from the other, and
nobody else has an end of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from typing import Any

from dipaco.base.errors import NetworkError

logger = logging.getLogger("dipaco.dht.channel")

# Writing a request takes microseconds; who reads nothing for longer has died or hangs.
WRITE_LIMIT_S = 20.0
_LENGTH_BYTES = 4
# Instead of a request's number: the node has started, or not; it lives; why it ends.
READY, BEAT, LAST = 0, -1, -2


def framed(message: Any) -> bytes:
    """Return the bytes of a message."""
    pickled = bytes(ForkingPickler.dumps(message))
    return len(pickled).to_bytes(_LENGTH_BYTES, "big") + pickled


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Read one message. Raises `asyncio.IncompleteReadError` at the end, or what unpickling does.

    A message that cannot be unpickled is read to its end all the same.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    return ForkingPickler.loads(await reader.readexactly(length))


class Channel:
    """The end of the connection in the process that asks. Thread-safe.

    A thread reads. Once the connection has ended every request fails at once, and so do later ones.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(WRITE_LIMIT_S)
        self._socket = connected
        self._writing, self._lock = threading.Lock(), threading.Lock()
        self._numbers = itertools.count(1)
        self.ready: Future[Any] = Future()
        """Whether the process serves; fails with what kept it from that."""
        self._asked: dict[int, Future[Any]] = {READY: self.ready}
        self.heard = 0
        """Messages that came. The process sends a beat every second."""
        self.end = ""
        """Why nothing will be answered any more."""
        self._reader = threading.Thread(target=self._read, name="dht answers", daemon=True)
        self._reader.start()

    def send(self, message: Any) -> None:
        """Write a message as a whole; where that fails the connection ends."""
        data = framed(message)
        try:
            with self._writing:
                self._socket.sendall(data)
        except OSError:
            self.close("the DHT process takes no requests")

    def ask(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        """Have `await function(node, *arguments)` called there. The future fails with
        `NetworkError` when the connection ends, and else with a `RuntimeError` of what failed."""
        number = next(self._numbers)
        asked: Future[Any] = Future()
        with self._lock:
            if self.end:
                asked.set_exception(NetworkError(self.end))
                return asked
            self._asked[number] = asked
        self.send((number, function, arguments))
        return asked

    def close(self, why: str) -> None:
        """End the connection; the first reason counts."""
        with self._lock:
            self.end = self.end or why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def finish(self, limit_s: float) -> bool:
        """Ask for nothing more, and wait until the process has closed its end. True if it has."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._reader.join(limit_s)
        return not self._reader.is_alive()

    def _read(self) -> None:
        try:
            while True:
                length = int.from_bytes(self._read_exactly(_LENGTH_BYTES), "big")
                self._take(*ForkingPickler.loads(self._read_exactly(length)))
        except (EOFError, OSError):
            pass
        except Exception:
            logger.warning("an answer of the DHT process could not be read", exc_info=True)
        self.close("the DHT process has ended")
        self._socket.close()
        with self._lock:
            left, self._asked = self._asked, {}
        for asked in left.values():
            asked.set_exception(NetworkError(self.end))

    def _read_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            # Silence is noticed by who counts what is `heard`.
            with contextlib.suppress(TimeoutError):
                piece = self._socket.recv(count - len(data))
                if not piece:
                    raise EOFError
                data += piece
        return bytes(data)

    def _take(self, number: int, is_answer: bool, value: Any) -> None:
        self.heard += 1
        if number == LAST:
            with self._lock:
                self.end = self.end or value
        with self._lock:
            asked = self._asked.pop(number, None)
        if asked is None:
            return
        if is_answer:
            asked.set_result(value)
        else:
            asked.set_exception(RuntimeError(value))
