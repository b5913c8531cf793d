"""How long the rest of a training takes, from its recent steps."""

import statistics
import time
from collections import deque

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
