"""Figures of the rewards of completions, for `cogumi rewards`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """Distribution of one reward over completions, or of their weighted total (weight None).

    Figures are of the scored completions, NaN without any. deviation: of the population. quartiles: 25 %, the median, 75 %,
    interpolated. zeros: the share that is exactly 0.
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

    def __str__(self) -> str:
        weight = "" if self.weight is None else f" (weight {self.weight:g})"
        part = f"{self.not_scored:,} ({self.not_scored / self.completions:.1%}) not scored"
        head = f"{self.name}{weight}: {self.completions:,} completions, {part if self.not_scored else 'all scored'}"
        if self.not_scored == self.completions:
            return head
        low, median, high = self.quartiles
        figures = f"  mean {self.mean:.4g}, deviation {self.deviation:.4g}; minimum {self.minimum:.4g}, "
        figures += f"quartiles {low:.4g} {median:.4g} {high:.4g}, maximum {self.maximum:.4g}; {self.zeros:.1%} are 0"
        return f"{head}\n{figures}"


def describe_rewards(name: str, weight: float | None, scores: Sequence[float | None]) -> Distribution:
    """Compute the distribution of some scores; None and NaN are not scored."""
    values = np.array(scores, dtype=float)
    values = values[~np.isnan(values)]
    not_scored = len(scores) - len(values)
    if not len(values):
        nan = math.nan
        return Distribution(name, weight, len(scores), not_scored, nan, nan, nan, (nan, nan, nan), nan, nan)
    low, median, high = np.percentile(values, (25, 50, 75)).tolist()
    mean, deviation, minimum, maximum = (float(f(values)) for f in (np.mean, np.std, np.min, np.max))
    zeros = float(np.mean(values == 0))
    quartiles = (low, median, high)
    return Distribution(name, weight, len(scores), not_scored, mean, deviation, minimum, quartiles, maximum, zeros)


def weighted_total(scores: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float]:
    """Add up the rewards of each completion as a run does: None does not apply, NaN leaves the completion unscored.

    scores: by reward. The total is NaN if no reward applies.
    """
    totals = []
    for completion_scores in zip(*scores, strict=True):
        scored = [score * weight for score, weight in zip(completion_scores, weights, strict=True) if score is not None]
        totals.append(math.fsum(scored) if scored else math.nan)
    return totals


def share_of_equal_groups(groups: Sequence[int], total: Sequence[float]) -> tuple[int, int]:
    """Count (groups of several completions, those whose rewards are all equal): equal ones have advantages of 0.

    groups: the number of each completion's prompt.
    """
    rewards_by_group: dict[int, list[float]] = {}
    for group, reward in zip(groups, total, strict=True):
        if not math.isnan(reward):
            rewards_by_group.setdefault(group, []).append(reward)
    several = [rewards for rewards in rewards_by_group.values() if len(rewards) > 1]
    return len(several), sum(min(rewards) == max(rewards) for rewards in several)
