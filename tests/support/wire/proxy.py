"""A server in front of a page that puts it under a sub-path, as nginx or Traefik do."""

import http.client
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

TIMEOUT_S = 60.0
# Of one connection, not passed on.
_HOP = ("connection", "keep-alive", "transfer-encoding", "host")


@contextmanager
def behind_proxy(address, prefix):
    """Give the address, without a slash at its end, under which a proxy passes requests on.

    The proxy takes `prefix`, such as `/swarm`, off each path, passes answers on as they come, and
    answers nothing else.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.partition("?")[0].removesuffix("/") != prefix and not (self.path.startswith(prefix + "/")):
                self.send_error(404)
                return
            length = int(self.headers.get("content-length", "0"))
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            behind = http.client.HTTPConnection(urlsplit(address).netloc, timeout=TIMEOUT_S)
            try:
                path = self.path.removeprefix(prefix) or "/"
                behind.request(self.command, path, self.rfile.read(length), headers)
                answer = behind.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                self.end_headers()
                while part := answer.read1(65536):
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:
                pass  # the browser left, or the page ended
            finally:
                behind.close()

        do_POST = do_GET

        def log_message(self, *_):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{prefix}"
    finally:
        server.shutdown()
        thread.join(TIMEOUT_S)
        server.server_close()
