"""What the loss that ran received: the one place where cogumi looks into a GRPO trainer, TRL's or unsloth's.

Nothing here computes a loss. TRL's `compute_loss` asks the trainer for the new log-probabilities and goes on with them;
under unsloth the same happens inside its generated module (`cogumi.rl.unsloth_loss_capture`). Both are overheard for the
duration of one call.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from torch import Tensor

from cogumi.patches.unsloth_rl import is_unsloths
from cogumi.rl.loss_call import LossCall
from cogumi.rl.unsloth_loss_capture import observed

Backend = Literal["trl", "unsloth"]
# Shapes of the soft clips, named after their losses.
GATES = tuple(f"sapo_temperature_{sign}" for sign in ("pos", "neg")) + tuple(
    f"vespo_{name}_{sign}" for name in ("k", "lambda") for sign in ("pos", "neg")
)


def backend_of(trainer: Any) -> Backend:
    """Whose `compute_loss` this trainer has."""
    return "unsloth" if is_unsloths(type(trainer)) else "trl"


def overheard(trainer: Any, inputs: dict[str, Any], token_ratio: bool) -> AbstractContextManager[list[LossCall]]:
    """While it is entered, one `trainer.compute_loss(model, inputs)` leaves its LossCalls in the list."""
    if backend_of(trainer) == "unsloth":
        return observed(trainer)
    return overheard_in_trl(trainer, inputs, token_ratio)


@contextmanager
def overheard_in_trl(trainer: Any, inputs: dict[str, Any], token_ratio: bool = False) -> Iterator[list[LossCall]]:
    """TRL 1.15: `_compute_loss` calls `_get_per_token_logps_and_entropies` once and reads the rest from `inputs`.

    With `token_ratio`, `inputs` gets other old log-probabilities once the new ones are known, so that the ratio the
    loss forms is GSPO-token's: the sequence's in value, each token's in gradient.
    """
    name = "_get_per_token_logps_and_entropies"
    compute, own = getattr(trainer, name), vars(trainer).get(name)
    calls: list[LossCall] = []

    def overhear(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        call = trl_call(trainer, inputs, new=result[0], entropy=result[1])
        calls.append(call)
        if token_ratio:
            inputs["old_per_token_logps"] = gspo_token_old(call)
        return result

    setattr(trainer, name, overhear)
    try:
        yield calls
    finally:
        if own is None:
            delattr(trainer, name)
        else:
            setattr(trainer, name, own)


def trl_call(trainer: Any, inputs: dict[str, Any], new: Tensor, entropy: Tensor | None) -> LossCall:
    mask = inputs["completion_mask"]
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction and trainer.loss_type != "vespo"
    return LossCall(
        new=new,
        old=inputs.get("old_per_token_logps"),
        ref=inputs.get("ref_per_token_logps") if trainer.beta != 0 else None,
        mask=mask * inputs["tool_mask"] if "tool_mask" in inputs else mask,
        advantages=inputs["advantages"],
        entropy=entropy,
        function=type(trainer)._compute_loss,
        arguments={
            "loss_type": trainer.loss_type,
            "importance_sampling_level": trainer.importance_sampling_level,
            "epsilon_low": trainer.epsilon_low,
            "epsilon_high": trainer.epsilon_high,
            "delta": trainer.args.delta,
            "beta": trainer.beta,
            "temperature": trainer.temperature,
            "use_bias_correction_kl": trainer.args.use_bias_correction_kl,
            "max_completion_length": trainer.max_completion_length,
            "num_items_in_batch": inputs.get("num_items_in_batch"),
            "num_processes": trainer.accelerator.num_processes,
            "current_gradient_accumulation_steps": trainer.current_gradient_accumulation_steps,
            "steps_per_generation": trainer.args.steps_per_generation,
            **{name: getattr(trainer.args, name) for name in GATES if name.startswith(trainer.loss_type)},
        },
        weight=inputs.get("importance_sampling_ratio") if corrected else None,
    )


def gspo_token_old(call: LossCall) -> Tensor:
    """Old log-probabilities (B, T) with which a token ratio is GSPO-token's, sg[R_s] * p_t / sg[p_t].

    arXiv:2507.18071, equation 14: exp(new - (sg[new] - sg[log R_s])) is R_s in value, and its gradient is R_s times
    that of the token's own log-probability.
    """
    new = call.new.detach()
    counts = call.mask.sum(-1, keepdim=True).clamp(min=1)
    log_ratio = ((new - call.old_or_new()) * call.mask).sum(-1, keepdim=True) / counts
    return new - log_ratio


def sequence_log_ratio(call: LossCall) -> Tensor:
    """log R_s = mean over the sequence's tokens of new - old, (B,), as the loss's own dtype has it."""
    new = call.new.detach()
    return ((new - call.old_or_new()) * call.mask).sum(-1) / call.mask.sum(-1).clamp(min=1)


def is_per_sequence(call: LossCall, token_ratio: bool = False) -> bool:
    return token_ratio or call.arguments["importance_sampling_level"] == "sequence"
