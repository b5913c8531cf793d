"""The levels of isolation, from the strongest: how a process of each begins, and a trial of what each stops here.

A level holds if the trial's program ran in it and reached nothing outside. Nothing is concluded from versions.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SCRATCH = "/scratch"
MODULES = ("confinement", "scratch_directory", "program_process", "sandbox_worker")
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("null", "zero", "full", "random", "urandom")
# The modules come over the socket, as the package's own directory may be out of sight. Then a program runs as __main__.
BEGIN = """
import json, os, socket, struct, sys, types
channel = socket.socket(fileno=os.dup(0))
null = os.open(os.devnull, os.O_RDWR); os.dup2(null, 0); os.close(null)
with channel.makefile("rb", buffering=0) as file:
    size, data = struct.unpack("!Q", file.read(8))[0], b""
    while len(data) < size:
        data += file.read(size - len(data)) or sys.exit()
sent = json.loads(data)
for name in ("cogumi", "cogumi.sandbox", *sent["modules"]):
    sys.modules[name] = types.ModuleType(name); sys.modules[name].__path__ = []
for name, source in sent["modules"].items():
    exec(compile(source, name, "exec"), sys.modules[name].__dict__)
    setattr(sys.modules["cogumi.sandbox"], name.rpartition(".")[2], sys.modules[name])
worker, process = (sys.modules[f"cogumi.sandbox.{name}"] for name in ("sandbox_worker", "program_process"))
process.execute(worker.serve(channel, sent["setup"]))
"""
BECOME = """
import os, sys
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
os.execv(sys.argv[2], sys.argv[2:])
"""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same program gives the same output
    "MALLOC_ARENA_MAX": "2",  # address space, which is limited, for each thread
    "TZ": "UTC",
}
# What a program of the trial tries, and how it is called where it worked.
TRIALS = {
    "connect": "the network",
    "signal": "signals to the trainer and to other programs",
    "environ": "reading the environment of the user's other processes",
    "private": "reading the user's private files",
    "public": "reading files that every user may read",
    "write": "writing where every user may write (/tmp)",
    "daemon": "leaving its process group",
}
TRIAL = """
import ctypes, decimal, json, os, socket
given = json.loads(open("given.json").read())
def connect():
    socket.create_connection(("127.0.0.1", given["port"]), 1)
def signal():
    if os.getppid() != 1 or given["parent"] != 1:  # 1 is the sandbox's own process
        os.kill(given["parent"], 0)
def environ():
    if os.getppid() != 1 or given["parent"] != 1:
        open(f"/proc/{given['parent']}/environ", "rb").read()
def private():
    open(given["private"]).read()
def public():
    open(given["public"]).read()
def write():
    open(given["directory"] + "/written", "w")
def daemon():
    if os.getppid() == 1:
        raise PermissionError("the first process of a namespace ends them all")
    if os.fork() == 0:
        try:
            os.setsid()
            open("daemon", "w").close()
        finally:
            os._exit(0)
    os.wait()
    open("daemon").close()
worked = []
for trial in (connect, signal, environ, private, public, write, daemon):
    try:
        trial()
        worked.append(trial.__name__)
    except OSError:
        pass
print(json.dumps(worked))
"""


@dataclass(frozen=True)
class Launch:
    """How a worker begins. drop: where it becomes another user, if it is root: outside, inside, or only its programs."""

    level: str
    drop: str | None
    bubblewrap: str = ""

    def command(self, uid: int, scratch_bytes: int) -> list[str]:
        python = [interpreter(), "-s", "-S", "-P", "-B", "-c", BEGIN]
        if self.level != "bubblewrap":
            return python
        before = [interpreter(), "-S", "-c", BECOME, str(uid)] if self.drop == "before" else []
        return [*before, self.bubblewrap, *bubblewrap_options(self, scratch_bytes), *python]

    def setup(self, uid: int, scratch_bytes: int, pool: str, slot: int) -> dict[str, Any]:
        """What the worker is told; at the level `limits` its scratch directory is made here."""
        scratch, library = SCRATCH, []
        if self.level == "limits":
            library = readable_library(pool) if self.drop else []
            scratch = tempfile.mkdtemp(prefix=f"{slot}-", dir=pool)
            if self.drop:
                os.chown(scratch, uid, uid)
        # bubblewrap becomes another user by itself, so that nothing is left to do inside.
        drop = None if self.level == "bubblewrap" and self.drop == "before" else self.drop
        readable = [*readable_paths(), *((*SYSTEM, *library[:2]) if self.level == "limits" else ())]
        return {
            "level": self.level, "drop": drop, "uid": uid, "readable": readable, "scratch": scratch,
            "scratch_bytes": scratch_bytes, "library": library, "pool": pool, "parent": os.getpid(),
        }  # fmt: skip


def launches(isolation: str) -> Iterator[Launch]:
    """The ways to begin that are tried, in order."""
    root, linux = os.geteuid() == 0, sys.platform == "linux"
    found = shutil.which("bwrap", path=os.environ.get("PATH", "") + ":/usr/bin") if linux else None
    if isolation in ("auto", "bubblewrap") and found:
        yield from (Launch("bubblewrap", drop, found) for drop in (("inside", "before") if root else (None,)))
    if isolation in ("auto", "namespaces") and linux:
        yield from (Launch("namespaces", drop) for drop in (("inside", "before") if root else (None,)))
    if isolation in ("auto", "limits"):
        yield from (Launch("limits", drop) for drop in (("program", None) if root else (None,)))


def bubblewrap_options(launch: Launch, scratch_bytes: int) -> list[str]:
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--as-pid-1", "--cap-drop", "ALL"]
    if launch.drop == "inside":
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            options += ["--ro-bind", path, path]
    paths = dict.fromkeys(("/usr", *readable_paths()))
    parents = {str(parent) for path in (*paths, "/dev/null") for parent in Path(path).parents if str(parent) != "/"}
    for parent in sorted(parents):  # that bubblewrap makes by itself only its own user may enter
        options += ["--perms", "0755", "--dir", parent]
    for path in paths:
        options += ["--ro-bind", path, path]
    for device in DEVICES:
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    options += ["--proc", "/proc", "--symlink", SCRATCH, "/dev/shm", "--perms", "1777"]
    if takes_size(launch.bubblewrap):
        options += ["--size", str(scratch_bytes)]
    return [*options, "--tmpfs", SCRATCH, "--remount-ro", "/", "--chdir", SCRATCH]


@cache
def takes_size(bubblewrap: str) -> bool:
    """Versions before 0.7 have no --size; the worker's own look at the directory is then the only limit."""
    return "--size" in subprocess.run([bubblewrap, "--help"], capture_output=True, text=True).stdout


def interpreter() -> str:
    """The Python itself, without the virtual environment: programs have its standard library only."""
    return os.path.realpath(sys.executable)


def readable_paths() -> list[str]:
    """Where the interpreter lies, outside /usr."""
    places = (sys.base_prefix, sys.base_exec_prefix, str(Path(interpreter()).parents[1]))
    return [place for place in dict.fromkeys(map(os.path.realpath, places)) if not f"{place}/".startswith("/usr/")]


def readable_library(pool: str) -> list[str]:
    """Where another user finds the standard library, and where it was; empty where that is readable for every user.

    Links to its files, where only root may enter its directory.
    """
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


def modules() -> dict[str, str]:
    folder = Path(__file__).parent
    return {f"cogumi.sandbox.{name}": (folder / f"{name}.py").read_text() for name in MODULES}


def try_out(run: Callable[[str, dict[str, str]], tuple[bool, str]]) -> list[str]:
    """What the program of the trial reached outside, as TRIALS calls it. Raises OSError where it did not run."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listening:
        place = Path(folder)
        place.chmod(0o777)
        for name, mode in (("private", 0o600), ("public", 0o644)):
            (place / name).write_text(name)
            (place / name).chmod(mode)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        given = {"port": listening.getsockname()[1], "parent": os.getpid(), "directory": folder}
        given |= {name: str(place / name) for name in ("private", "public")}
        finished, output = run(TRIAL, {"given.json": json.dumps(given)})
        with suppress(ValueError):
            if finished:
                return [TRIALS[name] for name in json.loads(output)]
    raise OSError(f"the trial's program did not run: {output.strip().splitlines()[-1:]}")
