"""Logging: its set-up for commands without typed options; how often others are complained of."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Hashable

from dipaco.modules.command_line import configure_logging, run_command


class Complaints:
    """Keeps others from filling the log: the level at which to say a complaint about somebody.

    The first about a subject within `period_s` is a warning, and so are at most `limit` of
    different subjects; the rest are for debugging.
    """

    def __init__(self, period_s: float, limit: int) -> None:
        self._period_s = period_s
        self._limit = limit
        self._said_at: dict[Hashable, float] = {}

    def level(self, subject: Hashable) -> int:
        """Return `logging.WARNING` or `logging.DEBUG` for a complaint that is made now."""
        now = time.monotonic()
        self._said_at = {
            other: at for other, at in self._said_at.items() if now - at < self._period_s
        }
        if subject in self._said_at or len(self._said_at) >= self._limit:
            return logging.DEBUG
        self._said_at[subject] = now
        return logging.WARNING


def run_logged(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Set up logging, run a command with its options, and return the exit code."""
    configure_logging(options.debug)
    return run_command(lambda: run(options), options.debug)
