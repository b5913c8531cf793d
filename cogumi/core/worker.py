"""Run functions in a subprocess whose children are all killed on exit."""

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
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.formatting import last_line

# This cogumi, and not another one that is installed; and only cogumi from here, everything else from where it would come.
BEGIN = "import sys; sys.path.insert(0, sys.argv[1]); from cogumi.core import worker; del sys.path[0]; worker.main()"
POLL = 0.1  # seconds between two looks at the clock


class Worker:
    """A Python process that runs functions of importable modules, one call after another, and keeps what it prints.

    It leads a process group, so that Ctrl-C in this process spares it. name: for messages.
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

    def receive(self, timeout: float | None = None) -> Any:
        """Return the function's result.

        Raises its UsageError, and RuntimeError if the process ended or took longer than `timeout` seconds.
        """
        assert self.process.stdout is not None
        began = time.monotonic()
        while not select.select([self.process.stdout], [], [], POLL)[0]:
            if timeout is not None and time.monotonic() - began >= timeout:
                self.stop()
                raise RuntimeError(f"{self.name} was ended after {time.monotonic() - began:.1f} s without an answer")
        try:
            answer = pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            status = self.process.wait()
            if status < 0:
                raise RuntimeError(f"{self.name} was ended by {signal.Signals(-status).name}") from None
            reason = last_line(self.hear(0).decode(errors="replace"))
            raise RuntimeError(f"{self.name} ended with status {status}: {reason}") from None
        if isinstance(answer, UsageError):
            raise answer
        return answer

    def hear(self, start: int) -> bytes:
        """Return what it printed from that byte on, without moving the file's offset, which is also the process's."""
        size = os.fstat(self.printed.fileno()).st_size
        return os.pread(self.printed.fileno(), size - start, start)

    def stop(self) -> None:
        """Kill the process and everything it started; it must not be used again."""
        kill_with_children(self.process.pid)

    def close(self) -> None:
        self.stop()
        self.process.communicate()
        self.printed.close()


def call(
    name: str, function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str], timeout: float
) -> Any:
    """Call a function in a process of its own; results and errors are those of `Worker.receive`."""
    with closing(Worker(name, environment)) as worker:
        worker.send(function, *arguments)
        return worker.receive(timeout)


def kill_with_children(pid: int, spare: bool = False) -> None:
    """Kill a process, if it still runs and is not to be spared, and everything it started, in any process group."""
    import psutil  # here, as the doctor imports this module where packages are missing

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for running in (*process.children(recursive=True), *[process] * (not spare)):
            with suppress(psutil.NoSuchProcess):
                running.kill()


def main() -> None:
    """Entry point of the child: serve calls until the pipe closes."""
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
