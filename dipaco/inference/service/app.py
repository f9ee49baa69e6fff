"""The web application: OpenAI's interface over the engine, bounds on what comes in, and the page.

Nothing here computes: the event loop only hands work over and passes on what comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .answers import Reply
from .engine import Engine
from .errors import ApiError
from .requests import (
    AUTO,
    ChatBody,
    CompletionBody,
    Request,
    RequestReader,
    parse_body,
    path_name,
)
from .texts import TokenNames
from .work import Ended, Event, Failed

logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("page.html")
_BODY_LIMIT_S = 30.0
_CLIENT_LEFT = 499
# A person sees no difference to a wake for each token.
_WAKE_S = 0.02

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class ServiceLimits:
    """What a request may take."""

    body_bytes: int = 4 * 2**20
    timeout_s: float = 300.0


class Service:
    """The endpoints.

    :param template: the chat template, None where the model has none
    """

    def __init__(
        self,
        engine: Engine,
        *,
        limits: ServiceLimits | None = None,
        api_key: str | None = None,
        template: str | None = None,
    ) -> None:
        self._engine = engine
        self._limits = limits or ServiceLimits()
        self._api_key = api_key
        self._reader = RequestReader(engine, template=template, timeout_s=self._limits.timeout_s)
        self._names = TokenNames(engine.tokenizer)
        self._started = int(time.time())
        self._page = PAGE.read_text(encoding="utf-8")

    def close(self) -> None:
        """End what runs beside this process."""
        self._reader.close()

    def application(self) -> Starlette:
        """Return the application, for a server or a test."""
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{name}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _say_api_error,
                HTTPException: _say_http_error,
                Exception: _say_failure,
            },
        )

    async def page(self, request: HttpRequest) -> Response:
        """Return the page for people."""
        # Only itself: no other place is asked for anything, and no other page may frame it.
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
        )
        return HTMLResponse(self._page, headers={"content-security-policy": policy})

    async def health(self, request: HttpRequest) -> Response:
        """Say whether answers can be expected; open to everybody."""
        engine = self._engine
        alive = engine.is_alive
        troubles = [*engine.troubles, *dict(engine.unavailable).values()]
        return JSONResponse(
            {
                "status": ("degraded" if troubles else "ok") if alive else "failed",
                "troubles": troubles,
                "unfinished": engine.unfinished,
                "paths_in_memory": sorted({path for paths in engine.loaded() for path in paths}),
            },
            status_code=200 if alive else 503,
        )

    async def models(self, request: HttpRequest) -> Response:
        """List `auto` and every path, with the states that are served."""
        self._check_key(request)
        loaded = self._engine.loaded()
        shown = [self._shown_auto()]
        shown += [self._shown_path(path, loaded) for path in range(self._engine.grid.path_count)]
        return JSONResponse({"object": "list", "data": shown})

    async def model(self, request: HttpRequest) -> Response:
        """Show one model."""
        self._check_key(request)
        path = self._reader.path_of(request.path_params["name"])
        if path is None:
            return JSONResponse(self._shown_auto())
        return JSONResponse(self._shown_path(path, self._engine.loaded()))

    def _shown_auto(self) -> dict[str, Any]:
        plan = self._engine.plan
        return {
            **self._shown(AUTO),
            "dipaco": {
                "run": plan.run_id,
                "paths": self._engine.grid.path_count,
                "chat": self._reader.has_template,
            },
        }

    def _shown_path(self, path: int, loaded: Any) -> dict[str, Any]:
        batch = loaded.get((path,))
        if batch is None:
            states: dict[str, Any] = {
                "modules": [{"module": m} for m in self._engine.grid.modules_of_path(path)]
            }
            reason = self._engine.unavailable.get(path)
            if reason is not None:
                states["unavailable"] = reason
        else:
            states = {
                "modules": list(batch.states.modules),
                "states": batch.states.short,
            }
        return {
            **self._shown(path_name(path)),
            "dipaco": {"path": path, "in_memory": batch is not None, **states},
        }

    def _shown(self, name: str) -> dict[str, Any]:
        plan = self._engine.plan
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": plan.name,
            "max_model_len": self._engine.model.sequence_length,
        }

    async def completions(self, request: HttpRequest) -> Response:
        """Continue texts."""
        return await self._answer(request, CompletionBody, self._reader.completion)

    async def chat(self, request: HttpRequest) -> Response:
        """Answer a chat."""
        return await self._answer(request, ChatBody, self._reader.chat)

    async def _answer(
        self,
        http: HttpRequest,
        kind: type[Any],
        read: Callable[[Any, Callable[[int, Event], None]], Request],
    ) -> Response:
        self._check_key(http)
        content = await self._content(http)
        mailbox = Mailbox(asyncio.get_running_loop())
        # Long texts take a while to parse and to cut into tokens.
        request = await asyncio.to_thread(lambda: read(parse_body(content, kind), mailbox.put))
        prefix = "chatcmpl" if kind is ChatBody else "cmpl"
        reply = Reply(
            request, f"{prefix}-{secrets.token_hex(12)}", self._engine.plan.run_id, self._names
        )
        mailbox.is_watched = bool(request.body.stream)
        self._engine.submit(request.works)
        if request.body.stream:
            return EventStream(request, reply, mailbox)
        try:
            return await _unless_left(http.receive, _gathered(reply, mailbox))
        finally:
            _cancel(request)

    def _check_key(self, request: HttpRequest) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "")
        scheme, _, key = given.strip().partition(" ")
        is_right = hmac.compare_digest(key.strip().encode(), self._api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "this service wants its key: Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    async def _content(self, request: HttpRequest) -> bytes:
        """Return the body. Raises ApiError if it is too long, too slow or of another kind."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also so that no foreign web page can use the service through a visitor's browser.
            raise ApiError(
                415, f"the content type is '{kind}'; send Content-Type: application/json"
            )
        most = self._limits.body_bytes
        too_long = ApiError(413, f"the body is longer than {most} bytes")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise too_long
        parts: list[bytes] = []
        received = 0
        try:
            async with asyncio.timeout(_BODY_LIMIT_S):
                async for part in request.stream():
                    received += len(part)
                    if received > most:
                        raise too_long
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {_BODY_LIMIT_S:.0f} s") from None
        except ClientDisconnect:
            raise ApiError(_CLIENT_LEFT, "the client left") from None
        return b"".join(parts)


class Mailbox:
    """Brings events of the model thread to the event loop, which is woken once for many of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[tuple[int, Event]] = deque()
        self._has_come = asyncio.Event()
        self._next_wake_s = 0.0
        self.is_watched = False
        """Somebody sees the answer as it comes; else only its end matters."""

    def put(self, prompt: int, event: Event) -> None:
        """Leave an event; called by the model thread."""
        self._events.append((prompt, event))
        now_s = time.monotonic()
        is_due = self.is_watched and now_s >= self._next_wake_s
        if is_due or isinstance(event, Ended | Failed):
            self._next_wake_s = now_s + _WAKE_S
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                self._loop.call_soon_threadsafe(self._has_come.set)

    async def take(self) -> list[tuple[int, Event]]:
        """Wait for events and return them."""
        while not self._events:
            await self._has_come.wait()
            self._has_come.clear()
        return [self._events.popleft() for _ in range(len(self._events))]


async def _gathered(reply: Reply, mailbox: Mailbox) -> Response:
    """Wait for a whole answer."""
    while reply.open:
        for prompt, event in await mailbox.take():
            if isinstance(event, Failed):
                raise event.error
            reply.take(prompt, event)
    return JSONResponse(reply.whole(), headers=reply.headers())


async def _unless_left(receive: Receive, answer: Awaitable[Response]) -> Response:
    """Return the answer, or stop waiting for it when the client leaves."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(left())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        return Response(status_code=_CLIENT_LEFT)
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


def _cancel(request: Request) -> None:
    """Have nothing more computed for a request; harmless when all of it was."""
    for work in request.works:
        work.cancelled = True


class EventStream(Response):
    """An answer as server-sent events, until it ends or the client leaves."""

    def __init__(self, request: Request, reply: Reply, mailbox: Mailbox) -> None:
        super().__init__(media_type="text/event-stream")
        self._request = request
        self._reply = reply
        self._mailbox = mailbox
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            await _unless_left(receive, self._sent(send))
        finally:
            _cancel(self._request)

    async def _sent(self, send: Send) -> Response:
        """Send everything. An error before anything was said has a status of its own."""
        started = False
        while not self._is_over:
            said = self._lines(await self._mailbox.take())
            if not said:
                continue
            if not started and isinstance(said[0], ApiError):
                return await self._refuse(said[0], send)
            if not started:
                started = True
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-store"),
                    (b"x-accel-buffering", b"no"),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            lines = [json.dumps(o.body()) if isinstance(o, ApiError) else o for o in said]
            if self._is_over:
                lines.append("[DONE]")
            body = "".join(f"data: {line}\n\n" for line in lines).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return self

    def _lines(self, events: list[tuple[int, Event]]) -> list[str | ApiError]:
        """Return what is said of some events, and note when all was."""
        reply, options = self._reply, self._request.body.stream_options
        said: list[str | ApiError] = []
        for prompt, event in events:
            if isinstance(event, Failed):
                self._is_over = True
                return [*said, event.error]
            reply.take(prompt, event)
            said += reply.chunks(prompt, event)
        self._is_over = not reply.open
        if self._is_over and options is not None and options.include_usage:
            said.append(reply.usage_chunk())
        return said

    async def _refuse(self, error: ApiError, send: Send) -> Response:
        response = _error_response(error)
        await send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": response.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": response.body})
        return response


def _error_response(error: ApiError) -> JSONResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _say_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _say_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {
        404: f"there is nothing at {request.url.path}; look at /v1/models",
        405: f"{request.method} is not for {request.url.path}",
    }
    message = told.get(error.status_code, error.detail)
    response = _error_response(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _say_failure(request: HttpRequest, error: Exception) -> Response:
    return _error_response(ApiError(500, "the service failed; its log says why"))
