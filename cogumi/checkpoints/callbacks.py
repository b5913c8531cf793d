"""Callbacks that `protect` adds to a trainer: a check for non-finite numbers, signals, and signs of life for the watchdog.

From the end of a step to the optimizer of the next no weight changes: a signal inside a step, and memory that runs out there,
save the last finished one. The rest of a checkpoint is remembered when a step ends. Several processes cannot agree within a step:
they stop after it.
"""

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cogumi.checkpoints.interruption import StepInterrupted, Watchdog
from cogumi.checkpoints.saving import UNLOGGED, Saver
from cogumi.patches import trl_internals as internals
from cogumi.stack.ranks import Ranks, whole_tensor

log = logging.getLogger(__name__)
MAX_STEPS, MAX_FP16_STEPS = 3, 20  # float16's scaler skips such steps, and halves a scale that begins at 2**16
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
    if internals.makes_rollouts(trainer):
        values.append((lambda at: internals.set_rollout_position(trainer, *at), internals.rollout_position(trainer)))
    return values


class Watch(TrainerCallback):
    """Finishes commits between steps and obeys signals. A signal to one process is one to all of them."""

    def __init__(self, saver: Saver) -> None:
        self.saver, self.preemption = saver, saver.preemption
        self.trainer = trainer = saver.trainer
        self.start_step = 0
        self.last_finished: Values = []
        steps_in_backward = any(name in trainer.args.optim.value for name in ("lomo", "layerwise"))
        has_statistics = any(name.endswith("running_mean") for name, _ in trainer.model.named_buffers())
        if saver.ranks.count == 1 and not steps_in_backward and not has_statistics:
            internals.wrap_method(trainer, internals.RUN_EPOCH, self.run_epoch)
            internals.wrap_method(trainer, internals.LOG_EVALUATE_SAVE, self.log_evaluate_save)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.start_step, self.last_finished = state.global_step, []
        self.saver.find_best()
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
        except torch.OutOfMemoryError:
            # auto_find_batch_size starts over by itself.
            if self.preemption.interruptible and not self.trainer.args.auto_find_batch_size:
                self.end(arguments["trial"])
            raise
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
        """Save the last finished step, and end the training as after any step."""
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


class FiniteGuard(TrainerCallback):
    """Ends a training at a non-finite trained weight, or after MAX_STEPS non-finite losses or gradient norms in a row.

    Both stay on the device, and are read every MAX_STEPS steps (after each one where rollouts are made, which would fail).
    """

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self.trainer, self.ranks = trainer, ranks
        self.interval = 1 if internals.makes_rollouts(trainer) else MAX_STEPS
        self.on_train_begin()
        for name in ("training_step", internals.GRAD_NORM):
            internals.wrap_method(trainer, name, self.note)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.values: list[Any] = []  # of the step under way: the loss of each micro-batch, and last the gradient norm
        self.unread: dict[int, torch.Tensor] = {}  # by step: whether the loss, and the gradient norm, are not finite
        self.streak, self.reason, self.ended = 0, "", ""

    def note(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.values.append(method(*args, **kwargs))
        return self.values[-1]

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        *losses, norm = self.values
        loss = sum(losses, torch.zeros(()))
        norm = whole_tensor(torch.as_tensor(norm, device=loss.device))
        self.unread[state.global_step] = ~torch.stack([loss, norm]).isfinite()
        self.values = []
        if self.streak or len(self.unread) >= self.interval:
            self.read()
        if self.streak and (self.streak >= (MAX_FP16_STEPS if args.fp16 else MAX_STEPS) or self.find_fault()):
            control.should_log = control.should_training_stop = True
            self.ended = self.reason
            if self.ranks.leads:
                log.error("the training ends after step %d: %s", state.global_step, self.reason)

    def read(self) -> None:
        for step, broken in self.unread.items():
            loss, norm = self.ranks.total(broken.tolist())
            self.streak = self.streak + 1 if loss or norm else 0
            if self.streak == 1:
                names = " and ".join(["the loss"] * bool(loss) + ["the gradient norm"] * bool(norm))
                self.reason = f"not finite since step {step}: {names}"
        self.unread = {}

    def find_fault(self) -> str:
        """Return why the model must not be kept as it is now; "" where every trained weight is finite."""
        self.read()
        weight = max(self.ranks.gather(find_broken_weight(self.trainer.model, trained_only=True)))
        return weight and (self.reason if self.streak else f"not finite: {weight}")


def find_broken_weight(model: Any, trained_only: bool = False) -> str:
    """Return the first weight that is not finite, "frozen ..." before "trained ...", or "". Reads all, or trained ones."""
    for name, weight in sorted(model.named_parameters(), key=lambda named: named[1].requires_grad):
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        counts = local.is_floating_point() and (weight.requires_grad or not trained_only)
        if counts and not bool(local.isfinite().all()):
            return f"{'trained' if weight.requires_grad else 'frozen'} {name}"
    return ""


class Pulse(TrainerCallback):
    """Tells a Watchdog what the trainer does. Not on_save: a callback that has it makes protect's saves wait for the disk."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.watchdog.alive()

    on_substep_end = on_prediction_step = on_evaluate = on_log = on_step_begin

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.watchdog.note_step(state.global_step)
