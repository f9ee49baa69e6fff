"""Listening, and ending when told to: for `dipaco-status --serve` and `dipaco-serve`."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from dipaco.modules.errors import AddressError
from starlette.applications import Starlette

# Answers under way get so long when the service is told to end.
_GRACE_S = 3
_WAITING_CONNECTIONS = 256
_MOST_CONNECTIONS = 1024


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return a listening socket. Raises AddressError when the address cannot be had.

    `flag` is how the command is told its port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=_WAITING_CONNECTIONS)
    except OSError as error:
        raise AddressError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose others with "
            f"--host and {flag} (0 is any free one)"
        ) from None
    return found


class _Server(uvicorn.Server):
    """Ends when it is told to, and lets the command end as usual then."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM for the time of serving; the second one ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        told = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in told}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def server_of(application: Starlette) -> uvicorn.Server:
    """Return the server of an application, which serves when it is run."""
    return _Server(
        uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=30,
            limit_concurrency=_MOST_CONNECTIONS,
            server_header=False,
            h11_max_incomplete_event_size=64 * 1024,
        )
    )


def serve_until_told(application: Starlette, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once."""
    server_of(application).run(sockets=[listening])
