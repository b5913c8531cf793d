"""What the loss that ran received: the one place where cogumi looks into a GRPO trainer, TRL's or unsloth's.

Nothing here computes a loss. For one call of `compute_loss`, recorders replace what it calls. They pass everything
through unchanged, so neither the loss nor its gradient can differ. TRL's loss asks the trainer for the new
log-probabilities. unsloth's never calls TRL's `_compute_loss`. It hands log-probabilities, mask and advantages to
`UnslothEfficientGRPO.apply`, or on a slower path to `grpo_compute_loss_slow`, both globals of the generated module.
"""

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from cogumi.patches import replaced
from cogumi.patches.fused_head import triton_device
from cogumi.patches.head_logps import FusedLogProbFunction
from cogumi.patches.trl_internals import INNER_LOSS, TOKEN_LOGPS, methods_replaced
from cogumi.patches.unsloth_rl import is_unsloth_trainer

Backend = Literal["trl", "unsloth"]
# Shapes of the soft clips, named after their losses.
GATES = tuple(f"{name}_{sign}" for name in ("sapo_temperature", "vespo_k", "vespo_lambda") for sign in ("pos", "neg"))
# What turns hidden states, or logits, into log-probabilities in unsloth_zoo.rl_replacements.
SCORERS = (
    "chunked_hidden_states_selective_log_softmax",
    "chunked_hidden_states_selective_log_softmax_recompute",
    "grpo_chunked_hidden_states_logprobs",  # since 2026.10.8
    "chunked_selective_log_softmax",
)
VOCABULARY_TILE = 32768  # TRL's own (trl/trainer/utils.py); cogumi's function takes smaller ones where it likes
LOGIT_ROWS = 1024


@dataclass
class LossInputs:
    """One micro-batch as the loss that ran received it. B sequences of at most T completion tokens."""

    new: Tensor
    """(B, T) log-probabilities under the policy that is trained, with their graph, in nats."""
    old: Tensor | None
    """(B, T) log-probabilities under the policy that wrote the completions; None: the loss took `new.detach()`."""
    ref: Tensor | None
    """(B, T) log-probabilities under the reference model; None without a KL term."""
    mask: Tensor
    """(B, T) 1 for the tokens that count: completion, and not written by a tool."""
    advantages: Tensor
    """(B,), or (B, T) where they vary along the sequence."""
    entropy: Tensor | None
    """(B, T) of the policy at the sampling temperature, in nats."""
    function: Any
    """What computed the loss."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The loss's settings: as it was called under unsloth, as it reads them off the trainer under TRL."""
    weight: Tensor | None = None
    """(B, T) or (B, 1) factor of the policy term: TRL's correction for the sampler's own numerics (vLLM)."""

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


# ------------------------------------------------------------------------------------------------------------------ TRL


@contextmanager
def capture_trl_loss(trainer: Any, inputs: dict[str, Any], token_ratio: bool = False) -> Iterator[list[LossInputs]]:
    """TRL 1.15: its loss asks the trainer for log-probabilities and entropies once, and reads the rest from `inputs`.

    With `token_ratio`, `inputs` gets other old log-probabilities once the new ones are known. The loss then forms
    GSPO-token's ratio: the sequence's in value, each token's in gradient.
    """
    compute = getattr(trainer, TOKEN_LOGPS)
    calls: list[LossInputs] = []

    def overhear(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        call = read_trl_inputs(trainer, inputs, new=result[0], entropy=result[1])
        calls.append(call)
        if token_ratio:
            inputs["old_per_token_logps"] = gspo_token_old_logps(call)
        return result

    with methods_replaced(trainer, {TOKEN_LOGPS: overhear}):
        yield calls


def read_trl_inputs(trainer: Any, inputs: dict[str, Any], new: Tensor, entropy: Tensor | None) -> LossInputs:
    mask = inputs["completion_mask"]
    corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction and trainer.loss_type != "vespo"
    return LossInputs(
        new=new,
        old=inputs.get("old_per_token_logps"),
        ref=inputs.get("ref_per_token_logps") if trainer.beta != 0 else None,
        mask=mask * inputs["tool_mask"] if "tool_mask" in inputs else mask,
        advantages=inputs["advantages"],
        entropy=entropy,
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
    new = call.new.detach()
    counts = call.mask.sum(-1, keepdim=True).clamp(min=1)
    log_ratio = ((new - call.old_logps()) * call.mask).sum(-1, keepdim=True) / counts
    return new - log_ratio


# -------------------------------------------------------------------------------------------------------------- unsloth


@contextmanager
def capture_unsloth_loss(trainer: Any) -> Iterator[list[LossInputs]]:
    """(B, T) is unsloth's layout: rows packed to the left, T = completion columns + the widest left padding, which
    `mask` leaves out. `entropy` is None under no_grad (evaluation), where nothing links a score to its token.

    Raises RuntimeError when the generated module is not the one this was written for.
    """
    home = next(cls.__module__ for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    generated = sys.modules[home]
    for name in ("UnslothEfficientGRPO", "grpo_compute_loss_slow", "grpo_accumulated_loss"):
        if not hasattr(generated, name):
            raise RuntimeError(f"{type(trainer).__name__}.compute_loss comes from {home}, which has no {name}")
    zoo = importlib.import_module("unsloth_zoo.rl_replacements")
    calls: list[LossInputs] = []
    scores = EntropyRecorder()
    losses = {
        "UnslothEfficientGRPO": wrap_efficient_loss(generated.UnslothEfficientGRPO, calls, scores),
        "grpo_compute_loss_slow": wrap_slow_loss(generated.grpo_compute_loss_slow, calls, scores),
    }
    with ExitStack() as stack:
        stack.callback(scores.stop)  # unsloth's recomputing backward still holds the recorders later
        recorders = {name: scores.recorder(getattr(zoo, name)) for name in SCORERS if hasattr(zoo, name)}
        stack.enter_context(replaced(zoo, recorders))
        stack.enter_context(replaced(generated, losses))
        yield calls


def wrap_efficient_loss(original: Any, calls: list[LossInputs], scores: "EntropyRecorder") -> Any:
    """The autograd function `original` under its own name, which records what it is applied to."""
    forward = inspect.signature(original.forward)

    def apply(*args: Any, **kwargs: Any) -> Any:
        given = forward.bind(None, *args, **kwargs).arguments
        outputs = original.apply(*args, **kwargs)
        settings = given.get("extra_kwargs") or {}
        named = {key: given[f"_{key}"] for key in ("new_logps", "old_logps", "ref_logps", "mask", "advantages")}
        calls.append(read_unsloth_inputs(original, named, given["beta"], settings, outputs[4], scores))
        return outputs

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original)(original.__name__, (original,), {"apply": staticmethod(apply), **names})


def wrap_slow_loss(original: Any, calls: list[LossInputs], scores: "EntropyRecorder") -> Callable[..., Any]:
    @functools.wraps(original)
    def compute(
        ref: Tensor | None,
        new: Tensor,
        old: Tensor | None,
        sampling_per_token_logps: Tensor | None,
        input_ids: Tensor,
        mask: Tensor,
        beta: float,
        advantages: Tensor,
        **settings: Any,
    ) -> Any:
        outputs = original(ref, new, old, sampling_per_token_logps, input_ids, mask, beta, advantages, **settings)
        named = {"new_logps": new, "old_logps": old, "ref_logps": ref, "mask": mask, "advantages": advantages}
        calls.append(read_unsloth_inputs(original, named, beta, settings, outputs[4], scores))
        return outputs

    return compute


def read_unsloth_inputs(
    function: Any,
    given: dict[str, Any],
    beta: float,
    settings: dict[str, Any],
    sampler_ratio: Tensor | None,
    scores: "EntropyRecorder",
) -> LossInputs:
    corrected = settings.get("use_vllm") and settings.get("vllm_importance_sampling_correction")
    weighed = corrected and settings.get("loss_type") != "vespo" and sampler_ratio is not None and sampler_ratio.numel()
    return LossInputs(
        new=given["new_logps"],
        old=given["old_logps"],
        ref=given["ref_logps"] if beta != 0 else None,
        mask=given["mask"],
        advantages=given["advantages"],
        entropy=scores.entropy(given["new_logps"], given["mask"]),
        function=function,
        arguments={"beta": beta, **{key: value for key, value in settings.items() if not callable(value)}},
        weight=sampler_ratio if weighed else None,
    )


class EntropyRecorder:
    """Log-probabilities as unsloth's scorers returned them during one loss, each with its tokens' entropies.

    unsloth computes no entropy unless the loss needs one, and asking it to would switch it to another scorer. So that of
    the same hidden states is computed beside it without a graph: one more product with the head, a tile at a time.
    """

    def __init__(self) -> None:
        self.recorded: list[tuple[Tensor, Tensor]] = []
        self.open = True
        self.scoring = False

    def stop(self) -> None:
        self.open = False
        self.recorded.clear()

    def recorder(self, scorer: Callable[..., Any]) -> Callable[..., Any]:
        """`scorer`, and the entropies of what it scored. Calls without a graph (unsloth's checks) are let through."""
        parameters = inspect.signature(scorer)

        @functools.wraps(scorer)
        def score(*args: Any, **kwargs: Any) -> Any:
            if not self.open or self.scoring:  # one scorer may call another
                return scorer(*args, **kwargs)
            self.scoring = True
            try:
                result = scorer(*args, **kwargs)
            finally:
                self.scoring = False
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            scored = given["logits"] if "logits" in given else given["hidden_states"]
            # Not `is_grad_enabled`: the offloading scorer runs this inside its own forward, where it is off.
            if scored.requires_grad:
                logps = result[0] if isinstance(result, tuple) else result
                self.recorded.append((logps, compute_entropies(given).view(logps.shape)))
            return result

        return score

    def entropy(self, new: Tensor, mask: Tensor) -> Tensor | None:
        """(B, T) entropies in nats of the tokens of `new`, 0 outside `mask`; None where a token's is not known.

        unsloth scores padded rows, one packed row or shared prefixes, and scatters the scores into `new`. The backward
        of that scattering finds where each score went. It is given the places' numbers as the gradient of `new`, and
        returns to every score the number of its place. It does not run a scorer's backward.
        """
        recorded = [(logps, entropy) for logps, entropy in self.recorded if logps.requires_grad]
        self.recorded.clear()
        if not new.requires_grad:
            return None
        places = torch.arange(1, new.numel() + 1, dtype=new.dtype, device=new.device).view_as(new)
        found = new.new_zeros(new.numel())
        reached = torch.zeros(new.numel(), dtype=torch.bool, device=new.device)
        if recorded:
            scores = [logps for logps, _ in recorded]
            went = torch.autograd.grad(new, scores, places, retain_graph=True, allow_unused=True)
            for place, (_, entropy) in zip(went, recorded, strict=True):
                if place is not None:
                    used = place > 0
                    index = place[used].long() - 1
                    found[index] = entropy[used].to(found)
                    reached[index] = True
        if bool((mask.reshape(-1).bool() & ~reached).any()):
            warnings.warn("unsloth scored tokens where cogumi does not look: no entropy is logged", stacklevel=2)
            return None
        return found.view_as(new) * mask


@torch.no_grad()
def compute_entropies(given: dict[str, Any]) -> Tensor:
    """Of the tokens a scorer was given, flat, in nats at its temperature: over the whole vocabulary, as TRL's are."""
    if "logits" in given:
        logits, temperature = given["logits"], given["temperature"]
        rows = logits.detach().reshape(-1, logits.shape[-1]).split(LOGIT_ROWS)
        logps = ((some.float() / temperature).log_softmax(-1) for some in rows)
        return torch.cat([-(each.exp() * each).sum(-1) for each in logps])
    head, bias = given["lm_head"].detach(), given["lm_head_bias"]
    hidden = given["hidden_states"].detach().reshape(-1, head.shape[1])
    # 0 is unsloth's "off" for all three.
    scale = (given["logit_scale_multiply"] or 1.0) / (given["logit_scale_divide"] or 1.0)
    # What stock TRL computes its `entropy` metric with on this machine.
    function: Any = FusedLogProbFunction
    if triton_device() is not None:
        function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    _, entropy, *_ = function.apply(
        hidden.to(head),
        head,
        None if bias is None else bias.detach(),
        given["index"].reshape(-1).to(head.device),
        given["temperature"],
        VOCABULARY_TILE,
        given["logit_softcapping"] or None,
        scale,
        ("entropy",),
    )
    return entropy.to(hidden.device)
