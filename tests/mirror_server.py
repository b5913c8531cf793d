"""What the tests of the mirror talk to: moto's S3 server in a process of its own, and a proxy before it that fails on request.

The S3 server runs in a process because its packages are beside the lane's (`.venv/s3-server`), not among them.
"""

import http.client
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).parents[1] / ".venv" / "s3-server"
SERVE = """
import logging
import sys
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler
logging.getLogger("werkzeug").setLevel(logging.ERROR)
WSGIRequestHandler.disable_nagle_algorithm = True  # or every answer takes 40 ms
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the tests are over, or killed
"""
# What a proxy does to a request in place of passing it on: an answer of this status with this code of S3's, or "cut", which
# reads some of the body and closes the connection.
Fault = tuple[int, str] | str


@contextmanager
def s3_server() -> Iterator[int]:
    """moto's server on a port of its own."""
    assert PACKAGES.is_dir(), "no S3 server: run `sh requirements/install.sh test`"
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait()


class Proxy:
    """Passes requests on to a server, but for those that `faults` picks. Can be stopped, and started on the same port.

    faults: called with the method and the path of each request; None passes it on. after: called when one was answered.
    """

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self.faults: Callable[[str, str], Fault | None] = lambda method, path: None
        self.after: Callable[[str, str], None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.open: set[socket.socket] = set()
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.server = Listener(("127.0.0.1", self.port), Passing)
        self.server.proxy = self  # type: ignore[attr-defined]
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """As a killed server: nobody listens, and open connections are closed in the middle of what they carry."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None
        for connection in list(self.open):
            cut(connection)


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


class Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.proxy: Proxy = self.server.proxy  # type: ignore[attr-defined]
        self.proxy.open.add(self.connection)

    def finish(self) -> None:
        self.proxy.open.discard(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests read what the mirror logs."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the other side, or `stop`, has closed the connection
            self.close_connection = True

    def answer(self) -> None:
        self.proxy.requests.append((self.command, self.path))
        fault = self.proxy.faults(self.command, self.path)
        if fault == "cut":
            if self.headers.get("Transfer-Encoding") == "chunked":
                self.rfile.readline()
            else:
                self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            cut(self.connection)
            self.close_connection = True
            return
        body = self.body()
        if isinstance(fault, tuple):
            status, code = fault
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as asked</Message></Error>".encode()
            self.reply(status, {"Content-Type": "application/xml"}, text)
            return
        with connected(self.proxy.behind) as onward:
            kept = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "transfer-encoding")}
            onward.request(self.command, self.path, body, kept | {"Content-Length": str(len(body))})
            answer = onward.getresponse()
            data = answer.read()
        self.proxy.after(self.command, self.path)
        skipped = ("transfer-encoding", "content-length", "connection", "date", "server")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in skipped}
        self.reply(answer.status, headers, data, int(answer.getheader("Content-Length") or len(data)))

    def body(self) -> bytes:
        """The body of a request, which clients of S3 may send in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def reply(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        yield connection
    finally:
        connection.close()


def cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        return
