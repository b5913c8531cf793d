"""What the tests of downloads and uploads talk to: the part of the Hugging Face hub's HTTP API that huggingface_hub 1.33,
transformers 5.17 and datasets 4.8 ask for when they read, and a commit to a model, over a directory of repositories with commits.

    with hub_server(tmp_path / "hub") as hub:
        commit = hub.publish("someone/model", directory)  # or {"config.json": b"..."}; kind="dataset" for those
        subprocess.run([sys.executable, ...], env=os.environ | hub.environment(tmp_path / "cache"))

HF_ENDPOINT is read when huggingface_hub is imported, so whoever is to talk to it runs in a process of its own. Address and
cache have the same names in each test of a process, so that one prepared process (tests/prepared_process.py) serves all of
them. There is no Xet: what ends in LARGE is stored by LFS.
"""

import atexit
import base64
import hashlib
import json
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".pt", ".pth", ".bin", ".parquet", ".gguf", ".onnx")
BLOCK = 1 << 14
NAME, ASKED = r"((?:[^/]+/)?[^/]+?)", r"(revision|tree|paths-info|refs|discussions|auth-check)"
# In place of the answer: a status, or "cut", which sends half of the body and closes the connection.
Fault = int | Literal["cut"]
Kind = Literal["model", "dataset"]
CACHES = Path(tempfile.mkdtemp(prefix="cogumi-tests-caches-"))  # links to those of the tests, by their names
atexit.register(shutil.rmtree, CACHES)
ports: list[int] = []  # of the hubs that were started here


class HubServer:
    """Repositories below `root`: {model,dataset}/{id}/{commit}/files, and {id}/refs.json with the branches.

    faults: called with the method, the path and the headers of each request; None answers it. gated: repositories whose
    files need `token`; private: those that are not even there without it. bytes_per_second: how fast files go out, each
    connection for itself. requests: (method, path) of all that came. sent: bytes of each file that went out, by path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults: Callable[[str, str, Mapping[str, str]], Fault | None] = lambda method, path, headers: None
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.token = "hf_" + "t" * 34
        self.bytes_per_second: float | None = None
        self.requests: list[tuple[str, str]] = []
        self.sent: dict[str, int] = {}
        self.lock = threading.Lock()
        self.digests: dict[Path, tuple[str, str]] = {}
        self.uploaded: dict[str, bytes] = {}  # by LFS, before they are in a commit
        self.server = listen(self)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, cache: Path, token: str | None = None) -> dict[str, str]:
        """Variables with which a process reads from here, into a cache of its own; the token, if any, is its own."""
        cache.mkdir(exist_ok=True)
        home = CACHES / cache.name
        home.unlink(missing_ok=True)
        home.symlink_to(cache)
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_DATASETS_CACHE": str(home / "datasets"),
            "HF_TOKEN": token or "",
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def publish(self, name: str, files: Path | Mapping[str, bytes], kind: Kind = "model") -> str:
        """A commit that holds just these files; the newest of `main`. Returns its hash."""
        home = self.root / kind / name
        number = len([path for path in home.iterdir() if path.is_dir()]) if home.is_dir() else 0
        commit = hashlib.sha1(f"{kind} {name} {number}".encode()).hexdigest()
        if isinstance(files, Path):
            shutil.copytree(files, home / commit)
        else:
            for path, content in files.items():
                (home / commit / path).parent.mkdir(parents=True, exist_ok=True)
                (home / commit / path).write_bytes(content)
        (home / "refs.json").write_text(json.dumps({"main": commit}), encoding="utf-8")
        return commit

    def names(self, kind: str, owner: str) -> list[str]:
        below = self.root / kind / owner
        return sorted(f"{owner}/{path.name}" for path in below.iterdir()) if owner and below.is_dir() else []

    def refs(self, kind: str, name: str) -> dict[str, str]:
        path = self.root / kind / name / "refs.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def digest(self, file: Path) -> tuple[str, str]:
        """(git's blob id, sha256) of a file, which never changes once it is published."""
        if file not in self.digests:
            data = file.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            self.digests[file] = (blob, hashlib.sha256(data).hexdigest())
        return self.digests[file]


def listen(hub: HubServer) -> "Listener":
    """Listen on the port of the hub before, unless that one still does."""
    with suppress(OSError):
        return Listener(hub, Answering, ports[-1] if ports else 0)
    return Listener(hub, Answering)


@contextmanager
def hub_server(root: Path) -> Iterator[HubServer]:
    hub = HubServer(root)
    ports.append(hub.server.server_port)
    try:
        yield hub
    finally:
        hub.server.stop()


class Listener(ThreadingHTTPServer):
    """The server of its owner, on a free port of this machine or a given one, in threads that keep no process alive."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: Any, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.owner = owner
        self.open: set[socket.socket] = set()  # connections
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """As a killed server: nobody listens, and open connections are closed in the middle of what they carry."""
        self.shutdown()
        self.server_close()
        for connection in list(self.open):  # a thread of its own would go on answering on each
            cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent where the other side has gone away, as a process that a test kills does."""
        if not isinstance(sys.exception(), (ConnectionError, ValueError)):
            super().handle_error(request, client_address)


def cut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """Keeps connections open, and its server's list of them; logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listener

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class Answering(Handler):
    @property
    def hub(self) -> HubServer:
        return self.server.owner  # type: ignore[no-any-return]

    def answer(self) -> None:
        split = urlsplit(self.path)
        path, query = unquote(split.path), parse_qs(split.query)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append((self.command, path))
        fault = self.hub.faults(self.command, path, self.headers)  # type: ignore[arg-type]
        if isinstance(fault, int):
            self.refuse(fault, "", "as asked")
            return
        if path.startswith("/api/whoami"):
            if self.may_see_all():
                self.reply(200, {"name": "someone", "type": "user"})
            else:
                self.refuse(401, "", "no")
            return
        if path in ("/api/models", "/api/datasets"):
            kind = path.removeprefix("/api/").removesuffix("s")
            self.reply(200, [{"id": name} for name in self.hub.names(kind, query.get("author", [""])[0])])
            return
        if self.writes(path, body):
            return
        match = re.fullmatch(rf"/api/(model|dataset)s/{NAME}(?:/{ASKED}(?:/(.*))?)?", path)
        if match is not None:
            kind, name, what, rest = match.groups()
            if self.is_there(kind, name):
                self.about(kind, name, what or "revision", rest or "main", query, body)
            return
        match = re.fullmatch(rf"/(datasets/)?{NAME}/resolve/([^/]+)/(.+)", path)
        if match is not None:
            kind, (name, revision, file) = ("dataset" if match[1] else "model"), match.groups()[1:]
            if self.is_there(kind, name):
                self.resolve(kind, name, unquote(revision), file, cut=fault == "cut")
            return
        self.refuse(404, "", f"{path} is not answered here")

    do_GET = do_HEAD = do_POST = do_PUT = answer

    # ------------------------------------------------------------------------------------------------------------ writing

    def writes(self, path: str, body: bytes) -> bool:
        """Answer what makes a repository or a commit: models alone, files in LARGE by LFS in one part."""
        if path == "/api/validate-yaml":  # of a model card
            self.reply(200, {"errors": [], "warnings": []})
            return True
        match = re.fullmatch(rf"/api/models/{NAME}/(preupload|commit)/([^/]+)", path)
        batch = re.fullmatch(rf"/{NAME}\.git/info/lfs/objects/batch", path)
        if path != "/api/repos/create" and match is None and batch is None and not path.startswith("/lfs/"):
            return False
        if path.startswith("/lfs/"):
            if self.command == "PUT":
                self.hub.uploaded[path.rpartition("/")[2]] = body
            self.reply(200, {})
        elif not self.may_see_all():
            self.refuse(401, "", "Invalid username or password.")
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if not name.startswith("someone/"):
                self.refuse(403, "", "You don't have the rights to create a model under this namespace")
                return True
            there = bool(self.hub.refs("model", name))
            if not there:
                self.hub.publish(name, {".gitattributes": b""})
                self.hub.private |= {name} if asked.get("visibility") == "private" else set()
            self.reply(409 if there else 200, {"url": f"{self.hub.url}/{name}", "name": name})
        elif batch is not None:
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]
            self.reply(200, {"transfer": "basic", "objects": objects})
        elif match is not None and match[2] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
            rows = [{"path": path, "shouldIgnore": False, "uploadMode": mode} for path, mode in modes.items()]
            self.reply(200, {"files": rows})
        elif match is not None:
            self.commit(match[1], [json.loads(line) for line in body.splitlines()])
        return True

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        """A commit on main: the files of the last one with these changes."""
        home = self.hub.root / "model" / name / self.hub.refs("model", name)["main"]
        files = {path.relative_to(home).as_posix(): path.read_bytes() for path in home.rglob("*") if path.is_file()}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = self.hub.publish(name, files)
        self.reply(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    # ------------------------------------------------------------------------------------------------- who may see what

    def may_see_all(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def is_there(self, kind: str, name: str) -> bool:
        """Whether the repository is there for whoever asks; answered if not, in the hub's words."""
        if (self.hub.root / kind / name).is_dir() and (name not in self.hub.private or self.may_see_all()):
            return True
        # The hub does not say whether a repository is missing or private to somebody without a token.
        status, message = (
            (404, "Repository not found") if self.may_see_all() else (401, "Invalid username or password.")
        )
        self.refuse(status, "RepoNotFound", message)
        return False

    def commit_of(self, kind: str, name: str, revision: str) -> str | None:
        """The commit of a branch or commit; answered where there is none."""
        if (self.hub.root / kind / name / revision).is_dir():
            return revision
        commit = self.hub.refs(kind, name).get(revision)
        if commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # -------------------------------------------------------------------------------------------------- about a repository

    def may_read(self, kind: str, name: str) -> bool:
        """Whether the files of a repository are for whoever asks; answered if not."""
        if name in self.hub.gated and not self.may_see_all():
            message = f"Access to {kind} {name} is restricted. You must have access to it and be authenticated."
            self.refuse(403 if "Authorization" in self.headers else 401, "GatedRepo", message)
            return False
        return True

    def about(self, kind: str, name: str, what: str, rest: str, query: dict[str, list[str]], body: bytes) -> None:
        if what == "auth-check":
            if self.may_read(kind, name):
                self.reply(200, {})
            return
        if what == "discussions":
            self.reply(200, {"discussions": [], "count": 0, "start": 0})
            return
        if what == "refs":
            branches = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commit}
                for branch, commit in self.hub.refs(kind, name).items()
            ]
            self.reply(200, {"branches": branches, "converts": [], "tags": []})
            return
        revision, _, inside = rest.partition("/")
        commit = self.commit_of(kind, name, unquote(revision))
        if commit is None:
            return
        home = self.hub.root / kind / name / commit
        if what == "revision":
            self.reply(200, self.info(kind, name, commit))
        elif what == "paths-info":
            paths = [home / path.strip("/") for path in parse_qs(body.decode())["paths"]]
            there = [path for path in paths if path.exists()]
            self.reply(200, [self.entry(home, path) for path in there])
        else:
            below = home / inside
            if not below.is_dir():
                self.refuse(404, "EntryNotFound", f"{inside} does not exist on {revision!r}")
                return
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            paths = sorted(below.rglob("*") if recursive else below.iterdir())
            self.reply(200, [self.entry(home, path) for path in paths])

    def info(self, kind: str, name: str, commit: str) -> dict[str, Any]:
        home = self.hub.root / kind / name / commit
        files = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
        gated = "manual" if name in self.hub.gated else False
        shown = {"id": name, "sha": commit, "private": name in self.hub.private, "gated": gated}
        return shown | {"siblings": [{"rfilename": file} for file in files]}

    def entry(self, home: Path, path: Path) -> dict[str, Any]:
        """A file or directory as the hub lists it."""
        relative = path.relative_to(home).as_posix()
        if path.is_dir():
            oid = hashlib.sha1(relative.encode()).hexdigest()
            return {"type": "directory", "path": relative, "size": 0, "oid": oid}
        blob, sha = self.hub.digest(path)
        size = path.stat().st_size
        described: dict[str, Any] = {"type": "file", "path": relative, "size": size, "oid": blob}
        if relative.endswith(LARGE):
            described["lfs"] = {"oid": sha, "size": size, "pointerSize": 134}
        return described

    # ----------------------------------------------------------------------------------------------------------- a file

    def resolve(self, kind: str, name: str, revision: str, file: str, cut: bool) -> None:
        commit = self.commit_of(kind, name, revision)
        if commit is None or not self.may_read(kind, name):
            return
        path = self.hub.root / kind / name / commit / file
        if not path.is_file():
            self.refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
            return
        blob, sha = self.hub.digest(path)
        size = path.stat().st_size
        first, last = 0, size - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is not None:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
            if first >= size:
                self.refuse(416, "", "Range not satisfiable", {"Content-Range": f"bytes */{size}"})
                return
        self.send_response(206 if asked else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{sha if file.endswith(LARGE) else blob}"')
        self.send_header("Accept-Ranges", "bytes")
        if file.endswith(LARGE):
            self.send_header("X-Linked-Size", str(size))
            self.send_header("X-Linked-ETag", f'"{sha}"')
        if asked is not None:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if self.command != "HEAD":
            self.send_file(path, first, last + 1, cut)

    def send_file(self, path: Path, start: int, end: int, cut: bool) -> None:
        stop = start + (end - start) // 2 if cut else end
        name, hub = unquote(urlsplit(self.path).path), self.hub
        sent = hub.sent  # what still goes to a reader who has gone is not counted among what a test counts from there
        with path.open("rb") as file:
            file.seek(start)
            while start < stop:
                block = file.read(min(BLOCK, stop - start))
                try:
                    self.wfile.write(block)
                except OSError:  # whoever read has gone
                    self.close_connection = True
                    return
                start += len(block)
                with hub.lock:
                    sent[name] = sent.get(name, 0) + len(block)
                if hub.bytes_per_second is not None:
                    time.sleep(len(block) / hub.bytes_per_second)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    # ---------------------------------------------------------------------------------------------------------- answers

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        named = {"X-Error-Code": code} if code else {}
        self.reply(status, {"error": message}, named | {"X-Error-Message": message} | dict(headers or {}))

    def reply(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | dict(headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
