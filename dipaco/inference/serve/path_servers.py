"""Which paths have a server of llama.cpp: each path that is asked for, as far as memory allows.

A path that is asked for gets a server. Where there is no room, the server that was used least
recently ends first, once its answers have. Newer states get a new server while the old one answers
what it has begun. Paths are started one at a time, in the order in which they were asked for, so
none is kept out by others that are asked for more often. A server that hangs is ended: llama.cpp
computes with some grammars for ever, and answers nobody meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dipaco.base.blocking import run_blocking

from .api_error import ApiError
from .gguf_files import GgufFiles, PathFile, PathStates
from .llama_server import LlamaServer

logger = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")

# A path that could not be fetched is tried again after this time.
_RETRY_S = 30.0
# Between two questions to a server whether it hangs, as a share of how long it may be silent.
_ASKED_EVERY = 1 / 4
# A fetch under way is waited for no longer when the service ends.
_END_LIMIT_S = 3.0


class _UnavailableError(ApiError):
    """A path cannot be fetched now."""

    def __init__(self, path: int, reason: str) -> None:
        super().__init__(503, f"path {path}: {reason}", parameter="model", code="path_unavailable")


@dataclass(eq=False)
class PathServer:
    """A path and its server."""

    path: int
    states: PathStates
    server: LlamaServer
    users: int = 0
    """Answers under way."""
    used_s: float = field(default_factory=time.monotonic)
    is_leaving: bool = False
    """Whether it ends with its last answer."""


class PathServers:
    """The servers of paths, used in one event loop. Start it, and close it.

    :param files: writes paths; only called in one thread at a time
    :param launch: starts the process of a path's server
    :param capacity: how many paths have a server at the same time. While newer states are taken
        over, there is one more.
    :param refresh_s: seconds between looks for newer states; 0 is never
    :param silent_s: a server that says nothing for so long hangs
    """

    def __init__(
        self,
        files: GgufFiles,
        launch: Callable[[PathFile], LlamaServer],
        *,
        capacity: int,
        refresh_s: float,
        silent_s: float,
    ) -> None:
        self._files = files
        self._launch = launch
        self._capacity = capacity
        self._refresh_s = refresh_s
        self._silent_s = silent_s
        self._source = asyncio.Lock()
        self._at_source: asyncio.Future[Any] | None = None
        """The last thing done with the files, which belong to one thread at a time."""
        self._current: dict[int, PathServer] = {}
        self._all: set[PathServer] = set()
        self._waiting: dict[int, list[asyncio.Future[PathServer]]] = {}
        """The requests that wait for a path without a server."""
        self._asked: deque[int] = deque()
        """Paths that are to be started, each once, in their order."""
        self._has_asked = asyncio.Event()
        self._has_room = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._starting: LlamaServer | None = None
        self._is_closed = False
        self.unavailable: dict[int, str] = {}
        """Paths that could not be had when they were last asked for, and why."""
        self.troubles: tuple[str, ...] = ()
        """Why the states that are served may be old."""

    def start(self) -> None:
        """Begin; called in the event loop."""
        self._tasks = [asyncio.create_task(self._start_asked()), asyncio.create_task(self._watch())]
        if self._refresh_s:
            self._tasks.append(asyncio.create_task(self._refresh()))

    async def close(self) -> None:
        """End all servers. Bounded: a fetch under way is not waited for."""
        self._is_closed = True
        starting = self._starting
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(ApiError(503, "the service is shutting down"))
        servers = [one.server for one in self._all]
        if starting is not None:
            servers.append(starting)
        await asyncio.gather(*(run_blocking(server.close) for server in servers))
        if self._at_source is not None:
            await asyncio.wait([self._at_source], timeout=_END_LIMIT_S)

    @property
    def served(self) -> Mapping[int, PathStates]:
        """The paths that have a server, with their states."""
        return {path: one.states for path, one in self._current.items()}

    @asynccontextmanager
    async def use(self, paths: Sequence[int]) -> AsyncIterator[PathServer]:
        """Yield the server of the first of these paths that can be fetched; it does not end
        meanwhile. Raises ApiError."""
        server = await self._first_of(paths)
        try:
            yield server
        finally:
            self._give_back(server)

    async def look_again(self) -> None:
        """Look for newer states, and take them over."""
        looked = await self._done(self._files.look_again, self.served)
        for line in set(looked.troubles) - set(self.troubles):
            logger.warning("%s", line)
        self.troubles = looked.troubles
        self.unavailable.clear()
        for path in looked.changed & self._current.keys():
            self._ask(path)

    # -- taking and giving back

    async def _first_of(self, paths: Sequence[int]) -> PathServer:
        for path in paths[:-1]:
            with contextlib.suppress(_UnavailableError):
                return await self._taken(path)
        return await self._taken(paths[-1])

    async def _taken(self, path: int) -> PathServer:
        current = self._current.get(path)
        if current is not None and not current.server.is_alive:
            logger.warning("the server of path %d ended: %s", path, current.server.reason())
            self._leave(current)
            current = None
        if current is not None:
            current.users += 1
            current.used_s = time.monotonic()
            return current
        if path in self.unavailable:
            raise _UnavailableError(path, self.unavailable[path])
        if self._is_closed:
            raise ApiError(503, "the service is shutting down")
        future: asyncio.Future[PathServer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(path, []).append(future)
        self._ask(path)
        try:
            return await future
        except asyncio.CancelledError:
            # It may have come in the meantime.
            if future.done() and not future.cancelled() and not future.exception():
                self._give_back(future.result())
            raise

    def _give_back(self, server: PathServer) -> None:
        server.users -= 1
        server.used_s = time.monotonic()
        if server.is_leaving and not server.users:
            self._end(server)

    def _leave(self, server: PathServer) -> None:
        """Let a server end with its last answer; it gets no more."""
        if self._current.get(server.path) is server:
            del self._current[server.path]
        server.is_leaving = True
        if not server.users:
            self._end(server)

    def _end(self, server: PathServer) -> None:
        async def end() -> None:
            await run_blocking(server.server.close)
            self._all.discard(server)
            self._has_room.set()

        self._tasks.append(asyncio.create_task(end()))
        self._tasks = [task for task in self._tasks if not task.done()]

    async def _watch(self) -> None:
        """End servers that hang, for as long as this object lives."""
        while True:
            await asyncio.sleep(_ASKED_EVERY * self._silent_s)
            await asyncio.gather(*(self._end_if_silent(one) for one in self._all))

    async def _end_if_silent(self, one: PathServer) -> None:
        if await one.server.is_silent(self._silent_s) and one in self._all:
            logger.warning("path %d: llama.cpp hangs, and is started again", one.path)
            self._leave(one)
            if one.users:  # their answers end with the process
                await run_blocking(one.server.close)

    # -- starting

    def _ask(self, path: int) -> None:
        if path not in self._asked:
            self._asked.append(path)
            self._has_asked.set()

    async def _start_asked(self) -> None:
        """Start what is asked for, one path after the other, for as long as this object lives."""
        while True:
            while not self._asked:
                self._has_asked.clear()
                await self._has_asked.wait()
            path = self._asked.popleft()
            old = self._current.get(path)
            if old is None and not self._waits(path):
                self._waiting.pop(path, None)
                continue
            try:
                if old is None:
                    await self._make_room()
                new = await self._started(path)
            except Exception as error:  # whatever it is, those who wait for the path hear of it
                reason = " ".join(str(error).split()) or type(error).__name__
                logger.warning("path %d cannot be served: %s", path, reason)
                if old is None:
                    self.unavailable[path] = reason
                    loop = asyncio.get_running_loop()
                    loop.call_later(_RETRY_S, self.unavailable.pop, path, None)
                for future in self._waiting.pop(path, []):
                    if not future.done():
                        future.set_exception(_UnavailableError(path, reason))
                continue
            self._all.add(new)
            self._current[path] = new
            if old is not None:
                self._leave(old)
            for future in self._waiting.pop(path, []):
                if not future.done():
                    new.users += 1
                    future.set_result(new)

    def _waits(self, path: int) -> bool:
        return any(not future.done() for future in self._waiting.get(path, []))

    async def _make_room(self) -> None:
        """Wait until there is room for one more server; the least recently used makes it."""
        while len(self._all) >= self._capacity:
            self._has_room.clear()
            if not any(one.is_leaving for one in self._all):
                # One that answers nobody at first, and then the one whose last answer began first.
                self._leave(
                    min(self._current.values(), key=lambda one: (one.users > 0, one.used_s))
                )
            await self._has_room.wait()

    async def _started(self, path: int) -> PathServer:
        file = await self._done(self._files.write, path)
        try:
            server = self._starting = self._launch(file)
            try:
                await run_blocking(server.wait_until_ready)
            except Exception:
                await run_blocking(server.close)
                raise
            return PathServer(path, file.states, server)
        finally:
            self._starting = None
            # llama.cpp has mapped it.
            file.remove()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            with contextlib.suppress(Exception):  # the next look may be better
                await self.look_again()

    async def _done(self, act: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
        """Do something with the files on their thread, which may take minutes."""
        async with self._source:
            doing = self._at_source = asyncio.ensure_future(run_blocking(act, *arguments))
            return await asyncio.shield(doing)
