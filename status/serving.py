"""`dipaco-status --serve`: one thread reads, a server shows what was read."""

from __future__ import annotations

import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dipaco.base.errors import DipacoError, StorageError
from dipaco.base.http_server import serve_until_told
from dipaco.modules.plan import RunPlan
from dipaco.protocol.ledger import read_ledger
from dipaco.protocol.records import refresh_period_s

from .history import History, default_history_file
from .service import Board, Credits, StatusService
from .summary import with_what_was_known

logger = logging.getLogger("dipaco.status.serving")

# The swarm is read as often as its records change, within these bounds.
LEAST_INTERVAL_S = 5.0
MOST_INTERVAL_S = 60.0
# Reading a swarm is bounded itself; ending does not wait longer for it.
JOIN_S = 5.0
# Its sums are made anew each time.
LEDGER_EVERY_S = 300.0


def interval_s(plan: RunPlan) -> float:
    """Return how often a swarm is read."""
    return min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, refresh_period_s(plan.rounds)))


class Sampler:
    """Reads the swarm again and again: the only place that makes work for others."""

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        history: History,
        board: Board,
        every_s: float,
        read_ledger: Callable[[], None] | None = None,
    ) -> None:
        self._read, self._history, self._board = read, history, board
        self._read_ledger, self._ledger_read_s = read_ledger, -math.inf
        self._every_s = every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.sample()
            self._stopping.wait(self._every_s)

    def sample(self) -> None:
        """Read once. What fails is said on the page, and is tried again the next time."""
        try:
            status = self._read()
            run = status["run"]["id"]
            if run != self._history.run_id:
                self._history.begin_another(run)
            before = self._board.status or self._history.at(math.inf)
            if before is not None and before["run"]["id"] == run:
                status = with_what_was_known(status, before)
            self._board.put(status)
            self._history.write(status)
            if self._read_ledger and time.monotonic() - self._ledger_read_s >= LEDGER_EVERY_S:
                self._read_ledger()
                self._ledger_read_s = time.monotonic()
        except DipacoError as error:
            logger.warning("%s", error)
            self._board.fail(str(error))
        except Exception as error:
            # The page must not go on showing old values as if they were new.
            logger.exception("reading the swarm failed")
            self._board.fail(f"reading the swarm failed: {type(error).__name__}")


def serve_swarm(
    read: Callable[[], dict[str, Any]],
    plan: RunPlan,
    listening: socket.socket,
    history_file: Path | None,
    ledger_file: Path | None,
    names: tuple[str, ...] = (),
) -> int:
    """Serve the page of a swarm that runs until told to end. Returns the exit code."""
    file = history_file or default_history_file(plan.run_id)
    credits = Credits()
    read_ledger = _ledger_reader(ledger_file, plan.run_id, credits)
    history = History(file, plan.run_id)
    every_s = interval_s(plan)
    board = Board(every_s)
    say(f"run '{plan.name}' ({plan.run_id}) is read every {every_s:g} s; history in {file}")
    try:
        with Sampler(read, history, board, every_s, read_ledger):
            _serve(StatusService(history, board, credits), listening, names)
    finally:
        history.close()
    return 0


def _ledger_reader(file: Path | None, run_id: str, credits: Credits) -> Callable[[], None] | None:
    """Read what `dipaco-ledger --json` has written, and return what reads it again.

    Raises StorageError.
    """
    if file is None:
        return None

    def read() -> None:
        try:
            credits.put(read_ledger(file.read_bytes(), run_id))
        except OSError as error:
            raise StorageError(f"--ledger {file}: {error.strerror}") from None
        except StorageError as error:
            raise StorageError(f"--ledger {file}: {error}") from None

    read()
    return read


def _serve(service: StatusService, listening: socket.socket, names: tuple[str, ...]) -> None:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"serving at http://{shown}:{port}")
    serve_until_told(service.application(), listening, names)


def say(line: str) -> None:
    """Tell the person who started it."""
    print(line, file=sys.stderr, flush=True)
