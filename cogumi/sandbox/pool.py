"""The sandbox in which programs that a model wrote run: warm processes, none of which is a fork of the trainer.

A pool of workers (sandbox_worker.py) is started at the strongest level of isolation that this machine allows. Each
runs one program at a time and is replaced if it is lost. Nothing that a program leaves reaches the next one.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal

from cogumi.core.errors import UsageError
from cogumi.core.formatting import last_line
from cogumi.sandbox import isolation as levels
from cogumi.sandbox.sandbox_worker import HEADER

Status = Literal["finished", "timeout", "crashed"]
MOST_WORKERS = 32
LAST_UID = 65534  # of users without rights; workers of root run as it and those below
GRACE = 10.0  # seconds beyond a program's own, after which its worker counts as lost
BEGINNING = 30.0  # seconds that a worker may take to begin
KERNEL = "errors of the kernel"
TOGETHER = "memory of many processes together"
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one program may use, all of its processes together where nothing else is said."""

    seconds: float = 10.0
    """By the clock."""
    cpu_seconds: int = 5
    """Of processor time, each process."""
    memory_bytes: int = 512 * MIB
    """Address space of each process, and resident memory of all (on Linux)."""
    file_bytes: int = 16 * MIB
    """Of one file."""
    scratch_bytes: int = 64 * MIB
    """Of its scratch directory. A call cannot raise it above the sandbox's own."""
    processes: int = 32
    """Processes and threads."""
    open_files: int = 64
    """Open files of each process."""
    output_bytes: int = 64 * KIB
    """Of standard output and standard error that are kept. What a program writes beyond is dropped."""


@dataclass(frozen=True)
class SandboxResult:
    """What became of a program.

    It *finished* if it ended by itself, with any exit code. A *timeout* took more seconds of clock or processor than it
    had. It *crashed* if a signal ended it, if it held too much, or if the sandbox lost it.
    """

    status: Status
    exit_code: int | None
    """None unless it finished."""
    output: str
    """Standard output and standard error, as they came, cut at `output_bytes`."""
    seconds: float
    """By the clock."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The text files asked for with `keep`, as the program left them, up to `file_bytes` of each."""


class Lost(Exception):
    """A worker gave no answer: the reason."""


class Worker:
    """One process in which programs run, and the socket to it. Raises Lost where it does not begin."""

    def __init__(self, command: Sequence[str], setup: Mapping[str, Any]) -> None:
        self.channel, theirs = socket.socketpair()
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.said, env=levels.ENVIRONMENT, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        try:
            self.send({"modules": levels.modules(), "setup": setup})
            self.ready = self.receive(BEGINNING)
        except BaseException:
            self.kill()
            raise

    def send(self, request: Mapping[str, Any]) -> None:
        data = json.dumps(request).encode()
        self.channel.settimeout(BEGINNING)
        try:
            self.channel.sendall(HEADER.pack(len(data)) + data)
        except OSError as error:
            raise Lost(str(error)) from None

    def receive(self, seconds: float, most: int = MIB) -> dict[str, Any]:
        """An answer. Raises Lost where none came in time, or none that is a JSON object of at most so many bytes."""
        deadline = time.monotonic() + seconds
        try:
            size = HEADER.unpack(self.read(HEADER.size, deadline))[0]
            answer = json.loads(self.read(size, deadline)) if size <= most else None
        except TimeoutError:
            raise Lost("no answer in time") from None
        except (OSError, ValueError, RecursionError) as error:
            raise Lost(str(error)) from None
        if not isinstance(answer, dict):
            raise Lost("an answer that is too long, or no object")
        return answer

    def read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self.channel.settimeout(max(0.001, deadline - time.monotonic()))
            part = self.channel.recv(min(size - len(data), MIB))
            if not part:
                raise Lost(last_line(self.heard()) or "the worker ended")
            data += part
        return bytes(data)

    def heard(self) -> str:
        return os.pread(self.said.fileno(), 64 * KIB, 0).decode(errors="replace")

    def hang_up(self) -> None:
        """Have it end by itself, with the program that it runs and all that this one left."""
        with suppress(OSError):  # it has ended
            self.channel.setblocking(False)
            self.channel.sendall(HEADER.pack(2) + b"{}")
            self.channel.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=3)
        with suppress(ProcessLookupError, PermissionError):  # it has ended; the group of another user has
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        self.said.close()


class Sandbox:
    """A pool of workers, to be closed or used as a context manager. Threads may share it; a fork has to make its own.

    workers: programs that run at the same time, by default one for each core, at most 32. isolation: "auto" takes the
    strongest level that holds on this machine. Raises UsageError where the level asked for does not hold.
    """

    def __init__(
        self,
        workers: int | None = None,
        limits: Limits | None = None,
        isolation: Literal["auto", "bubblewrap", "namespaces", "limits"] = "auto",
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = workers or min(cores, MOST_WORKERS)
        self.limits = limits or Limits()
        self._process, self._closed = os.getpid(), False
        self._pool = ""  # a directory, at the level that has no other place for scratch directories
        self._workers: dict[int, Worker] = {}
        self._idle: SimpleQueue[int] = SimpleQueue()
        for slot in reversed(range(self.workers)):
            self._idle.put(slot)
        try:
            self._launch, self.reaches = self._strongest(isolation)
        except BaseException:
            self.close()
            raise
        self.isolation: str = self._launch.level

    def _strongest(self, isolation: str) -> tuple[levels.Launch, list[str]]:
        refused = []
        for launch in levels.launches(isolation):
            self._launch = launch
            if launch.level == "limits" and not self._pool:
                self._pool = tempfile.mkdtemp(prefix="cogumi-sandbox-")
                os.chmod(self._pool, 0o711)
            try:
                reached = levels.try_out(self._try)
                if reached and launch.level != "limits":
                    raise OSError(f"a program reached {', '.join(reached)}")
                (worker,) = self._workers.values()
                return launch, reached if worker.ready.get("watched") else [*reached, TOGETHER]
            except (Lost, OSError) as error:
                refused.append(f"{launch.level}: {error}")
                self._stop_workers()
        why = "; ".join(refused) or f"{isolation} is not installed, or is not for this system"
        raise UsageError(
            f"no sandbox here: {why}",
            key="isolation",
            fix='use "auto", or see docs/security.md for what each level takes',
        )

    def _try(self, program: str, files: Mapping[str, str]) -> tuple[bool, str]:
        result = self.run(program, files)
        return result.status == "finished" and result.exit_code == 0, result.output

    def describe(self) -> str:
        """One line for the start of a run: the level, and what it does not stop."""
        what = "no namespaces" if self.isolation == "limits" else "own processes, files and network"
        user = ", as another user" if self._launch.drop else ", as root" if os.geteuid() == 0 else ""
        open_to = ", ".join([*self.reaches, KERNEL])
        return f"sandbox: {self.isolation} ({what}{user}), workers: {self.workers}; not stopped: {open_to}"

    def run(
        self,
        program: str,
        files: Mapping[str, str] = {},
        keep: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run Python source in a scratch directory that holds `files`. Raises ValueError for a name outside of it.

        Raises TypeError for a program that is no text.
        """
        if self._closed or os.getpid() != self._process:
            raise RuntimeError("this sandbox is closed, or belongs to the process that this one is a fork of")
        if not isinstance(program, str):
            raise TypeError(f"a program is text, and this is {type(program).__name__}")
        for name in (*files, *keep):
            check_name(name)
        limits = limits or self.limits
        request = {"program": program, "files": dict(files), "keep": list(keep), "limits": asdict(limits)}
        most = 6 * (limits.output_bytes + limits.file_bytes * len(keep)) + MIB  # six characters of JSON for a byte
        slot, began = self._idle.get(), time.monotonic()
        worker = None
        try:
            worker = self._begin(slot, request)
            began = time.monotonic()
            answer = worker.receive(limits.seconds + GRACE, most)
            result = read_result(answer)
            if answer.get("retire") is False and not self._closed:
                self._workers[slot], worker = worker, None
            return result
        except Lost as lost:
            seconds = time.monotonic() - began
            return SandboxResult("timeout" if seconds >= limits.seconds else "crashed", None, str(lost), seconds)
        finally:
            if worker is not None:
                worker.kill()
            self._idle.put(slot)

    def _begin(self, slot: int, request: Mapping[str, Any]) -> Worker:
        """A worker that has begun with this program. One that was lost before is replaced. Raises Lost where both were."""
        for last in (False, True):
            worker = self._workers.pop(slot, None)
            try:
                worker = worker or self._start(slot)
                worker.send(request)
                worker.receive(BEGINNING)
                return worker
            except BaseException as error:
                if worker is not None:
                    worker.kill()
                if last or not isinstance(error, Lost):
                    raise
        raise AssertionError

    def _start(self, slot: int) -> Worker:
        # Of its own for each worker, also of other ranks: the kernel counts the processes of a user together.
        uid = LAST_UID - slot % MOST_WORKERS - MOST_WORKERS * (os.getpid() % 64)
        scratch_bytes = self.limits.scratch_bytes
        setup = self._launch.setup(uid, scratch_bytes, self._pool, slot)
        return Worker(self._launch.command(uid, scratch_bytes), setup)

    def run_all(
        self,
        programs: Sequence[str],
        files: Sequence[Mapping[str, str]] | None = None,
        keep: Sequence[str] = (),
    ) -> list[SandboxResult]:
        """The results of programs in their order, each with its own files. They run side by side."""
        each = files if files is not None else [{}] * len(programs)
        if len(each) != len(programs):
            raise ValueError(f"{len(programs)} programs and {len(each)} sets of files")
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(partial(self.run, keep=keep), programs, each))

    def _stop_workers(self) -> None:
        for worker in self._workers.values():
            worker.hang_up()
        while self._workers:
            self._workers.popitem()[1].kill()

    def close(self) -> None:
        """End the workers, which may be called twice. A program that still runs in another thread ends with its result."""
        if os.getpid() != self._process or self._closed:
            return
        self._closed = True
        self._stop_workers()
        if self._pool:  # by programs that take any depth, which rmtree does not
            subprocess.run(["chmod", "-R", "u+rwX", self._pool], stderr=subprocess.DEVNULL)
            subprocess.run(["rm", "-rf", self._pool])

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def check_name(name: str) -> None:
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is no path inside a scratch directory")


def read_result(answer: Mapping[str, Any]) -> SandboxResult:
    """An answer as a result. Raises Lost where it is none."""
    status, code, output = answer.get("status"), answer.get("exit_code"), answer.get("output")
    seconds, files = answer.get("seconds"), answer.get("files")
    whole = isinstance(output, str) and isinstance(seconds, float) and isinstance(files, dict)
    if status not in ("finished", "timeout", "crashed") or not whole or not isinstance(code, int | None):
        raise Lost("an answer that is no result")
    return SandboxResult(status, code, output, seconds, files)  # type: ignore[arg-type]


_default: dict[int, Sandbox] = {}
_lock = threading.Lock()


def default_sandbox() -> Sandbox:
    """The sandbox of this process, made when it is first asked for and closed when the process ends."""
    with _lock:
        if os.getpid() not in _default:
            _default[os.getpid()] = Sandbox()
            atexit.register(_default[os.getpid()].close)
        return _default[os.getpid()]
