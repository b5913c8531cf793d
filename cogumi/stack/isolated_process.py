"""A command in a process group of its own, of which nothing is left when it is over, however it ended."""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

LOOK = 0.1  # seconds between two looks at the clock
PIPES = 5.0  # seconds that the pipes of a killed process may take to close
LOOKS, BETWEEN = 200, 0.02  # at what is left, seconds; one that waits for a dead disk cannot be killed, and is given up
TOKEN = "COGUMI_APART"  # the variable by which what a command started is known, also outside its process group


@dataclass(frozen=True)
class Ended:
    """How a command ended. status: as in subprocess, negative for a signal; None: it was killed after `timeout` seconds."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def how(self) -> str:
        if self.status is None:
            return "no answer in time"
        return f"ended by {signal.Signals(-self.status).name}" if self.status < 0 else f"exit status {self.status}"


def run_apart(
    command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None, stop: Event | None = None
) -> Ended:
    """Run a command for at most `timeout` seconds; then, on Ctrl-C, or once `stop` is set, its process group is killed.

    What it started and left running is killed too, however it ended. Raises OSError where it cannot be started.
    """
    token, until = secrets.token_hex(16), time.monotonic() + timeout
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
            said = None
            while said is None:
                try:
                    said = process.communicate(timeout=LOOK)
                except subprocess.TimeoutExpired:
                    if time.monotonic() > until or (stop is not None and stop.is_set()):
                        break
            status = process.returncode if said is not None else None
            if said is None:
                os.killpg(process.pid, signal.SIGKILL)
                kill_marked(token)
                said = what_was_said(process)
        finally:
            if process.poll() is None:  # Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
            kill_marked(token)
    return Ended(status, *said)


def kill_marked(token: str) -> None:
    """Kill every process that has the token in its environment, which a child inherits, and wait until none is left.

    Linux alone tells (/proc). A process shows no environment while it becomes another program, so one look is not enough.
    """
    empty = 0
    for _ in range(LOOKS):
        empty = 0 if kill_those_with(f"{TOKEN}={token}".encode()) else empty + 1
        if empty == 2:
            return
        time.sleep(BETWEEN)


def kill_those_with(mark: bytes) -> bool:
    found = False
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in place.read_bytes().split(b"\0"):
                found = True
                os.kill(int(place.parent.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended, or somebody else's
    return found


def what_was_said(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """The output of a killed process; none where somebody out of reach still holds its pipes."""
    try:
        return process.communicate(timeout=PIPES)
    except subprocess.TimeoutExpired:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return "", ""
