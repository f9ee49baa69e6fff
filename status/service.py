"""The page of a swarm and the JSON under it: the history and the newest status, never the DHT.

What is asked for often is made once for each reading and handed out as bytes; what is worked out
for a request is bounded, and is done on a thread, a few at once.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dipaco.base.errors import DipacoError
from dipaco.base.metrics import CONTENT_TYPE

from .history import History
from .metrics import swarm_text

PAGE = Path(__file__).with_name("page.html")
MOST_POINTS = 1000
# Moments that are unpacked for one peer's, path's or module's history.
MOST_UNPACKED = 120
KEPT_ANSWERS = 32
_PEER = re.compile(r"[1-9A-HJ-NP-Za-km-z]{1,64}")
_MODULE = re.compile(r"L[0-9]{1,4}\.E[0-9]{1,5}|P[0-9]{1,8}")
_NUMBER = re.compile(r"[0-9]{1,9}")

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A body that is handed out again and again."""

    body: bytes
    packed: bytes
    tag: str

    @classmethod
    def of(cls, values: Values, tag: str) -> Answer:
        """Return the answer with these values; equal tags are equal bodies."""
        body = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        return cls(body, gzip.compress(body, 5, mtime=0), f'"{tag}"')


class Board:
    """The newest status, and what is wrong with reading it. Written by one thread, read by many."""

    def __init__(self, interval_s: float) -> None:
        """Make a board that is written every `interval_s` seconds."""
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._status: dict[str, Any] | None = None
        self._error: str | None = None
        self._answer = self._make()

    def put(self, status: dict[str, Any]) -> None:
        """Show a new status."""
        with self._lock:
            self._status, self._error = status, None
            self._answer = self._make()

    def fail(self, error: str) -> None:
        """Say why there is no newer one."""
        with self._lock:
            if error != self._error:
                self._error = error
                self._answer = self._make()

    def _make(self) -> Answer:
        time_s = self._status["time_s"] if self._status else None
        values = {
            "live": True,
            "interval_s": self._interval_s,
            "error": self._error,
            "status": self._status,
        }
        error = hashlib.sha256((self._error or "").encode()).hexdigest()[:8]
        return Answer.of(values, f"{time_s}-{error}")

    @property
    def answer(self) -> Answer:
        """The newest status as the page asks for it."""
        with self._lock:
            return self._answer

    @property
    def status(self) -> dict[str, Any] | None:
        """The newest status."""
        with self._lock:
            return self._status


class Credits:
    """What a ledger says that each peer has contributed. Written by one thread, read by many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_peer: dict[str, Any] = {}
        self._answer: Answer | None = None

    def put(self, ledger: dict[str, Any]) -> None:
        """Show a ledger as `dipaco.protocol.ledger.exported` returns it."""
        answer = Answer.of(ledger, f"ledger {ledger['tokens']}")
        with self._lock:
            self._by_peer = {one["peer_id"]: one for one in ledger["peers"]}
            self._answer = answer

    def of(self, peer: str) -> dict[str, Any] | None:
        """Return what the ledger says of a peer."""
        with self._lock:
            return self._by_peer.get(peer)

    @property
    def answer(self) -> Answer | None:
        """The whole ledger; None when there is none."""
        with self._lock:
            return self._answer


class StatusService:
    """The endpoints."""

    def __init__(self, history: History, board: Board, credits: Credits) -> None:
        self._history, self._board, self._credits = history, board, credits
        self._page = PAGE.read_text(encoding="utf-8")
        self._policy = _policy(self._page)
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def application(self) -> Starlette:
        """Return the application, for a server or a test."""
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/api/status", self.status),
                Route("/api/series", self.series),
                Route("/api/ledger", self.ledger),
                Route("/metrics", self.metrics),
                Route("/api/peer/{id}", self.peer),
                Route("/api/path/{id}", self.path),
                Route("/api/module/{id}", self.module),
            ],
            exception_handlers={HTTPException: _say_error, Exception: _say_failure},
        )

    async def page(self, request: Request) -> Response:
        """Return the page for people."""
        return Response(
            self._page,
            media_type="text/html; charset=utf-8",
            headers={
                "content-security-policy": self._policy,
                "cache-control": "no-cache",
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
            },
        )

    async def status(self, request: Request) -> Response:
        """Return the swarm as it is, or as it was `at` a moment."""
        at_s = _moment(request)
        if at_s is None:
            return _answer(request, self._board.answer)
        return await self._worked_out(request, f"status {at_s}", lambda: self._at(at_s))

    def _at(self, at_s: float) -> Values:
        status = self._history.at(at_s)
        if status is None:
            raise HTTPException(404, "nothing has been kept yet; ask again later")
        return {"live": False, "interval_s": 0, "error": None, "status": status}

    async def series(self, request: Request) -> Response:
        """Return the figures of the swarm over time, by column."""
        begin_s = _number(request, "since", -math.inf)
        end_s = _number(request, "until", math.inf)
        points = int(_number(request, "points", 500.0))
        if not 1 <= points <= MOST_POINTS:
            raise HTTPException(400, f"points={points}: give 1 to {MOST_POINTS}")

        def read() -> Values:
            span = self._history.span()
            return {
                "ledger": self._credits.answer is not None,
                "span": None if span is None else vars(span),
                "series": self._history.series(begin_s, end_s, points),
            }

        return await self._worked_out(request, f"series {begin_s} {end_s} {points}", read)

    async def ledger(self, request: Request) -> Response:
        """Return the whole ledger as `dipaco-ledger --json` prints it."""
        answer = self._credits.answer
        if answer is None:
            raise HTTPException(404, "there is no ledger here; start it with --ledger FILE")
        return _answer(request, answer)

    async def metrics(self, request: Request) -> Response:
        """Return the newest status as Prometheus reads it."""
        status = self._board.status
        if status is None:
            raise HTTPException(503, "nothing has been read yet; ask again later")
        return Response(swarm_text(status), headers={"content-type": CONTENT_TYPE})

    async def peer(self, request: Request) -> Response:
        """Return what a peer does, and what it did over time."""
        peer = _named(request, _PEER, "a peer's id")

        def find(status: Values) -> Values | None:
            return next((one for one in status["peers"] if one["peer_id"] == peer), None)

        columns = ("state", "path", "tokens_per_s", "reachable", "bytes_up", "bytes_down")
        return await self._one(request, "peer", peer, find, columns)

    async def path(self, request: Request) -> Response:
        """Return how a path is, and how it was over time."""
        path = int(_named(request, _NUMBER, "a path's number"))

        def find(status: Values) -> Values | None:
            paths = status["paths"]
            return paths[path] if path < len(paths) else None

        columns = ("state", "last_round", "tokens", "validation_loss", "tokens_per_s")
        return await self._one(request, "path", str(path), find, columns)

    async def module(self, request: Request) -> Response:
        """Return how a module is, and how it was over time."""
        module = _named(request, _MODULE, "a module's name")

        def find(status: Values) -> Values | None:
            return next((one for one in status["modules"] if one["module"] == module), None)

        columns = ("version", "weight", "last_round", "trainers", "agree", "digest")
        return await self._one(request, "module", module, find, columns)

    async def _one(
        self,
        request: Request,
        kind: str,
        name: str,
        find: Callable[[Values], Values | None],
        columns: Sequence[str],
    ) -> Response:
        """Return one thing of the swarm at a moment, and its columns over time before."""
        at_s = _moment(request)

        def read() -> Values:
            begin: dict[str, list[Any]] = {"time_s": [], **{name: [] for name in columns}}
            end_s = math.inf if at_s is None else at_s
            seen = None
            for status in self._history.moments(end_s=end_s, most=MOST_UNPACKED):
                found = find(status)
                seen = found or seen
                begin["time_s"].append(status["time_s"])
                for column in columns:
                    begin[column].append(found.get(column) if found else None)
            newest = self._board.status if at_s is None else None
            status_then = newest or self._history.at(end_s)
            now = find(status_then) if status_then else None
            if now is None and seen is None:
                raise HTTPException(404, f"no {kind} {name} is known here")
            found = {kind: name, "now": now, "last_seen": now or seen, "history": begin}
            return {**found, "credit": self._credits.of(name)} if kind == "peer" else found

        return await self._worked_out(request, f"{kind} {name} {at_s}", read)

    async def _worked_out(
        self, request: Request, question: str, read: Callable[[], Values]
    ) -> Response:
        """Answer a question from the history, once for as long as the history stays the same."""
        answer = await run_in_threadpool(self._answer_to, question, read)
        return _answer(request, answer)

    def _answer_to(self, question: str, read: Callable[[], Values]) -> Answer:
        # One at a time: what many ask at once is worked out once, and takes one core at most.
        with self._lock:
            span = self._history.span()
            tag = f"{question} {span.count}-{span.end_s}" if span else f"{question} -"
            answer = self._kept.get(tag)
            if answer is None:
                answer = Answer.of(read(), tag)
                self._kept[tag] = answer
            self._kept.move_to_end(tag)
            while len(self._kept) > KEPT_ANSWERS:
                self._kept.popitem(last=False)
            return answer


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


def _answer(request: Request, answer: Answer) -> Response:
    headers = {"etag": answer.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == answer.tag:
        return Response(status_code=304, headers=headers)
    body = answer.body
    if "gzip" in request.headers.get("accept-encoding", ""):
        body = answer.packed
        headers["content-encoding"] = "gzip"
    headers["x-content-type-options"] = "nosniff"
    return Response(body, media_type="application/json", headers=headers)


def _moment(request: Request) -> float | None:
    return _number(request, "at", 0.0) if "at" in request.query_params else None


def _number(request: Request, name: str, usual: float) -> float:
    given = request.query_params.get(name)
    if given is None:
        return usual
    try:
        value = float(given[:32])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not 0 <= value <= 1e11:
        raise HTTPException(400, f"{name}={given[:32]!r}: give a Unix time or a count")
    return value


def _named(request: Request, pattern: re.Pattern[str], what: str) -> str:
    given = str(request.path_params["id"])
    if not pattern.fullmatch(given):
        raise HTTPException(400, f"{given[:64]!r} is not {what}")
    return given


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    body = json.dumps({"error": message}) + "\n"
    return Response(body, status, dict(headers or {}), media_type="application/json")


async def _say_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {
        404: f"there is nothing at {request.url.path[:80]}; look at /api/status",
        405: f"{request.method} is not for {request.url.path[:80]}; GET is",
    }
    usual = error.detail in ("Not Found", "Method Not Allowed")
    message = told.get(error.status_code, error.detail) if usual else error.detail
    return _error(error.status_code, message, error.headers)


async def _say_failure(request: Request, error: Exception) -> Response:
    message = str(error) if isinstance(error, DipacoError) else "it failed; its log says why"
    return _error(500, message)
