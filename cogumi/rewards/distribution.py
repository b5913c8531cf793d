"""How rewards are spread over completions: figures and a histogram in text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS, BAR_WIDTH = 10, 40


@dataclass(frozen=True)
class Distribution:
    """Of one reward over completions, or of their weighted total (weight None).

    Figures are of the completions that were scored, and NaN where none was. deviation: of the population. quartiles: 25 %,
    the median, 75 %, interpolated. zeros: the share that is exactly 0. histogram: (from, to, completions); a value alone
    where there are few.
    """

    name: str
    weight: float | None
    completions: int
    not_scored: int
    mean: float
    deviation: float
    minimum: float
    quartiles: tuple[float, float, float]
    maximum: float
    zeros: float
    histogram: tuple[tuple[float, float, int], ...]

    def __str__(self) -> str:
        weight = "" if self.weight is None else f" (weight {self.weight:g})"
        part = f"{self.not_scored:,} ({self.not_scored / self.completions:.1%}) not scored"
        lines = [f"{self.name}{weight}: {self.completions:,} completions, {part if self.not_scored else 'all scored'}"]
        if self.not_scored == self.completions:
            return lines[0]
        low, median, high = self.quartiles
        figures = f"  mean {self.mean:.4g}, deviation {self.deviation:.4g}; minimum {self.minimum:.4g}, "
        figures += f"quartiles {low:.4g} {median:.4g} {high:.4g}, maximum {self.maximum:.4g}; {self.zeros:.1%} are 0"
        lines.append(figures)
        most = max(count for *_, count in self.histogram)
        for first, last, count in self.histogram:
            of = f"{first:.4g}" if first == last else f"{first:.4g} to {last:.4g}"
            lines.append(f"  {of:>20} {count:>9,} {'█' * math.ceil(BAR_WIDTH * count / most)}")
        return "\n".join(lines)


def describe_rewards(name: str, weight: float | None, scores: Sequence[float | None]) -> Distribution:
    """The distribution of some scores, of which None and NaN are none."""
    values = np.array(scores, dtype=float)
    values = values[~np.isnan(values)]
    quartiles = np.percentile(values, (25, 50, 75)).tolist() if len(values) else [math.nan] * 3
    return Distribution(
        name=name,
        weight=weight,
        completions=len(scores),
        not_scored=len(scores) - len(values),
        mean=float(values.mean()) if len(values) else math.nan,
        deviation=float(values.std()) if len(values) else math.nan,
        minimum=float(values.min()) if len(values) else math.nan,
        quartiles=(quartiles[0], quartiles[1], quartiles[2]),
        maximum=float(values.max()) if len(values) else math.nan,
        zeros=float(np.mean(values == 0)) if len(values) else math.nan,
        histogram=count_values(values),
    )


def count_values(values: np.ndarray) -> tuple[tuple[float, float, int], ...]:
    """Bars: each value by itself where there are at most BINS, else BINS ranges of equal width."""
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) <= BINS:
        return tuple((float(value), float(value), int(count)) for value, count in zip(distinct, counts, strict=True))
    counts, edges = np.histogram(values, BINS)
    return tuple(
        (float(first), float(last), int(count))
        for first, last, count in zip(edges[:-1], edges[1:], counts, strict=True)
    )


def weighted_total(scores: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float]:
    """Of each completion, as a run adds rewards up: None does not apply, and NaN leaves the whole completion unscored.

    scores: by reward. NaN where no reward applies.
    """
    found = []
    for of_one in zip(*scores, strict=True):
        scored = [score * weight for score, weight in zip(of_one, weights, strict=True) if score is not None]
        found.append(math.fsum(scored) if scored else math.nan)
    return found


def share_of_equal_groups(groups: Sequence[int], total: Sequence[float]) -> tuple[int, int]:
    """(groups of several completions, those of them whose rewards are all equal): their advantages are 0.

    groups: the number of each completion's prompt.
    """
    of_group: dict[int, list[float]] = {}
    for group, reward in zip(groups, total, strict=True):
        if not math.isnan(reward):
            of_group.setdefault(group, []).append(reward)
    several = [rewards for rewards in of_group.values() if len(rewards) > 1]
    return len(several), sum(min(rewards) == max(rewards) for rewards in several)
