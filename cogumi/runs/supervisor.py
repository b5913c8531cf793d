"""The other side of `cogumi.start`: `python -m cogumi.runs.supervisor FD RUN_DIR` trains in a session of its own.

    start -> launcher (ends at once) -> supervisor -> trainer

The launcher leads a session of its own, which a terminal that closes does not reach. It ends, so those who kill a kernel's
children do not find the rest. The supervisor writes how the trainer ended, which one that was killed cannot do itself.

What to train comes on standard input, secrets and all, and is nowhere written but, redacted, in config.yaml. FD is a pipe
for JSON lines on what becomes of the start. It is closed when all of these have ended.
"""

import faulthandler
import fcntl
import json
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogumi.checkpoints.interruption import raise_exit
from cogumi.checkpoints.mirror import Mirror
from cogumi.core.errors import UsageError
from cogumi.core.liveness import end_process_after
from cogumi.core.run_directory import (
    CONSOLE,
    START,
    is_empty,
    is_running,
    refuse_occupied,
    same_process,
    this_process,
    unwritable_error,
    write_json,
)
from cogumi.core.signatures import EXIT_RETRY, exit_status, known_death
from cogumi.stack.host import count_oom_kills
from cogumi.telemetry.status import AT_WORK, read_json_or_empty, status_of, tail_lines

if TYPE_CHECKING:
    from cogumi.config.schema import RunConfig

log = logging.getLogger("cogumi")
LAST_WORDS = 50  # lines of the console in which a cause is looked for
ORPHAN_SECONDS = 15.0  # that the workers of a killed process may take to notice


def main() -> None:
    pipe, run_dir = int(sys.argv[1]), Path(sys.argv[2])
    if os.fork():
        os._exit(0)  # start waits for this
    if trainer := os.fork():
        supervise(trainer, run_dir)
        return
    faulthandler.enable()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Before and after the training, which has a handler of its own: status.json is to say so.
    signal.signal(signal.SIGTERM, raise_exit)
    line = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.WARNING, format=line, stream=sys.stderr, force=True)
    log.setLevel(logging.INFO)
    run = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with end_process_after():
        sys.exit(run_training(pipe, run_dir, run))


def supervise(trainer: int, run_dir: Path) -> None:
    """Wait until the trainer has ended; record its exit status (a signal is negative), and the cause if it recorded none."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what is meant for the trainer is not to end the one who tells of it
    oom_kills = count_oom_kills()
    code = os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1])
    started, status = (read_json_or_empty(run_dir / name) for name in (START, "status.json"))
    if started.get("pid") == trainer:
        output = "\n".join(tail_lines(run_dir / CONSOLE)[-LAST_WORDS:]).rpartition(f"process {trainer} of ")[2]
        recorded = same_process(started, status)
        is_death = (code == 1 or code < 0) and not (recorded and status["state"] not in AT_WORK)
        known = known_death(code, count_oom_kills() - oom_kills, output) if is_death else {}
        if recorded and is_death:
            write_json(run_dir / "status.json", {**status, **known})
        known |= {"retriable": True} if code == EXIT_RETRY else {}
        write_json(run_dir / START, {**started, **known, "exit": code})  # last, as it is waited for


def run_training(pipe: int, run_dir: Path, run: "RunConfig") -> int:
    """Check, report to the process that started this, and train. Returns 0, or the exit status of a failure."""

    def send_startup_message(**fields: str) -> None:
        with suppress(BrokenPipeError):  # that process is gone, or waits no longer
            os.write(pipe, json.dumps(fields).encode() + b"\n")

    try:
        from cogumi.runs.entry import import_backend, train_run

        with import_backend(run):
            already = describe_existing(run)
        if already:
            send_startup_message(already=already)
            return 0
        with redirect_to_console(run_dir, run.cogumi.restarts) as record:
            if not record:
                send_startup_message(already=f"{run.run_dir} is just being started")
                return 0
            send_startup_message(begins=str(run_dir))
            try:
                return 0 if train_run(run).passed else 1
            except UsageError as error:
                log.error("refused: %s", error)
                send_startup_message(refused=str(error), status=str(exit_status(error)))
                run_dir.mkdir(exist_ok=True)  # a refusal by a library has taken it away
                write_json(run_dir / START, {**record, "refused": str(error)})
                return exit_status(error)
    except UsageError as error:
        send_startup_message(refused=str(error), status=str(exit_status(error)))
        return exit_status(error)


def describe_existing(run: "RunConfig") -> str:
    """Describe the run in the directory if it is under way or over already; "" if it is to be started.

    Raises UsageError if something else is in the directory.
    """
    from cogumi.training.resume import bring_back, describe_differences, refuse_unless_unfinished

    if is_empty(run.run_dir):
        if run.cogumi.mirror is not None and bring_back(run, Mirror(run.cogumi.mirror)):
            return f"{run.run_dir} is finished already in {run.cogumi.mirror}, and fetched from there"
        return ""
    if not (run.run_dir / "status.json").exists():
        refuse_occupied(run.run_dir)
    status = status_of(run.run_dir)
    differences = describe_differences(run) if (run.run_dir / "config.yaml").exists() else ""
    if status.alive:
        other = f", with another configuration ({differences}): that one is attached to, nothing is started"
        return f"{run.run_dir} is under way already{other if differences else ''}"
    if not status.state.startswith("finished"):
        refuse_unless_unfinished(run)
        return ""
    if differences:
        problem = f"{run.run_dir} holds a run ({status.state}) of another configuration ({differences})"
        raise UsageError(problem, fix="set cogumi.run_dir to a new directory")
    return f"{run.run_dir}: {status.state} already; there is nothing to start"


@contextmanager
def redirect_to_console(run_dir: Path, restarts: int) -> Iterator[dict[str, Any]]:
    """Make the directory and redirect everything this process prints to its console.log.

    Yields the record of this start, with whether there was no run before it, and how often it restarts by itself; {} if
    another start has the console.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        console = os.open(run_dir / CONSOLE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        # Of its own: a process that prints to the console does not hold it.
        lock = os.open(run_dir / CONSOLE, os.O_RDONLY)
    except OSError as error:
        raise unwritable_error(run_dir, error) from None
    try:
        if not acquire_lock(lock, run_dir):
            yield {}
            return
        record = {**this_process(), "time": time.time(), "new": is_empty(run_dir), "restarts": restarts}
        write_json(run_dir / START, record)
        for stream in (1, 2):
            os.dup2(console, stream)
        log.info("process %d of %s, in %s", os.getpid(), os.uname().nodename, os.getcwd())
        yield record
    finally:
        os.close(console)
        os.close(lock)


def acquire_lock(lock: int, run_dir: Path) -> bool:
    """Take the lock; False if another living start has it. The workers of a killed one end some seconds later."""
    until = time.monotonic() + ORPHAN_SECONDS
    while time.monotonic() < until:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if is_running(read_json_or_empty(run_dir / START)):
                return False
        time.sleep(0.2)
    raise UsageError(f"{run_dir / CONSOLE} is held by what a killed run left", fix=f"end it (`fuser {CONSOLE}`)")


if __name__ == "__main__":
    main()
