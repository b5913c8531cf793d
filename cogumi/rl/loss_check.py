"""Record what the loss of a GRPO trainer received, TRL's or unsloth's, and compare the loss that ran with its formula.

For one call of `compute_loss`, recorders replace what it calls, and pass everything through unchanged. TRL's loss asks
the trainer for the new log-probabilities. unsloth's hands log-probabilities, mask and advantages to
`UnslothEfficientGRPO.apply`, or on a slower path to `grpo_compute_loss_slow`, both globals of the generated module.

Before each of the first optimizer steps, the loss that was asked for is computed once more in float64, from the
log-probabilities that the loss itself was given. Both the value that the loss returned and the gradient that reached
those log-probabilities must agree.
"""

import functools
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cogumi.patches import replaced
from cogumi.patches.trl_internals import INNER_LOSS, TOKEN_LOGPS
from cogumi.patches.unsloth_rl import is_unsloth_trainer

Backend = Literal["trl", "unsloth"]
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # TRL 1.15's losses with PPO's two-sided clip
WITH_FORMULA = (*CLIPPED, "cispo", "sapo", "vespo")
# Shapes of the soft clips, named after their losses.
GATES = tuple(f"{name}_{sign}" for name in ("sapo_temperature", "vespo_k", "vespo_lambda") for sign in ("pos", "neg"))
# The settings that TRL's loss reads off the trainer, and off its arguments.
OF_TRAINER = (
    "loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "beta", "temperature", "max_completion_length",
    "current_gradient_accumulation_steps",
)  # fmt: skip
OF_ARGS = ("delta", "use_bias_correction_kl", "steps_per_generation")
TOLERANCE = 1e-4  # relative; the losses are computed in float32 from sums of up to thousands of terms
LAST_STEP = 100  # by which a clip that has not acted is not waited for any longer
BOUNDARY = 1e-6  # a ratio this close to the clip may fall on either side of it in another precision


class WrongLossError(RuntimeError):
    """The loss that ran is not the loss that was asked for."""


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
    gradient: Tensor | None = None  # (B, T), which reached `new`; None before the backward pass

    def old_logps(self) -> Tensor:
        return self.new.detach() if self.old is None else self.old


def sequence_log_ratio(call: LossInputs) -> Tensor:
    """Return log R_s, the mean over the sequence's tokens of new - old, (B,), in the loss's own dtype."""
    new = call.new.detach()
    return ((new - call.old_logps()) * call.mask).sum(-1) / call.mask.sum(-1).clamp(min=1)


def is_per_sequence(call: LossInputs) -> bool:
    return bool(call.arguments["importance_sampling_level"] == "sequence")


def backend_of(trainer: Any) -> Backend:
    """Return whose `compute_loss` this trainer has."""
    return "unsloth" if is_unsloth_trainer(type(trainer)) else "trl"


def capture_loss_inputs(trainer: Any, inputs: dict[str, Any]) -> AbstractContextManager[list[LossInputs]]:
    """Collect the LossInputs of one `trainer.compute_loss(model, inputs)` in the block."""
    return capture_unsloth_loss(trainer) if backend_of(trainer) == "unsloth" else capture_trl_loss(trainer, inputs)


@contextmanager
def capture_trl_loss(trainer: Any, inputs: dict[str, Any]) -> Iterator[list[LossInputs]]:
    """Capture TRL 1.15's loss, which asks the trainer for log-probabilities once, and reads the rest from `inputs`."""
    compute = getattr(trainer, TOKEN_LOGPS)
    calls: list[LossInputs] = []

    def capture_logprobs(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        calls.append(read_trl_inputs(trainer, inputs, result[0]))
        return result

    with replaced(trainer, {TOKEN_LOGPS: capture_logprobs}):
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
            **{name: getattr(trainer, name) for name in OF_TRAINER},
            **{name: getattr(trainer.args, name) for name in OF_ARGS},
            **{name: getattr(trainer.args, name) for name in GATES if name.startswith(trainer.loss_type)},
            "num_items_in_batch": inputs.get("num_items_in_batch"),
            "num_processes": trainer.accelerator.num_processes,
        },
        weight=inputs.get("importance_sampling_ratio") if corrected else None,
    )


@contextmanager
def capture_unsloth_loss(trainer: Any) -> Iterator[list[LossInputs]]:
    """Capture unsloth's loss, in its layout: rows packed to the left, T = completion columns + the widest left padding.

    `mask` leaves the padding out. Raises RuntimeError when the generated module is not the one this was written for.
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
    """Return the autograd function `original` under its own name, recording what it is applied to."""
    forward = inspect.signature(original.forward)

    def apply(*args: Any, **kwargs: Any) -> Any:
        bound = forward.bind(None, *args, **kwargs).arguments
        outputs = original.apply(*args, **kwargs)
        settings = bound.get("extra_kwargs") or {}
        tensors = {key: bound[f"_{key}"] for key in ("new_logps", "old_logps", "ref_logps", "mask", "advantages")}
        calls.append(read_unsloth_inputs(original, tensors, bound["beta"], settings, outputs[4]))
        return outputs

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original)(original.__name__, (original,), {"apply": staticmethod(apply), **names})


def wrap_slow_loss(original: Any, calls: list[LossInputs]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute(*args: Any, **settings: Any) -> Any:
        ref, new, old, _, _, mask, beta, advantages = args  # the fourth and fifth: the sampler's, and input_ids
        outputs = original(*args, **settings)
        tensors = {"new_logps": new, "old_logps": old, "ref_logps": ref, "mask": mask, "advantages": advantages}
        calls.append(read_unsloth_inputs(original, tensors, beta, settings, outputs[4]))
        return outputs

    return compute


def read_unsloth_inputs(
    function: Any, tensors: dict[str, Any], beta: float, settings: dict[str, Any], sampler_ratio: Tensor | None
) -> LossInputs:
    corrected = settings.get("use_vllm") and settings.get("vllm_importance_sampling_correction")
    weighed = corrected and settings.get("loss_type") != "vespo" and sampler_ratio is not None and sampler_ratio.numel()
    return LossInputs(
        new=tensors["new_logps"],
        old=tensors["old_logps"],
        ref=tensors["ref_logps"] if beta != 0 else None,
        mask=tensors["mask"],
        advantages=tensors["advantages"],
        function=function,
        arguments={"beta": beta, **{key: value for key, value in settings.items() if not callable(value)}},
        weight=sampler_ratio if weighed else None,
    )


class LossCheck:
    """Compare optimizer steps with the formula until one has exercised the clip, and describe the comparison.

    On the policy's own rollout every ratio is 1, and a loss with another epsilon, or with token ratios, is the same. So
    the check continues, to step LAST_STEP at most, until it has compared a gradient and seen the clip take one away. A
    loss without a clip needs a ratio other than 1. The second step is usually the last.
    """

    def __init__(
        self, expected: dict[str, Any], unproven: list[str], user_function: Any = None, own_objective: bool = False
    ) -> None:
        """Set up the check of one training.

        Args:
            expected: settings that the loss must have been called with.
            unproven: terms that the formula leaves out; with any, only the settings are compared.
            user_function: the user's function that the loss comes out of.
            own_objective: the objective is the user's, and is compared with nothing.
        """
        self.expected, self.unproven = expected, unproven
        self.user_function, self.own_objective = user_function, own_objective
        self.calls: list[tuple[LossInputs, Tensor]] = []  # micro-batches without their graph, and their losses
        self.step = 0
        self.has_moved = False  # whether any ratio has been other than 1
        self.record: dict[str, Any] = {"unproven": unproven, "asserted": False, "clip_seen_at_step": None}
        self.worst = {"loss": 0.0, "gradient": 0.0}

    @property
    def is_complete(self) -> bool:
        """True once everything is shown that can be."""
        clips = self.record.get("arguments", {}).get("loss_type") in CLIPPED
        seen = self.record["clip_seen_at_step"] is not None if clips else self.has_moved
        return bool(self.step and (self.unproven or (self.record["asserted"] and seen) or self.step >= LAST_STEP))

    def add(self, call: LossInputs, loss: Tensor) -> None:
        """Add one micro-batch: its inputs and its loss; its gradient is noted in the backward pass."""
        seen = replace(call, new=call.new.detach())  # no graph: backward frees it

        def note(gradient: Tensor) -> None:
            seen.gradient = gradient.detach()

        if call.new.requires_grad:
            call.new.register_hook(note)
        self.calls.append((seen, loss.detach()))

    def check(self, scale: float = 1.0) -> dict[str, Any]:
        """Compare before an optimizer step, and return the record for `loss.json`. scale: the gradient scaler's.

        Raises WrongLossError when a setting, the value or the gradient is not what was asked for.
        """
        self.step += 1
        if not self.calls and not self.own_objective:
            raise WrongLossError(
                f"{format_location(self.user_function) or 'compute_loss of the trainer'} made a step without asking for the "
                "new log-probabilities: it is not the loss that was asked for"
            )
        if self.step == 1 and self.calls:
            first, _ = self.calls[0]
            self.record |= {
                **describe_function(first.function),
                "arguments": {name: to_json(value) for name, value in first.arguments.items()},
                "micro_batches": len(self.calls),
            }
        if self.own_objective:
            self.record |= describe_function(self.user_function)
        for name, expected in self.expected.items():
            value = self.calls[0][0].arguments.get(name)
            is_close = isinstance(expected, float) and value is not None and math.isclose(value, expected)
            if not is_close and value != expected:
                place = f" (in {format_location(self.user_function)})" if self.user_function is not None else ""
                raise WrongLossError(f"the loss ran with {name}={value!r}{place}, and {expected!r} was asked for")
        if not self.unproven:
            for call, loss in self.calls:
                self._compare(call, loss, scale)
            self.record["relative_difference"] = self.worst | {"tolerance": TOLERANCE, "steps": self.step}
        self.calls = []
        return self.record

    def _compare(self, call: LossInputs, loss: Tensor, scale: float) -> None:
        gradient = call.gradient
        expected, size, slope = loss_and_gradient(call)
        if not torch.isfinite(loss) and not torch.isfinite(expected):
            return  # both are wrong: the run itself is not finite, which its verdict says
        if gradient is not None and scale != 1 and not torch.isfinite(gradient).all():
            return  # overflowed in float16: the gradient scaler drops this step and tries a smaller scale
        ratio, low, high = clip_bounds(call)
        # A ratio on a bound, up to rounding, may be clipped or not.
        decided = ~(((ratio - low).abs() < BOUNDARY) | ((ratio - high).abs() < BOUNDARY))
        tiny = torch.finfo(torch.float32).tiny
        differences = {"loss": ((loss.double() - expected).abs() / size.clamp(min=tiny)).item(), "gradient": math.nan}
        if not slope.abs().max() > 0:
            differences["gradient"] = 0.0 if gradient is None or not gradient[decided].any() else math.inf
        elif gradient is not None:
            difference = (gradient.double() / scale - slope)[decided].abs()
            differences["gradient"] = (difference.max() / slope.abs().max()).item() if len(difference) else 0.0
            self.record["asserted"] |= bool(len(difference))
        for name, apart in differences.items():
            if not apart <= TOLERANCE:  # NaN is not
                raise WrongLossError(
                    f"the {name} of step {self.step} is not that of the loss that was asked for: {apart:.2g} apart "
                    f"(relative; at most {TOLERANCE:g}). "
                    f"{format_location(self.user_function) or self.record['function']} ran with {self.record['arguments']}"
                )
            self.worst[name] = max(self.worst[name], apart)
        self.has_moved |= bool(((call.new - call.old_logps()).abs() * (call.mask > 0) > BOUNDARY).any())
        if self.record["clip_seen_at_step"] is None and has_clipped_gradient(call):
            self.record["clip_seen_at_step"] = self.step


def describe_function(function: Any) -> dict[str, Any]:
    """Return a function's name, location and hash: a cache generated yesterday is not the library of today."""
    try:
        lines, first = inspect.getsourcelines(function)
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        source = {"file": inspect.getsourcefile(function), "line": first, "sha256": digest}
    except OSError:  # typed into an interpreter, or piped into it
        code = function.__code__
        source = {"file": code.co_filename, "line": code.co_firstlineno, "sha256": None}
    return {"function": f"{function.__module__}.{function.__qualname__}", "source": source}


def format_location(function: Any) -> str:
    """Return a function with its file and line, as in `Mine.compute_loss (train.py:12)`; "" for None."""
    if function is None:
        return ""
    function = inspect.unwrap(function)
    name, code = getattr(function, "__qualname__", repr(function)), getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def has_clipped_gradient(call: LossInputs) -> bool:
    """Return whether the clip took the policy term's gradient from a token that counts.

    Read off the ratios: a KL term has a gradient on both sides of the clip, and a token of weight 0 (vLLM's) on none.
    """
    if call.arguments.get("loss_type") not in CLIPPED:
        return False
    ratio, low, high = clip_bounds(call)
    advantages = call.advantages[:, None] if call.advantages.dim() == 1 else call.advantages
    cut = ((ratio > high + BOUNDARY) & (advantages > 0)) | ((ratio < low - BOUNDARY) & (advantages < 0))
    return bool((cut & (call.mask > 0)).any())


def clip_bounds(call: LossInputs) -> tuple[Tensor, float, float]:
    """Return the ratio (B, T) in float64, and the clip's lower and upper bound."""
    log_ratio = call.new - call.old_logps()
    if is_per_sequence(call):
        log_ratio = sequence_log_ratio(call)[:, None].expand_as(call.new)
    return log_ratio.double().exp(), 1 - call.arguments["epsilon_low"], 1 + call.arguments["epsilon_high"]


def list_unchecked_terms(trainer: Any) -> list[str]:
    """List the terms of the trainer's loss without a formula here; with any of them only the settings are compared."""
    args = trainer.args
    terms = {
        f"loss_type {args.loss_type}": args.loss_type not in WITH_FORMULA,
        "entropy_coef": args.entropy_coef != 0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile": args.top_entropy_quantile < 1,
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "router_aux_loss_coef": getattr(trainer, "aux_loss_enabled", False),
    }
    return [name for name, present in terms.items() if present]


def to_json(value: Any) -> Any:
    """Return a JSON value: tensors of one element as numbers, objects by their name."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"tensor{tuple(value.shape)}"
    return value if isinstance(value, (int, float, str, bool, type(None))) else getattr(value, "__name__", str(value))


# The policy losses in float64, from the papers that `cogumi.config.presets` and TRL's GRPOConfig name, with TRL 1.15's
# normalisers.


def loss_and_gradient(call: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the sum of the magnitudes of its parts, and d loss / d new (B, T), all float64."""
    new = call.new.detach().double().requires_grad_()
    with torch.enable_grad():
        parts = _token_losses(call, new)
        loss = parts.sum()
        (gradient,) = torch.autograd.grad(loss, new)
    return loss.detach(), parts.detach().abs().sum(), gradient


def _token_losses(call: LossInputs, new: Tensor) -> Tensor:
    mask = (call.mask > 0).double()
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    keep = mask > 0
    old = new.detach() if call.old is None else call.old.detach().double()
    log_ratio = torch.where(keep, new - torch.where(keep, old, 0.0), 0.0)
    log_weight = log_ratio.sum(-1, keepdim=True) / lengths if is_per_sequence(call) else log_ratio
    advantages = call.advantages.detach().double()
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    token_loss = _policy_term(call, log_weight.exp(), log_ratio, advantages, new)
    if call.weight is not None:
        token_loss = token_loss * call.weight.detach().double()
    if call.ref is not None and call.arguments["beta"] != 0:
        away = torch.where(keep, call.ref.detach().double() - new, 0.0)
        kl = away.exp() - away - 1  # Schulman's k3
        if call.arguments.get("use_bias_correction_kl"):
            kl = kl * log_weight.exp()
        token_loss = token_loss + call.arguments["beta"] * kl
    return torch.where(keep, token_loss.expand_as(mask), 0.0) * _inverse_normaliser(call, mask, lengths)


def _policy_term(call: LossInputs, ratio: Tensor, log_ratio: Tensor, advantages: Tensor, new: Tensor) -> Tensor:
    settings = call.arguments
    loss_type = settings["loss_type"]
    low, high = settings["epsilon_low"], settings["epsilon_high"]

    def by_sign(name: str, is_positive: Tensor) -> Tensor:
        pos, neg = (advantages.new_tensor(settings[f"{name}_{sign}"]) for sign in ("pos", "neg"))
        return torch.where(is_positive, pos, neg)

    if loss_type in CLIPPED:
        capped = ratio if settings.get("delta") is None else ratio.clamp(max=settings["delta"])
        return -torch.minimum(capped * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if loss_type == "cispo":
        return -ratio.clamp(max=high).detach() * advantages * new
    if loss_type == "sapo":
        temperature = by_sign("sapo_temperature", advantages > 0)
        return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages
    assert loss_type == "vespo", loss_type
    # Clamped as in the authors' code, so that the weight of a far-off sequence is a number. log_ratio is 0 outside the mask.
    sequence_log_ratio = log_ratio.detach().clamp(-20, 20).sum(-1, keepdim=True).clamp(math.log(1e-8), 20)
    k, rate = by_sign("vespo_k", advantages >= 0), by_sign("vespo_lambda", advantages >= 0)
    return -torch.exp(rate + k * sequence_log_ratio - rate * sequence_log_ratio.exp()) * advantages * new


def _inverse_normaliser(call: LossInputs, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return what a token's loss is multiplied by: one over the loss's normaliser."""
    settings = call.arguments
    rows, accumulation = len(mask), settings["current_gradient_accumulation_steps"]
    match settings["loss_type"]:
        case "grpo" | "sapo":
            normaliser = lengths * rows
        case "luspo":
            normaliser = torch.full_like(lengths, rows)
        case "bnpo":
            normaliser = mask.sum().clamp(min=1)
        case "dr_grpo":
            normaliser = torch.full_like(lengths, rows * settings["max_completion_length"])
        case _:  # dapo, cispo, vespo: the step's tokens, which TRL takes to be an even share of the rollout's
            tokens = max(float(settings["num_items_in_batch"]), 1.0) / settings["num_processes"]
            normaliser = torch.full_like(lengths, tokens / settings["steps_per_generation"])
    return 1 / (normaliser * accumulation)
