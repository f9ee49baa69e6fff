"""A thread that does one thing after the other, and that nothing waits for at the end."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class DaemonThread:
    """Does what an event loop asks for and may take minutes, such as a fetch.

    Unlike the threads of an executor it keeps no process from ending.
    """

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._asked = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def do(self, act: Callable[[], ResultT]) -> ResultT:
        """Wait for the result of `act`, which this thread computes."""
        future: Future[ResultT] = Future()
        self._asked.put((future, act))
        return await asyncio.wrap_future(future)

    def close(self, limit_s: float) -> None:
        """Have the thread end; what it is at is waited for no longer than that."""
        self._asked.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, act = asked
            if future.set_running_or_notify_cancel():
                with contextlib.suppress(RuntimeError):  # the event loop may have ended
                    _fulfil(future, act)


def _fulfil(future: Future[Any], act: Callable[[], Any]) -> None:
    try:
        result = act()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
