"""Does GSPO learn: reward on the sample fill-in-the-middle task, seed by seed, with token-level GRPO beside it.

`python -m benchmarks gspo_learning` trains one SFT model with configs/smoke/sft.yaml and starts every run from it:
configs/smoke/gspo.yaml as it is, and the same file with GRPO's token ratio and its clip of 0.2. Seeds, data, reward,
learning rate and number of rollouts are the same, so the two differ by the loss alone; neither is tuned. The model has
under two million weights: that reward rises shows that the machinery works, not how the methods rank.

`python -m benchmarks.gspo_learning RESULT.json PICTURE.png` draws the series a run has saved.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Row, row

CONFIGS = ROOT / "configs" / "smoke"
SEEDS = (1, 2, 3, 4, 5)
METHODS: dict[str, dict[str, Any]] = {
    "GSPO": {},
    "GRPO, token level": {
        "train__loss_type": "grpo",
        "train__importance_sampling_level": "token",
        "train__beta": 0.0,
        "train__epsilon": 0.2,
        "train__epsilon_high": 0.2,
    },
}
QUICK = {"sft": 15, "rl": 8}  # optimizer steps
# What is kept of each rollout: its mean reward, and the two metrics of its last step, which is the most off-policy one.
REWARD, CLIPPED, EFFECTIVE = "reward", "policy/clipped_ratio_fraction", "policy/effective_sample_size"
OUTSIDE = "share of ratios outside the clip, last step of a rollout"  # whether or not the clip then acts
# {"reward": {"1": [...], "2": [...]}, ...}: metric -> seed -> a value per rollout. Strings, because JSON has no others.
Series = dict[str, dict[str, list[float]]]


# ----------------------------------------------------------------------------------------------------------- the runs


def run(quick: bool = False) -> Iterator[Row]:
    """The rows of each method, its series in the row "reward, last quarter above first"."""
    with tempfile.TemporaryDirectory() as folder:
        series = trained(Path(folder), SEEDS[:2] if quick else SEEDS, quick)
    for method, found in series.items():
        # A quick run has too few rollouts for a rise to be more than luck.
        yield from method_rows(method, found, must_rise=method == "GSPO" and not quick)
    yield versus_row(series)


def trained(folder: Path, seeds: tuple[int, ...], quick: bool, **overrides: Any) -> dict[str, Series]:
    """method -> series of every seed. `overrides` are cogumi.train's keywords for the policy runs."""
    from transformers.utils.logging import disable_progress_bar

    import cogumi

    disable_progress_bar()  # of loading a model of 4 MB
    logging.getLogger("cogumi").addHandler(logging.NullHandler())  # a run's log is in its directory, not on the screen
    short = {"train__max_steps": QUICK["sft"]} if quick else {}
    sft = cogumi.train(CONFIGS / "sft.yaml", cogumi__run_dir=folder / "sft", **short)
    common: dict[str, Any] = {
        "model__name": str(sft.merged),
        "data__eval_rows": 0,
        "cogumi__merge": False,
        **({"train__max_steps": QUICK["rl"]} if quick else {}),
        **overrides,
    }
    series: dict[str, Series] = {method: {REWARD: {}, CLIPPED: {}, EFFECTIVE: {}} for method in METHODS}
    for seed in seeds:
        for number, (method, values) in enumerate(METHODS.items()):
            run_dir = folder / f"{number}-{seed}"
            result = cogumi.train(
                CONFIGS / "gspo.yaml", train__seed=seed, cogumi__run_dir=run_dir, **{**common, **values}
            )
            for metric, found in rollout_series(result.metrics).items():
                series[method][metric][str(seed)] = found
    return series


def rollout_series(metrics: list[dict[str, Any]]) -> dict[str, list[float]]:
    """A value per rollout of each metric, from the logged steps of a run. KeyError when a step lacks one of them.

    TRL logs a reward at the step that samples the rollout, and every step until the next one trains on it.
    """
    rollouts: list[list[dict[str, Any]]] = []
    for step in (each for each in metrics if "loss" in each):
        if REWARD in step:
            rollouts.append([])
        rollouts[-1].append(step)
    return {
        REWARD: [steps[0][REWARD] for steps in rollouts],
        CLIPPED: [steps[-1][CLIPPED] for steps in rollouts],
        EFFECTIVE: [steps[-1][EFFECTIVE] for steps in rollouts],
    }


# ----------------------------------------------------------------------------------------------------------- the rows


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
    yield over_seeds(case, "reward, first quarter", firsts)
    yield over_seeds(case, "reward, last quarter", lasts)
    yield over_seeds(case, "reward, last quarter - first", rises)
    rose = sum(rise > 0 for rise in rises)
    target = f">= {len(rises)}" if must_rise else ""
    yield row("gspo_learning", case, "seeds with last quarter above first", rose, target=target) | {"series": series}
    for metric, name in (
        (CLIPPED, OUTSIDE),
        (EFFECTIVE, "effective sample size, same step"),
    ):
        yield over_seeds(case, name, [statistics.fmean(each) for each in series[metric].values()])


def versus_row(series: dict[str, Series]) -> Row:
    """By how much GSPO's rise exceeds GRPO's, seed by seed. Without a target: it is a comparison, not a promise."""
    rises = []
    for found in series.values():
        both = {seed: quarters(each) for seed, each in found[REWARD].items()}
        rises.append({seed: last - first for seed, (first, last) in both.items()})
    gspo, grpo = rises
    return over_seeds("GSPO - GRPO, seed by seed", "reward, last quarter - first", [gspo[s] - grpo[s] for s in gspo])


def over_seeds(case: str, metric: str, values: tuple[float, ...] | list[float]) -> Row:
    deviation = f"standard deviation {statistics.stdev(values):.3g}" if len(values) > 1 else ""
    spread = (min(values), max(values))
    return row("gspo_learning", case, metric, statistics.fmean(values), spread=spread, note=deviation)


# -------------------------------------------------------------------------------------------------------- the picture


def saved_series(result: Path) -> dict[str, Series]:
    """method -> series, from a saved result."""
    rows = json.loads(result.read_text())["rows"]
    found = [each["series"] for each in rows if "series" in each]
    if len(found) != len(METHODS):
        raise SystemExit(f"{result} has {len(found)} series instead of {len(METHODS)}: not a result of gspo_learning")
    return dict(zip(METHODS, found, strict=True))


COLOURS = dict(zip(METHODS, ("#1f5fa8", "#c8651b"), strict=True))


def draw(series: dict[str, Series], picture: Path) -> None:
    """Reward of both methods above; below it, of GSPO alone, ratios outside the clip and the effective sample size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 6.6), layout="constrained", dpi=150)
    reward, clip, effective = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.2, 1.2))
    for method, colour in COLOURS.items():
        curves(reward, series[method][REWARD], colour, method)
    reward.set_ylabel("mean reward")
    reward.legend(frameon=False, loc="upper left")
    ours = series["GSPO"]
    curves(clip, ours[CLIPPED], COLOURS["GSPO"], "GSPO")
    clip.set_ylabel("GSPO: ratios\noutside the clip")
    clip.set_ylim(0, 1.05)
    curves(effective, ours[EFFECTIVE], COLOURS["GSPO"], "GSPO")
    effective.set_ylabel("GSPO: effective\nsample size")
    effective.set_xlabel("rollout")
    for axes in (reward, clip, effective):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    seeds = len(ours[REWARD])
    figure.suptitle(f"Fill in the middle, smoke model: mean of {seeds} seeds, each seed thin", fontsize=10)
    figure.align_ylabels()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def curves(axes: Any, by_seed: dict[str, list[float]], colour: str, label: str) -> None:
    rollouts = range(1, 1 + len(next(iter(by_seed.values()))))
    for values in by_seed.values():
        axes.plot(rollouts, values, color=colour, linewidth=0.7, alpha=0.3)
    mean = [statistics.fmean(each) for each in zip(*by_seed.values(), strict=True)]
    axes.plot(rollouts, mean, color=colour, linewidth=2, label=label)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("python -m benchmarks.gspo_learning RESULT.json PICTURE.png")
    draw(saved_series(Path(sys.argv[1])), Path(sys.argv[2]))
