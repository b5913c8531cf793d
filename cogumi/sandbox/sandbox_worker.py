"""The process inside the sandbox: it forks each program, watches it, ends all that it left, and answers in JSON.

The standard library only, as nothing else is there. The process is the first of its PID namespace, or a subreaper, so
that every process a program leaves becomes its child. The programs it forks have none of its descriptors.
"""

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from cogumi.sandbox import confinement
from cogumi.sandbox.program_process import LINUX, Place, confine, end_first
from cogumi.sandbox.scratch_directory import FILES, directory_bytes, empty, read_files, write_files

HEADER = struct.Struct("!Q")
LOOK = 0.05  # seconds between two looks at what a program holds
# What programs import most, imported once.
WARM = (
    "abc", "argparse", "ast", "base64", "bisect", "calendar", "cmath", "collections.abc", "contextlib", "copy", "csv",
    "ctypes", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq",
    "importlib.util", "inspect", "io", "itertools", "json", "logging", "math", "numbers", "operator", "os.path",
    "pathlib", "pickle", "pprint", "queue", "random", "re", "shutil", "statistics", "string", "subprocess", "tempfile",
    "textwrap", "threading", "timeit", "tokenize", "types", "typing", "unittest", "unittest.mock", "uuid", "warnings",
    "weakref", "zlib",
)  # fmt: skip


def prepare(setup: dict[str, Any]) -> Place:
    """Enter what isolates this process. Raises OSError where the kernel refuses it."""
    end_first("500")
    level, uid = setup["level"], setup["uid"]
    if setup["drop"] == "before":
        confinement.become(uid)
        confinement.prctl(confinement.PR_SET_DUMPABLE, 1)  # or the files of its namespaces in /proc are root's
    if level == "namespaces":
        confinement.enter_namespaces(setup["readable"], setup["scratch_bytes"], wait_outside)
    if setup["drop"] == "inside":
        confinement.become(uid)
    place = Place(
        separated=level != "limits",
        scratch=setup["scratch"],
        uid=uid if setup["drop"] == "program" else None,
        library=setup["library"],
        parent=setup["parent"],
        pool=setup["pool"],
    )
    os.chdir(place.scratch)
    place.directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    os.environ.update(HOME=place.scratch, TMPDIR=place.scratch)
    if LINUX:
        confinement.prctl(confinement.PR_SET_DUMPABLE, 0)  # nothing reads or traces this process
        confinement.prctl(confinement.PR_SET_CHILD_SUBREAPER, 1)
    if not place.separated:
        place.ruleset = confinement.landlock_ruleset(setup["readable"], confinement.DEVICES, place.scratch)
    for name in WARM:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    if LINUX and os.path.exists("/proc/self/statm"):
        place.resident = resident_pages("self")
    return place


def wait_outside(child: int) -> None:
    """Of the process outside the namespaces: it has nothing open that the one inside could be missed by."""
    os.closerange(0, 64)
    os.waitpid(child, 0)


def serve(channel: socket.socket, setup: dict[str, Any]) -> str:
    """Answer requests until the trainer is gone. Returns in the process of a program, with its source."""
    place = prepare(setup)
    wake, wakened = socket.socketpair()
    for end in (wake, wakened):
        end.setblocking(False)
    signal.set_wakeup_fd(wakened.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    send(channel, {"ready": True, "watched": place.resident > 0})
    request: Any = {}
    while empty(place.directory) and (request := receive(channel)):
        send(channel, {"begun": True})
        write_files(request["files"], place.uid)
        reading, writing = os.pipe()
        began = time.monotonic()
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            confine(request["limits"], place, writing)
            return str(request["program"])
        os.close(writing)
        answer = observe(pid, reading, channel, wake, request["limits"], place)
        os.close(reading)
        if answer is None:
            request = receive(channel)
            break
        owner, most = os.geteuid() if place.uid is None else place.uid, request["limits"]["file_bytes"]
        kept = read_files(request["keep"], place.directory, owner, most)
        answer |= {"seconds": time.monotonic() - began, "files": kept}
        if not send(channel, answer):
            request = None
        if not request or answer["retire"]:
            break
    if empty(place.directory) and request is None and not place.separated:
        remove_pool(place)
    os._exit(0)


def remove_pool(place: Place) -> None:
    """What the trainer does by itself if it ends otherwise than killed, of which its workers are told with an empty request."""
    deadline = time.monotonic() + 10
    while os.getppid() == place.parent and time.monotonic() < deadline:  # its socket is closed before it is dead
        time.sleep(0.01)
    if os.getppid() != place.parent:
        subprocess.run(["rm", "-rf", place.pool])


# --- watching a program ----------------------------------------------------------------------------------------------


def observe(
    pid: int, reading: int, channel: socket.socket, wake: socket.socket, limits: dict[str, Any], place: Place
) -> dict[str, Any] | None:
    """How a program ended and what it printed, once all of its processes are gone; None where the trainer is gone."""
    kept = bytearray()
    began = time.monotonic()
    deadline, look = began + limits["seconds"], began + LOOK
    why, ended = "", False
    sources: list[Any] = [reading, wake, channel]
    while not ended and not why:
        ready = select.select(sources, [], [], max(0.0, min(deadline, look) - time.monotonic()))[0]
        if reading in ready and not read_output(reading, kept, limits["output_bytes"]):
            sources.remove(reading)
        if wake in ready:
            wake.recv(4096)
        if channel in ready:  # the trainer sends nothing meanwhile: it is gone
            kill_all(pid, place)
            return None
        ended = has_ended(pid)
        now = time.monotonic()
        if not ended and now >= deadline:
            why = "timeout"
        elif not ended and now >= look:
            why = "crashed" if holds_too_much(limits, place) else ""
            look = time.monotonic() + LOOK
    status, usage, gone = kill_all(pid, place)
    os.set_blocking(reading, False)
    with suppress(BlockingIOError):
        while read_output(reading, kept, limits["output_bytes"]):
            pass
    code = os.waitstatus_to_exitcode(status)
    if not why and code < 0:
        late = -code == signal.SIGXCPU or usage >= limits["cpu_seconds"]
        why = "timeout" if late else "crashed"
    text = kept.decode(errors="replace")
    return {"status": why or "finished", "exit_code": None if why else code, "output": text, "retire": not gone}


def read_output(reading: int, kept: bytearray, most: int) -> int:
    """How many bytes were read; those beyond `most` are dropped."""
    data = os.read(reading, 1 << 16)
    kept += data[: max(0, most - len(kept))]
    return len(data)


def has_ended(pid: int) -> bool:
    """Whether it has, without taking its status: its process group still has its number."""
    if sys.platform == "linux":
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
    try:
        with select.kqueue() as queue:
            return bool(queue.control([event], 1, 0))
    except ProcessLookupError:
        return True


def kill_all(pid: int, place: Place) -> tuple[int, float, bool]:
    """End a program and all that it started: its status, the seconds of CPU that it used, and whether all are gone."""
    status: int = signal.SIGKILL  # of one that could not be ended
    used, deadline = 0.0, time.monotonic() + 5
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL) if place.separated else os.killpg(pid, signal.SIGKILL)
        for each in () if place.separated else descendants():
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        try:
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                if ended[0] == pid:
                    status, used = ended[1], ended[2].ru_utime + ended[2].ru_stime
        except ChildProcessError:
            return status, used, True
        time.sleep(0.0005)
    return status, used, False


def descendants() -> list[int]:
    """The processes below this one, which end up here once their parents have ended."""
    found, last = [], [os.getpid()]
    while last:
        below: list[int] = []
        for pid in last:
            with suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                        below += map(int, file.read().split())
        found += below
        last = below
    return found


def holds_too_much(limits: dict[str, Any], place: Place) -> bool:
    """Whether the processes of a program together hold more than it may: processes, memory, files."""
    if place.separated:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        disk = os.statvfs(".")
        blocks, files = disk.f_blocks - disk.f_bfree, disk.f_files - disk.f_ffree
        too_full = blocks * disk.f_frsize > limits["scratch_bytes"] or files > FILES
    else:
        pids = descendants()
        too_full = directory_bytes(place.directory, pids, limits["scratch_bytes"]) > limits["scratch_bytes"]
    own = sum(max(0, resident_pages(str(pid)) - place.resident) for pid in pids)
    memory = (own + place.resident) * resource.getpagesize()
    return too_full or len(pids) > limits["processes"] or (bool(pids) and memory > limits["memory_bytes"])


def resident_pages(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError):  # it has ended
        return 0


# --- the channel -----------------------------------------------------------------------------------------------------


def send(channel: socket.socket, value: dict[str, Any]) -> bool:
    data = json.dumps(value).encode()
    with suppress(OSError):  # the trainer is gone, which the next `receive` finds too
        channel.sendall(HEADER.pack(len(data)) + data)
        return True
    return False


def receive(channel: socket.socket) -> Any:
    """A request; an empty one to end; None where the trainer is gone."""
    with suppress(OSError):
        header = read_exactly(channel, HEADER.size)
        data = read_exactly(channel, HEADER.unpack(header)[0]) if header else None
        return json.loads(data) if data is not None else None
    return None


def read_exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
