"""Which clip learns best where a rollout serves several steps: the paper's, one above the rounding, one step, or float32.

`python -m benchmarks gspo_clip` trains one SFT model with configs/smoke/chat-sft.yaml and starts every run from it:
configs/smoke/chat-gspo.yaml with the same seeds, rewards and number of completions, in bfloat16 unless the arm says
otherwise. Each rollout has all of the few prompts, so that the rewards of two rollouts compare.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cogumi
from benchmarks.gspo_learning import quarters
from benchmarks.harness import ROOT, Row, mean_row, quiet
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
PROMPTS, GROUP = 12, 8
MAX_STEPS, QUICK_STEPS, HELD_OUT = 32, 8, 16
REWARD, HELD_OUT_REWARD, CLIPPED = "reward", "eval_reward", "policy/clipped_ratio_fraction"
FIGURES = {
    "last": "reward, last quarter",
    "held_out": "reward on held-out prompts",
    "clipped": "share outside the clip",
}


def run(quick: bool = False, log: Path | None = None) -> Iterator[Row]:
    """Rows of each rate and arm. `log`: JSON lines of finished runs, which are not repeated, and to which each is added."""
    quiet()
    records = read_jsonl(log) if log is not None and log.exists() else []
    finished = {(each["seed"], each["rate"], each["arm"]) for each in records}
    seeds, rates = (SEEDS[:1], RATES[:1]) if quick else (SEEDS, RATES)
    with tempfile.TemporaryDirectory() as folder:
        sft = cogumi.train(CONFIGS / "chat-sft.yaml", cogumi__run_dir=Path(folder, "sft")).merged
        assert sft is not None
        for number, key in enumerate(itertools.product(seeds, rates, ARMS)):
            if key in finished:
                continue
            seed, rate, arm = key
            settings = ARMS[arm] | {"train__seed": seed, "train__learning_rate": rate}
            records.append(
                {"seed": seed, "rate": rate, "arm": arm} | train(sft, Path(folder, str(number)), settings, quick)
            )
            if log is not None:
                append_jsonl(log, records[-1])
    yield from summarize(records)


def summarize(records: list[dict[str, Any]]) -> Iterator[Row]:
    """Means over the seeds of each rate and arm."""
    for rate, arm in itertools.product(RATES, ARMS):
        runs = [each for each in records if (each["rate"], each["arm"]) == (rate, arm)]
        for key, name in FIGURES.items() if runs else ():
            case = f"{arm}, rate {rate:g}, seeds {', '.join(str(each['seed']) for each in runs)}"
            yield mean_row("gspo_clip", case, name, [each[key] for each in runs])


def train(sft: Path, run_dir: Path, settings: dict[str, Any], quick: bool = False) -> dict[str, Any]:
    """One run: mean reward of its last quarter of rollouts, of held-out prompts, and shares outside the clip by position."""
    steps = QUICK_STEPS if quick else MAX_STEPS
    common = {
        "model__name": str(sft),
        "data__max_rows": PROMPTS,
        "data__eval_rows": HELD_OUT,
        "train__per_device_train_batch_size": PROMPTS * GROUP // STEPS_PER_ROLLOUT,
        "train__per_device_eval_batch_size": HELD_OUT * GROUP,
        "train__max_steps": steps,
        "train__eval_strategy": "steps",
        "train__eval_steps": steps,
        "train__save_strategy": "no",
        "cogumi__merge": False,
        "cogumi__run_dir": run_dir,
    }
    result = cogumi.train(CONFIGS / "chat-gspo.yaml", **common | settings)
    logged = [each for each in result.metrics if CLIPPED in each]
    rewards = [each[REWARD] for each in logged if REWARD in each]
    held_out = [each[HELD_OUT_REWARD] for each in result.metrics if HELD_OUT_REWARD in each]
    position = settings["train__steps_per_generation"]
    shares = [statistics.fmean(each[CLIPPED] for each in logged[start::position]) for start in range(position)]
    return {
        "rewards": rewards,
        "first": quarters(rewards)[0],
        "last": quarters(rewards)[1],
        "held_out": held_out[-1],
        "shares": shares,
        "clipped": shares[-1],
    }
