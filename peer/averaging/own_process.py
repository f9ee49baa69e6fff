"""What the averager's process does first, and what its host does when it forks it."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator

logger = logging.getLogger("dipaco.peer.averaging.averager")


def become_quiet() -> None:
    """Called first in the process: ignore SIGINT, end on SIGTERM, libraries log for debug only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    demote_foreign_loggers()


class _DebugHandler(logging.Handler):
    """Passes another library's records on as debug lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.debug("%s: %s", record.name, record.getMessage(), exc_info=record.exc_info)


def demote_foreign_loggers() -> None:
    """Failures reach the host as exceptions; their tracebacks are for debugging."""
    for name in ("hivemind", "asyncio"):
        foreign = logging.getLogger(name)
        foreign.handlers = [_DebugHandler()]
        foreign.propagate = False


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Hold back Ctrl+C and termination while forking, until the child has its own handlers."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
