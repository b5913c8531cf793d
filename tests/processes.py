"""What tests with processes of their own share: waiting for what they do."""

import time
from collections.abc import Callable
from typing import Any

import psutil


def until(happened: Callable[[], Any], seconds: float = 120) -> Any:
    """What `happened` returns, once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def processes_with(variable: str, value: object) -> list[psutil.Process]:
    """Processes that were started with this variable of the environment; `info` has command line and directory."""
    running = psutil.process_iter(["environ", "cmdline", "cwd"])  # None where the system does not tell
    return [process for process in running if (process.info["environ"] or {}).get(variable) == str(value)]
