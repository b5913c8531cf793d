"""Watch a run in every stage, from before its base is read to its end: its budget, and signs of life.

One thread looks each second. In the training it is the `Watchdog` of `protect`. In a stage without steps a run hangs when
nothing calls `liveness.beat` for STAGE_SECONDS; with `cogumi.on_hung: stop` it is asked to end. A spent budget ends a training
after its step; where no step ends in half of a grace, the run is asked to end.

Asked to end is the main thread, as by SIGTERM: a training saves its last finished step. If that takes too long, the process
ends at once, as if killed, and resumes from what is on the disk.
"""

import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cogumi.checkpoints.interruption import Watchdog, run_with_timeout
from cogumi.config.schema import RunConfig
from cogumi.core import liveness
from cogumi.core.errors import EndedByWatch, ends_by_signal
from cogumi.core.notices import is_notebook
from cogumi.core.signatures import EXIT_RETRY, exit_status
from cogumi.core.worker import kill_with_children
from cogumi.notebook.panel import write_report
from cogumi.telemetry.recorder import set_status
from cogumi.telemetry.status import BUDGET_SPENT, HUNG
from cogumi.telemetry.throughput import Meter
from cogumi.training.resume import RESUME_HINTS, budget_reached

log = logging.getLogger("cogumi")
TICK_SECONDS = 1.0
# Of silence, by stage. data: all until there is a run directory (base, rows, tokens, a try of the rewards). load: the model,
# and the engine of rollouts. rollout: with its rewards, until a training has its first steps. The others have OTHER_SECONDS.
STAGE_SECONDS = {"data": 3600.0, "download": 900.0, "load": 3600.0, "rollout": 3600.0, "merge": 3600.0}
OTHER_SECONDS = 1800.0
VERDICT_SECONDS = 40.0  # for trackers and report after the verdict; with EXIT_SECONDS less than a minute
SAVE_SECONDS, LEAVE_SECONDS = 300.0, 30.0  # for a run that hangs and was asked to end: in its training, elsewhere
GRACE_SHARE, MIN_GRACE, MAX_GRACE = 0.12, 5.0, 300.0  # of the time spent, in seconds
EARLY_LOG = Path("/dev/stderr")  # until there is a run directory


class RunWatch(Watchdog):
    """The watch of one run: `with watch.running(): ...`. meter: its stage, and the time that the budget counts."""

    running = Watchdog.watching

    def __init__(self, run: RunConfig, meter: Meter) -> None:
        super().__init__(EARLY_LOG, run.cogumi.on_hung)
        self.options, self.run_dir, self.meter = run.cogumi, run.run_dir, meter
        self.signs, self.deadline = liveness.signs, math.inf
        self.trains = self.has_directory = False
        self.spent_at: float | None = None
        self.ending: EndedByWatch | None = None
        self.exit_status: int | None = None  # once the run is over

    @property
    def tick(self) -> float:
        return min(TICK_SECONDS, super().tick)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps of a training in the block, by the same thread."""
        self.forget()
        self.trains = True
        try:
            yield
        finally:
            self.trains = False
            self.forget()

    @contextmanager
    def in_directory(self) -> Iterator[None]:
        """Write stacks and state into the run directory. Raises EndedByWatch where the block ends as it was asked to."""
        self.log_path, self.has_directory = self.run_dir / "run.log", True
        try:
            yield
        except BaseException as error:
            ending = self.ending if ends_by_signal(error) else None
            self.restart_silence()
            self.exit_status = exit_status(ending or error)
            if ending is not None:
                raise ending from error
            raise

    def finish(self, passed: bool) -> None:
        """Note that the run has its verdict: little may follow, whatever the policy."""
        self.restart_silence()
        self.exit_status = 0 if passed else 1
        self.ending, self.deadline, self.asked_at = None, math.inf, None

    @property
    def limit(self) -> float:
        if self.exit_status is not None:
            return VERDICT_SECONDS
        return super().limit if self.trains and self.armed else STAGE_SECONDS.get(self.meter.stage, OTHER_SECONDS)

    @property
    def stops(self) -> bool:
        return self.policy == "stop" or (self.exit_status is not None and not is_notebook())

    def describe(self, limit: float) -> str:
        stage = "exit" if self.exit_status is not None else self.meter.stage
        after = f" after step {self.step}" if self.step else ""
        return f"the run hangs: no sign of life in the stage {stage}{after} for more than {limit:.1f} s"

    def look(self, now: float) -> None:
        if self.signs != liveness.signs:
            self.signs = liveness.signs
            self.alive()
        if now > self.deadline:
            self.end_process()
        if self.ending is None:
            self.judge_budget(now)
            super().look(now)

    def judge_budget(self, now: float) -> None:
        elapsed = self.meter.elapsed()
        spent = budget_reached(self.options, elapsed) if self.exit_status is None else None
        if spent is None:
            return
        grace = min(max(GRACE_SHARE * elapsed, MIN_GRACE), MAX_GRACE)
        self.spent_at = now if self.spent_at is None else self.spent_at
        if now - self.spent_at > grace / 2:
            then = RESUME_HINTS[BUDGET_SPENT] if self.has_directory else "nothing was written"
            reason = f"{spent}, in the stage {self.meter.stage}; {then}"
            run_with_timeout(self.report, f"the budget is spent: {spent}", "; the run is asked to end")
            self.end(EndedByWatch(1, BUDGET_SPENT, reason), grace / 2)

    def stop(self, limit: float) -> None:
        seconds = SAVE_SECONDS if self.trains else LEAVE_SECONDS
        if self.exit_status is None:
            self.end(EndedByWatch(EXIT_RETRY, HUNG, self.describe(limit)), min(limit, seconds))
        else:  # its state is on the disk
            self.end(EndedByWatch(self.exit_status, "", self.describe(limit)), 0.0)

    def end(self, ending: EndedByWatch, seconds: float) -> None:
        """Ask the run to end. If it has not ended in that time, `look` ends the process."""
        self.ending, self.deadline = ending, self.now() + seconds
        if self.has_directory and ending.state and callable(signal.getsignal(signal.SIGTERM)):
            super().stop(seconds)

    def end_process(self) -> None:
        """End this process and all that it has started, with state and report on the disk where they can be written."""
        assert self.ending is not None
        state, reason, status = self.ending.state, self.ending.reason, self.ending.status
        run_with_timeout(log.error, "%s; the process ends, with exit status %d", reason, status)
        if self.has_directory and state:
            more = {"retriable": True} if state == HUNG else {}
            run_with_timeout(lambda: set_status(self.run_dir, state, reason=reason, **more))
            if (self.run_dir / "metrics.jsonl").exists():
                run_with_timeout(write_report, self.run_dir)
        kill_with_children(os.getpid(), spare=True)
        run_with_timeout(sys.stdout.flush)
        run_with_timeout(logging.shutdown)
        os._exit(status)
