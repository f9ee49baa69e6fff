"""The web application before llama.cpp's servers: who may ask, what for, and which path answers.

A request is checked, waits for its place, is routed as training routes texts, and goes to the
server of its path. What comes back is passed on as it comes, and nothing is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dipaco.protocol.plan import RunPlan
from dipaco.routing.routers.document_routing import DocumentRouter

from .api_error import ApiError
from .fair_places import FairPlaces, client_of
from .path_servers import PathServer, PathServers
from .request_fields import AUTO, PathRequest, RequestReader, path_name
from .whole_answer import WholeAnswer

logger = logging.getLogger(__name__)

_MOST_BODY_BYTES = 2 * 2**20
_BODY_LIMIT_S = 30.0
# Bodies that are read and cut into tokens at the same time.
_READ_AT_ONCE = 16
_CONNECT_LIMIT_S = 30.0
# A process that aborts closes its connections a moment before it has ended.
_ENDING_S = 1.0
_JSON = {"content-type": "application/json"}
_MOST_ERROR_BYTES = 2**16
_CLIENT_LEFT = 499
# llama.cpp sends it while it has no answer yet to several prompts; no client knows it.
_NO_EVENT = b"data: null\n\n"
# llama.cpp sends its page packed to those who can read that, and to others not at all.
_PAGE_HEADERS = {"accept-encoding": "gzip"}
_PAGE_FILES = re.compile(
    r"/(index\.html|build\.json|manifest\.webmanifest|[\w-]+\.(ico|svg|png|js)|_app/[\w./-]+)?"
)
# Nothing is loaded from elsewhere, and no other page may frame this one.
_PAGE_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class RouteLimits:
    """What requests may take."""

    places: int
    """Answers that are computed at the same time, of all paths together."""
    queue: int
    """Requests that may wait."""
    timeout_s: float = 300.0
    """The limit until an answer is complete, with all the waits before it."""


class OpenAiRoute:
    """The endpoints.

    :param servers: started and closed by this application
    :param api_key: what clients must send as their key; None lets everybody in
    """

    def __init__(
        self,
        servers: PathServers,
        reader: RequestReader,
        router: DocumentRouter,
        plan: RunPlan,
        limits: RouteLimits,
        api_key: str | None = None,
    ) -> None:
        self._servers = servers
        self._reader = reader
        self._router = router
        self._plan = plan
        self._limits = limits
        self._api_key = api_key
        self._reading = FairPlaces(_READ_AT_ONCE, limits.queue)
        self._places = FairPlaces(limits.places, limits.queue)
        # Where texts are cut into tokens and routed, one after the other.
        self._routing = ThreadPoolExecutor(1, thread_name_prefix="routing")
        self._started = int(time.time())

    def application(self) -> Starlette:
        """Return the application, for a server or a test."""
        answers = {
            "/v1/chat/completions": self._reader.chat,
            "/v1/completions": self._reader.completion,
            "/v1/embeddings": self._reader.embedding,
        }
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{name}", self.model),
                Route("/props", self.properties),
                Route("/tools", _nothing, methods=["GET", "POST"]),
                Route("/v1/streams/lookup", _nothing, methods=["POST"]),
                Route("/v1/stream", _nothing, methods=["DELETE"]),
                *(
                    Route(address, partial(self._answer, read, address), methods=["POST"])
                    for address, read in answers.items()
                ),
                Route("/", self.page),
                Route("/{file:path}", self.page),
            ],
            lifespan=self._lifespan,
            exception_handlers={
                ApiError: _say_api_error,
                TimeoutError: _say_too_late,
                HTTPException: _say_http_error,
                Exception: _say_failure,
            },
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        self._servers.start()
        try:
            yield
        finally:
            await self._servers.close()
            self._routing.shutdown(wait=False, cancel_futures=True)
            self._reader.close()

    # -- what is said of the service

    async def health(self, request: Request) -> Response:
        """Say whether newer states come and all paths can be had; open to everybody."""
        troubles = [*self._servers.troubles, *dict(self._servers.unavailable).values()]
        return JSONResponse(
            {
                "status": "degraded" if troubles else "ok",
                "troubles": troubles,
                "answering": self._places.taken,
                "waiting": self._places.waiting,
                "paths_in_memory": sorted(self._servers.served),
            }
        )

    async def models(self, request: Request) -> Response:
        """List `auto` and every path, with the states that are served."""
        self._check_key(request)
        names = (AUTO, *map(path_name, range(self._reader.paths)))
        return JSONResponse({"object": "list", "data": [self._shown(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """Show one model."""
        self._check_key(request)
        path = self._reader.path_of(request.path_params["name"])
        return JSONResponse(self._shown(AUTO if path is None else path_name(path)))

    def _shown(self, name: str) -> dict[str, Any]:
        about: dict[str, Any]
        if (path := self._reader.path_of(name)) is None:
            about = {"run": self._plan.run_id, "paths": self._reader.paths}
        else:
            states = self._servers.served.get(path)
            about = {"path": path, "in_memory": states is not None}
            if states is not None:
                about |= {"states": states.short, "modules": list(states.modules)}
            if path in self._servers.unavailable:
                about["unavailable"] = self._servers.unavailable[path]
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": self._plan.name,
            "max_model_len": self._reader.context,
            "dipaco": about,
        }

    # -- what llama.cpp has for its page

    async def properties(self, request: Request) -> Response:
        """Return what llama.cpp's page asks for: what the model can do, and its settings."""
        self._check_key(request)
        content, _ = await self._fetched("/props")
        shown = json.loads(content)
        shown |= {"model_path": AUTO, "model_alias": AUTO}
        return JSONResponse(shown)

    async def page(self, request: Request) -> Response:
        """Return llama.cpp's page for people, or a file that it needs."""
        name = request.url.path
        if not _PAGE_FILES.fullmatch(name) or ".." in name:
            raise HTTPException(404)
        content, headers = await self._fetched(name)
        headers["content-security-policy"] = _PAGE_POLICY
        return Response(content, headers=headers)

    async def _fetched(self, address: str) -> tuple[bytes, dict[str, str]]:
        """Return what any one of the servers has at an address. Raises ApiError, TimeoutError."""
        served = list(self._servers.served)
        paths = [*served, *(p for p in range(self._reader.paths) if p not in served)]
        async with (
            asyncio.timeout(self._limits.timeout_s),
            self._servers.use(paths) as server,
            _asked(server, "GET", address, headers=_PAGE_HEADERS) as answer,
        ):
            if answer.status != 200:
                raise HTTPException(answer.status)
            kept = ("content-type", "content-encoding", "cache-control")
            headers = {n.lower(): v for n, v in answer.headers.items() if n.lower() in kept}
            return await answer.read(), headers

    # -- answers

    async def _answer(
        self, read: Callable[[bytes], PathRequest], address: str, http: Request
    ) -> Response:
        """Read a request; its answer waits for a place, and is passed on as it comes."""
        self._check_key(http)
        client = client_of(http.client.host if http.client else None)
        deadline_s = asyncio.get_running_loop().time() + self._limits.timeout_s
        async with asyncio.timeout_at(deadline_s), self._reading.take(client):
            content = await _content(http)
            request = await self._apart(partial(read, content))
            paths = await self._paths(request)
        return _Answer(partial(self._send, request, paths, address, client, deadline_s))

    async def _send(
        self,
        request: PathRequest,
        paths: Sequence[int],
        address: str,
        client: str,
        deadline_s: float,
        reply: _Reply,
    ) -> None:
        """Have a request answered by the first of these paths that can be fetched."""
        try:
            async with (
                asyncio.timeout_at(deadline_s),
                self._places.take(client, request.answers),
                self._servers.use(paths) as server,
            ):
                body = request.content(path_name(server.path))
                async with _asked(server, "POST", address, data=body, headers=_JSON) as answer:
                    if answer.status != 200:
                        raise await _refusal(answer)
                    if request.is_whole:
                        whole = WholeAnswer()
                        async for part in answer.content.iter_any():
                            whole.add(part)
                        await reply.begin("application/json", server)
                        await reply.add(whole.body())
                    else:
                        await reply.begin(answer.content_type, server)
                        async for part in answer.content.iter_any():
                            await reply.add(part.replace(_NO_EVENT, b""))
                    await reply.end()
        except ApiError as error:
            await reply.fail(error)
        except TimeoutError:
            await reply.fail(_too_late())

    async def _paths(self, request: PathRequest) -> list[int]:
        """Return the paths that may answer, the best first."""
        if request.path is not None:
            return [request.path]
        ranked = await self._apart(
            partial(self._router.nearest_paths, request.routed_by, self._reader.paths)
        )
        if len(set(ranked[:, 0].tolist())) > 1:
            names = ", ".join(path_name(path) for path in ranked[:, 0].tolist())
            raise ApiError(
                400,
                f"these prompts are for several paths ({names}); send them one by one, or name "
                f"the path",
                parameter="prompt",
            )
        found: list[int] = ranked[0].tolist()
        return found

    async def _apart(self, act: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._routing, act)

    def _check_key(self, request: Request) -> None:
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


class _Reply:
    """What a client is sent: an answer as it comes, or an error."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = self._is_stream = False

    async def begin(self, kind: str, server: PathServer) -> None:
        """Send the head of an answer of this content type, and which path it is of."""
        self._has_begun = True
        self._is_stream = kind == "text/event-stream"
        headers = {
            "content-type": kind,
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-dipaco-path": str(server.path),
            "x-dipaco-states": server.states.short,
        }
        await self._start(200, headers)

    async def add(self, part: bytes) -> None:
        """Send a part of the answer."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """Send that the answer is complete."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Send an error: as the answer, or as the last event of a stream that has begun."""
        body = json.dumps(error.body()).encode()
        if not self._has_begun:
            headers = {"content-type": "application/json", **error.headers()}
            await self._start(error.status, headers)
            await self.add(body)
        elif self._is_stream:
            await self.add(b"data: " + body + b"\n\n")
        else:
            raise error  # the connection is closed, as the answer is not whole
        await self.end()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


class _Answer(Response):
    """An answer that ends when the client leaves."""

    def __init__(self, send_all: Callable[[_Reply], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._send_all = send_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        reply = _Reply(send)
        answering = asyncio.create_task(self._send_all(reply))
        leaving = asyncio.create_task(left())
        is_cut_off = False
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the service has been told to end
            is_cut_off = not answering.done()
        for task in (answering, leaving):
            task.cancel()
        found, _ = await asyncio.gather(answering, leaving, return_exceptions=True)
        if is_cut_off:
            await reply.fail(ApiError(503, "the service is shutting down"))
        elif isinstance(found, Exception):
            raise found


@contextlib.asynccontextmanager
async def _asked(
    server: PathServer, method: str, address: str, **options: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Give a server's answer; llama.cpp stops computing it when this is left. Raises ApiError when
    the server ends meanwhile."""
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(server.server.socket, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_LIMIT_S),
                auto_decompress=False,
            ) as session,
            session.request(method, f"http://localhost{address}", **options) as answer,
        ):
            yield answer
    except aiohttp.ClientError as error:
        reason = str(error)
        if await asyncio.to_thread(server.server.has_ended, _ENDING_S):
            reason = await asyncio.to_thread(server.server.reason)
        logger.warning("path %d did not answer: %s", server.path, reason)
        raise ApiError(
            503, f"path {server.path} did not answer: {reason}; try again", code="path_failed"
        ) from None


async def _refusal(answer: aiohttp.ClientResponse) -> ApiError:
    """Return llama.cpp's reason not to answer."""
    content = await answer.content.read(_MOST_ERROR_BYTES)
    message, kind = content.decode("utf-8", "replace"), None
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(content)["error"]
        message, kind = str(error["message"]), error.get("type")
    code = "context_length_exceeded" if kind == "exceed_context_size_error" else None
    return ApiError(answer.status if 400 <= answer.status < 500 else 503, message, code=code)


async def _content(request: Request) -> bytes:
    """Return the body. Raises ApiError if it is too long, too slow or of another kind."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also so that no foreign web page can use the service through a visitor's browser.
        raise ApiError(415, f"the content type is '{kind}'; send Content-Type: application/json")
    too_long = ApiError(413, f"the body is longer than {_MOST_BODY_BYTES} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 10 or int(length) > _MOST_BODY_BYTES:
        raise too_long
    parts: list[bytes] = []
    received = 0
    try:
        async with asyncio.timeout(_BODY_LIMIT_S):
            async for part in request.stream():
                received += len(part)
                if received > _MOST_BODY_BYTES:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {_BODY_LIMIT_S:.0f} s") from None
    except ClientDisconnect:
        raise ApiError(_CLIENT_LEFT, "the client left") from None
    return b"".join(parts)


def _too_late() -> ApiError:
    return ApiError(
        503, "the answer took longer than the service allows (--timeout-s)", code="timeout"
    )


async def _nothing(request: Request) -> Response:
    """Tell llama.cpp's page that what it asks for does not exist."""
    return JSONResponse([])


async def _say_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


async def _say_too_late(request: Request, error: Exception) -> Response:
    return await _say_api_error(request, _too_late())


async def _say_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {
        404: f"there is nothing at {request.url.path}; look at /v1/models",
        405: f"{request.method} is not for {request.url.path}",
    }
    said = ApiError(error.status_code, told.get(error.status_code, error.detail))
    return JSONResponse(said.body(), status_code=error.status_code, headers=error.headers)


async def _say_failure(request: Request, error: Exception) -> Response:
    return JSONResponse(
        ApiError(500, "the service failed; its log says why").body(), status_code=500
    )
