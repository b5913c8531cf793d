"""Score the old log-probabilities of unsloth's GRPO trainer by the forward pass that trains.

unsloth scores a whole rollout at once without a gradient (prompts shared, rows packed, other attention kernels), and
trains on shuffled micro-batches. On an H200 its ratios were up to 0.018 away from 1 before the first step (docs/measured.md).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cogumi.patches import replaced, trl_internals
from cogumi.patches.vllm_engine import kept_random_state
from cogumi.rl.loss_capture import capture_unsloth_loss


def score_old_by_training_pass(trainer: Any, compute_loss: Callable[..., Tensor]) -> None:
    """Have each new rollout scored one micro-batch at a time, by the trainer's own `compute_loss` with a gradient.

    This replaces unsloth's pass over the rollout. Until the first update every ratio is exactly 1. A rollout that is
    restored from a checkpoint keeps its scores.
    """

    def placeholder(model: Any, ids: Tensor, mask: Tensor, columns: int, **more: Any) -> tuple[Any, ...]:
        # Zeros (B, T). From T unsloth's loss takes the widest left padding, which it counts by token where all is text.
        padding = (ids[:, :-columns] == trainer.processing_class.pad_token_id).sum(-1).max()
        width = columns + int(padding) * (more.get("pixel_values") is None)
        return torch.zeros(len(ids), width, device=ids.device), None, None

    def make_unscored(make: Callable[[Any], Any], inputs: Any) -> Any:
        skip = trainer.model.training and trainer.beta == 0  # else the same method scores the reference as well
        with replaced(trainer, {trl_internals.TOKEN_LOGPS: placeholder} if skip else {}):
            return make(inputs)

    def prepare(prepare_inputs: Callable[[Any], Any], batch: Any) -> Any:
        before = trl_internals.rollout_position(trainer)[1]
        inputs = prepare_inputs(batch)
        rollout = trl_internals.rollout_position(trainer)[1]
        for micro_batch in rollout if rollout is not before else ():
            if "old_per_token_logps" in micro_batch:  # else the loss takes `new.detach()`
                micro_batch["old_per_token_logps"] = score(trainer, compute_loss, micro_batch)
        return inputs

    trl_internals.observe_rollouts(trainer, make_unscored)
    trl_internals.wrap_method(trainer, trl_internals.PREPARE_INPUTS, prepare)


def score(trainer: Any, compute_loss: Callable[..., Tensor], micro_batch: dict[str, Any]) -> Tensor:
    """Return the log-probabilities (B, T) that training on this micro-batch would compute now, and change nothing."""
    context = trainer.compute_loss_context_manager()
    with trl_internals.discard_metrics(trainer), kept_random_state(), capture_unsloth_loss(trainer) as calls, context:
        compute_loss(trainer.model, dict(micro_batch))
    return calls[0].new.detach().clone()
