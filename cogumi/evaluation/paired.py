"""Models compared by their scores of the same rows: the mean difference with a bootstrap interval, and an exact sign test."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from statistics import fmean
from typing import Any, Self

import numpy as np

from cogumi.core.run_directory import jsonable_numbers

CONFIDENCE = 0.95
RESAMPLES, CHUNK = 4000, 100  # CHUNK bounds the memory: CHUNK x rows numbers at a time
SEED = 0
MIN_ROWS, FEW_ROWS_P_VALUE = 30, 0.05
MIN_DECIDABLE_ROWS = 6  # of fewer, the sign test of all wins is above FEW_ROWS_P_VALUE


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
        """Return better or worse if the interval excludes 0, equal if every row is a tie, else "not told apart".

        Below MIN_ROWS, where the interval is too narrow, the sign test has to tell them apart as well.
        """
        if self.rows and self.ties == self.rows:
            return "equal"
        if self.rows < MIN_ROWS and self.p_value >= FEW_ROWS_P_VALUE:
            return "not told apart"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "not told apart"

    @property
    def counts(self) -> str:
        return f"{self.wins}/{self.ties}/{self.losses}"

    def __str__(self) -> str:
        figures = f"{self.mean:+.4f}, 95 % interval {self.low:+.4f} to {self.high:+.4f}; wins/ties/losses {self.counts}"
        return f"{self.verdict}, {figures}, sign test p = {self.p_value:.2g}"


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


@dataclass(frozen=True)
class Comparison:
    """Completions of the same prompts and their scores.

    prompts: the last message or the text; answers: expected answers, None where there are none; written: completions by
    model; scores: by score and model, NaN where a completion is not scored.
    """

    prompts: list[str]
    answers: list[str] | None
    written: dict[str, list[str]]
    scores: dict[str, dict[str, list[float]]]
    notes: tuple[str, ...] = ()

    def mean(self, score: str, name: str) -> float:
        """Return the mean score of a model over the rows that are scored."""
        return fmean([value for value in self.scores[score][name] if not math.isnan(value)] or [math.nan])

    def paired(self, score: str, before: str, after: str) -> PairedDifference:
        return compare_paired(self.scores[score][before], self.scores[score][after])

    def pairs(self) -> list[tuple[str, str, str, PairedDifference]]:
        names = list(combinations(self.written, 2))
        return [(score, *pair, self.paired(score, *pair)) for score in self.scores for pair in names]

    def shown(self, count: int) -> range:
        """Return the rows to show, whatever was answered: evenly spaced, as neighbours are often of one source file."""
        return range(0, len(self.prompts), max(1, len(self.prompts) // count))[:count]

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the comparison of `as_dict`, also as read from JSON."""
        scores = {
            score: {name: list(map(float, values)) for name, values in by_name.items()}  # NaN is a string there
            for score, by_name in record["scores"].items()
        }
        return cls(**{field.name: record[field.name] for field in fields(cls)} | {"scores": scores})

    def as_dict(self) -> dict[str, Any]:
        pairs = [
            {"score": score, "before": before, "after": after, **asdict(pair), "verdict": pair.verdict}
            for score, before, after, pair in self.pairs()
        ]
        means = {score: {name: self.mean(score, name) for name in self.written} for score in self.scores}
        return jsonable_numbers({"means": means, "pairs": pairs, **asdict(self)})  # type: ignore[no-any-return]

    def __str__(self) -> str:
        lines = [f"{len(self.prompts):,} held-out prompts; {'; '.join(self.notes)}"]
        for score in self.scores:
            lines += ["", f"{score}: " + ", ".join(f"{name} {self.mean(score, name):.4f}" for name in self.written)]
            lines += [f"  {after} - {before}: {pair}" for name, before, after, pair in self.pairs() if name == score]
        return "\n".join(lines)
