"""samples.jsonl: what the model writes for the same held-out prompts, before the training, every so many steps, at the end.

Greedy completions. The training is as it would be without them: the random states and each module's mode are put back.
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
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.models.complete import complete_to_end
from cogumi.rundir import SAMPLES_FILE, append_jsonl, line_of, read_jsonl, write_atomic

log = logging.getLogger("cogumi")

SAMPLES = 4
# Where the config does not say: so often on the way, and not more often than every so many steps.
TIMES, FEWEST = 10, 50
SHARE = 0.02  # of the training's time, at most, for those


class Samples(TrainerCallback):
    """Writes samples after every `every` steps of a training. `aside` is entered while it does.

    every: None for each tenth of the steps, not more often than every FEWEST, as long as it takes no more than SHARE of the
    time. spent: the seconds by stage so far.
    """

    def __init__(
        self,
        run_dir: Path,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Dataset,
        every: int | None,
        aside: Callable[[str], AbstractContextManager[None]],
        spent: Callable[[], dict[str, float]],
        stops: Sequence[str] = (),
    ) -> None:
        self.run_dir, self.tokenizer, self.prompts, self.every, self.aside = run_dir, tokenizer, prompts, every, aside
        self.spent, self.stops = spent, stops
        self.limited = every is None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        keep_until(self.run_dir, state.global_step)
        if self.every is None:
            self.every = max(FEWEST, math.ceil(state.max_steps / TIMES))
        on_the_way = f"every {self.every} steps " if self.every < state.max_steps else ""
        limit = f", at most {SHARE:.0%} of the time" if on_the_way and self.limited else ""
        log.info("samples: %d held-out prompts before the first step, %sand at the end%s (cogumi.samples_every)",
                 min(SAMPLES, len(self.prompts)), on_the_way, limit)  # fmt: skip

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        assert self.every is not None
        if state.global_step % self.every == 0 and state.global_step < state.max_steps and self.is_cheap():
            with self.aside("samples"):
                write_samples(self.run_dir, model, self.tokenizer, self.prompts, state.global_step, self.stops)

    def is_cheap(self) -> bool:
        """Whether samples have taken no more than their share of the time so far."""
        spent = self.spent()
        return not self.limited or spent.get("samples", 0.0) <= SHARE * spent.get("train", 0.0)


def write_samples(
    run_dir: Path,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset,
    step: int,
    stops: Sequence[str] = (),
) -> None:
    """Add completions of the first prompts to samples.jsonl: rows of step, the prompt's columns, completion.

    prompts: `prompt` (text), `prompt_ids`, and what would be the answer.

    Those of this step and of later ones, of a part of the run that is made again, are replaced.
    """
    keep_until(run_dir, step - 1)
    examples = prompts.select(range(min(SAMPLES, len(prompts))))
    with as_before(model):
        written = complete_to_end(model, tokenizer, list(examples["prompt_ids"]), stops=stops)
    for example, (completion, ended) in zip(examples.remove_columns("prompt_ids"), written, strict=True):
        append_jsonl(run_dir / SAMPLES_FILE, {"step": step, **example, "completion": completion, "ended": ended})


def keep_until(run_dir: Path, step: int, file: str = SAMPLES_FILE) -> None:
    """Drop the rows of later steps: they are of a training that is made again from here."""
    path = run_dir / file
    rows = read_jsonl(path)
    kept = [row for row in rows if row.get("step", step + 1) <= step]
    if len(kept) < len(rows):
        write_atomic(path, "".join(map(line_of, kept)))


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Put back, after the block, what it may have moved: every random state, and which modules were in training mode."""
    modes = {module: module.training for module in model.modules()}
    states = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count()))
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, training in modes.items():
            module.training = training
