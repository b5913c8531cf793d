"""Commands of cogumi as processes of their own that need not import torch first: forks of one process that has.

`run(words, cwd, environment)` is `subprocess.run([sys.executable, "-m", "cogumi", *words], ...)` without the seconds of
imports. A test for what happens while modules are imported, or of which are, starts Python itself.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

IMPORTED = ("torch", "datasets", "transformers", "trl", "peft", "cogumi.cli", "cogumi.training", "cogumi.training.run")
# Read by a library when it is imported: another value needs another prepared process.
AT_IMPORT = ("CUDA_", "HF_", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS_", "UNSLOTH_", "XDG_CACHE_HOME")
FILES = ("stdin", "stdout", "stderr")
addresses: dict[tuple[tuple[str, str], ...], str] = {}

# What a program that stands for `cogumi` does: hand its files, directory, variables and words to the prepared process.
CLIENT = """\
import json, os, signal, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect(sys.argv[1])
said = json.dumps({"words": sys.argv[2:], "cwd": os.getcwd(), "environment": dict(os.environ)}).encode()
socket.send_fds(door, [len(said).to_bytes(8, "big")], [0, 1, 2])
door.sendall(said)
pid = int.from_bytes(door.recv(8), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
status = int.from_bytes(door.recv(8), "big", signed=True)
sys.exit(status if status >= 0 else 128 - status)
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
    return [sys.executable, "-I", "-S", "-c", CLIENT, address_for(environment)]


def address_for(environment: Mapping[str, str]) -> str:
    """Where the prepared process of this environment listens; it is started where there is none yet."""
    key = tuple(sorted((name, value) for name, value in environment.items() if name.startswith(AT_IMPORT)))
    if key not in addresses:
        address = str(Path(tempfile.mkdtemp(prefix="cogumi-")) / "door")
        command = [sys.executable, "-m", "tests.prepared_process", address]
        server = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        atexit.register(server.kill)
        addresses[key] = address
    return addresses[key]


def serve(address: str) -> None:
    """Fork for each that connects, until standard input ends, and tell it the process's number and then its status."""
    for name in IMPORTED:
        __import__(name)
    gc.collect()
    gc.freeze()
    doors = socket.socket(socket.AF_UNIX)
    doors.bind(address)
    doors.listen()
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    asked: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([doors, awake, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        if awake in ready:
            os.read(awake, 4096)
            tell_those_that_ended(asked)
        if doors in ready:
            connection, _ = doors.accept()
            length, files, _, _ = socket.recv_fds(connection, 8, len(FILES))
            said = b""
            while len(said) < int.from_bytes(length, "big"):
                said += connection.recv(1 << 20)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for other in (connection, doors, *asked.values()):
                    other.close()
                become(json.loads(said), files)
            for each in files:
                os.close(each)
            connection.sendall(pid.to_bytes(8, "big"))
            asked[pid] = connection


def tell_those_that_ended(asked: dict[int, socket.socket]) -> None:
    while asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with asked.pop(pid) as connection:
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))


def become(asked: dict[str, object], files: list[int]) -> NoReturn:
    """Be the process that was asked for, to its end."""
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(str(asked["cwd"]))
    os.environ.clear()
    os.environ.update(asked["environment"])  # type: ignore[call-overload]
    sys.argv = ["cogumi", *asked["words"]]  # type: ignore[misc]
    sys.path[0] = ""
    status = run_main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking this interpreter down, with all that it has imported, would take two seconds


def run_main() -> int:
    from cogumi.__main__ import main

    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001  # as the interpreter would at its end
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
