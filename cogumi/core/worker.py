"""Python functions called in a process of their own, of which nothing is left when it is over."""

import faulthandler
import os
import pickle
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.formatting import last_line

# This cogumi, and not another one that is installed; and only cogumi from here, everything else from where it would come.
BEGIN = "import sys; sys.path.insert(0, sys.argv[1]); from cogumi.core import worker; del sys.path[0]; worker.main()"
POLL = 0.1  # seconds between two looks at the clock
# Looks at what is left of a worker, and seconds between two: a process that waits for a dead disk cannot be killed.
LOOKS, BETWEEN = 200, 0.02
# The variable by which what a worker started is known, also outside its process group. COGUMI_* are keys of a config.
TOKEN = "WORKER_OF_COGUMI"


class Worker:
    """A Python process that runs functions of importable modules, one call after another, and keeps what it prints.

    name: what messages call it. It leads a process group: an interrupt of this process spares it, `stop` ends all of it.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name, self.token = name, secrets.token_hex(16)
        self.printed = TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            env={**environment, TOKEN: self.token},
            start_new_session=True,
        )

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` says so
            pickle.dump((function, arguments), self.process.stdin)
            self.process.stdin.flush()

    def receive(self, timeout: float | None = None, stopped: Event | None = None) -> Any:
        """What the function returns. Raises its UsageError, and RuntimeError where the process ended, took longer than
        `timeout` seconds, or was ended because `stopped` was set."""
        assert self.process.stdout is not None
        began = time.monotonic()
        while not select.select([self.process.stdout], [], [], POLL)[0]:
            late = timeout is not None and time.monotonic() - began >= timeout
            if late or (stopped is not None and stopped.is_set()):
                self.stop()
                raise RuntimeError(f"{self.name} was ended after {time.monotonic() - began:.1f} s without an answer")
        try:
            answer = pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            status = self.process.wait()
            if status < 0:
                raise RuntimeError(f"{self.name} was ended by {signal.Signals(-status).name}") from None
            said = last_line(self.hear(0).decode(errors="replace"))
            raise RuntimeError(f"{self.name} ended with status {status}: {said}") from None
        if isinstance(answer, UsageError):
            raise answer
        return answer

    def hear(self, start: int) -> bytes:
        """What it has printed from that byte on. (Reading moves no offset: the file's is the process's own, too.)"""
        size = os.fstat(self.printed.fileno()).st_size
        return os.pread(self.printed.fileno(), size - start, start)

    def stop(self) -> None:
        with suppress(ProcessLookupError):  # it had ended
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, which must not be asked again, and all that it started."""
        self.stop()
        self.process.communicate()
        kill_marked(f"{TOKEN}={self.token}".encode())
        self.printed.close()


def call(
    name: str, function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str], timeout: float
) -> Any:
    """What a function returns in a process of its own, as `Worker.receive` has it."""
    with closing(Worker(name, environment)) as worker:
        worker.send(function, *arguments)
        return worker.receive(timeout)


def kill_marked(mark: bytes) -> None:
    """Kill every process that has the mark in its environment, which a child inherits, and wait until none is left.

    Linux alone tells (/proc). A process shows no environment while it becomes another program, so one look is not enough.
    """
    empty = 0
    for _ in range(LOOKS):
        empty += 1
        for place in Path("/proc").glob("[0-9]*/environ"):
            # It ended, or is another user's.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if mark in place.read_bytes().split(b"\0"):
                    empty = 0
                    os.kill(int(place.parent.name), signal.SIGKILL)
        if empty == 2:
            return
        time.sleep(BETWEEN)


def main() -> None:
    """Of the process itself: answer call after call until there is none."""
    faulthandler.enable()
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # what libraries print goes elsewhere
        while True:
            try:
                function, arguments = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer = function(*arguments)
            except UsageError as error:
                answer = error
            sys.stdout.flush()
            pickle.dump(answer, output)
            output.flush()
