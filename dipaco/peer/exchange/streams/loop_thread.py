"""An event loop on a thread of its own, so that serving others goes on while this peer trains."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from dipaco.base.errors import NetworkError
from dipaco.base.waits import may_wait_for, never_waiting
from dipaco.dht.dht_process import hold_tasks

_ResultT = TypeVar("_ResultT")

_CANCEL_TIMEOUT_S = 0.5
_START_TIMEOUT_S = 10.0
_STOP_LIMIT_S = 1.0
# How often a call looks whether it can still be answered.
_LOOK_S = 0.5


class LoopThread:
    """A uvloop event loop on a daemon thread, with a blocking way in. Thread-safe.

    `check` raises when what the loop stands on is gone, so that no call waits for its answer.
    """

    def __init__(self, name: str, check: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._check = check
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; returns when its loop runs. Raises `NetworkError`."""
        ready = threading.Event()

        def run() -> None:
            loop = uvloop.new_event_loop()
            asyncio.set_event_loop(loop)
            hold_tasks(loop)
            self._loop = loop
            loop.call_soon(ready.set)
            try:
                with never_waiting():
                    loop.run_forever()
            finally:
                self._loop = None
                with contextlib.suppress(Exception):
                    loop.close()

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        if not ready.wait(_START_TIMEOUT_S):
            raise NetworkError(f"the {self._name} did not start within {_START_TIMEOUT_S:.0f} s")

    def call(self, coroutine: Coroutine[Any, Any, _ResultT], timeout_s: float) -> _ResultT:
        """Run a coroutine on the loop and wait for its result.

        Raises `NetworkError` when the loop is stopped or `timeout_s` has passed, and what `check`
        raises; an interrupted wait (Ctrl+C) cancels the coroutine.
        """
        assert threading.current_thread() is not self._thread, "would wait for itself"
        may_wait_for(f"the {self._name}")
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            coroutine.close()
            raise NetworkError(f"the {self._name} is not running")
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:
            coroutine.close()
            raise NetworkError(f"the {self._name} was stopped") from None
        until = time.monotonic() + timeout_s
        try:
            while not future.done() and (left_s := until - time.monotonic()) > 0:
                concurrent.futures.wait([future], min(_LOOK_S, left_s))
                if not future.done():
                    self._check()
            return future.result(0)
        except concurrent.futures.CancelledError:
            raise NetworkError(f"the {self._name} was stopped") from None
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise NetworkError(
                f"the {self._name} did not answer within {timeout_s:.0f} s"
            ) from None
        finally:
            future.cancel()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop, whatever becomes of it; from any thread, also the loop's."""
        loop = self._loop
        try:
            if loop is None:
                raise RuntimeError
            asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:
            coroutine.close()

    def stop(self) -> None:
        """Cancel everything on the loop and end the thread. May be called twice."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(_cancel_others(loop), loop)
        thread.join(_STOP_LIMIT_S)


async def _cancel_others(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)
    # One more turn, so that callers of cancelled tasks learn it before the loop ends.
    loop.call_soon(loop.stop)
