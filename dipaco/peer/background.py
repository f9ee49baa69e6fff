"""Threads beside the one that trains: none of them ends in silence."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from dipaco.base.errors import DipacoError
from dipaco.base.waits import BriefLock

logger = logging.getLogger("dipaco.peer.background")

_ResultT = TypeVar("_ResultT")


class BackgroundError(DipacoError):
    """A background thread was ended by an exception that nobody foresaw."""


class Background:
    """Starts background work and keeps its first failure, for the main thread to raise.

    A refresher that ended unnoticed would let the claim expire while the peer trains on. The
    session and the bootstrap node call `check` in every turn. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = BriefLock()
        self._failure: DipacoError | None = None
        self._listeners: list[Callable[[], None]] = []

    def on_failure(self, listener: Callable[[], None]) -> None:
        """Call `listener` once `check` raises: it wakes somebody who waits for the work."""
        self._listeners.append(listener)

    def thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Return a daemon thread that does `work`, for the caller to start."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._fail(name, error)

        return threading.Thread(target=run, name=name, daemon=True)

    def watch(self, name: str, future: Future[_ResultT]) -> Future[_ResultT]:
        """Keep the failure of work whose result nobody asks for; returns `future`."""

        def look(done: Future[_ResultT]) -> None:
            try:
                done.result()
            except CancelledError:
                pass
            except Exception as error:
                self._fail(name, error)

        future.add_done_callback(look)
        return future

    def check(self) -> None:
        """Raise the first failure, if there was one: a `DipacoError`, whatever it was."""
        with self._lock:
            failure = self._failure
        if failure is not None:
            raise failure

    def fail(self, error: DipacoError) -> None:
        """Make `check` raise an error that ends the peer. Any thread may call it."""
        self._fail("background", error)

    def _fail(self, name: str, error: Exception) -> None:
        logger.debug("the %s thread failed", name, exc_info=error)
        failure = error
        if not isinstance(failure, DipacoError):
            failure = BackgroundError(
                f"the {name} thread failed: {type(error).__name__}: {error}; start again, and "
                "report it with what --debug shows"
            )
        with self._lock:
            self._failure = self._failure or failure
        for listener in self._listeners:
            listener()
