"""The metrics of a run as curves: every line of metrics.jsonl is read once, and a million of them stay a few kilobytes.

A curve is cut into bins of so many steps, each with the least, the mean and the greatest of its values, so that a spike of
one step in a million is still there. What is not finite is no part of a bin: its steps are kept beside it.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

CHUNK_BYTES = 4 << 20
MOST_BINS = 300  # of a curve: as many as a small plot has pixels
MOST_BROKEN = 100


@dataclass(frozen=True)
class Plot:
    """Curves that are shown together. keys: as TRL and cogumi log them; those that a run does not log are left out."""

    title: str
    keys: tuple[str, ...]
    unit: str = ""


PLOTS = (
    Plot("loss", ("loss", "eval_loss")),
    Plot("reward", ("reward",), "mean of a batch"),
    Plot("reward spread", ("reward_std",), "standard deviation"),
    Plot("margin", ("rewards/margins",), "chosen - rejected"),
    Plot("KL", ("policy/kl_new_old", "kl"), "nats per token"),
    Plot("clipped", ("policy/clipped_ratio_fraction",), "share of completions"),
    Plot("gradient norm", ("grad_norm",), "before clipping"),
    Plot("entropy", ("entropy",), "nats per token"),
    Plot("learning rate", ("learning_rate",)),
    Plot("speed", ("perf/tokens_per_second",), "tokens per second"),
)
KEYS = tuple(dict.fromkeys(key for plot in PLOTS for key in plot.keys))
FIRST, LAST, LOW, SUM, HIGH, COUNT = range(6)


@dataclass
class Curve:
    """One metric. `bins`: an array of (first step, last step, least, sum, greatest, number of values) by bin."""

    bins: np.ndarray = field(default_factory=lambda: np.empty((6, 0)))
    width: int = 1
    broken: list[int] = field(default_factory=list)
    """Steps, the first hundred, whose value is NaN or infinite."""

    @property
    def steps(self) -> np.ndarray:
        """The middle of each bin."""
        return (self.bins[FIRST] + self.bins[LAST]) / 2

    @property
    def low(self) -> np.ndarray:
        return self.bins[LOW]

    @property
    def mean(self) -> np.ndarray:
        return self.bins[SUM] / self.bins[COUNT]

    @property
    def high(self) -> np.ndarray:
        return self.bins[HIGH]

    def __bool__(self) -> bool:
        return bool(self.bins.shape[1] or self.broken)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Values of later steps than those that are there."""
        finite = np.isfinite(values)
        self.broken += steps[~finite][: MOST_BROKEN - len(self.broken)].astype(int).tolist()
        steps, values = steps[finite], values[finite]
        bins = np.concatenate([self.bins, [steps, steps, values, values, values, np.ones_like(values)]], axis=1)
        begins = self.begins(bins)
        while len(begins) > MOST_BINS:
            self.width *= 2
            begins = self.begins(bins)
        if len(begins):
            together = (np.minimum, np.maximum, np.minimum, np.add, np.maximum, np.add)
            rows = zip(together, bins, strict=True)
            self.bins = np.stack([function.reduceat(row, begins) for function, row in rows])

    def begins(self, bins: np.ndarray) -> np.ndarray:
        """Where in a row of bins another stretch of `width` steps begins."""
        stretch = bins[FIRST] // self.width
        return np.flatnonzero(np.diff(stretch, prepend=np.nan))


class Curves:
    """The curves of one metrics.jsonl, read on with each `read()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()

    def forget(self) -> None:
        self.of = {key: Curve() for key in KEYS}
        self.offset = self.rows = 0
        self.file_number: int | None = None
        self.behind = False

    def read(self, most: float = math.inf) -> bool:
        """Take in the lines written since the last time; whether there were any. A file that was cut is read anew.

        most: bytes, about, after which it is enough for this time; `behind` then says that there are more. A run that goes
        on from an earlier step replaces the file by one without the steps that it makes again.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            self.forget_another(file)
            before, self.behind = self.offset, False
            for lines in self.whole_lines(file):
                self.take(lines)
                if self.offset - before >= most:
                    self.behind = True
                    break
        return self.offset > before

    def forget_another(self, file: IO[bytes]) -> None:
        now = os.fstat(file.fileno())
        if self.file_number not in (None, now.st_ino) or now.st_size < self.offset:
            self.forget()
        self.file_number = now.st_ino

    def whole_lines(self, file: IO[bytes]) -> Iterator[bytes]:
        """Pieces of some megabytes from `offset` on, each up to the end of a line."""
        file.seek(self.offset)
        rest = b""
        while data := file.read(CHUNK_BYTES):
            data = rest + data
            end = data.rfind(b"\n") + 1
            rest = data[end:]
            if end:
                self.offset += end
                yield data[:end]

    def take(self, lines: bytes) -> None:
        import polars as pl

        # Not-finite values are strings in the file (`cogumi.core.run_directory.finite`), which is rare, and slower to read.
        said = pl.String if b'"nan"' in lines or b'inf"' in lines else pl.Float64
        schema = dict.fromkeys(("step", *KEYS), said)
        rows = pl.read_ndjson(lines, schema=schema, ignore_errors=True)
        self.rows += len(rows)
        there = ~rows.select(pl.all().is_null()).to_numpy()  # null and NaN are one in an array of numbers
        values = rows.cast(pl.Float64, strict=False).to_numpy()
        for column, key in enumerate(KEYS, 1):
            logged = there[:, 0] & there[:, column]
            if logged.any():
                self.of[key].add(values[logged, 0], values[logged, column])

    def plots(self) -> list[tuple[Plot, dict[str, Curve]]]:
        """What there is to be shown, in the order of PLOTS."""
        found = [(plot, {key: self.of[key] for key in plot.keys if self.of[key]}) for plot in PLOTS]
        return [(plot, curves) for plot, curves in found if curves]


def range_of(curves: Iterable[Curve]) -> tuple[float, float]:
    """From the least to the greatest value, for an axis. About a value that stays the same by half of it; of 0 up to 1."""
    there = [curve for curve in curves if len(curve.low)]
    low = min((float(curve.low.min()) for curve in there), default=0.0)
    high = max((float(curve.high.max()) for curve in there), default=1.0)
    if low < high:
        return low, high
    return (low - abs(low) / 2, low + abs(low) / 2) if low else (0.0, 1.0)
