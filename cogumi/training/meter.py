"""Wall time and money of a run, by stage, over all the parts that it was made in.

A run that was killed and goes on has cost what both parts cost. The heartbeat is the record: what it last said of an
earlier part is taken up, so at most a second of each is lost, or all of it where the directory was fetched from a mirror.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cogumi.rundir import read_json

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
        """What was counted besides (`cogumi.training.throughput`), kept with the seconds for the same reason."""
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
