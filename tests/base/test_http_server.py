"""What listens for browsers: the names that it answers to, and how long a request may take."""

import contextlib
import socket
import sys
import threading

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from dipaco.base import http_server
from dipaco.base.http_server import listen, serve_until_told
from support.programs.processes import ran

LIMIT_S = 60.0


async def hello(request):
    return PlainTextResponse(f"hello, {len(await request.body())} bytes")


@pytest.fixture
def port(monkeypatch):
    servers = []
    make = http_server.server_of
    monkeypatch.setattr(http_server, "REQUEST_LIMIT_S", 0.3)
    monkeypatch.setattr(http_server, "server_of", lambda *words: servers.append(make(*words)) or servers[0])
    application = Starlette(routes=[Route("/", hello, methods=["GET", "POST"])])
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=serve_until_told, args=(application, listening, ("status.example.org",)))
        thread.start()
        yield listening.getsockname()[1]
        servers[0].should_exit = True
        thread.join(LIMIT_S)


def said(port, *parts):
    """Return what comes back until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        for part in parts:
            connection.sendall(part.encode())
        answer = b""
        try:
            while data := connection.recv(4096):
                answer += data
        except ConnectionResetError:
            pass
    return answer.decode()


def asked(host, further="connection: close"):
    return f"GET / HTTP/1.1\r\nhost: {host}\r\n{further}\r\n\r\n"


def test_no_page_from_elsewhere_reads_it_through_a_visitor_s_browser(port):
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "status.example.org"):
        assert "hello, 0 bytes" in said(port, asked(host))
    for host in ("evil.example.org", "localhost.evil.example.org", "", "::1", "localhost:evil"):
        answer = said(port, asked(host))
        assert answer.startswith("HTTP/1.1 400")
        assert f"does not answer to the name '{host}'; " in answer
        assert "--proxy-name" in answer


def test_half_a_request_holds_no_place_for_ever(port):
    assert said(port, "GET / HT") == ""
    # Nor does one after a whole one.
    answer = said(port, asked("localhost", "accept: text/plain"), "GET / HTTP/1.1\r\nhost: ")
    assert answer.count("hello, 0 bytes") == 1


def test_half_requests_that_are_renewed_keep_nobody_out(port, monkeypatch):
    # Far beyond the patience of this test: it is not the deadline that closes the oldest.
    monkeypatch.setattr(http_server, "REQUEST_LIMIT_S", 100 * LIMIT_S)
    monkeypatch.setattr(http_server, "MAX_WAITING", 4)
    with contextlib.ExitStack() as held:
        halves = []
        for _ in range(3 * 4):
            connecting = socket.create_connection(("127.0.0.1", port), LIMIT_S)
            halves.append(held.enter_context(connecting))
            halves[-1].sendall(b"GET / HT")
            assert "hello, 0 bytes" in said(port, asked("localhost"))
        with contextlib.suppress(ConnectionResetError):
            assert halves[0].recv(1) == b"", "the oldest is closed"


def test_of_256_connections_that_wait_for_a_request_none_is_closed_and_of_257_the_oldest(port, monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_LIMIT_S", 100 * LIMIT_S)
    begun, rest = asked("localhost")[:8], asked("localhost")[8:]

    def half():
        halves.append(held.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S)))
        halves[-1].sendall(begun.encode())

    with contextlib.ExitStack() as held:
        halves = []
        for _ in range(255):
            half()
        # The answer says that all of them are there: connections are taken in their order.
        assert "hello, 0 bytes" in said(port, asked("localhost"))
        halves[0].sendall(rest.encode())
        assert b"hello, 0 bytes" in halves[0].makefile("rb").read()
        half()
        half()
        assert "hello, 0 bytes" in said(port, asked("localhost"))
        with contextlib.suppress(ConnectionResetError):
            assert halves[1].recv(1) == b""
        halves[2].sendall(rest.encode())
        assert b"hello, 0 bytes" in halves[2].makefile("rb").read()


def test_half_a_body_holds_no_place_for_ever(port):
    head = "POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
    assert "hello" not in said(port, head, "1234")


def test_a_request_that_can_be_read_in_two_ways_gets_no_answer(port):
    two = "POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked"
    assert "hello" not in said(port, f"{two}\r\n\r\n0\r\n\r\nGET /")


def test_a_health_check_without_a_name_is_answered(port):
    assert said(port, "GET / HTTP/1.0\r\n\r\n").startswith("HTTP/1.1 200")


@pytest.mark.parametrize("times", [1, 2])
def test_answers_that_nobody_takes_keep_nobody_out(monkeypatch, times):
    """Attack: one client asks on all connections that there may be, and reads none of the answers."""
    monkeypatch.setattr(http_server, "ANSWER_LIMIT_S", 100 * LIMIT_S)
    monkeypatch.setattr(http_server, "MAX_WAITING", 4)
    monkeypatch.setattr(http_server, "_MAX_CONNECTIONS", 8)
    large = Starlette(routes=[Route("/", lambda request: PlainTextResponse(bytes(2**23)))])
    server = http_server.server_of(large)
    with listen("127.0.0.1", 0) as listening, contextlib.ExitStack() as held:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        for _ in range(3 * 8):
            untaken = held.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))
            untaken.sendall(times * asked("localhost", "accept: text/plain").encode())
            assert untaken.recv(8) == b"HTTP/1.1", "the answer has begun"
        assert said(port, asked("localhost")).startswith("HTTP/1.1 200")
        server.should_exit = True
    thread.join(LIMIT_S)


def test_a_second_ctrl_c_ends_at_once_and_without_a_traceback():
    script = """
import contextlib, os, signal, socket
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from dipaco.base.http_server import listen, serve_until_told
signal.signal(signal.SIGINT, signal.default_int_handler)  # These tests may run where it is ignored.
@contextlib.asynccontextmanager
async def lifespan(application):
    try:
        yield
    finally:
        print("closed")
async def hello(request):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    return PlainTextResponse("hello")
with listen("127.0.0.1", 0) as listening:
    asking = socket.create_connection(listening.getsockname())
    asking.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
    serve_until_told(Starlette(routes=[Route("/", hello)], lifespan=lifespan), listening)
"""
    done = ran(sys.executable, "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
