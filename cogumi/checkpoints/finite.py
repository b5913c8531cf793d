"""Non-finite losses and gradients: noticed at their step, kept out of checkpoints, and the end of a training."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from cogumi.patches.trl_internals import GRAD_NORM, makes_rollouts, wrap_method
from cogumi.stack.ranks import Ranks, whole_tensor

log = logging.getLogger(__name__)
MAX_STEPS, MAX_FP16_STEPS = 3, 20  # float16's scaler skips such steps, and halves a scale that begins at 2**16


class FiniteGuard(TrainerCallback):
    """Ends a training at a non-finite trained weight, or after MAX_STEPS non-finite losses or gradient norms in a row.

    Both stay on the device, and are read every MAX_STEPS steps (after each one where rollouts are made, which would fail).
    """

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self.trainer, self.ranks = trainer, ranks
        self.interval = 1 if makes_rollouts(trainer) else MAX_STEPS
        self.on_train_begin()
        for name in ("training_step", GRAD_NORM):
            wrap_method(trainer, name, self.note)

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
    """The first weight that is not finite, "frozen ..." before "trained ...", or "". Reads every weight, or each trained one."""
    for name, weight in sorted(model.named_parameters(), key=lambda named: named[1].requires_grad):
        own = weight.to_local() if hasattr(weight, "to_local") else weight
        counts = own.is_floating_point() and (weight.requires_grad or not trained_only)
        if counts and not bool(own.isfinite().all()):
            return f"{'trained' if weight.requires_grad else 'frozen'} {name}"
    return ""
