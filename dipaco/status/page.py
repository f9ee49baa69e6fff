"""`dipaco-status --serve`: the page of a swarm and the JSON under it.

Threads read the swarm. Visitors cause no work: each answer is made once for a reading, and sent as
bytes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dipaco.base.errors import DipacoError
from dipaco.base.http_server import serve_until_told
from dipaco.base.running import say
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.records import refresh_period_s

from .history import COLUMNS, History, default_file
from .summary import with_what_was_known
from .swarm_metrics import swarm_metrics

logger = logging.getLogger("dipaco.status.page")

PAGE = Path(__file__).with_name("page.html")
# The swarm is read as often as its records change, within these bounds.
_INTERVAL_S = (5.0, 60.0)
# The ledger, for which all chains are read from the genesis, is counted after each step; but of the
# time no more than a tenth goes into it.
_LOOK_FOR_STEPS_S = 2.0
_LEDGER_SHARE = 0.1
# Reading a swarm is bounded itself; ending does not wait longer for it.
_JOIN_S = 5.0


@dataclass(frozen=True)
class Answer:
    """A body that is handed out again and again."""

    body: bytes
    packed: bytes
    tag: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Answer:
        """Return the answer with these values."""
        body = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        tag = hashlib.sha256(body).hexdigest()[:16]
        return cls(body, gzip.compress(body, 5, mtime=0), f'"{tag}"')


class SwarmPage:
    """What the page shows, and what is wrong with reading it.

    Each answer is written by one thread and read by many; replacing it is one assignment.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        history: History,
        interval_s: float,
        read_ledger: Callable[[], dict[str, Any]] | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` returns a status, and is called every `interval_s` seconds; `read_ledger` returns
        the ledger of the run that was read last."""
        self._read, self._history, self._read_ledger = read, history, read_ledger
        self._monotonic, self._count_at_s = monotonic, -math.inf
        self._counted: tuple[str, int] | None = None
        self._said: dict[str, str] = {}
        """Why each thing that is read could not be read the last time."""
        self._interval_s = interval_s
        self.status: dict[str, Any] | None = None
        """The newest status."""
        self.error: str | None = None
        """Why the swarm could not be read the last time."""
        self.ledger: Answer | None = None
        self.newest = self._answer()
        self.series = Answer.of(dict.fromkeys(COLUMNS, ()))

    def look(self) -> None:
        """Read the swarm once. A failure is shown on the page, and the next look tries again."""
        try:
            status = self._read()
            if self.status is not None and self.status["run"] == status["run"]:
                status = with_what_was_known(status, self.status)
            self.status, self.error = status, None
            self.newest = self._answer()
            self._history.write(status)
            self.series = Answer.of(self._history.series(status["run"]["id"]))
            self._said.pop("the swarm", None)
        except DipacoError as error:
            self._complain("the swarm", error)
            self._fail(str(error))
        except Exception as error:
            # The page must not go on showing old values as if they were new.
            logger.exception("reading the swarm failed")
            self._fail(f"reading the swarm failed: {type(error).__name__}")

    def count(self) -> None:
        """Read the ledger of the run that is shown, if a step came since the last time."""
        status, began_s = self.status, self._monotonic()
        if status is None or began_s < self._count_at_s:
            return
        run = status["run"]["id"]
        rows = sum(module["weight"] for module in status["modules"])
        if self._counted == (run, rows):
            return
        assert self._read_ledger is not None
        try:
            ledger = self._read_ledger()
            self.ledger = Answer.of({**ledger, "counted_at_s": time.time()})
            self._counted = run, rows
            self._said.pop("the ledger", None)
        except DipacoError as error:
            self._complain("the ledger", error)
        except Exception:
            logger.exception("reading the ledger failed")
        ended_s = self._monotonic()
        self._count_at_s = ended_s + (ended_s - began_s) / _LEDGER_SHARE

    def _complain(self, what: str, error: DipacoError) -> None:
        """Log why something cannot be read, once, however often it fails."""
        if self._said.get(what) != str(error):
            self._said[what] = str(error)
            logger.warning("%s cannot be read; it is tried again: %s", what, error)

    def _fail(self, error: str) -> None:
        self.error = error
        self.newest = self._answer()

    def _answer(self) -> Answer:
        return Answer.of(
            {
                "interval_s": self._interval_s,
                "error": self.error,
                "has_ledger": self.ledger is not None,
                "status": self.status,
            }
        )


def serve_swarm(
    read: Callable[[], dict[str, Any]],
    read_ledger: Callable[[History], dict[str, Any]],
    plan: RunPlan,
    listening: socket.socket,
    names: tuple[str, ...] = (),
    file: Path | None = None,
) -> int:
    """Serve the page of a swarm that runs until told to end. Returns the exit code.

    What was seen is kept in `file`. The page answers to `names`, as `serve_until_told` says.
    """
    file, every_s = file or default_file(), interval_s(plan)
    host, port = listening.getsockname()[:2]
    history = History(file)
    page = SwarmPage(read, history, every_s, lambda: read_ledger(history))
    say(f"run '{plan.name}' ({plan.run_id}) is read every {every_s:g} s; its curves are in {file}")
    with repeated(page.look, every_s), repeated(page.count, _LOOK_FOR_STEPS_S):
        say(f"serving at http://{f'[{host}]' if ':' in host else host}:{port}")
        serve_until_told(application(page), listening, names)
    history.close()
    return 0


def interval_s(plan: RunPlan) -> float:
    """Return how often a swarm is read."""
    least_s, most_s = _INTERVAL_S
    return min(most_s, max(least_s, refresh_period_s(plan.rounds)))


@contextmanager
def repeated(act: Callable[[], None], every_s: float) -> Iterator[threading.Thread]:
    """Do something on a thread of its own while the body runs: now, and `every_s` seconds after it
    ended the last time."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.is_set():
            act()
            stopping.wait(every_s)

    thread = threading.Thread(target=run, name="status", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stopping.set()
        thread.join(_JOIN_S)


# -- what the server answers


def application(page: SwarmPage) -> Starlette:
    """Return the application, for a server or a test."""
    text = PAGE.read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(text),
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }

    async def show(request: Request) -> Response:
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)

    async def metrics(request: Request) -> Response:
        if page.status is None:
            raise HTTPException(503, "nothing has been read yet; ask again later")
        status = page.status
        if page.error is not None:
            # What was seen before is no proof of health now.
            status = {**status, "healthy": False}
        body = generate_latest(swarm_metrics(status))
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})

    def answer(of: Callable[[], Answer | None]) -> Callable[[Request], Awaitable[Response]]:
        async def hand_out(request: Request) -> Response:
            found = of()
            if found is None:
                raise HTTPException(404, "the ledger has not been read yet; ask again later")
            return _hand_out(request, found)

        return hand_out

    return Starlette(
        routes=[
            Route("/", show),
            Route("/api/status", answer(lambda: page.newest)),
            Route("/api/series", answer(lambda: page.series)),
            Route("/api/ledger", answer(lambda: page.ledger)),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _say_error, Exception: _say_failure},
    )


def _policy(page: str) -> str:
    """Return what a browser may do with the page: run what stands in it, and ask this server.

    No other place is asked for anything, no other page may frame it, and what a stranger smuggled
    into the page would not run.
    """
    allowed = {}
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        allowed[tag] = f"{tag}-src 'sha256-{digest}'"
    return (
        f"default-src 'none'; {allowed['script']}; {allowed['style']}; connect-src 'self'; "
        "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def _hand_out(request: Request, answer: Answer) -> Response:
    headers = {"etag": answer.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == answer.tag:
        return Response(status_code=304, headers=headers)
    body = answer.body
    if "gzip" in request.headers.get("accept-encoding", ""):
        body = answer.packed
        headers["content-encoding"] = "gzip"
    headers["x-content-type-options"] = "nosniff"
    return Response(body, media_type="application/json", headers=headers)


async def _say_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {
        "Not Found": f"there is nothing at {request.url.path[:80]}; look at /api/status",
        "Method Not Allowed": f"{request.method} is refused at {request.url.path[:80]}; use GET",
    }.get(error.detail, error.detail)
    return Response(_line(said), error.status_code, error.headers, "application/json")


async def _say_failure(request: Request, error: Exception) -> Response:
    said = str(error) if isinstance(error, DipacoError) else "it failed; its log says why"
    return Response(_line(said), 500, media_type="application/json")


def _line(error: str) -> str:
    return json.dumps({"error": error}) + "\n"
