"""heartbeat.json: once a second, in every stage, what a run is doing, how long it takes yet, and what it costs."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from cogumi.core.durability import NO_SPACE
from cogumi.core.run_directory import write_json
from cogumi.telemetry.stage_timer import HEARTBEAT, Meter
from cogumi.telemetry.throughput import MachineUse, Throughput

log = logging.getLogger("cogumi")
HEARTBEAT_SECONDS = 1.0


@dataclass
class Progress:
    """How far the training is. Written by the thread that trains, read by the one that beats."""

    step: int = 0
    steps: int | None = None
    step_time: float | None = None
    """When the last step ended, in seconds since the epoch: what stands still when the training hangs."""
    eta_seconds: float | None = None
    """To the end of the training, as of `step_time`; samples, merge and checks come after it."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    of_a_stage: bool = False
    """Whether these are steps and seconds of one stage before the training (`dpo.ReferencePass`)."""


class Heartbeat:
    """`with Heartbeat(run_dir, meter) as heart:` beats in a thread of its own until the block ends, and once more then.

    The thread holds the interpreter for about a millisecond a beat and waits for nothing but the disk. `time` says that
    the process lives; a training that hangs keeps its `step_time`, and one that holds the interpreter keeps its `time`.
    """

    def __init__(self, run_dir: Path, meter: Meter) -> None:
        self.run_dir, self.meter = run_dir, meter
        self.progress = Progress()
        self.throughput: Throughput | None = None
        self.stalled: Callable[[], str] = str  # what a mirror says that falls behind, "" where it does not
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self.use = MachineUse(run_dir)
        self.thread = threading.Thread(target=self.run, name="cogumi heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        self.thread.join()
        if self.failure is None:
            self.run()
        if self.failure is not None and kind is None:
            raise self.failure
        if self.failure is not None:  # what went wrong first is raised; a lost GPU, say, has stopped both
            log.error("the heartbeat has stopped: %s: %s", type(self.failure).__name__, self.failure)

    def run(self) -> None:
        try:
            while True:
                self.beat()
                if self.over.wait(HEARTBEAT_SECONDS):
                    return
        except BaseException as failure:  # noqa: BLE001  the thread that trains raises it, at its next step or at the end
            self.failure = failure

    def refuse_silence(self) -> None:
        """Raise, in the thread that trains, what stopped the heartbeat."""
        if self.failure is not None:
            raise self.failure

    def beat(self) -> None:
        try:
            write_json(self.run_dir / HEARTBEAT, self.now())
        except OSError as error:  # on a full disk the one of before stays, and the next may fit
            if error.errno not in NO_SPACE:
                raise

    def now(self) -> dict[str, Any]:
        progress, meter = self.progress, self.meter
        left = progress.eta_seconds
        return {
            "stage": meter.stage,
            "step": progress.step,
            "steps": progress.steps,
            "time": time.time(),
            "step_time": progress.step_time,
            "started": meter.started,
            "elapsed_seconds": meter.elapsed(),
            "eta_seconds": left,
            "cost_so_far": meter.cost(),
            "cost_at_end": None if left is None or progress.of_a_stage else meter.cost(left),
            "tokens_per_second": progress.tokens_per_second,
            "mfu": progress.mfu,
            "seconds": meter.seconds(),
            "counts": meter.counts,
            "stalled": self.stalled() or None,
            **self.use.now(),
        }
