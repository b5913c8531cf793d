"""The sandbox in which programs that a model wrote run: warm processes, none of which is a fork of the trainer.

A pool of workers (sandbox_worker.py) is started at the strongest level of isolation in which a trial program reached
nothing outside. Each runs one program at a time, is replaced if it is lost, and is emptied between two programs.
"""

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from cogumi.core.errors import UsageError
from cogumi.sandbox.sandbox_worker import DEVICES, receive, send

MAX_WORKERS = 32
LAST_UID = 65534  # of users without rights; workers of root run as it and those below
EXTRA_SECONDS = 10.0  # beyond a program's own, after which its worker counts as lost
START_SECONDS = 30.0  # that a worker may take to begin
MIB = 1 << 20
SCRATCH = "/scratch"
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
# The source comes with the command, as the package's own directory may be out of sight. A program runs as __main__.
BEGIN = """
import sys, types
sys.modules["worker"] = worker = types.ModuleType("worker")
exec({source!r}, worker.__dict__)
worker.main()
"""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8", "PYTHONUTF8": "1", "TZ": "UTC",
    "PYTHONHASHSEED": "0",  # the same program gives the same output
    "MALLOC_ARENA_MAX": "2",  # address space, which is limited, for each thread
}  # fmt: skip
# What a program of the trial tries, by the words for it if it works. In a PID namespace it is a child of process 1.
TRIALS = {
    "the network": "socket.create_connection(('127.0.0.1', given['port']), 1)",
    "signals to the trainer and to other programs": "os.kill(parent, 0)",
    "reading the environment of the user's other processes": "open(f'/proc/{parent}/environ', 'rb').read()",
    "reading the user's private files": "open(given['private']).read()",
    "reading files that every user may read": "open(given['public']).read()",
    "writing where every user may write (/tmp)": "open(given['directory'] + '/written', 'w')",
    "leaving its process group": "leave()",
}
TRIAL = """
import ctypes, decimal, json, os, socket
given = json.load(open("given.json"))
# The trainer's number, or one that no process has where that is the number of the sandbox's own process.
parent = given["parent"] if os.getppid() != 1 or given["parent"] != 1 else 1 << 22
def leave():
    if os.fork() == 0:
        os._exit(ctypes.CDLL(None).setsid() > 0)
    if not os.wait()[1] or os.getppid() == 1:  # the first process of a namespace ends them all
        raise PermissionError
succeeded = []
for name, source in given["trials"].items():
    try:
        exec(source)
        succeeded.append(name)
    except OSError:
        pass
print(json.dumps(succeeded))
"""


@dataclass(frozen=True)
class Limits:
    """Limits of one program, for all of its processes together unless stated otherwise."""

    seconds: float = 10.0  # wall-clock time
    cpu_seconds: int = 5  # of each process
    memory_bytes: int = 512 * MIB  # address space of each process, and resident memory of all (on Linux)
    file_bytes: int = 16 * MIB  # of one file
    scratch_bytes: int = 64 * MIB  # of the scratch directory; a call cannot raise it above the sandbox's own
    processes: int = 32  # and threads
    open_files: int = 64  # of each process
    output_bytes: int = 1 << 16  # of standard output and standard error that are kept; the rest is dropped


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a program: "finished" by itself, "timeout", or "crashed" by a signal or another limit."""

    status: Literal["finished", "timeout", "crashed"]
    exit_code: int | None  # None unless it finished
    output: str  # standard output and standard error, as they came, cut at `output_bytes`
    seconds: float  # wall-clock time
    files: Mapping[str, str] = field(default_factory=dict)  # those asked for with `keep`, up to `file_bytes` of each


class WorkerDied(Exception):
    """A worker gave no answer; the text is the reason."""


class Worker:
    """One process in which programs run, and the socket to it. Raises WorkerDied if it does not start."""

    def __init__(self, command: Sequence[str], setup: Mapping[str, Any]) -> None:
        self.channel, theirs = socket.socketpair()
        self.stderr_file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.stderr_file,
                env=ENVIRONMENT, cwd="/", start_new_session=True,
            )  # fmt: skip
        try:
            self.ask(setup)
        except BaseException:
            self.kill()
            raise

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request and wait until it has been received."""
        try:
            self.channel.settimeout(START_SECONDS)
            send(self.channel, request)
        except OSError as error:
            raise WorkerDied(str(error)) from None
        self.receive(START_SECONDS)

    def receive(self, seconds: float, limit: int = MIB) -> dict[str, Any]:
        """Return an answer of at most `limit` bytes. Raises WorkerDied if none came in time, or no JSON object."""
        try:
            answer = receive(self.channel, limit, seconds)
        except (OSError, ValueError, RecursionError) as error:
            stderr = os.pread(self.stderr_file.fileno(), 1 << 16, 0).decode(errors="replace").strip()
            raise WorkerDied(stderr.rpartition("\n")[2] or str(error)) from None
        if not isinstance(answer, dict):
            raise WorkerDied("an answer that is no JSON object")
        return answer

    def hang_up(self) -> None:
        """Have it end by itself, with the program that it runs and everything that this one left."""
        with suppress(OSError):  # it has ended
            self.channel.setblocking(False)
            send(self.channel, {})
            self.channel.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=3)
        with suppress(ProcessLookupError, PermissionError):  # it has ended; the group of another user has
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        self.stderr_file.close()


class Sandbox(AbstractContextManager["Sandbox"]):
    """A pool of workers, to be closed or used as a context manager. Threads may share it; a fork has to make its own.

    Args:
        workers: Programs that run at the same time, by default one for each core, at most 32.
        limits: Of each program.
        isolation: "bubblewrap", "limits", or "auto", the strongest that holds here. UsageError if it does not hold.
    """

    def __init__(
        self,
        workers: int | None = None,
        limits: Limits | None = None,
        isolation: Literal["auto", "bubblewrap", "limits"] = "auto",
    ) -> None:
        if sys.platform != "linux":
            raise UsageError(f"no sandbox here: it takes Linux, and this is {sys.platform}", key="isolation")
        self.workers = workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self.limits = limits or Limits()
        self._process, self._closed = os.getpid(), False
        self._pool = ""  # the scratch directories at the level that has no other place for them
        self._workers: dict[int, Worker] = {}
        self._idle: SimpleQueue[int] = SimpleQueue()
        for slot in reversed(range(self.workers)):
            self._idle.put(slot)
        try:
            self.isolation, self.reaches = self._find_strongest(isolation)
        except BaseException:
            self.close()
            raise

    def _find_strongest(self, isolation: str) -> tuple[str, list[str]]:
        refused = []
        for level in ("bubblewrap", "limits"):
            if isolation not in ("auto", level) or (level == "bubblewrap" and not find_bubblewrap()):
                continue
            self.isolation = level
            if level == "limits":
                self._pool = tempfile.mkdtemp(prefix="cogumi-sandbox-")
                os.chmod(self._pool, 0o711)
            try:
                reached = try_out(self.run)
                if reached and level != "limits":
                    raise OSError(f"a program reached {', '.join(reached)}")
                return level, reached
            except (WorkerDied, OSError) as error:
                refused.append(f"{level}: {error}")
                self._stop_workers()
        reason = "; ".join(refused) or f"{isolation} is not installed, or is not for this system"
        fix = 'use "auto", or see docs/rewards.md for what each level takes'
        raise UsageError(f"no sandbox here: {reason}", key="isolation", fix=fix)

    def describe(self) -> str:
        """Return one line for the start of a run: the level, and what it does not stop."""
        mode = "no namespaces" if self.isolation == "limits" else "own processes, files and network"
        user = ", as another user" if os.geteuid() == 0 else ""
        open_to = ", ".join([*self.reaches, "errors of the kernel"])
        open_to += "" if find_bubblewrap() else "; install bubblewrap for namespaces of their own"
        return f"sandbox: {self.isolation} ({mode}{user}), workers: {self.workers}; not stopped: {open_to}"

    def run(
        self, program: str, files: Mapping[str, str] = {}, keep: Sequence[str] = (), limits: Limits | None = None
    ) -> SandboxResult:
        """Run Python source in a scratch directory that holds `files`. Raises ValueError for a name outside of it."""
        if self._closed or os.getpid() != self._process:
            raise RuntimeError("this sandbox is closed, or belongs to the process that this one is a fork of")
        if not isinstance(program, str):
            raise TypeError(f"a program is text, and this is {type(program).__name__}")
        for name in (*files, *keep):
            if not name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
                raise ValueError(f"{name!r} is no path inside a scratch directory")
        limits = limits or self.limits
        request = {"program": program, "files": dict(files), "keep": list(keep), "limits": asdict(limits)}
        max_answer = 6 * (limits.output_bytes + limits.file_bytes * len(keep)) + MIB  # up to six characters for a byte
        slot, began = self._idle.get(), time.monotonic()
        worker = None
        try:
            worker = self._start_program(slot, request)
            began = time.monotonic()
            answer = worker.receive(limits.seconds + EXTRA_SECONDS, max_answer)
            result = read_result(answer)
            if answer.get("retire") is False and not self._closed:
                self._workers[slot], worker = worker, None
            return result
        except WorkerDied as reason:
            seconds = time.monotonic() - began
            return SandboxResult("timeout" if seconds >= limits.seconds else "crashed", None, str(reason), seconds)
        finally:
            if worker is not None:
                worker.kill()
            self._idle.put(slot)

    def _start_program(self, slot: int, request: Mapping[str, Any]) -> Worker:
        """Return a worker that has begun with the program; one that died before is replaced once."""
        # A user of its own for each worker, also of other ranks: the kernel counts the processes of a user together.
        uid = LAST_UID - slot % MAX_WORKERS - MAX_WORKERS * (os.getpid() % 64)
        for is_last in (False, True):
            worker = self._workers.pop(slot, None)
            try:
                if worker is None:
                    command = worker_command(self.isolation, self.limits.scratch_bytes)
                    worker = Worker(command, worker_setup(self.isolation, uid, self._pool))
                worker.ask(request)
                return worker
            except BaseException as error:
                if worker is not None:
                    worker.kill()
                if is_last or not isinstance(error, WorkerDied):
                    raise
        raise AssertionError

    def run_all(
        self, programs: Sequence[str], files: Sequence[Mapping[str, str]] | None = None, keep: Sequence[str] = ()
    ) -> list[SandboxResult]:
        """Run programs side by side, each with its own files, and return the results in their order."""
        files = files if files is not None else [{}] * len(programs)
        if len(files) != len(programs):
            raise ValueError(f"{len(programs)} programs and {len(files)} sets of files")
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(partial(self.run, keep=keep), programs, files))

    def _stop_workers(self) -> None:
        for worker in self._workers.values():
            worker.hang_up()
        while self._workers:
            self._workers.popitem()[1].kill()

    def close(self) -> None:
        """End the workers; may be called twice. A program that still runs in another thread ends with its result."""
        if os.getpid() != self._process or self._closed:
            return
        self._closed = True
        self._stop_workers()
        if self._pool:  # by programs that take any depth, which rmtree does not
            subprocess.run(["chmod", "-R", "u+rwX", self._pool], stderr=subprocess.DEVNULL)
            subprocess.run(["rm", "-rf", self._pool])

    def __exit__(self, *_: object) -> None:
        self.close()


def read_result(answer: Mapping[str, Any]) -> SandboxResult:
    """Return an answer as a result. Raises WorkerDied if it is none."""
    status, code, output = answer.get("status"), answer.get("exit_code"), answer.get("output")
    seconds, files = answer.get("seconds"), answer.get("files")
    is_whole = isinstance(output, str) and isinstance(seconds, float) and isinstance(files, dict)
    if status not in ("finished", "timeout", "crashed") or not is_whole or not isinstance(code, int | None):
        raise WorkerDied("an answer that is no result")
    return SandboxResult(status, code, output, seconds, files)  # type: ignore[arg-type]


def find_bubblewrap() -> str:
    return shutil.which("bwrap", path=os.environ.get("PATH", "") + ":/usr/bin") or ""


def worker_command(level: str, scratch_bytes: int) -> list[str]:
    """Return the command of a worker. If the trainer is root, programs run as another user."""
    source = Path(__file__).with_name("sandbox_worker.py").read_text()
    python = [interpreter(), "-s", "-S", "-P", "-B", "-c", BEGIN.format(source=source)]
    if level != "bubblewrap":
        return python
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--as-pid-1", "--cap-drop", "ALL"]
    if os.geteuid() == 0:
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):  # links into /usr on today's systems
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            options += ["--ro-bind", path, path]
    paths = dict.fromkeys(("/usr", *readable_paths()))
    parents = {str(parent) for path in (*paths, "/dev/null") for parent in Path(path).parents if str(parent) != "/"}
    for parent in sorted(parents):  # bubblewrap's own would be closed to other users
        options += ["--perms", "0755", "--dir", parent]
    for path in paths:
        options += ["--ro-bind", path, path]
    for device in DEVICES:
        options += ["--dev-bind", device, device]
    options += ["--proc", "/proc", "--symlink", SCRATCH, "/dev/shm", "--perms", "1777"]
    if takes_size(find_bubblewrap()):
        options += ["--size", str(scratch_bytes)]
    options += ["--tmpfs", SCRATCH, "--remount-ro", "/", "--chdir", SCRATCH]
    return [find_bubblewrap(), *options, *python]


def worker_setup(level: str, uid: int, pool: str) -> dict[str, Any]:
    """Return a worker's `Place`; at the level `limits` its scratch directory is made here."""
    separated, is_root = level == "bubblewrap", os.geteuid() == 0
    scratch, library, readable = SCRATCH, [], []
    if not separated:
        library = readable_library(pool) if is_root else []
        readable = [*readable_paths(), *SYSTEM, *library[:2]]
        scratch = tempfile.mkdtemp(dir=pool)
        if is_root:
            os.chown(scratch, uid, uid)
    return {
        "separated": separated, "scratch": scratch, "worker_uid": uid if is_root and separated else None,
        "program_uid": uid if is_root and not separated else None, "readable": readable, "library": library,
        "parent": os.getpid(), "pool": pool,
    }  # fmt: skip


@cache
def takes_size(bubblewrap: str) -> bool:
    """Versions before 0.7 have no --size; then only the worker checks the size of the scratch directory."""
    return "--size" in subprocess.run([bubblewrap, "--help"], capture_output=True, text=True).stdout


def interpreter() -> str:
    """Return the Python itself, without the virtual environment: programs have its standard library only."""
    return os.path.realpath(sys.executable)


def readable_paths() -> list[str]:
    """List where the interpreter lies, outside /usr."""
    places = (sys.base_prefix, sys.base_exec_prefix, str(Path(interpreter()).parents[1]))
    return [place for place in dict.fromkeys(map(os.path.realpath, places)) if not f"{place}/".startswith("/usr/")]


def readable_library(pool: str) -> list[str]:
    """Return a copy of the standard library for other users, its extensions, and the original; [] if that is readable."""
    library = Path(sysconfig.get_path("stdlib"))
    if all(parent.stat().st_mode & 1 for parent in (library, *library.parents)):
        return []
    copy = Path(pool, "python")
    if not copy.exists():
        unused = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3")
        shutil.copytree(library, copy, copy_function=link_or_copy, ignore=unused, symlinks=True)
    return [str(copy), str(copy / "lib-dynload"), str(library)]


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem
        shutil.copy2(source, target)


def try_out(run: Callable[[str, dict[str, str]], Any]) -> list[str]:
    """Run the trial and return what it reached outside, in the words of TRIALS. Raises OSError if it did not run."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listening:
        Path(folder).chmod(0o777)
        settings: dict[str, Any] = {"parent": os.getpid(), "directory": folder, "trials": TRIALS}
        for name, mode in (("private", 0o600), ("public", 0o644)):
            settings[name] = f"{folder}/{name}"
            Path(folder, name).write_text(name)
            Path(folder, name).chmod(mode)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        settings["port"] = listening.getsockname()[1]
        result = run(TRIAL, {"given.json": json.dumps(settings)})
        with suppress(ValueError):
            if result.exit_code == 0:
                return list(json.loads(result.output))
    raise OSError(f"the trial's program did not run: {result.output.strip().splitlines()[-1:]}")


_default: dict[int, Sandbox] = {}
_lock = threading.Lock()


def default_sandbox() -> Sandbox:
    """Return the sandbox of this process, made at the first call and closed when the process ends."""
    with _lock:
        if os.getpid() not in _default:
            _default[os.getpid()] = Sandbox()
            atexit.register(_default[os.getpid()].close)
        return _default[os.getpid()]
