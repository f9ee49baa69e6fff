"""Listening, and ending when told to: for `dipaco-status --serve` and `dipaco-serve`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import signal
import socket
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dipaco.base.errors import AddressError, printable
from dipaco.base.running import stop_signals

# Answers under way get so long when the service is told to end.
_GRACE_S = 3
_WAITING_CONNECTIONS = 256
_MAX_CONNECTIONS = 1024
# A request has come by then.
REQUEST_LIMIT_S = 30.0
# A client that takes nothing of its answer for so long is gone.
ANSWER_LIMIT_S = 30.0
# Connections on which a client is waited for, to send its request or to take its answer; of more
# the one that has waited longest goes. So half requests and answers that nobody takes, however
# often they are begun anew, keep nobody out.
MAX_WAITING = 256


def listen(host: str, port: int, flags: str = "--host and --port") -> socket.socket:
    """Return a listening socket. Raises AddressError when the address cannot be had.

    `flags` are how the command is told where to listen.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=_WAITING_CONNECTIONS)
    except OSError as error:
        raise AddressError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose others with "
            f"{flags} (port 0 is any free one)"
        ) from None
    return found


class _Protocol(H11Protocol):
    """Closes a connection on which no whole request comes in time, one whose answer is not taken,
    and one whose request could be read in two ways."""

    _deadline: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None
    _waiting: OrderedDict[asyncio.BaseTransport, None]
    """The connections of a server on which a client is waited for, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            if self.conn.their_state is not h11.SEND_BODY:
                self._stop_waiting()
            names = [name.lower() for name, _ in self.cycle.scope["headers"]]
            if b"content-length" in names and b"transfer-encoding" in names:
                self.transport.abort()
        else:
            self._expect()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of the answer to be taken."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_taking()
        else:
            self._expect()

    def pause_writing(self) -> None:
        """Wait for the client to take what was sent."""
        super().pause_writing()
        self._expect_taking()

    def resume_writing(self) -> None:
        """Go on: the client has taken most of it."""
        super().resume_writing()
        if self._untaken is not None and not self.transport.is_closing():
            self._untaken.cancel()
            self._untaken = None
            self._count()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None
        self._stop_waiting()
        self._count()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_LIMIT_S, self.transport.abort)
            self._count()

    def _expect_taking(self) -> None:
        if self._untaken is None:
            self._untaken = self.loop.call_later(ANSWER_LIMIT_S, self.transport.abort)
            self._count()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._count()

    def _count(self) -> None:
        """Count the connection as long as its client is waited for; the oldest of too many goes."""
        if self._deadline is None and self._untaken is None:
            self._waiting.pop(self.transport, None)
            return
        self._waiting[self.transport] = None
        while len(self._waiting) > MAX_WAITING:
            oldest, _ = self._waiting.popitem(last=False)
            oldest.abort()  # type: ignore[attr-defined]


class _Server(uvicorn.Server):
    """Ends when it is told to, and lets the command end as usual then."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals that end a command while it serves; the second ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, self.handle_exit) for n in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the application close what it has, also when it is told to end at once."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


class _KnownHosts:
    """Answers to these names, and to who gives none: a health check of HTTP/1.0 does, and a browser
    never."""

    def __init__(self, application: ASGIApp, names: Collection[str]) -> None:
        self._application, self._names = application, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or "*" in self._names or _without_port(host) in self._names:
            await self._application(scope, receive, send)
            return
        error = (
            f"this service does not answer to the name '{printable(host[:80])}'; if a server in "
            "front of it passes the name on, start the service with --proxy-name NAME\n"
        )
        await PlainTextResponse(error, status_code=400)(scope, receive, send)


def _without_port(host: str) -> str:
    return re.sub(r":[0-9]+$", "", host.lower())


def server_of(application: Starlette, names: tuple[str, ...] = ("*",)) -> uvicorn.Server:
    """Return the server of an application, which serves when it is run.

    It answers who calls it by one of `names`.
    """
    return _Server(
        uvicorn.Config(
            _KnownHosts(application, names),
            http=type("_Protocol", (_Protocol,), {"_waiting": OrderedDict()}),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=30,
            limit_concurrency=_MAX_CONNECTIONS,
            server_header=False,
            h11_max_incomplete_event_size=64 * 1024,
        )
    )


def serve_until_told(
    application: Starlette, listening: socket.socket, names: tuple[str, ...] = ()
) -> None:
    """Serve until a signal that ends a command; a second one ends at once.

    What listens on this machine alone answers to the names of this machine and to `names`: a page
    from elsewhere whose name leads here must not read it through a visitor's browser.
    """
    address = listening.getsockname()[0]
    is_local = ipaddress.ip_address(address).is_loopback
    allowed = (
        ("localhost", "127.0.0.1", "[::1]", address, *map(str.lower, names)) if is_local else ("*",)
    )
    server_of(application, allowed).run(sockets=[listening])
