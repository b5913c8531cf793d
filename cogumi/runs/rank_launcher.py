"""A run in processes of its own on this machine, several or one that is watched: start, forward signals, tell which one died.

Each is `python -m cogumi.runs.rank OUTCOME` with the variables of torchrun, in a session of its own. The job comes
on standard input, which stays open: at its end the launcher is gone. Rank 0 shares the launcher's output, and writes the
run's result into the file OUTCOME. The output of each other rank goes to a file, kept in the run directory if it died.
"""

import logging
import math
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.formatting import last_line
from cogumi.core.run_directory import this_process, write_json
from cogumi.core.signatures import EXIT_RETRY, known_death
from cogumi.core.worker import kill_with_children
from cogumi.stack.gpus import without_chosen_gpu
from cogumi.stack.host import count_oom_kills
from cogumi.telemetry.status import AT_WORK, read_json_or_empty

if TYPE_CHECKING:
    from cogumi.config.schema import RunConfig
    from cogumi.training import RunResult

log = logging.getLogger("cogumi")
Rank = subprocess.Popen[bytes]
OUTCOME = "outcome.pickle"
POLL_SECONDS = 0.05
PORTS = 20_000, 32_000  # Linux gives out those from 32768
# That the others have to end by themselves when one has died. With NCCL they would wait for it.
GRACE_SECONDS = 15.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The exit status of a process that a signal asked to end. Python ends itself by SIGINT after a KeyboardInterrupt.
ASKED = {*(128 + number for number in SIGNALS), *(-number for number in SIGNALS)}
UNHANDLED = {-signal.SIGTERM, -signal.SIGHUP}


def train_in_processes(run: "RunConfig", count: int) -> "RunResult":
    """Train in `count` processes: returns or raises what it does in the first of them.

    Raises RunFailed, with the number of the process, where one died.
    """
    job, oom_kills = pickle.dumps(run), count_oom_kills()
    with TemporaryDirectory(prefix="cogumi-ranks-") as directory:
        place, ranks = Path(directory), list[Rank]()
        try:
            with forward_signals() as pending:
                start_ranks(ranks, count, job, place)
                first = wait_for_all(ranks, pending)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    kill_with_children(rank.pid)
                rank.wait()
                if rank.stdin is not None:
                    rank.stdin.close()
        outcome = place / OUTCOME
        result, error = pickle.loads(outcome.read_bytes()) if outcome.exists() else (None, None)
        # A process that a library's thread aborts at its exit takes nothing from the result; the first process may only
        # have met the end of another one.
        if result is None and first is not None and not isinstance(error, UsageError) and (first > 0 or error is None):
            raise describe_failed_rank(ranks, first, place, run.run_dir, count_oom_kills() - oom_kills)
        if error is not None and ranks[0].returncode == EXIT_RETRY:  # its own cause does not survive pickling
            raise error from RunFailed(f"process 0 ended with exit status {EXIT_RETRY}", retriable=True)
        if error is not None:
            raise error
    if result is None:  # asked to end before it began
        code = next((rank.returncode for rank in ranks if rank.returncode in ASKED), ranks[0].returncode)
        raise SystemExit(code if code > 0 else 128 - code)
    return pickle.loads(result)  # type: ignore[no-any-return]


def start_ranks(ranks: list[Rank], count: int, job: bytes, place: Path) -> None:
    """Add the processes to `ranks`, one by one."""
    shared = without_chosen_gpu(os.environ)
    if count > 1:
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
        shared = {**threads, **shared, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
    for rank in range(count):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        with (place / f"rank-{rank}.log").open("wb") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "cogumi.runs.rank", str(place / OUTCOME)],
                stdin=subprocess.PIPE,
                stdout=log_file if rank > 0 else None,
                stderr=log_file if rank > 0 else None,
                env=shared | {name: str(value) for name, value in variables.items() if count > 1},
                start_new_session=True,  # a signal of the terminal comes once, from this process
            )
        ranks.append(process)
        assert process.stdin is not None
        process.stdin.write(job)
        process.stdin.flush()


def find_port() -> int:
    """A free one below those that Linux gives out itself: the first process takes it seconds later, after it imported torch."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)  # a seed of the user's would name the same one each time
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@contextmanager
def forward_signals() -> Iterator[list[int]]:
    """Collect the signals that ask this process to end: `wait_for_all` forwards them to the ranks, which save first."""
    pending: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pending
        return
    before = {number: signal.signal(number, lambda received, frame: pending.append(received)) for number in SIGNALS}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_all(ranks: list[Rank], pending: list[int]) -> int | None:
    """Wait until all ranks have ended, forwarding `pending` signals. Returns the first that died.

    After a death the others have GRACE_SECONDS. So they have when a signal ended one before its training could handle it, or
    the first one at any time: what is left would wait for it.
    """
    first, until = None, math.inf
    while True:
        # Not in the handler: a rank that is being started is not in the list yet, and would never hear of the signal.
        while pending:
            number = pending.pop(0)
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(number)
        codes = [rank.poll() for rank in ranks]
        died = [rank for rank, code in enumerate(codes) if code not in (None, 0, *ASKED)]
        if first is None and died:  # prefer ranks killed by a signal over ranks that exited non-zero
            first, until = min(died, key=lambda rank: ((codes[rank] or 0) > 0, rank)), time.monotonic() + GRACE_SECONDS
        if until == math.inf and (codes[0] in ASKED or not UNHANDLED.isdisjoint(codes)):
            until = time.monotonic() + GRACE_SECONDS
        if None not in codes or time.monotonic() > until:
            return first
        time.sleep(POLL_SECONDS)


def describe_death(code: int, output: Path) -> str:
    if code < 0:
        short = " (the kernel does so where main memory is short)" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{short}"
    return f"ended with status {code}: {last_line(output.read_text(encoding='utf-8', errors='replace'))}"


def describe_failed_rank(ranks: list[Rank], rank: int, place: Path, run_dir: Path, oom_kills: int) -> RunFailed:
    """Describe which process died and why; record it in the run's status, and keep its output in the run directory."""
    output, status = place / f"rank-{rank}.log", run_dir / "status.json"
    text = output.read_text(encoding="utf-8", errors="replace")
    known = {"retriable": False, **known_death(ranks[rank].returncode, oom_kills, text)}
    known["retriable"] |= ranks[rank].returncode == EXIT_RETRY
    recorded = read_json_or_empty(status)
    # As after an end by the run's watch.
    if recorded.get("pid") == ranks[rank].pid and recorded["state"] not in AT_WORK:
        return RunFailed(f"{recorded['state']}: {recorded.get('reason')}", known["retriable"])
    died = f"process {rank} of {len(ranks)} {describe_death(ranks[rank].returncode, output)}"
    if status.exists():
        if rank > 0:  # rank 0 shares the launcher's output
            copy = run_dir / output.name
            shutil.copyfile(output, copy)
            died += f"; its output is {copy}"
        write_json(status, {"state": "failed", "time": time.time(), **this_process(), "reason": died, **known})
    saved = any(run_dir.glob("checkpoints/checkpoint-*"))
    then = "The same command resumes from the last good checkpoint" if saved else "Nothing was saved yet"
    died += "; known cause: {cause} Fix: {fix}".format(**known) if "cause" in known else ""
    others = "; the others were ended" if len(ranks) > 1 else ""
    return RunFailed(f"{died}{others}. {then}", known["retriable"])
