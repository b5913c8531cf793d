"""Which process a record is of, and whether that one still lives: a number alone may be somebody else's by now."""

import os
import socket
from collections.abc import Mapping
from functools import cache
from typing import Any

import psutil

# The start of a process is told in the clock of today, which may have been set since; no number comes round as soon.
CLOCK_SECONDS = 5.0


@cache
def host() -> str:
    return socket.gethostname()


def this_process() -> dict[str, Any]:
    """The record of the process that asks: its number, the machine, and when it began (seconds since 1970)."""
    return {"pid": os.getpid(), "host": host(), "began": psutil.Process().create_time()}


def is_running(record: Mapping[str, Any]) -> bool | None:
    """Whether the process of a record lives; a zombie does not.

    None where that cannot be said from here: a process of another machine, or one whose number is another's today, unless
    it is the clock that was set.
    """
    if record.get("pid") is None or record.get("host") != host():
        return None
    try:
        process = psutil.Process(record["pid"])
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return True if abs(process.create_time() - record["began"]) <= CLOCK_SECONDS else None
    except psutil.NoSuchProcess:
        return False


def same_process(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records are of one process. A record of none is of no process."""
    return one.get("pid") is not None and all(one.get(key) == other.get(key) for key in ("pid", "host", "began"))
