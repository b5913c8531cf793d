"""Seconds of each stage of a run, and the seconds to go.

A run that was killed and goes on has cost what both parts cost. The heartbeat is the record: what it last said of an
earlier part is taken up, so at most a second of each is lost, or all of it where the directory was fetched from a mirror.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cogumi.core.run_directory import read_json

CYCLES = 50  # of the latest: sequence lengths and completions change over a run


class Pace:
    """Seconds per step. What happens between steps (saving, evaluation, logging) is counted apart.

    cycle: after how many steps the work repeats; in GSPO one of several steps makes the rollout that all of them train on.
    A cycle is timed as a whole, and the median of the latest cycles is the pace: the first step, one that compiled, and
    one that waited for a disk do not move it. Reading the data of a step belongs to the step.
    """

    def __init__(self, cycle: int = 1) -> None:
        self.cycle = cycle
        self.cycles: deque[float] = deque(maxlen=CYCLES)
        self.under_way: list[float] = []
        self.steps = 0
        self.between = 0.0
        self.last_step_end: float | None = None
        self.mark = 0.0

    def begin(self) -> None:
        self.last_step_end = None
        self.mark = time.monotonic()

    def step_ended(self) -> float:
        """The seconds that the step took."""
        now = time.monotonic()
        if self.last_step_end is not None:
            self.between += self.mark - self.last_step_end
        seconds = now - self.mark
        self.under_way.append(seconds)
        self.steps += 1
        if len(self.under_way) == self.cycle:
            self.cycles.append(sum(self.under_way))
            self.under_way.clear()
        self.last_step_end = self.mark = now
        return seconds

    def between_ended(self) -> None:
        """Something between two steps is done; what follows is the next step, or more of the kind."""
        self.mark = time.monotonic()

    def stood_still(self, seconds: float) -> None:
        """The training has waited for so long, and it counts as no time at all."""
        self.mark += seconds
        if self.last_step_end is not None:
            self.last_step_end += seconds

    def seconds_per_step(self) -> float | None:
        """None before the first step. The first cycle, which warms up, counts only while there is no other."""
        if not self.cycles:
            return statistics.mean(self.under_way) if self.under_way else None
        warm = list(self.cycles)[1:] if 1 < len(self.cycles) < CYCLES else self.cycles
        return statistics.median(warm) / self.cycle

    def eta(self, steps_left: int) -> float | None:
        """Seconds to the end of the training: the recent pace, and beside it what lay between steps so far at its rate."""
        pace = self.seconds_per_step()
        return None if pace is None else steps_left * (pace + self.between / self.steps)


# ---------------------------------------------------------------------------------------------------------- stage timer


HEARTBEAT = "heartbeat.json"


class Meter:
    """Counts seconds from the moment it is made. Every second belongs to one stage, the innermost.

    price_per_hour: what the machine costs while it is held, in whatever currency; None where nobody said.
    """

    def __init__(self, price_per_hour: float | None = None, stage: str = "data") -> None:
        self.price_per_hour = price_per_hour
        self.started = time.time()
        self.earlier = 0.0
        self.stage = stage
        self.base = stage
        self.spent: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        """What was counted besides (`cogumi.telemetry.throughput`), kept with the seconds for the same reason."""
        self.began = self.since = time.monotonic()

    def take_up(self, run_dir: Path) -> None:
        """Go on counting where the earlier parts of the run in this directory ended."""
        path = run_dir / HEARTBEAT
        if path.exists():
            beat = read_json(path)
            self.earlier += beat.get("elapsed_seconds", 0.0)
            self.started = beat.get("started", self.started)
            self.counts = beat.get("counts", {})
            for stage, seconds in beat.get("seconds", {}).items():
                self.spent[stage] = self.spent.get(stage, 0.0) + seconds

    def enter(self, stage: str) -> None:
        """From now on the run is in this stage, until the next."""
        self.base = stage
        self.turn_to(stage)

    @contextmanager
    def inside(self, stage: str) -> Iterator[None]:
        """A piece of work of its own within a stage: an evaluation, a rollout, samples."""
        outer = self.stage
        self.turn_to(stage)
        try:
            yield
        finally:
            self.turn_to(outer)

    def turn_to(self, stage: str) -> None:
        now = time.monotonic()
        self.spent[self.stage] = self.spent.get(self.stage, 0.0) + now - self.since
        self.stage, self.since = stage, now

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, in the order in which they were first entered."""
        stage, since, spent = self.stage, self.since, dict(self.spent)
        spent[stage] = spent.get(stage, 0.0) + max(0.0, time.monotonic() - since)
        return spent

    def elapsed(self) -> float:
        """Seconds of this part and of those before it."""
        return self.earlier + time.monotonic() - self.began

    def cost(self, more_seconds: float = 0.0) -> float | None:
        """What the run has cost, or will have after so many seconds more; None without a price."""
        return None if self.price_per_hour is None else (self.elapsed() + more_seconds) / 3600 * self.price_per_hour
