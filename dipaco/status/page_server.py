"""`dipaco-status --serve`: threads read the swarm, a server shows what was read."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dipaco.base.errors import DipacoError
from dipaco.base.http_server import serve_until_told
from dipaco.base.running import say
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.records import refresh_period_s

from .curves import History, default_history_file
from .page_endpoints import PageContent, StatusService
from .summary import with_what_was_known

logger = logging.getLogger("dipaco.status.page_server")

# The swarm is read as often as its records change, within these bounds.
LEAST_INTERVAL_S = 5.0
MAX_INTERVAL_S = 60.0
# All chains are read for it, from the genesis.
LEDGER_EVERY_S = 900.0
# Reading a swarm is bounded itself; ending does not wait longer for it.
JOIN_S = 5.0


def interval_s(plan: RunPlan) -> float:
    """Return how often a swarm is read."""
    return min(MAX_INTERVAL_S, max(LEAST_INTERVAL_S, refresh_period_s(plan.rounds)))


class Repeated:
    """Does something again and again on a thread of its own, while it is entered."""

    def __init__(self, act: Callable[[], None], every_s: float) -> None:
        """`act` is done now, and `every_s` seconds after it ended the last time."""
        self._act, self._every_s = act, every_s
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Repeated:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._act()
            self._stopping.wait(self._every_s)


class Sampler:
    """Reads the swarm and writes what the page shows. Looking at it makes no work for others."""

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        history: History,
        content: PageContent,
        read_ledger: Callable[[str], dict[str, Any]] | None = None,
    ) -> None:
        """`read` returns a status, `read_ledger` the ledger of a run."""
        self._read, self._history, self._content = read, history, content
        self._read_ledger = read_ledger

    def sample(self) -> None:
        """Read once. What fails is said on the page, and is tried again the next time."""
        try:
            status = self._read()
            before = self._content.status
            if before is not None and before["run"] == status["run"]:
                status = with_what_was_known(status, before)
            self._content.put(status)
            self._history.write(status)
            self._content.put_series(self._history.series(status["run"]["id"]))
        except DipacoError as error:
            logger.warning("%s", error)
            self._content.fail(str(error))
        except Exception as error:
            # The page must not go on showing old values as if they were new.
            logger.exception("reading the swarm failed")
            self._content.fail(f"reading the swarm failed: {type(error).__name__}")

    def sample_ledger(self, run: str) -> None:
        """Read the ledger of the run that is shown, of `run` before the first reading."""
        assert self._read_ledger is not None
        shown = self._content.status["run"]["id"] if self._content.status else run
        try:
            self._content.put_ledger(self._read_ledger(shown))
        except DipacoError as error:
            logger.warning("the ledger cannot be read; it is read again later: %s", error)
        except Exception:
            logger.exception("reading the ledger failed")


def serve_swarm(
    read: Callable[[], dict[str, Any]],
    plan: RunPlan,
    listening: socket.socket,
    history_file: Path | None = None,
    names: tuple[str, ...] = (),
    read_ledger: Callable[[str], dict[str, Any]] | None = None,
) -> int:
    """Serve the page of a swarm that runs until told to end. Returns the exit code."""
    file = history_file or default_history_file()
    history, every_s = History(file), interval_s(plan)
    content = PageContent(every_s)
    sampler = Sampler(read, history, content, read_ledger)
    say(f"run '{plan.name}' ({plan.run_id}) is read every {every_s:g} s; history in {file}")
    with ExitStack() as stack:
        stack.callback(history.close)
        stack.enter_context(Repeated(sampler.sample, every_s))
        if read_ledger is not None:
            stack.enter_context(
                Repeated(lambda: sampler.sample_ledger(plan.run_id), LEDGER_EVERY_S)
            )
        _serve(StatusService(content), listening, names)
    return 0


def _serve(service: StatusService, listening: socket.socket, names: tuple[str, ...]) -> None:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"serving at http://{shown}:{port}")
    serve_until_told(service.application(), listening, names)
