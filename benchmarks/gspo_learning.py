"""Does GSPO learn: reward on the sample fill-in-the-middle task, seed by seed, with token-level GRPO beside it.

`python -m benchmarks gspo_learning` trains one SFT model with configs/smoke/sft.yaml and starts every run from it:
configs/smoke/gspo.yaml as it is, and the same file with GRPO's token ratio and its clip of 0.2. Seeds, data, reward,
learning rate and number of rollouts are the same, so the two differ by the loss alone; neither is tuned. The model has
under two million weights: that reward rises shows that the machinery works, not how the methods rank.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cogumi
from benchmarks.harness import ROOT, Row, mean_row, quiet, row

CONFIGS = ROOT / "configs" / "smoke"
SEEDS = (1, 2, 3, 4, 5)
GRPO = {"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2}
METHODS = {"GSPO": {}, "GRPO, token level": {f"train__{key}": value for key, value in GRPO.items()}}
QUICK = {"sft": 15, "rl": 8}  # optimizer steps
# What is kept of each rollout: its mean reward, and the two metrics of its last step, which is the most off-policy one.
REWARD, CLIPPED, EFFECTIVE = "reward", "policy/clipped_ratio_fraction", "policy/effective_sample_size"
OUTSIDE = "share of ratios outside the clip, last step of a rollout"  # whether or not the clip then acts
# {"reward": {"1": [...], "2": [...]}, ...}: metric -> seed -> a value per rollout. Strings, because JSON has no others.
Series = dict[str, dict[str, list[float]]]


def run(quick: bool = False) -> Iterator[Row]:
    """The rows of each method, its series in the row "reward, last quarter above first"."""
    with tempfile.TemporaryDirectory() as folder:
        series = trained(Path(folder), SEEDS[:2] if quick else SEEDS, quick)
    for method, found in series.items():
        # A quick run has too few rollouts for a rise to be more than luck.
        yield from method_rows(method, found, must_rise=method == "GSPO" and not quick)


def trained(folder: Path, seeds: tuple[int, ...], quick: bool, **overrides: Any) -> dict[str, Series]:
    """method -> series of every seed. `overrides` are cogumi.train's keywords for the policy runs."""
    quiet()
    short = {"train__max_steps": QUICK["sft"]} if quick else {}
    sft = cogumi.train(CONFIGS / "sft.yaml", cogumi__run_dir=folder / "sft", **short)
    common: dict[str, Any] = {"model__name": str(sft.merged), "data__eval_rows": 0, "cogumi__merge": False} | overrides
    if quick:
        common["train__max_steps"] = QUICK["rl"]
    series: dict[str, Series] = {method: {REWARD: {}, CLIPPED: {}, EFFECTIVE: {}} for method in METHODS}
    for seed in seeds:
        for number, (method, values) in enumerate(METHODS.items()):
            places = {"train__seed": seed, "cogumi__run_dir": folder / f"{number}-{seed}"}
            result = cogumi.train(CONFIGS / "gspo.yaml", **common | places | values)
            for metric, found in rollout_series(result.metrics).items():
                series[method][metric][str(seed)] = found
    return series


def rollout_series(metrics: list[dict[str, Any]]) -> dict[str, list[float]]:
    """A value per rollout of each metric, from the logged steps of a run. KeyError when a step lacks one of them.

    TRL logs a reward at the step that samples the rollout, and every step until the next one trains on it.
    """
    steps = [row for row in metrics if "loss" in row]
    firsts = [number for number, step in enumerate(steps) if REWARD in step]
    lasts = [steps[number - 1] for number in (*firsts[1:], len(steps))]
    return {REWARD: [steps[number][REWARD] for number in firsts]} | {
        metric: [step[metric] for step in lasts] for metric in (CLIPPED, EFFECTIVE)
    }


def quarters(rewards: list[float]) -> tuple[float, float]:
    """Mean reward of the first and of the last quarter of the rollouts."""
    size = max(1, len(rewards) // 4)
    return statistics.fmean(rewards[:size]), statistics.fmean(rewards[-size:])


def method_rows(method: str, series: Series, must_rise: bool) -> Iterator[Row]:
    """Means over seeds, with the lowest and highest seed; "rose" has a target where the method `must_rise`."""
    rewards = series[REWARD]
    case = f"{method}, {len(rewards)} seeds, {len(next(iter(rewards.values())))} rollouts each"
    firsts, lasts = zip(*(quarters(each) for each in rewards.values()), strict=True)
    rises = [last - first for first, last in zip(firsts, lasts, strict=True)]
    yield mean_row("gspo_learning", case, "reward, first quarter", firsts)
    yield mean_row("gspo_learning", case, "reward, last quarter", lasts)
    yield mean_row("gspo_learning", case, "reward, last quarter - first", rises)
    rose = sum(rise > 0 for rise in rises)
    target = f">= {len(rises)}" if must_rise else ""
    yield row("gspo_learning", case, "seeds with last quarter above first", rose, target=target) | {"series": series}
    for metric, name in ((CLIPPED, OUTSIDE), (EFFECTIVE, "effective sample size, same step")):
        yield mean_row("gspo_learning", case, name, [statistics.fmean(each) for each in series[metric].values()])
