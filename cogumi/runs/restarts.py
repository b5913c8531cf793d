"""Start a run again by itself, `cogumi.restarts` times, from its last good checkpoint: it trains in a child process.

After a kill or an error that another try may not meet. A refusal, a failed check, a red flag, a budget, a signal that asked it
to end, and the same end at the same step as before are final.
"""

import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cogumi.checkpoints.interruption import exit_on_signals
from cogumi.core.formatting import format_duration, one_line
from cogumi.core.run_directory import STOP, this_process, write_json
from cogumi.core.signatures import EXIT_RETRY, exit_status
from cogumi.runs.rank_launcher import train_in_processes
from cogumi.telemetry.status import read_json_or_empty, status_of

if TYPE_CHECKING:
    from cogumi.config.schema import RunConfig
    from cogumi.training import RunResult

log = logging.getLogger("cogumi")
WAIT_SECONDS, WAIT_FACTOR, MAX_WAIT_SECONDS = 10.0, 3.0, 300.0


def train_with_restarts(run: "RunConfig", count: int) -> "RunResult":
    """Train in `count` processes, again where that may help. Returns or raises what the last try does."""
    ends: list[tuple[str, int]] = []
    while True:
        began = time.time()
        try:
            return train_in_processes(run, count)
        except (Exception, SystemExit) as error:
            end = describe_end(error, run.run_dir, began)
            is_final = exit_status(error) != EXIT_RETRY or (run.run_dir / STOP).exists()
            if is_final or len(ends) == run.cogumi.restarts:
                raise
            if end in ends:
                log.error("not started again: it ended in the same way at the same step (%d) before", end[1])
                raise
            ends.append(end)
            reason = one_line(error)
        wait_to_restart(run, len(ends), reason)


def describe_end(error: BaseException, run_dir: Path, began: float) -> tuple[str, int]:
    """Return the error without its numbers, and the step that this try, begun then, had reached; 0 before its training."""
    beat = read_json_or_empty(run_dir / "heartbeat.json")
    trained = beat.get("time", 0.0) > began and beat["steps"] is not None
    step = (status_of(run_dir).step or 0) if trained else 0
    return re.sub(r"\d+", "", f"{type(error).__name__}: {error}"), step


def wait_to_restart(run: "RunConfig", number: int, reason: str) -> None:
    """Wait, longer each time, with a status that says so. A signal, as of `cogumi stop`, ends the run meanwhile."""
    seconds = min(WAIT_SECONDS * WAIT_FACTOR ** (number - 1), MAX_WAIT_SECONDS)
    text = f"restart {number} of {run.cogumi.restarts} in {format_duration(seconds)}: {reason}"
    log.warning("%s", text)
    with exit_on_signals():
        try:
            record(run.run_dir, "starting", text)
            time.sleep(seconds)
        except BaseException:
            record(run.run_dir, "stopped", f"asked to before {text}")
            raise


def record(run_dir: Path, state: str, reason: str) -> None:
    if (status := run_dir / "status.json").exists():
        write_json(status, {"state": state, "time": time.time(), **this_process(), "reason": reason})
