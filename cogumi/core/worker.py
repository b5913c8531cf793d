"""Other processes: a command of which nothing is left when it is over, and Python functions called in a fresh one."""

import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import TIMEOUT_MAX, Event, Timer
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.core.formatting import last_line

LOOK = 0.1  # seconds between two looks at the clock
PIPES = 5.0  # seconds that the pipes of a killed process may take to close
# Looks at what is left of a killed command, and seconds between two: one that waits for a dead disk cannot be killed.
LOOKS, BETWEEN = 200, 0.02
TOKEN = "COGUMI_APART"  # the variable by which what a command started is known, also outside its process group


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. status: as in subprocess, negative for a signal; None: it was killed after `timeout` seconds."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def how(self) -> str:
        if self.status is None:
            return "no answer in time"
        return f"ended by {signal.Signals(-self.status).name}" if self.status < 0 else f"exit status {self.status}"


def run_command(
    command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None, stop: Event | None = None
) -> CommandResult:
    """Run a command for at most `timeout` seconds; then, on Ctrl-C, or once `stop` is set, its process group is killed.

    What it started and left running is killed too, however it ended. Raises OSError where it cannot be started.
    """
    token, until = secrets.token_hex(16), time.monotonic() + timeout
    said: tuple[str, str] | None = None
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**(os.environ if environment is None else environment), TOKEN: token},
        start_new_session=True,
    ) as process:
        try:
            while said is None and time.monotonic() < until and not (stop is not None and stop.is_set()):
                with suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=LOOK)
            status = None if said is None else process.returncode
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            kill_marked(f"{TOKEN}={token}".encode())
        with suppress(subprocess.TimeoutExpired):  # a process out of reach still holds the pipes
            said = said or process.communicate(timeout=PIPES)
    return CommandResult(status, *(said or ("", "")))


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


class Worker:
    """A Python process that runs functions of importable modules, one call after another, and keeps what it prints.

    name: what messages call it. It leads a process group: an interrupt of this process spares it, `stop` ends all of it.
    """

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self.printed = TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cogumi.core.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            env=dict(environment),
            start_new_session=True,
        )

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` says so
            pickle.dump((function, arguments), self.process.stdin)
            self.process.stdin.flush()

    def receive(self, timeout: float | None = None) -> Any:
        """What the function returns. Raises its UsageError, and RuntimeError where the process ended or took too long."""
        assert self.process.stdout is not None
        began, late = time.monotonic(), Timer(timeout or TIMEOUT_MAX, self.stop)
        late.daemon = True
        late.start()
        try:
            answer = pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            if timeout is not None and time.monotonic() - began >= timeout:
                raise RuntimeError(f"{self.name} was ended after {timeout:g} s") from None
            self.printed.seek(0)
            said = last_line(self.printed.read().decode(errors="replace"))
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}: {said}") from None
        finally:
            late.cancel()
        if isinstance(answer, UsageError):
            raise answer
        return answer

    def stop(self) -> None:
        with suppress(ProcessLookupError):  # it had ended
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, which must not be asked again."""
        self.stop()
        self.process.communicate()
        self.printed.close()


def main() -> None:
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
            pickle.dump(answer, output)
            output.flush()


if __name__ == "__main__":
    main()
