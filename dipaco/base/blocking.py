"""Waiting on an event loop for what blocks: a disk, a mirror, a fetch, the start of a process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_ResultT = TypeVar("_ResultT")


async def run_blocking(function: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
    """Run a blocking function on a daemon thread and await its result.

    Not an executor: its threads are joined when the interpreter exits, and a mirror or a disk
    that hangs must not keep a process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_ResultT] = loop.create_future()

    def settle(result: _ResultT | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: _ResultT | None = None
        failure: BaseException | None = None
        try:
            result = function(*arguments)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="blocking", daemon=True).start()
    return await future
