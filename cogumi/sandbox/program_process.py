"""The process of one program, from the fork on: its limits, what it may no longer do, and its source as `__main__`.

It runs inside the sandbox's own process, so it uses the standard library only.
"""

import atexit
import linecache
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cogumi.sandbox import confinement

LINUX = sys.platform == "linux"
SLACK = (
    128  # processes and threads that a user may begin elsewhere within a second, which cost a program none of its own
)


@dataclass
class Place:
    """Where programs run. separated: in namespaces; uid: whose they are from the fork on, None: as this process is."""

    separated: bool
    scratch: str
    uid: int | None
    library: list[str]
    parent: int
    pool: str
    ruleset: int | None = None
    directory: int = -1
    resident: int = 0  # pages of this process before a fork, which every process of a program shares
    tasks: tuple[float, int] = field(default=(0.0, 0))  # when they were counted, and how many this user has


def end_first(score: str) -> None:
    """Where memory runs out, the kernel ends the process with the highest score: a program, then this, not the trainer."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(score)


def confine(limits: dict[str, Any], place: Place, output: int) -> None:
    """Make this process, a fork, that of a program; where that fails, it dies before the program begins."""
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0), os.dup2(output, 1), os.dup2(output, 2)
        os.umask(0o077)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for limit, value in rlimits(limits, place):
            hard = resource.getrlimit(limit)[1]
            highest = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with suppress(*([] if LINUX else [ValueError, OSError])):  # a Mac refuses some
                resource.setrlimit(limit, (highest, highest + 1 if limit == resource.RLIMIT_CPU else highest))
        if place.uid is not None:
            confinement.become(place.uid)
        elif confinement.can_filter and not place.separated and os.geteuid() == 0:
            confinement.drop_capabilities()
        if LINUX:
            confinement.prctl(confinement.PR_SET_DUMPABLE, 1)  # this process is to be watched, and holds no secret
            confinement.prctl(confinement.PR_SET_PDEATHSIG, signal.SIGKILL)
            confinement.prctl(confinement.PR_SET_NO_NEW_PRIVS, 1)
        end_first("1000")
        if place.ruleset is not None:
            confinement.restrict_to(place.ruleset)
        os.closerange(3, 4096)
        if confinement.can_filter:
            confinement.install_seccomp(confinement.seccomp_filter(place.separated, os.getpid()))
        if place.library:
            move_library(*place.library)
        sys.path.insert(0, place.scratch)
        sys.path_importer_cache.clear()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os.kill(os.getpid(), signal.SIGKILL)
        raise


def move_library(to: str, extensions: str, once: str) -> None:
    """Have modules imported from another directory than before, those of packages that are imported already too."""
    sys.path[:] = [to, extensions]
    for module in list(sys.modules.values()):
        if path := getattr(module, "__path__", None):
            module.__path__ = [each.replace(once, to) for each in path]


def rlimits(limits: dict[str, Any], place: Place) -> list[tuple[int, int]]:
    values = [
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + others(place)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ]
    return [(limit, int(value)) for limit, value in values]


def others(place: Place) -> int:
    """Processes and threads that the kernel counts beside those of a program: it counts all of a user."""
    if place.separated:
        return 2  # this one, and the one outside
    if place.uid is not None:
        return 0
    counted, number = place.tasks
    if time.monotonic() - counted > 1:
        number = 0
        for pid in filter(str.isdigit, os.listdir("/proc") if LINUX else ()):
            with suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                    number += len(os.listdir(f"/proc/{pid}/task"))
        place.tasks = time.monotonic(), number + SLACK if LINUX else 1000
    return place.tasks[1]


def execute(source: str) -> None:
    """Run a program as `python FILE` runs one: as __main__, and what it raises is printed without this file's frames."""
    sys.argv = ["program.py"]
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(__name__="__main__", __builtins__=sys.modules["builtins"])
    linecache.cache["<program>"] = len(source), None, source.splitlines(keepends=True), "<program>"
    code = 0
    # It is the last of these functions, after threads were waited for: Python would free every module, for milliseconds.
    atexit.register(lambda: leave_program(code))
    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), namespace)
    except SystemExit as asked:
        if asked.code is not None:
            code = asked.code if isinstance(asked.code, int) else 1
            print("" if isinstance(asked.code, int) else f"{asked.code}\n", end="", file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises ends it
        code = 1
        at = error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename != "<program>":
            at = at.tb_next
        traceback.print_exception(type(error), error, at)


def leave_program(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the program closed or replaced it
            stream.flush()
    os._exit(code & 0xFF)
