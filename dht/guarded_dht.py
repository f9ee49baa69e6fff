"""No process outlives its peer: children end with their parent, and Ctrl+C spares p2pd.

A peer consists of the training process, the DHT process, one process per averager and p2pd.
Killed with SIGKILL, Hivemind's children would live on and go on answering for the dead peer. And
a terminal sends Ctrl+C to all of them at once, so p2pd would be gone before the peer can say
goodbye. Both are mended where the children start.

Also mended here: the training process, its threads and its averagers all write requests into the
one pipe to the DHT process, and a request longer than the kernel's 4 KiB is written in pieces,
which must neither mix nor be read before they are complete.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import Any

from dipaco.modules.errors import NetworkError
from hivemind import DHT
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

_find = DHTProtocol.call_find
_NEVER = float("-inf")


def install() -> None:
    """Change the DHT protocol of this process."""
    DHTProtocol._validate_dictionary = drop_refused
    DHTProtocol.call_find = call_find


def drop_refused(protocol: DHTProtocol, key: bytes, dictionary: DictionaryDHTValue) -> bool:
    """Drop the records that the validators refuse; the others are as good as they were.

    In place of Hivemind's check, which refuses all of a dictionary for one bad record.
    """
    dictionary.maxsize = float("inf")
    refused = []
    with dictionary.freeze():
        for subkey, (value, expiration_s) in dictionary.items():
            tag = protocol.serializer.dumps(subkey)
            if not protocol._validate_record(key, tag, value, expiration_s):
                refused.append(subkey)
    for subkey in refused:
        del dictionary[subkey]
    expirations = [item.expiration_time for item in dictionary.data.values()]
    dictionary.latest_expiration_time = max(expirations, default=_NEVER)
    return True


async def call_find(
    protocol: DHTProtocol, peer: Any, keys: Collection[Any]
) -> dict[Any, tuple[ValueWithExpiration[Any] | None, dict[Any, Any]]] | None:
    """Ask a node as Hivemind does, and take an answer's expiration from its records alone."""
    answers = await _find(protocol, peer, keys)
    if answers is None:
        return None
    return {key: (_bounded(found), nearest) for key, (found, nearest) in answers.items()}


def _bounded(found: ValueWithExpiration[Any] | None) -> ValueWithExpiration[Any] | None:
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return found
    if not found.value.data:
        return None
    return ValueWithExpiration(found.value, found.value.latest_expiration_time)


_PR_SET_PDEATHSIG = 1
# Writing a request takes microseconds; whoever holds the pipe longer died holding it.
_PIPE_TIMEOUT_S = 20.0


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends. Elsewhere: nothing."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _detach_from_terminal() -> None:
    """Run in p2pd before it starts: out of the terminal's process group, tied to its parent."""
    os.setsid()
    die_with_parent()


class _SharedPipe:
    """The sending end of a pipe into which several threads and forked processes write."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = multiprocessing.get_context("fork").Lock()

    def send(self, request: Any) -> None:
        """Write one request as a whole. Raises `NetworkError` when the pipe is held for ever."""
        if not self._lock.acquire(timeout=_PIPE_TIMEOUT_S):
            raise NetworkError("the DHT process takes no requests any more; start again")
        try:
            self._pipe.send(request)
        finally:
            self._lock.release()

    def close(self) -> None:
        self._pipe.close()


class _WholeRequests:
    """The receiving end. The event loop makes it non-blocking, and then Hivemind loses its place.

    A request beyond 16 KiB arrives in pieces: reading it without waiting for the rest ends the DHT
    process. Its writer is writing it already, so waiting takes microseconds.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def fileno(self) -> int:
        return self._pipe.fileno()

    def poll(self) -> bool:
        return self._pipe.poll()

    def recv(self) -> Any:
        """Read one request to its end."""
        os.set_blocking(self._pipe.fileno(), True)
        try:
            return self._pipe.recv()
        finally:
            os.set_blocking(self._pipe.fileno(), False)


class GuardedDHT(DHT):
    """Hivemind's DHT whose processes end with the peer that started them. Safe to share."""

    _outer_pipe: Any
    _inner_pipe: Any

    def __init__(self, *arguments: Any, start: bool, await_ready: bool = True, **options: Any):
        super().__init__(*arguments, start=False, **options)
        self._outer_pipe = _SharedPipe(self._outer_pipe)
        if start:
            self.run_in_background(await_ready=await_ready)

    def run(self) -> None:
        die_with_parent()
        install()
        self._inner_pipe = _WholeRequests(self._inner_pipe)
        start_process = asyncio.subprocess.create_subprocess_exec

        async def start_guarded(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
            return await start_process(*arguments, preexec_fn=_detach_from_terminal, **options)

        asyncio.subprocess.create_subprocess_exec = start_guarded
        super().run()
