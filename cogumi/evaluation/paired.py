"""Statistics of paired scores: the mean difference with a bootstrap interval, and an exact sign test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES, CHUNK = 4000, 100  # CHUNK bounds the memory: CHUNK x rows numbers at a time
SEED = 0


@dataclass(frozen=True)
class PairedDifference:
    """Scores of one model less those of another on the same rows.

    rows: those that both scored. low, high: the interval of the mean. wins: rows in which the difference is positive.
    p_value: two-sided, of the sign test. Without rows, mean and interval are NaN.
    """

    rows: int
    mean: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int
    p_value: float

    @property
    def verdict(self) -> str:
        """Return better or worse if the interval excludes 0, equal if every row is a tie, else "not told apart"."""
        if self.rows and self.ties == self.rows:
            return "equal"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "not told apart"

    def __str__(self) -> str:
        figures = f"{self.mean:+.4f}, 95 % interval {self.low:+.4f} to {self.high:+.4f}; wins/ties/losses "
        figures += f"{self.wins}/{self.ties}/{self.losses}, sign test p = {self.p_value:.2g}"
        return f"{self.verdict}, {figures}"


def compare_paired(before: Sequence[float], after: Sequence[float]) -> PairedDifference:
    """Compare two models by their scores of the same rows; rows that either leaves unscored (NaN) are left out."""
    differences = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    differences = differences[~np.isnan(differences)]
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    ties, p_value = len(differences) - wins - losses, sign_test(wins, losses)
    if not len(differences):
        return PairedDifference(0, math.nan, math.nan, math.nan, 0, 0, 0, p_value)
    low, high = bootstrap_interval(differences)
    return PairedDifference(len(differences), float(differences.mean()), low, high, wins, ties, losses, p_value)


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean, by a fixed seed (Efron and Tibshirani 1993, chapter 13)."""
    distinct, counts = np.unique(values, return_counts=True)
    generator, count = np.random.default_rng(SEED), len(values)
    # How often each distinct value is drawn: fewer numbers than the rows that are drawn, and the same distribution.
    draws = (generator.multinomial(count, counts / count, size=CHUNK) for _ in range(RESAMPLES // CHUNK))
    means = np.concatenate([drawn @ distinct / count for drawn in draws])
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def sign_test(wins: int, losses: int) -> float:
    """Return the exact two-sided p-value of wins and losses under a fair coin; ties are left out."""
    count, fewer = wins + losses, min(wins, losses)
    term, total = 1, 0
    for k in range(fewer + 1):
        total += term
        term = term * (count - k) // (k + 1)
    return min(1.0, 2 * total / 2**count)
