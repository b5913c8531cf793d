"""What the tests of the mirror talk to: moto's S3 server in a process of its own, a proxy before it that fails on request,
and answers of the Hugging Face hub's API.

The S3 server runs in a process because its packages are beside the lane's (`.venv/s3-server`), not among them.
"""

import base64
import hashlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

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


class Hub:
    """The part of the Hugging Face hub's HTTP API that a mirror uses, written from huggingface_hub 1.33 and its documentation.

    Repositories as commits: {path: content}. What ends in LARGE is stored by LFS, over the plain transfer; there is no Xet.
    faults: called with the method and the path of each request; a status in place of an answer, or None.
    """

    LARGE = (".safetensors", ".pt", ".pth", ".bin")

    def __init__(self) -> None:
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.writable = True
        self.faults: Callable[[str, str], int | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.server = Listener(("127.0.0.1", 0), Answering)
        self.server.hub = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, repository: str) -> dict[str, bytes]:
        """What the newest commit holds."""
        return self.repositories[repository][-1]


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append((self.command, path))
        fault = hub.faults(self.command, path)
        if fault is not None:
            self.reply(fault, {"error": "as asked"})
        elif path == "/api/repos/create":
            self.create(hub, json.loads(body))
        elif path.startswith("/lfs/"):
            hub.large[path.removeprefix("/lfs/")] = body
            self.reply(200, {})
        else:
            self.about_a_repository(hub, path, body)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def create(self, hub: Hub, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if name in hub.repositories:
            self.reply(409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"})
            return
        hub.repositories[name] = [{}]
        if asked.get("private") or asked.get("visibility") == "private":
            hub.private.add(name)
        self.reply(200, {"url": f"{hub.url}/{name}"})

    def about_a_repository(self, hub: Hub, path: str, body: bytes) -> None:
        inside = r"([^/]+/[^/]+?)(?:\.git)?(?:/(auth-check/write|info/lfs|[^/]+)/?(.*))?"
        match = re.fullmatch(f"(?:/api/models)?/(?!api/models/){inside}", path)
        name, what, rest = match.groups() if match is not None else ("", "", "")
        if name not in hub.repositories:
            self.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        commits = hub.repositories[name]
        if what == "auth-check/write":
            self.reply(200 if hub.writable else 403, {})
        elif what == "revision" or not what:
            self.reply(200, {"id": name, "sha": f"{len(commits) - 1:040x}", "siblings": []})
        elif what == "preupload":
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if large(file["path"]) else "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.reply(200, {"files": modes})
        elif what == "info/lfs":
            objects = json.loads(body)["objects"]
            for each in objects:
                if each["oid"] not in hub.large:
                    each["actions"] = {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}
            self.reply(200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"})
        elif what == "commit":
            self.commit(hub, name, [json.loads(line) for line in body.splitlines()])
        elif what == "tree":
            inside = rest.partition("/")[2]
            entries = [described(file, data) for file, data in commits[-1].items() if file.startswith(inside)]
            status = 200 if entries or not inside else 404
            self.reply(status, entries if status == 200 else {"error": "no"}, {"X-Error-Code": "EntryNotFound"})
        elif what == "paths-info":
            expected = parse_qs(body.decode())["paths"]
            files = commits[-1 if rest == "main" else int(rest, 16)]
            folders = [each for each in expected if any(file.startswith(f"{each}/") for file in files)]
            entries = [{"type": "directory", "path": folder, "oid": blob_id(b"")} for folder in folders]
            self.reply(200, [*entries, *(described(file, files[file]) for file in expected if file in files)])
        elif what == "resolve":
            revision, _, file = rest.partition("/")
            self.resolve(commits, revision, file)
        else:
            self.reply(404, {"error": f"{what} is not answered here"})

    def commit(self, hub: Hub, name: str, lines: list[dict[str, Any]]) -> None:
        commits = hub.repositories[name]
        files = dict(commits[-1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commits.append(files)
        oid = f"{len(commits) - 1:040x}"
        self.reply(200, {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"})

    def resolve(self, commits: list[dict[str, bytes]], revision: str, file: str) -> None:
        number = len(commits) - 1 if revision == "main" else int(revision, 16)
        if file not in commits[number]:
            self.reply(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        data = commits[number][file]
        etag = hashlib.sha256(data).hexdigest() if large(file) else blob_id(data)
        self.reply(200, data, {"X-Repo-Commit": f"{number:040x}", "ETag": f'"{etag}"'})

    def reply(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def large(path: str) -> bool:
    return path.endswith(Hub.LARGE)


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def described(path: str, data: bytes) -> dict[str, Any]:
    """A file as the hub lists it."""
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob_id(data)}
    if large(path):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
