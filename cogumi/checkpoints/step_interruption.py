"""Obey signals between two steps, and inside a step with the checkpoint of the last finished one.

From the end of a step to the optimizer of the next no weight changes. The rest of a checkpoint is remembered when a step ends.
Several processes cannot agree within a step: they stop after it.
"""

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.checkpoints.interruption import Preemption, StepInterrupted
from cogumi.checkpoints.saving import UNLOGGED, Saver
from cogumi.patches import trl_internals as internals

log = logging.getLogger(__name__)
Values = list[tuple[Callable[[Any], Any], Any]]


def remember(trainer: Any) -> Values:
    """Return random states, the trainer's state and its position in a rollout, each with the function that sets it."""
    values: Values = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
        (vars(trainer.state).update, vars(trainer.state) | {"log_history": list(trainer.state.log_history)}),
        (vars(trainer.control).update, dict(vars(trainer.control))),
        (lambda flos: setattr(trainer, "current_flos", flos), trainer.current_flos),
        (lambda sums: internals.set_unlogged(trainer, sums), internals.unlogged(trainer)),
    ]
    if torch.cuda.is_available():
        values.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    if internals.keeps_rollouts(trainer):
        values.append((lambda at: internals.set_rollout_position(trainer, *at), internals.rollout_position(trainer)))
    return values


class Watch(TrainerCallback):
    """Finishes commits between steps and obeys signals. A signal to one process is one to all of them."""

    def __init__(self, trainer: Any, saver: Saver, preemption: Preemption) -> None:
        self.trainer, self.saver, self.preemption = trainer, saver, preemption
        self.start_step = 0
        self.last_finished: Values = []
        steps_in_backward = any(name in trainer.args.optim.value for name in ("lomo", "layerwise"))
        has_statistics = any(name.endswith("running_mean") for name, _ in trainer.model.named_buffers())
        if saver.ranks.count == 1 and not steps_in_backward and not has_statistics:
            internals.wrap_method(trainer, internals.RUN_EPOCH, self.run_epoch)
            internals.wrap_method(trainer, internals.LOG_EVALUATE_SAVE, self.log_evaluate_save)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.start_step, self.last_finished = state.global_step, []
        if (sums := self.trainer.state.stateful_callbacks.pop(UNLOGGED, None)) and self.saver.ranks.count == 1:
            internals.set_unlogged(self.trainer, sums)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.preemption.interruptible = False

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.preemption.check()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.saver.ranks.leads:
            self.saver.poll()
        if received := self.saver.ranks.largest(self.preemption.received or 0):
            self.preemption.received = self.preemption.received or received
            control.should_save = control.should_training_stop = True

    def run_epoch(self, original: Callable[..., None], **arguments: Any) -> None:
        try:
            self.preemption.check(interruptible=True)
            original(**arguments)
        except StepInterrupted:
            self.end(arguments["trial"])
        finally:
            self.preemption.interruptible = False

    def log_evaluate_save(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.preemption.interruptible = False
        original(*args, **kwargs)
        self.last_finished = remember(self.trainer)
        state = self.trainer.state
        # After an epoch's last step its own evaluation and checkpoint follow, and then the next epoch is interruptible.
        if state.global_step < state.max_steps and not float(state.epoch).is_integer():
            self.preemption.check(interruptible=True)

    def end(self, trial: Any) -> None:
        """Save the last finished step, and have the training end as after any step."""
        trainer = self.trainer
        for put, value in self.last_finished:
            put(value)
        internals.drop_gradients(trainer)
        trainer.control.should_training_stop = True
        if trainer.state.global_step > self.start_step:
            getattr(trainer, internals.SAVE_CHECKPOINT)(trainer.model_wrapped, trial)
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        else:
            log.info("no step was finished since this start: there is nothing to save")
