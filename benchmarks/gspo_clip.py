"""Which clip learns best where a rollout serves several steps: the paper's, one above the rounding, one step, or float32.

`python -m benchmarks gspo_clip` trains one SFT model with configs/smoke/chat-sft.yaml and starts every run from it:
configs/smoke/chat-gspo.yaml with the same seeds, rewards and number of completions, in bfloat16 unless the arm says
otherwise. Each rollout has all of the few prompts, so that the rewards of two rollouts compare.

`python -m benchmarks.gspo_clip DIRECTORY LOG` starts from another model, such as that of benchmarks/smollm2.py, with sizes
that two CPU cores can train (REAL). LOG gets a JSON line for each finished run, and the same command goes on after them.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cogumi
from benchmarks.gspo_learning import quarters
from benchmarks.harness import ROOT, Row, mean_row, measure_another, quiet
from cogumi.core.run_directory import append_jsonl, read_jsonl

CONFIGS = ROOT / "configs" / "smoke"
SEEDS = (1, 2, 3, 4, 5)
RATES = (3e-4, 7e-4)
BF16, STEPS_PER_ROLLOUT = {"model__dtype": "bfloat16"}, 4
PAPER = {"train__epsilon": 3e-4, "train__epsilon_high": 4e-4, "train__steps_per_generation": STEPS_PER_ROLLOUT}
ARMS: dict[str, dict[str, Any]] = {
    "paper's clip": BF16 | PAPER,
    "wide clip": BF16 | PAPER | {"train__epsilon": 0.02, "train__epsilon_high": 0.027},
    "one step a rollout": BF16 | PAPER | {"train__steps_per_generation": 1},
    "float32, paper's clip": PAPER | {"model__dtype": "float32"},
}
GROUP = 8
SMALL = {"prompts": 12, "steps": 32, "held_out": 16, "max_completion_length": 24}
QUICK = SMALL | {"steps": 8}
REAL = {"prompts": 8, "steps": 16, "held_out": 8, "max_completion_length": 64}
REAL_SEEDS, REAL_RATES = SEEDS[:3], RATES[:1]
REWARD, HELD_OUT_REWARD, CLIPPED = "reward", "eval_reward", "policy/clipped_ratio_fraction"
FIGURES = {
    "last": "reward, last quarter",
    "held_out": "reward on held-out prompts",
    "clipped": "share outside the clip",
}


def run(quick: bool = False) -> Iterator[Row]:
    """Rows of each rate and arm for the small base."""
    seeds, rates = (SEEDS[:1], RATES[:1]) if quick else (SEEDS, RATES)
    with tempfile.TemporaryDirectory() as folder:
        sft = cogumi.train(CONFIGS / "chat-sft.yaml", cogumi__run_dir=Path(folder, "sft")).merged
        assert sft is not None
        yield from arm_rows(sft, seeds, rates, QUICK if quick else SMALL, Path(folder, "log"))


def arm_rows(
    model: Path, seeds: tuple[int, ...], rates: tuple[float, ...], sizes: dict[str, int], log: Path
) -> Iterator[Row]:
    """Rows of `model`, with a line in `log` for each finished run; those that it has are not repeated."""
    quiet()
    records = read_jsonl(log) if log.exists() else []
    finished = {(record["seed"], record["rate"], record["arm"]) for record in records}
    for seed, rate, arm in itertools.product(seeds, rates, ARMS):
        if (seed, rate, arm) not in finished:
            records.append(train(model, seed, rate, arm, sizes))
            append_jsonl(log, records[-1])
    yield from summarize(records)


def summarize(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Means over the seeds of each rate and arm."""
    for rate, arm in itertools.product(RATES, ARMS):
        runs = [record for record in records if (record["rate"], record["arm"]) == (rate, arm)]
        for key, name in FIGURES.items() if runs else ():
            case = f"{arm}, rate {rate:g}, seeds {', '.join(str(each['seed']) for each in runs)}"
            yield mean_row("gspo_clip", case, name, [each[key] for each in runs])


def train(model: Path, seed: int, rate: float, arm: str, sizes: dict[str, int]) -> dict[str, Any]:
    """One run: mean reward of its last quarter of rollouts, of held-out prompts, and shares outside the clip by position."""
    settings = ARMS[arm]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = cogumi.train(
            CONFIGS / "chat-gspo.yaml",
            **{
                "model__name": str(model),
                "data__max_rows": sizes["prompts"],
                "data__eval_rows": sizes["held_out"],
                "train__seed": seed,
                "train__learning_rate": rate,
                "train__max_completion_length": sizes["max_completion_length"],
                "train__per_device_train_batch_size": sizes["prompts"] * GROUP // STEPS_PER_ROLLOUT,
                "train__per_device_eval_batch_size": sizes["held_out"] * GROUP,
                "train__max_steps": sizes["steps"],
                "train__eval_strategy": "steps",
                "train__eval_steps": sizes["steps"],
                "train__save_strategy": "no",
                "cogumi__merge": False,
                "cogumi__run_dir": Path(folder, "run"),
            }
            | settings,
        )
    logged = [row for row in result.metrics if CLIPPED in row]
    rewards = [row[REWARD] for row in logged if REWARD in row]
    position = settings["train__steps_per_generation"]
    shares = [statistics.fmean(row[CLIPPED] for row in logged[start::position]) for start in range(position)]
    run = {"seed": seed, "rate": rate, "arm": arm, "seconds": time.monotonic() - begin, "rewards": rewards}
    return run | {
        "first": quarters(rewards)[0],
        "last": quarters(rewards)[1],
        "held_out": [row[HELD_OUT_REWARD] for row in result.metrics if HELD_OUT_REWARD in row][-1],
        "shares": shares,
        "clipped": shares[-1],
    }


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    measure_another(
        "gspo_clip", Path(sys.argv[1]), arm_rows(Path(sys.argv[1]), REAL_SEEDS, REAL_RATES, REAL, Path(sys.argv[2]))
    )
