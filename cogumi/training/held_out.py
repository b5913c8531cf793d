"""The held-out loss of a run: before its first step, now and then, and at its end; training is as it would be without it.

Where `train.eval_strategy` says nothing it is measured at each tenth of the steps, or more rarely, so that it stays cheap.
"""

import logging
import math
from functools import wraps
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.training.samples import as_before

log = logging.getLogger("cogumi")
TIMES = 10  # at most so often on the way
SHARE = 0.02  # of the computing of the training, at most, for what is measured on the way
PASSES = 3  # of a training step: forward, and backward at twice its cost


class HeldOut(TrainerCallback):
    """Asks for an evaluation after every so many steps."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.every = trainer, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        rows = len(self.trainer.eval_dataset)
        step = args.train_batch_size * args.gradient_accumulation_steps * PASSES
        self.every = max(math.ceil(state.max_steps / TIMES), math.ceil(rows / step / SHARE))
        times = (state.max_steps - 1) // self.every
        log.info(
            "held-out loss: %d rows before the first step, %sand at the end, about %.1f %% of the computing%s (data.eval_rows)",
            rows, f"every {self.every} steps " if times else "", 100 * (times + 2) * rows / step / state.max_steps,
            ", without the compilation before the first (train.torch_compile)" if args.torch_compile else "",
        )  # fmt: skip

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            control.should_evaluate = True  # after the step's own row is logged


def evaluate_without_trace(trainer: Any) -> None:
    """Have a trainer put back random states and modes after each evaluation."""
    evaluate = trainer.evaluate

    @wraps(evaluate)
    def as_if_not(*args: Any, **kwargs: Any) -> Any:
        with as_before(trainer.model):
            return evaluate(*args, **kwargs)

    trainer.evaluate = as_if_not
