"""What unsloth's loss received, overheard inside the module it generates.

unsloth's `compute_loss` never calls TRL's `_compute_loss`. It hands log-probabilities, mask and advantages to
`UnslothEfficientGRPO.apply` (or, on its slower path, to `grpo_compute_loss_slow`), both globals of the generated module.
For one call of `compute_loss` they are replaced by recorders that pass everything on unchanged, so neither the loss nor
its gradient can differ.

unsloth computes no entropy unless the loss needs one, and asking it to would switch it to another scorer. The functions
that turn hidden states (or logits) into log-probabilities are overheard as well, and the entropy of the same hidden states
is computed beside them without a graph: one more product with the head, a tile of logits at a time, nothing kept.
"""

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cogumi.patches.fused_head import triton_device
from cogumi.patches.head_logps import FusedLogProbFunction
from cogumi.patches.replacement import replaced
from cogumi.rl.loss_call import LossCall

HIDDEN_STATES_SCORERS = (
    "chunked_hidden_states_selective_log_softmax",
    "chunked_hidden_states_selective_log_softmax_recompute",
    "grpo_chunked_hidden_states_logprobs",  # since 2026.10.8
)
LOGITS_SCORER = "chunked_selective_log_softmax"
VOCABULARY_TILE = 32768  # TRL's own (trl/trainer/utils.py); cogumi's function takes smaller ones where it likes
LOGIT_ROWS = 1024


@contextmanager
def observed(trainer: Any) -> Iterator[list[LossCall]]:
    """While it is entered, each `trainer.compute_loss` of unsloth's trainer leaves one LossCall in the list.

    (B, T) is unsloth's layout: rows packed to the left, T = completion columns + the widest left padding, which
    `mask` leaves out. `entropy` is None under no_grad (evaluation), where nothing links a score to its token.
    Raises RuntimeError when the generated module is not the one this was written for.
    """
    generated = generated_module(trainer)
    scorers = importlib.import_module("unsloth_zoo.rl_replacements")
    calls: list[LossCall] = []
    overheard = Scores()
    efficient, slow = generated.UnslothEfficientGRPO, generated.grpo_compute_loss_slow
    wanted = [name for name in (*HIDDEN_STATES_SCORERS, LOGITS_SCORER) if hasattr(scorers, name)]
    with ExitStack() as stack:
        stack.callback(overheard.stop)  # unsloth's recomputing backward still holds the recorders later
        stack.enter_context(replaced(scorers, {name: overheard.recorder(getattr(scorers, name)) for name in wanted}))
        recorders = {
            "UnslothEfficientGRPO": record_efficient(efficient, calls, overheard),
            "grpo_compute_loss_slow": record_slow(slow, calls, overheard),
        }
        stack.enter_context(replaced(generated, recorders))
        yield calls


def generated_module(trainer: Any) -> ModuleType:
    """The module unsloth wrote `trainer.compute_loss` into."""
    home = next(cls.__module__ for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    module = sys.modules[home]
    for name in ("UnslothEfficientGRPO", "grpo_compute_loss_slow", "grpo_accumulated_loss"):
        if not hasattr(module, name):
            raise RuntimeError(f"{type(trainer).__name__}.compute_loss comes from {home}, which has no {name}")
    return module


# ------------------------------------------------------------------------------------------------------------- the loss


def record_efficient(original: Any, calls: list[LossCall], overheard: "Scores") -> Any:
    """The autograd function `original` under its own name, which records what it is applied to."""
    forward = inspect.signature(original.forward)

    def apply(*args: Any, **kwargs: Any) -> Any:
        given = forward.bind(None, *args, **kwargs).arguments
        outputs = original.apply(*args, **kwargs)
        settings = given.get("extra_kwargs") or {}
        named = {key: given[f"_{key}"] for key in ("new_logps", "old_logps", "ref_logps", "mask", "advantages")}
        calls.append(loss_call(original, named, given["beta"], settings, outputs[4], overheard))
        return outputs

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original)(original.__name__, (original,), {"apply": staticmethod(apply), **names})


def record_slow(original: Any, calls: list[LossCall], overheard: "Scores") -> Callable[..., Any]:
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
        calls.append(loss_call(original, named, beta, settings, outputs[4], overheard))
        return outputs

    return compute


def loss_call(
    function: Any,
    given: dict[str, Any],
    beta: float,
    settings: dict[str, Any],
    sampler_ratio: Tensor | None,
    overheard: "Scores",
) -> LossCall:
    new, mask = given["new_logps"], given["mask"]
    corrected = settings.get("use_vllm") and settings.get("vllm_importance_sampling_correction")
    weighed = corrected and settings.get("loss_type") != "vespo" and sampler_ratio is not None
    return LossCall(
        new=new,
        old=given["old_logps"],
        ref=given["ref_logps"] if beta != 0 else None,
        mask=mask,
        advantages=given["advantages"],
        entropy=overheard.entropy(new, mask),
        function=function,
        arguments={"beta": beta, **{key: value for key, value in settings.items() if not callable(value)}},
        weight=sampler_ratio if weighed and sampler_ratio is not None and sampler_ratio.numel() else None,
    )


# ----------------------------------------------------------------------------------------------------------- entropies


class Scores:
    """Log-probabilities as unsloth's scorers returned them during one loss, each with its tokens' entropies."""

    def __init__(self) -> None:
        self.recorded: list[tuple[Tensor, Tensor]] = []
        self.open = True
        self.inside = False

    def stop(self) -> None:
        self.open = False
        self.recorded.clear()

    def recorder(self, scorer: Callable[..., Any]) -> Callable[..., Any]:
        """`scorer`, and the entropies of what it scored. Calls without a graph (unsloth's checks) are let through."""
        parameters = inspect.signature(scorer)

        @functools.wraps(scorer)
        def score(*args: Any, **kwargs: Any) -> Any:
            if not self.open or self.inside:  # one scorer may call another
                return scorer(*args, **kwargs)
            self.inside = True
            try:
                result = scorer(*args, **kwargs)
            finally:
                self.inside = False
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            scored = given["logits"] if "logits" in given else given["hidden_states"]
            # Not `is_grad_enabled`: the offloading scorer runs this inside its own forward, where it is off.
            if scored.requires_grad:
                logps = result[0] if isinstance(result, tuple) else result
                self.recorded.append((logps, entropies(given).view(logps.shape)))
            return result

        return score

    def entropy(self, new: Tensor, mask: Tensor) -> Tensor | None:
        """(B, T) entropies in nats of the tokens of `new`, 0 outside `mask`; None where a token's cannot be told.

        unsloth scores padded rows, one packed row or shared prefixes, and scatters the results into `new`. Where each
        went is what the backward of that scattering says of its own input: sent the number of each place of `new`, it
        brings to every score the place it went to. That runs no scorer's backward.
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
def entropies(given: dict[str, Any]) -> Tensor:
    """Of the tokens a scorer was given, flat, in nats at its temperature: over the whole vocabulary, as TRL's are."""
    if "logits" in given:
        logits, temperature = given["logits"], given["temperature"]
        rows = logits.detach().reshape(-1, logits.shape[-1]).split(LOGIT_ROWS)
        return torch.cat([entropy_of_logits(some.float() / temperature) for some in rows])
    head, bias = given["lm_head"].detach(), given["lm_head_bias"]
    hidden = given["hidden_states"].detach().reshape(-1, head.shape[1])
    # 0 is unsloth's "off" for all three.
    scale = (given["logit_scale_multiply"] or 1.0) / (given["logit_scale_divide"] or 1.0)
    _, entropy, *_ = head_function().apply(
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


def entropy_of_logits(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def head_function() -> Any:
    """What stock TRL computes its `entropy` metric with on this machine."""
    if triton_device() is None:
        return FusedLogProbFunction
    return importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
