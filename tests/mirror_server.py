"""What the tests of the mirror talk to: moto's S3 server in a process of its own, and a proxy before it that fails on request.

The S3 server runs in a process because its packages are beside the lane's (`.venv/s3-server`), not among them.
"""

import http.client
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hub_server import Handler, Listener, cut
from pyarrow.fs import FileSelector, S3FileSystem

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
        self.server: Listener | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.server = Listener(self, Passing, self.port)
        self.port = self.server.server_port

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None


class Passing(Handler):
    @property
    def proxy(self) -> Proxy:
        return self.server.owner  # type: ignore[no-any-return]

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
        with closing(http.client.HTTPConnection("127.0.0.1", self.proxy.behind)) as onward:
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


class Bucket:
    """A bucket of its own for a test, behind a proxy; looked into past the proxy."""

    def __init__(self, server: int, name: str) -> None:
        login = {"access_key": "key", "secret_key": "secret", "region": "us-east-1"}
        self.direct = S3FileSystem(endpoint_override=f"http://127.0.0.1:{server}", allow_bucket_creation=True, **login)
        self.name = name
        self.direct.create_dir(name)
        self.proxy = Proxy(server)
        self.url = f"s3://{name}/runs/mine"
        self.environment = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        self.environment |= {"AWS_ENDPOINT_URL": self.proxy.url}

    def files(self) -> dict[str, set[str]]:
        """The names of the files in each checkpoint of the mirror."""
        collected: dict[str, set[str]] = {}
        for info in self.direct.get_file_info(
            FileSelector(f"{self.name}/runs/mine", recursive=True, allow_not_found=True)
        ):
            place, _, file = info.path.removeprefix(f"{self.name}/runs/mine/").partition("/")
            if info.is_file:
                collected.setdefault(place, set()).add(file)
        return collected

    def put(self, name: str, data: bytes) -> None:
        with self.direct.open_output_stream(f"{self.name}/runs/mine/{name}") as stream:
            stream.write(data)
