"""The other side of `cogumi.start`: python -m cogumi.runs.supervisor FD trains what it is told, in a session of its own.

    start -> launcher (ends at once) -> supervisor -> trainer

The launcher leads a session of its own, so neither a terminal that closes nor a notebook that is restarted reaches what it
leaves behind. Because it ends, those who kill a kernel's children do not find them either. The supervisor waits for the
trainer and writes how it ended, which a process that was killed cannot do itself.

What to train comes on standard input, secrets and all, and is nowhere written but, redacted, in config.yaml.
"""

import faulthandler
import fcntl
import json
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogumi.core.errors import UsageError
from cogumi.core.run_directory import (
    CONSOLE,
    START,
    is_empty,
    is_running,
    refuse_occupied,
    this_process,
    unwritable_error,
    write_json,
)
from cogumi.telemetry.status import read_json_or_empty, status_of

if TYPE_CHECKING:
    from cogumi.config.schema import RunConfig

log = logging.getLogger("cogumi")
# How long a word to the process that started this one waits for it to have listened.
LISTENING_SECONDS = 30.0
# How long the workers of a killed process may take to notice.
ORPHAN_SECONDS = 15.0


class Starter:
    """The process that asked for the run, for as long as it listens."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.socket.settimeout(LISTENING_SECONDS)

    def tell(self, **word: str) -> bool:
        """Tell it something. False where it does not listen any more."""
        try:
            self.socket.sendall(json.dumps(word).encode() + b"\n")
            return self.socket.recv(1) != b""
        except (ConnectionError, TimeoutError):
            return False

    def hang_up(self) -> None:
        """It waits for this after a refusal, so that what is to be removed is gone when it says so."""
        with suppress(OSError):  # it has ended already
            self.socket.shutdown(socket.SHUT_RDWR)


def main() -> None:
    descriptor = int(sys.argv[1])
    if os.fork():
        os._exit(0)  # start waits for this
    place, telling = os.pipe()
    trainer = os.fork()
    if trainer:
        os.close(descriptor)
        os.close(telling)
        supervise(trainer, place)
        return
    os.close(place)
    faulthandler.enable()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Before and after the training, which has a handler of its own: status.json is to say so.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    log.setLevel(logging.INFO)
    config, overrides = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.exit(run_training(Starter(descriptor), telling, config, overrides))


def supervise(trainer: int, place: int) -> None:
    """Wait until the trainer has ended, and add its exit status (a signal is negative) to the record of its start."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # what is meant for the trainer is not to end the one who tells of it
    code = os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1])
    os.set_blocking(place, False)  # a worker of the trainer may have it open still
    try:
        run_dir = Path(os.fsdecode(os.read(place, 65536)))
    except BlockingIOError:
        return  # it ended before it had a directory
    started = read_json_or_empty(run_dir / START)
    if started.get("pid") == trainer:
        write_json(run_dir / START, {**started, "exit": code})
        if code < 0:
            with (run_dir / CONSOLE).open("a", encoding="utf-8") as console:
                console.write(f"cogumi: process {trainer} was ended by {signal.Signals(-code).name}\n")


def run_training(starter: Starter, telling: int, config: Any, overrides: Mapping[str, Any]) -> int:
    """Check, say what there is to say, train. Returns the exit status: 0 good, 1 checks failed, 2 refused."""
    try:
        from cogumi.config.schema import load_config
        from cogumi.stack.gpus import use_one_gpu

        use_one_gpu()
        from cogumi.training import train  # where there is unsloth, it comes before what load_config will import

        run = load_config(config, **overrides)
        run_dir = run.run_dir.absolute()
        if nothing_to_start(run, starter):
            return 0
    except UsageError as error:
        starter.tell(refused=str(error))
        starter.hang_up()
        return 2
    fresh = is_empty(run_dir)
    os.write(telling, os.fsencode(run_dir))
    starter.tell(begins=str(run_dir))
    try:
        with redirect_to_console(run_dir) as ours:
            if not ours:
                starter.tell(already=f"{run.run_dir} is just being started", run_dir=str(run_dir))
                return 0
            starter.tell(run_dir=str(run_dir))
            return 0 if train(config, **overrides).passed else 1
    except UsageError as error:
        log.error("refused: %s", error)
        record_refusal(run_dir, fresh, str(error), starter.tell(refused=str(error)))
        starter.hang_up()
        return 2


def nothing_to_start(run: "RunConfig", starter: Starter) -> bool:
    """Whether the run that is asked for is under way or over already: then the starter is told so.

    Raises UsageError where something else is in its directory.
    """
    from cogumi.training.resumption import describe_differences, refuse_unless_unfinished

    if is_empty(run.run_dir):
        return False
    if not (run.run_dir / "status.json").exists():
        refuse_occupied(run.run_dir)
    status, run_dir = status_of(run.run_dir), str(run.run_dir.absolute())
    other = describe_differences(run) if (run.run_dir / "config.yaml").exists() else ""
    if status.alive:
        but = f", with another configuration ({other}): that one is attached to, nothing is started" if other else ""
        starter.tell(already=f"{run.run_dir} is under way already{but}", run_dir=run_dir)
        return True
    if not status.state.startswith("finished"):
        refuse_unless_unfinished(run)
        return False
    if other:
        raise UsageError(
            f"{run.run_dir} holds a run ({status.state}) of another configuration ({other})",
            fix="set cogumi.run_dir to a new directory",
        )
    starter.tell(already=f"{run.run_dir}: {status.state} already; there is nothing to start", run_dir=run_dir)
    return True


@contextmanager
def redirect_to_console(run_dir: Path) -> Iterator[bool]:
    """Make the directory, and let everything this process prints go to its console.log. False where another start does."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        console = os.open(run_dir / CONSOLE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        # Of its own: a process that prints to the console does not hold it.
        lock = os.open(run_dir / CONSOLE, os.O_RDONLY)
    except OSError as error:
        raise unwritable_error(run_dir, error) from None
    try:
        if not acquire_lock(lock, run_dir):
            yield False
            return
        write_json(run_dir / START, {**this_process(), "time": time.time()})
        for stream in (1, 2):
            os.dup2(console, stream)
        log.info("process %d of %s, in %s", os.getpid(), os.uname().nodename, os.getcwd())
        yield True
    finally:
        os.close(console)
        os.close(lock)


def acquire_lock(lock: int, run_dir: Path) -> bool:
    """Take the lock. False where another living start has it; the workers of one that was killed end some seconds later."""
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


def record_refusal(run_dir: Path, fresh: bool, line: str, heard: bool) -> None:
    """After a refusal: nothing is left of a run that never was, if the starter heard why; else the word is left there."""
    if not fresh or not heard:
        run_dir.mkdir(exist_ok=True)  # a refusal by a library has taken it away
        write_json(run_dir / START, {**this_process(), "time": time.time(), "refused": line})
    elif run_dir.is_dir():
        for name in (CONSOLE, START):
            (run_dir / name).unlink(missing_ok=True)
        if not any(run_dir.iterdir()):
            run_dir.rmdir()


if __name__ == "__main__":
    main()
