"""What the model writes: samples for held-out prompts, and the completions of each rollout.

A row of rollouts.jsonl has four keys. `step`: the first that trained on it. `rewards`: by function, one number per
completion. `reward`: their weighted sum. `shown`: a few completions from the worst to the best, each with its prompt
and its reward. Samples are greedy.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from cogumi.core.run_directory import ROLLOUTS, SAMPLES_FILE, append_jsonl, json_line, read_jsonl, write_atomic
from cogumi.models.completion import complete_with_ends
from cogumi.patches.trl_internals import logged_completions, observe_rollouts
from cogumi.telemetry.heartbeat import Heartbeat

log = logging.getLogger("cogumi")
SHOWN = 4  # completions of a rollout
MOST_CHARACTERS = 4000  # of a prompt, its end; of a completion, its beginning
SAMPLES = 4  # held-out prompts
# Where the config does not say: so often on the way, and not more often than every so many steps.
TIMES, FEWEST = 10, 50
SHARE = 0.02  # of the training's time, at most, for those


class Rollouts(TrainerCallback):
    """Writes what one trainer's rollouts came to. What TRL keeps for its own table of completions is read, not computed."""

    def __init__(self, trainer: Any, run_dir: Path, unless_full: Callable[[Callable[[], None]], None]) -> None:
        self.trainer, self.run_dir, self.write_unless_full = trainer, run_dir, unless_full
        observe_rollouts(trainer, self.record_rollout)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        drop_later_rows(self.run_dir, state.global_step, ROLLOUTS)

    def record_rollout(self, make: Callable[[Any], Any], inputs: Any) -> Any:
        found = make(inputs)
        if self.trainer.model.training:
            row = {"step": self.trainer.state.global_step + 1, **rollout_row(self.trainer)}
            self.write_unless_full(lambda: append_jsonl(self.run_dir / ROLLOUTS, row))
        return found


def rollout_row(trainer: Any) -> dict[str, Any]:
    """Of the rollout that a trainer has just made, which is what its logs hold. NaN where no function scored a completion."""
    logs, weights = logged_completions(trainer), trainer.reward_weights.tolist()
    rewards = {name: [round(value, 6) for value in values] for name, values in logs["rewards"].items()}
    total = [weighted_sum(each, weights) for each in zip(*rewards.values(), strict=True)]
    prompts, completions = map(text_of, logs["prompt"]), map(text_of, logs["completion"])
    rows = [
        {"prompt": prompt[-MOST_CHARACTERS:], "completion": completion[:MOST_CHARACTERS], "reward": reward}
        for prompt, completion, reward in zip(prompts, completions, total, strict=True)
    ]
    return {"reward": total, "rewards": rewards, "shown": [rows[n] for n in spread_by_reward(total)]}


def weighted_sum(rewards: tuple[float, ...], weights: list[float]) -> float:
    """As TRL adds them up: those that are numbers, and NaN where none is."""
    scored = [reward * weight for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return round(math.fsum(scored), 6) if scored else math.nan


def spread_by_reward(rewards: list[float]) -> list[int]:
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


class Samples(TrainerCallback):
    """Writes samples after every `every` steps of a training. timed_stage: entered meanwhile.
    None writes after each tenth of the steps, at least FEWEST apart, while this takes at most SHARE of the time."""

    def __init__(
        self,
        run_dir: Path,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Dataset,
        every: int | None,
        timed_stage: Callable[[str], AbstractContextManager[None]],
        heart: Heartbeat,
        stops: Sequence[str] = (),
    ) -> None:
        self.run_dir, self.tokenizer, self.prompts, self.stops = run_dir, tokenizer, prompts, stops
        self.every, self.limited = every, every is None
        self.timed_stage, self.heart = timed_stage, heart

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        drop_later_rows(self.run_dir, state.global_step)
        if self.every is None:
            self.every = max(FEWEST, math.ceil(state.max_steps / TIMES))
        on_the_way = f"every {self.every} steps " if self.every < state.max_steps else ""
        limit = f", at most {SHARE:.0%} of the time" if on_the_way and self.limited else ""
        said = f"before the first step, {on_the_way}and at the end{limit} (cogumi.samples_every)"
        log.info("samples: %d held-out prompts %s", min(SAMPLES, len(self.prompts)), said)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **_: Any) -> None:
        assert self.every is not None
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        spent = self.heart.meter.seconds()
        if not self.limited or spent.get("samples", 0.0) <= SHARE * spent.get("train", 0.0):
            with self.timed_stage("samples"):
                write_samples(self.run_dir, model, self.tokenizer, self.prompts, state.global_step, self.stops)


def write_samples(
    run_dir: Path, model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Dataset, step: int, stops: Sequence[str]
) -> None:
    """Add completions of the first prompts to samples.jsonl: rows of step, the prompt's columns, completion.

    prompts: `prompt` (text), `prompt_ids`, and what would be the answer. Rows of this step and of later ones are replaced.
    """
    drop_later_rows(run_dir, step - 1)
    examples = prompts.select(range(min(SAMPLES, len(prompts))))
    with preserve_rng_and_mode(model):
        written = complete_with_ends(model, tokenizer, list(examples["prompt_ids"]), stops=stops)
    for example, (completion, ended) in zip(examples.remove_columns("prompt_ids"), written, strict=True):
        append_jsonl(run_dir / SAMPLES_FILE, {"step": step, **example, "completion": completion, "ended": ended})


def drop_later_rows(run_dir: Path, step: int, file: str = SAMPLES_FILE) -> None:
    """Drop the rows of later steps: they are of a training that is made again from here."""
    path = run_dir / file
    rows = read_jsonl(path)
    kept = [row for row in rows if row.get("step", step + 1) <= step]
    if len(kept) < len(rows):
        write_atomic(path, "".join(map(json_line, kept)))


@contextmanager
def preserve_rng_and_mode(model: nn.Module) -> Iterator[None]:
    """Put back, after the block, what it may have moved: every random state, and which modules were in training mode."""
    modes = {module: module.training for module in model.modules()}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for module, training in modes.items():
            module.training = training
