"""rollouts.jsonl: what each rollout of a GRPO trainer earned, and some of its completions.

A row: step (the first that trained on it), rewards (by function, one number a completion), reward (their weighted sum),
shown (a few completions from the worst to the best: prompt, completion, reward).
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.rundir import ROLLOUTS, append_jsonl
from cogumi.training.samples import keep_until

SHOWN = 4
MOST_CHARACTERS = 4000  # of a prompt, its end; of a completion, its beginning


class Rollouts(TrainerCallback):
    """Writes what one trainer's rollouts came to. What TRL keeps for its own table of completions is read, not computed."""

    def __init__(self, trainer: Any, run_dir: Path, unless_full: Callable[[Callable[[], None]], None]) -> None:
        self.trainer, self.run_dir, self.unless_full = trainer, run_dir, unless_full
        self.generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self.noted

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        keep_until(self.run_dir, state.global_step, ROLLOUTS)

    def noted(self, inputs: Any) -> Any:
        found = self.generate(inputs)
        if self.trainer.model.training:
            row = {"step": self.trainer.state.global_step + 1, **earned(self.trainer)}
            self.unless_full(lambda: append_jsonl(self.run_dir / ROLLOUTS, row))
        return found


def earned(trainer: Any) -> dict[str, Any]:
    """Of the rollout that a trainer has just made, which is what its logs hold. NaN where no function scored a completion."""
    logs, weights = trainer._logs, trainer.reward_weights.tolist()
    rewards = {name: [round(value, 6) for value in values] for name, values in logs["rewards"].items()}
    total = [weighted(each, weights) for each in zip(*rewards.values(), strict=True)]
    prompts, completions = list(logs["prompt"]), list(logs["completion"])
    return {
        "reward": total,
        "rewards": rewards,
        "shown": [
            {
                "prompt": text_of(prompts[n])[-MOST_CHARACTERS:],
                "completion": text_of(completions[n])[:MOST_CHARACTERS],
                "reward": total[n],
            }
            for n in spread(total)
        ],
    }


def weighted(rewards: tuple[float, ...], weights: list[float]) -> float:
    """As TRL adds them up: those that are numbers, and NaN where none is."""
    scored = [reward * weight for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return round(math.fsum(scored), 6) if scored else math.nan


def spread(rewards: list[float]) -> list[int]:
    """The places of a few rewards, from the lowest to the highest."""
    ranked = sorted((n for n, reward in enumerate(rewards) if not math.isnan(reward)), key=rewards.__getitem__)
    if len(ranked) <= SHOWN:
        return ranked
    return [ranked[round((len(ranked) - 1) * n / (SHOWN - 1))] for n in range(SHOWN)]


def text_of(said: Any) -> str:
    """A text as it is; messages with who says them."""
    if isinstance(said, str):
        return said
    return "\n".join(f"{each['role']}: {each.get('content') or each.get('tool_calls', '')}" for each in said)
