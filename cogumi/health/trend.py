"""Does a noisy series rise or fall: a robust slope, a test that knows the noise, and the noise itself."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trend:
    """`slope` per unit of x; `z`: how many standard deviations the ordering of the values is from chance."""

    slope: float
    z: float

    def change(self, x: Sequence[float]) -> float:
        """What the slope amounts to from the first to the last x."""
        return self.slope * (x[-1] - x[0])


def trend(x: Sequence[float], y: Sequence[float]) -> Trend:
    """Theil and Sen's slope (the median over all pairs; Sen 1968, doi:10.1080/01621459.1968.10480934) and Mann and
    Kendall's test: S = number of rising minus falling pairs, with variance n(n-1)(2n+5)/18 less what ties take away.

    Neither knows outliers from others nor a scale, so that one spike is one of n values. O(n^2): for windows of some
    hundred. x increasing. Fewer than three values have no trend.
    """
    n = len(y)
    if n < 3:
        return Trend(0.0, 0.0)
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    later, earlier = np.triu_indices(n, 1)[::-1]
    rises = ys[later] - ys[earlier]
    slope = float(np.median(rises / (xs[later] - xs[earlier])))
    s = float(np.sign(rises).sum())
    ties = np.unique(ys, return_counts=True)[1].astype(np.float64)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if variance <= 0:  # all values the same
        return Trend(slope, 0.0)
    return Trend(slope, (s - math.copysign(min(1.0, abs(s)), s)) / math.sqrt(variance))


def noise(y: Sequence[float]) -> float:
    """The scatter of one value about a smooth curve: the median absolute difference of neighbours as a standard deviation.

    For a normal scatter |difference| has the median 0.6745 * sqrt(2) * sigma. Jumps and trends hardly count.
    """
    if len(y) < 3:
        return 0.0
    return float(np.median(np.abs(np.diff(np.asarray(y, dtype=np.float64))))) / (0.6744897501960817 * math.sqrt(2))


BEYOND_NOISE = 4.0  # standard deviations from which a fall is more than noise
USUAL_FALL = 0.1  # of the loss, as a share of its start: axolotl's training-stability page for the first 100 steps
ORDERED = 2.5  # z of a trend below which the order of the values is chance


@dataclass(frozen=True)
class Fall:
    """From the first values to the last ones. `z`: the fall in standard deviations of what the noise alone would do."""

    start: float
    end: float
    z: float
    error: float
    """One standard deviation of `start - end`."""

    @property
    def share(self) -> float:
        """Of the start."""
        return (self.start - self.end) / abs(self.start) if self.start else 0.0

    def is_by(self, least: float) -> bool:
        """Whether it is beyond noise, and at least this share of the start."""
        return self.z > BEYOND_NOISE and self.share >= least


def fall(y: Sequence[float]) -> Fall:
    """The median of the first three values against that of the last fifth, held against the scatter of neighbours.

    z is of these, or of the first and last tenth or quarter where they show more: a slow fall is in all values. The median
    of n normal values has the standard deviation 1.2533 sigma / sqrt(n), and the mean absolute difference of neighbours is
    2 sigma / sqrt(pi): of few values it says more than the median one, and a steep fall only adds to it. A fall that the
    order of the values does not show (`trend`) has z = 0. y: at least one value.
    """
    sigma = float(np.abs(np.diff(y)).mean()) * math.sqrt(math.pi) / 2 if len(y) > 1 else 0.0
    compared = [
        (statistics.median(y[:first]) - statistics.median(y[-last:]), sigma * 1.2533 * math.sqrt(1 / first + 1 / last))
        for first, last in ((3, max(3, len(y) // 5)), (len(y) // 10, len(y) // 10), (len(y) // 4, len(y) // 4))
        if first >= 3
    ]
    order = trend(range(len(y)), y).z
    found = [away / error for away, error in compared if error and away * order < 0 and abs(order) > ORDERED]
    start, end = statistics.median(y[:3]), statistics.median(y[-max(3, len(y) // 5) :])
    return Fall(start, end, max(found, key=abs, default=0.0), compared[0][1])


def smooth(y: Sequence[float]) -> list[float]:
    """The median of each value and its two neighbours: one spike is gone, a step stays where it is."""
    return [statistics.median(y[i : i + 3]) for i in range(max(1, len(y) - 2))] if len(y) else []
