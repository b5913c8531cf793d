"""Python functions called in a process of their own, of which nothing is left when it is over."""

import faulthandler
import os
import pickle
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


class Worker:
    """A Python process that runs functions of importable modules, one call after another, and keeps what it prints.

    name: what messages call it. It leads a process group, so that an interrupt of this process spares it.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self.printed = TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            env=environment,
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
        """End the process, which must not be asked again, and all that it started."""
        kill_with_children(self.process.pid)

    def close(self) -> None:
        self.stop()
        self.process.communicate()
        self.printed.close()


def call(
    name: str, function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str], timeout: float
) -> Any:
    """What a function returns in a process of its own, as `Worker.receive` has it."""
    with closing(Worker(name, environment)) as worker:
        worker.send(function, *arguments)
        return worker.receive(timeout)


def kill_with_children(pid: int) -> None:
    """Kill a process and all that it started, in whatever process group that is. Nothing happens if it has ended."""
    import psutil  # here, as the doctor imports this module where packages are missing

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()


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
