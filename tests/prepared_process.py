"""Commands as processes of their own that need not import torch first: forks of one process that has.

`run(words, cwd, environment)` is `subprocess.run([sys.executable, "-m", "cogumi", *words], ...)` without the seconds of
imports. A test for what happens while modules are imported, or of which are, starts Python itself. Where standard input is a
terminal that no session has, the fork leads a session of its own there, as the child of `pty.fork` does.
"""

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

IMPORTED = (
    "torch",
    "datasets",
    "transformers",
    "trl",
    "peft",
    "cogumi.cli.app",
    "cogumi.training",
    "cogumi.training.run",
)
# Read by a library when it is imported: another value needs another prepared process.
AT_IMPORT = ("CUDA_", "HF_", "HOME", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS_", "UNSLOTH_", "XDG_CACHE_HOME")
FILES_AT_MOST = 16
addresses: dict[tuple[tuple[str, str], ...], str] = {}

# What a program that stands for `python` does: hand its files, directory, variables and words to the prepared process, and
# end as that one's fork ends. The address is a name of the kernel's, so that no file is left.
CLIENT = """\
import contextlib, json, os, signal, socket, sys
handed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)  # until it is known to whom
files = [0, 1, 2]
for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # the one that listed them
        if int(name) > 2 and os.get_inheritable(int(name)):
            files.append(int(name))
door = socket.socket(socket.AF_UNIX)
door.connect("\\0" + sys.argv[1])
said = json.dumps({"words": sys.argv[2:], "cwd": os.getcwd(), "environment": dict(os.environ), "files": files}).encode()
socket.send_fds(door, [len(said).to_bytes(8, "big")], files)
door.sendall(said)
pid = int.from_bytes(door.recv(8), "big")
for number in handed_on:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
answer = door.recv(8)
if not answer:
    sys.exit("the prepared process is gone")
status = int.from_bytes(answer, "big", signed=True)
if status < 0:
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def run(words: Sequence[object], cwd: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `cogumi WORDS` and return what it printed and its exit status."""
    return subprocess.run(
        [*client(environment), *map(str, words)],
        cwd=cwd,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def client(environment: Mapping[str, str]) -> list[str]:
    """The words that stand for `python -m cogumi` with this environment."""
    return [*python(environment), "-m", "cogumi"]


def python(environment: Mapping[str, str]) -> list[str]:
    """The words that stand for `python` with this environment, before `-m MODULE` or `-c CODE`."""
    return [sys.executable, "-I", "-S", "-c", CLIENT, address_for(environment)]


def as_program(path: Path, environment: Mapping[str, str]) -> str:
    """An executable file that stands for `python` with this environment, and is `sys.executable` to what it runs."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*python(environment), "-X", f"executable={path}"])} "$@"\n')
    path.chmod(0o755)
    return str(path)


def address_for(environment: Mapping[str, str]) -> str:
    """Where the prepared process of this environment listens; it is started where there is none yet."""
    key = tuple(sorted((name, value) for name, value in environment.items() if name.startswith(AT_IMPORT)))
    if key not in addresses:
        address = f"cogumi-tests-{os.getpid()}-{len(addresses)}"
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.prepared_process", address],
            cwd=Path(__file__).parents[1],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal of the tests is for those who started a command
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        atexit.register(end, server)
        addresses[key] = address
    return addresses[key]


def end(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def serve(address: str) -> NoReturn:
    """Fork for each that connects, and tell it the process's number and then its status.

    A fork whose client is gone is killed, as the client was. Where standard input ends, so does everything here.
    """
    for name in IMPORTED:
        __import__(name)
    gc.collect()
    gc.freeze()
    doors = socket.socket(socket.AF_UNIX)
    doors.bind("\0" + address)
    doors.listen()
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    requests: dict[int, socket.socket] = {}
    heard = select.poll()
    for number in (doors.fileno(), awake, 0):
        heard.register(number, select.POLLIN)
    while True:
        ready = {number for number, _ in heard.poll()}
        if 0 in ready:
            for pid in requests:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        for pid, connection in requests.items():
            if connection.fileno() in ready:  # nothing but its end is heard
                heard.unregister(connection)
                os.kill(pid, signal.SIGKILL)
        if awake in ready:
            os.read(awake, 4096)
            tell_those_that_ended(requests, heard)
        if doors.fileno() in ready:
            connection, _ = doors.accept()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for other in (doors, *requests.values()):
                    other.close()
                os.close(awake)
                os.close(wake)
                become(connection)
            with suppress(OSError):
                connection.sendall(pid.to_bytes(8, "big"))
            requests[pid] = connection
            heard.register(connection, 0)


def tell_those_that_ended(asked: dict[int, socket.socket], heard: select.poll) -> None:
    while asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with asked.pop(pid) as connection, suppress(KeyError, OSError):
            heard.unregister(connection)
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))


def become(connection: socket.socket) -> NoReturn:
    """Be the process that is asked for, to its end."""
    status = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        length, files, _, _ = socket.recv_fds(connection, 8, FILES_AT_MOST)
        asked = json.loads(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
        connection.close()
        apart = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 1 + max(asked["files"])) for file in files]
        for number, each in zip(asked["files"], apart, strict=True):
            os.dup2(each, number)
        for each in {*files, *apart} - {*asked["files"]}:
            os.close(each)
        if os.isatty(0):
            os.setsid()
            with suppress(PermissionError):  # the terminal of another session stays its own
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        tempfile.tempdir = None  # TMPDIR may be another
        status = status_of(asked["words"])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(status)  # taking this interpreter down, with all that it has imported, would take two seconds


def status_of(words: list[str]) -> int:
    """Run `python WORDS`, to its status."""
    if words[0] == "-X":
        sys.executable = words[1].removeprefix("executable=")
        words = words[2:]
    how, what, *rest = words
    sys.argv = ["-c" if how == "-c" else what, *rest]
    sys.path[0] = ""
    try:
        if how == "-c":
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.modules.pop(what, None)  # or runpy warns of it
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  # as the interpreter would at its end
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
