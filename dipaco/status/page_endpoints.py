"""The page of a swarm and the JSON under it, made once for each reading and handed out as bytes."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
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

from .curves import COLUMNS
from .swarm_metrics import swarm_metrics

PAGE = Path(__file__).with_name("page.html")


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


class PageContent:
    """What the page shows, and what is wrong with reading it.

    Each answer is written by one thread and read by many; replacing it is one assignment.
    """

    def __init__(self, interval_s: float) -> None:
        """Tell the page that there is a new status every `interval_s` seconds."""
        self._interval_s = interval_s
        self.status: dict[str, Any] | None = None
        """The newest status."""
        self.ledger: Answer | None = None
        self.newest = self._answer(None)
        self.series = Answer.of(dict.fromkeys(COLUMNS, ()))

    def put(self, status: dict[str, Any]) -> None:
        """Show a new status."""
        self.status, self.newest = status, self._answer(None, status)

    def put_series(self, series: Mapping[str, Any]) -> None:
        """Show figures over time."""
        self.series = Answer.of(series)

    def put_ledger(self, ledger: Mapping[str, Any]) -> None:
        """Show who has contributed, as `dipaco.protocol.ledger.exported` returns it."""
        self.ledger = Answer.of(ledger)

    def fail(self, error: str) -> None:
        """Say why there is no newer status."""
        self.newest = self._answer(error, self.status)

    def _answer(self, error: str | None, status: dict[str, Any] | None = None) -> Answer:
        return Answer.of(
            {
                "interval_s": self._interval_s,
                "error": error,
                "has_ledger": self.ledger is not None,
                "status": status,
            }
        )


class StatusService:
    """The endpoints."""

    def __init__(self, content: PageContent) -> None:
        self._content = content
        self._page = PAGE.read_text(encoding="utf-8")
        self._policy = _policy(self._page)

    def application(self) -> Starlette:
        """Return the application, for a server or a test."""
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/api/status", self.status),
                Route("/api/series", self.series),
                Route("/api/ledger", self.ledger),
                Route("/metrics", self.metrics),
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
        """Return the swarm as it was read last."""
        return _hand_out(request, self._content.newest)

    async def series(self, request: Request) -> Response:
        """Return the figures of the swarm over time, by column."""
        return _hand_out(request, self._content.series)

    async def ledger(self, request: Request) -> Response:
        """Return what `dipaco-status --ledger --json` prints."""
        if self._content.ledger is None:
            raise HTTPException(404, "there is no ledger here, or not yet; start it with --ledger")
        return _hand_out(request, self._content.ledger)

    async def metrics(self, request: Request) -> Response:
        """Return the newest status as Prometheus reads it."""
        if self._content.status is None:
            raise HTTPException(503, "nothing has been read yet; ask again later")
        text = generate_latest(swarm_metrics(self._content.status))
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


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
