"""What the loss that ran received: the one place where cogumi looks into a GRPO trainer, TRL's or unsloth's.

For one call of `compute_loss`, recorders replace what it calls, and pass everything through unchanged. TRL's loss asks
the trainer for the new log-probabilities. unsloth's hands log-probabilities, mask and advantages to
`UnslothEfficientGRPO.apply`, or on a slower path to `grpo_compute_loss_slow`, both globals of the generated module.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from cogumi.patches import replaced
from cogumi.patches.trl_internals import INNER_LOSS, TOKEN_LOGPS
from cogumi.patches.unsloth_rl import is_unsloth_trainer

Backend = Literal["trl", "unsloth"]
# Shapes of the soft clips, named after their losses.
GATES = tuple(f"{name}_{sign}" for name in ("sapo_temperature", "vespo_k", "vespo_lambda") for sign in ("pos", "neg"))


@dataclass
class LossInputs:
    """One micro-batch as the loss that ran received it. B sequences of at most T completion tokens."""

    new: Tensor  # (B, T) log-probabilities under the policy that is trained, with their graph, in nats
    old: Tensor | None  # (B, T), under the policy that wrote the completions; None: the loss took `new.detach()`
    ref: Tensor | None  # (B, T), under the reference model; None without a KL term
    mask: Tensor  # (B, T) 1 for the tokens that count: completion, and not written by a tool
    advantages: Tensor  # (B,), or (B, T) where they vary along the sequence
    function: Any  # what computed the loss
    # The loss's settings: as it was called under unsloth, as it reads them off the trainer under TRL.
    arguments: dict[str, Any] = field(default_factory=dict)
    weight: Tensor | None = None  # (B, T) or (B, 1), of the policy term: TRL's correction for vLLM's own numerics

    def old_logps(self) -> Tensor:
        return self.new.detach() if self.old is None else self.old


def sequence_log_ratio(call: LossInputs) -> Tensor:
    """log R_s = mean over the sequence's tokens of new - old, (B,), as the loss's own dtype has it."""
    new = call.new.detach()
    return ((new - call.old_logps()) * call.mask).sum(-1) / call.mask.sum(-1).clamp(min=1)


def is_per_sequence(call: LossInputs, token_ratio: bool = False) -> bool:
    return token_ratio or call.arguments["importance_sampling_level"] == "sequence"


def backend_of(trainer: Any) -> Backend:
    """Whose `compute_loss` this trainer has."""
    return "unsloth" if is_unsloth_trainer(type(trainer)) else "trl"


def capture_loss_inputs(
    trainer: Any, inputs: dict[str, Any], token_ratio: bool
) -> AbstractContextManager[list[LossInputs]]:
    """While it is entered, one `trainer.compute_loss(model, inputs)` leaves its LossInputs in the list."""
    if backend_of(trainer) == "unsloth":
        return capture_unsloth_loss(trainer)
    return capture_trl_loss(trainer, inputs, token_ratio)


@contextmanager
def capture_trl_loss(trainer: Any, inputs: dict[str, Any], token_ratio: bool = False) -> Iterator[list[LossInputs]]:
    """TRL 1.15: its loss asks the trainer for log-probabilities once, and reads the rest from `inputs`.

    With `token_ratio`, `inputs` gets other old log-probabilities once the new ones are known. The loss then forms
    GSPO-token's ratio: the sequence's in value, each token's in gradient.
    """
    compute = getattr(trainer, TOKEN_LOGPS)
    calls: list[LossInputs] = []

    def overhear(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        call = read_trl_inputs(trainer, inputs, result[0])
        calls.append(call)
        if token_ratio:
            inputs["old_per_token_logps"] = gspo_token_old_logps(call)
        return result

    with replaced(trainer, {TOKEN_LOGPS: overhear}):
        yield calls


def read_trl_inputs(trainer: Any, inputs: dict[str, Any], new: Tensor) -> LossInputs:
    mask = inputs["completion_mask"]
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction and trainer.loss_type != "vespo"
    return LossInputs(
        new=new,
        old=inputs.get("old_per_token_logps"),
        ref=inputs.get("ref_per_token_logps") if trainer.beta != 0 else None,
        mask=mask * inputs["tool_mask"] if "tool_mask" in inputs else mask,
        advantages=inputs["advantages"],
        function=getattr(type(trainer), INNER_LOSS),
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


def gspo_token_old_logps(call: LossInputs) -> Tensor:
    """Old log-probabilities (B, T) with which a token ratio is GSPO-token's, sg[R_s] * p_t / sg[p_t].

    arXiv:2507.18071, equation 14: exp(new - (sg[new] - sg[log R_s])) is R_s in value, and its gradient is R_s times
    that of the token's own log-probability.
    """
    return call.new.detach() - sequence_log_ratio(call)[:, None]


@contextmanager
def capture_unsloth_loss(trainer: Any) -> Iterator[list[LossInputs]]:
    """(B, T) is unsloth's layout: rows packed to the left, T = completion columns + the widest left padding, which
    `mask` leaves out. Raises RuntimeError when the generated module is not the one this was written for.
    """
    home = next(cls.__module__ for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    generated = sys.modules[home]
    for name in ("UnslothEfficientGRPO", "grpo_compute_loss_slow", "grpo_accumulated_loss"):
        if not hasattr(generated, name):
            raise RuntimeError(f"{type(trainer).__name__}.compute_loss comes from {home}, which has no {name}")
    calls: list[LossInputs] = []
    losses = {
        "UnslothEfficientGRPO": wrap_efficient_loss(generated.UnslothEfficientGRPO, calls),
        "grpo_compute_loss_slow": wrap_slow_loss(generated.grpo_compute_loss_slow, calls),
    }
    with replaced(generated, losses):
        yield calls


def wrap_efficient_loss(original: Any, calls: list[LossInputs]) -> Any:
    """The autograd function `original` under its own name, which records what it is applied to."""
    forward = inspect.signature(original.forward)

    def apply(*args: Any, **kwargs: Any) -> Any:
        given = forward.bind(None, *args, **kwargs).arguments
        outputs = original.apply(*args, **kwargs)
        settings = given.get("extra_kwargs") or {}
        named = {key: given[f"_{key}"] for key in ("new_logps", "old_logps", "ref_logps", "mask", "advantages")}
        calls.append(read_unsloth_inputs(original, named, given["beta"], settings, outputs[4]))
        return outputs

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original)(original.__name__, (original,), {"apply": staticmethod(apply), **names})


def wrap_slow_loss(original: Any, calls: list[LossInputs]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute(*given: Any, **settings: Any) -> Any:
        ref, new, old, _, _, mask, beta, advantages = given  # the fourth and fifth: the sampler's, and input_ids
        outputs = original(*given, **settings)
        named = {"new_logps": new, "old_logps": old, "ref_logps": ref, "mask": mask, "advantages": advantages}
        calls.append(read_unsloth_inputs(original, named, beta, settings, outputs[4]))
        return outputs

    return compute


def read_unsloth_inputs(
    function: Any, given: dict[str, Any], beta: float, settings: dict[str, Any], sampler_ratio: Tensor | None
) -> LossInputs:
    corrected = settings.get("use_vllm") and settings.get("vllm_importance_sampling_correction")
    weighed = corrected and settings.get("loss_type") != "vespo" and sampler_ratio is not None and sampler_ratio.numel()
    return LossInputs(
        new=given["new_logps"],
        old=given["old_logps"],
        ref=given["ref_logps"] if beta != 0 else None,
        mask=given["mask"],
        advantages=given["advantages"],
        function=function,
        arguments={"beta": beta, **{key: value for key, value in settings.items() if not callable(value)}},
        weight=sampler_ratio if weighed else None,
    )
