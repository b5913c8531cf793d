"""Which loss ran: the first optimizer steps' loss and gradient against the formula, before the weights are moved.

The loss that was asked for is computed once more in float64, from the log-probabilities that the loss itself was given.
Both the value that the loss returned and the gradient that reached those log-probabilities must agree.
"""

import hashlib
import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cogumi.rl.loss_capture import LossInputs, is_per_sequence, sequence_log_ratio

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # TRL 1.15's losses with PPO's two-sided clip
TOLERANCE = 1e-4  # relative; the losses are computed in float32 from sums of up to thousands of terms
LAST_STEP = 100  # by which a clip that has not acted is not waited for any longer
BOUNDARY = 1e-6  # a ratio this close to the clip may fall on either side of it in another precision


class WrongLossError(RuntimeError):
    """The loss that ran is not the loss that was asked for."""


@dataclass
class ObservedCall:
    """A micro-batch without its graph. gradient: (B, T), which reached the new log-probabilities; None before backward."""

    inputs: LossInputs
    loss: Tensor
    gradient: Tensor | None = None


class LossCheck:
    """Compares optimizer steps with the formula until one has exercised the clip, and describes what it found.

    On the policy's own rollout every ratio is 1, and a loss with another epsilon, or with token ratios, is the same. So
    the proof continues, to step LAST_STEP at most, until it has compared a gradient and seen the clip take one away. A
    loss without a clip needs a ratio other than 1. The second step is usually the last.
    """

    def __init__(
        self, asked_for: dict[str, Any], token_ratio: bool, unproven: list[str], written: Any = None, own: bool = False
    ) -> None:
        """`asked_for`: the settings the loss must have been called with; `unproven`: terms the formula leaves out.

        `written`: the user's function that the loss comes out of. `own`: its objective is compared with nothing.
        """
        self.asked_for, self.unproven = asked_for, unproven
        self.written, self.own = written, own
        self.token_ratio = token_ratio
        self.calls: list[ObservedCall] = []
        self.step = 0
        self.moved = False  # has any ratio been other than 1?
        self.record: dict[str, Any] = {"unproven": unproven, "asserted": False, "clip_seen_at_step": None}
        self.worst = {"loss": 0.0, "gradient": 0.0}

    @property
    def is_complete(self) -> bool:
        """Nothing is left to be shown, or nothing can be."""
        clips = self.record.get("arguments", {}).get("loss_type") in CLIPPED
        seen = self.record["clip_seen_at_step"] is not None if clips else self.moved
        return bool(self.step and (self.unproven or (self.record["asserted"] and seen) or self.step >= LAST_STEP))

    def add(self, call: LossInputs, loss: Tensor) -> None:
        """One micro-batch: what went in, what came out; its gradient is noted when it passes."""
        seen = ObservedCall(replace(call, new=call.new.detach()), loss.detach())  # no graph: backward frees it

        def note(gradient: Tensor) -> None:
            seen.gradient = gradient.detach()

        if call.new.requires_grad:
            call.new.register_hook(note)
        self.calls.append(seen)

    def check(self, scale: float = 1.0) -> dict[str, Any]:
        """Before each optimizer step: the record of the comparison, for `loss.json`. `scale`: the gradient scaler's.

        Raises WrongLossError when a setting, the value or the gradient is not what was asked for.
        """
        self.step += 1
        if not self.calls and not self.own:
            raise WrongLossError(
                f"{format_location(self.written) or 'compute_loss of the trainer'} made a step without asking for the new "
                "log-probabilities: it is not the loss that was asked for"
            )
        if self.step == 1 and self.calls:
            first = self.calls[0].inputs
            self.record |= {
                **describe_function(first.function),
                "arguments": {name: to_json(value) for name, value in first.arguments.items()},
                "micro_batches": len(self.calls),
            }
        if self.own:
            self.record |= describe_function(self.written)
        self._check_settings()
        if not self.unproven:
            for seen in self.calls:
                self._compare(seen, scale)
            self.record["relative_difference"] = self.worst | {"tolerance": TOLERANCE, "steps": self.step}
        self.calls = []
        return self.record

    def _check_settings(self) -> None:
        for name, wanted in self.asked_for.items():
            found = self.calls[0].inputs.arguments.get(name)
            same = math.isclose(found, wanted) if isinstance(wanted, float) and found is not None else found == wanted
            if not same:
                place = f" (in {format_location(self.written)})" if self.written is not None else ""
                raise WrongLossError(f"the loss ran with {name}={found!r}{place}, and {wanted!r} was asked for")

    def _compare(self, seen: ObservedCall, scale: float) -> None:
        call, loss, gradient = seen.inputs, seen.loss, seen.gradient
        expected, size, slope = loss_and_gradient(call, self.token_ratio)
        if not torch.isfinite(loss) and not torch.isfinite(expected):
            return  # wrong together: it is the run that is not a number, which its verdict says
        if gradient is not None and scale != 1 and not torch.isfinite(gradient).all():
            return  # overflowed in float16: the gradient scaler drops this step and tries a smaller scale
        sure = ~is_at_clip(call, self.token_ratio)
        tiny = torch.finfo(torch.float32).tiny
        apart = {"loss": ((loss.double() - expected).abs() / size.clamp(min=tiny)).item(), "gradient": math.nan}
        if not slope.abs().max() > 0:
            apart["gradient"] = 0.0 if gradient is None or not gradient[sure].any() else math.inf
        elif gradient is not None:
            difference = (gradient.double() / scale - slope)[sure].abs()
            apart["gradient"] = (difference.max() / slope.abs().max()).item() if len(difference) else 0.0
            self.record["asserted"] |= bool(len(difference))
        for name, found in apart.items():
            if not found <= TOLERANCE:  # NaN is not
                raise WrongLossError(
                    f"the {name} of step {self.step} is not that of the loss that was asked for: {found:.2g} apart "
                    f"(relative; at most {TOLERANCE:g}). "
                    f"{format_location(self.written) or self.record['function']} ran with {self.record['arguments']}"
                )
            self.worst[name] = max(self.worst[name], found)
        self.moved |= bool(((call.new - call.old_logps()).abs() * (call.mask > 0) > BOUNDARY).any())
        if self.record["clip_seen_at_step"] is None and has_clipped_gradient(call, self.token_ratio):
            self.record["clip_seen_at_step"] = self.step


def describe_function(function: Any) -> dict[str, Any]:
    """Its name, where the code that ran is, and its hash: a cache generated yesterday is not the library of today."""
    try:
        lines, first = inspect.getsourcelines(function)
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        source = {"file": inspect.getsourcefile(function), "line": first, "sha256": digest}
    except OSError:  # typed into an interpreter, or piped into it
        code = function.__code__
        source = {"file": code.co_filename, "line": code.co_firstlineno, "sha256": None}
    return {"function": f"{function.__module__}.{function.__qualname__}", "source": source}


def format_location(function: Any) -> str:
    """A function with its file and line, as in `Mine.compute_loss (train.py:12)`; "" of None."""
    if function is None:
        return ""
    function = inspect.unwrap(function)
    name, code = getattr(function, "__qualname__", repr(function)), getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def has_clipped_gradient(call: LossInputs, token_ratio: bool = False) -> bool:
    """Whether the clip took the policy term's gradient from a token that counts.

    Read off the ratios: a KL term has a gradient on both sides of the clip, and a token of weight 0 (vLLM's) on none.
    """
    if call.arguments.get("loss_type") not in CLIPPED:
        return False
    ratio, low, high = clip_bounds(call, token_ratio)
    advantages = call.advantages[:, None] if call.advantages.dim() == 1 else call.advantages
    cut = ((ratio > high + BOUNDARY) & (advantages > 0)) | ((ratio < low - BOUNDARY) & (advantages < 0))
    return bool((cut & (call.mask > 0)).any())


def is_at_clip(call: LossInputs, token_ratio: bool = False) -> Tensor:
    """(B, T) tokens whose ratio is on a bound of the clip, up to rounding."""
    ratio, low, high = clip_bounds(call, token_ratio)
    return ((ratio - low).abs() < BOUNDARY) | ((ratio - high).abs() < BOUNDARY)


def clip_bounds(call: LossInputs, token_ratio: bool) -> tuple[Tensor, float, float]:
    """(ratio (B, T) in float64, the clip's lower bound, its upper bound)."""
    if is_per_sequence(call, token_ratio):
        log_ratio = sequence_log_ratio(call)[:, None].expand_as(call.new)
    else:
        log_ratio = call.new - call.old_logps()
    return log_ratio.double().exp(), 1 - call.arguments["epsilon_low"], 1 + call.arguments["epsilon_high"]


def list_unchecked_terms(trainer: Any) -> list[str]:
    """Terms of the trainer's loss that the formula does not have; with any of them only the settings are asserted."""
    args = trainer.args
    terms = {
        "entropy_coef": args.entropy_coef != 0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
        "top_entropy_quantile": args.top_entropy_quantile < 1,
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "router_aux_loss_coef": getattr(trainer, "aux_loss_enabled", False),
    }
    return [name for name, present in terms.items() if present]


def to_json(value: Any) -> Any:
    """A JSON value: tensors of one element as numbers, what is not data by its name."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"tensor{tuple(value.shape)}"
    return value if isinstance(value, (int, float, str, bool, type(None))) else getattr(value, "__name__", str(value))


# The policy losses in float64, written from the papers named in `cogumi.config.presets`, with TRL 1.15's normalisers.


def loss_and_gradient(call: LossInputs, token_ratio: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, sum of the magnitudes of its parts, d loss / d new (B, T)), all float64."""
    new = call.new.detach().double().requires_grad_()
    with torch.enable_grad():
        parts = _token_losses(call, new, token_ratio)
        loss = parts.sum()
        (gradient,) = torch.autograd.grad(loss, new)
    return loss.detach(), parts.detach().abs().sum(), gradient


def _token_losses(call: LossInputs, new: Tensor, token_ratio: bool) -> Tensor:
    mask = (call.mask > 0).double()
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    keep = mask > 0
    old = new.detach() if call.old is None else call.old.detach().double()
    log_ratio = torch.where(keep, new - torch.where(keep, old, 0.0), 0.0)
    per_sequence = log_ratio.sum(-1, keepdim=True) / lengths
    if token_ratio:
        log_weight = per_sequence.detach() + log_ratio - log_ratio.detach()
    else:
        log_weight = per_sequence if call.arguments["importance_sampling_level"] == "sequence" else log_ratio
    advantages = call.advantages.detach().double()
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    token_loss = _policy_term(call, log_weight.exp(), log_ratio, advantages, new, mask)
    if call.weight is not None:
        token_loss = token_loss * call.weight.detach().double()
    if call.ref is not None and call.arguments["beta"] != 0:
        away = torch.where(keep, call.ref.detach().double() - new, 0.0)
        kl = away.exp() - away - 1  # Schulman's k3
        if call.arguments.get("use_bias_correction_kl"):
            kl = kl * log_weight.exp()
        token_loss = token_loss + call.arguments["beta"] * kl
    return torch.where(keep, token_loss.expand_as(mask), 0.0) * _inverse_normaliser(call, mask, lengths)


def _policy_term(
    call: LossInputs, ratio: Tensor, log_ratio: Tensor, advantages: Tensor, new: Tensor, mask: Tensor
) -> Tensor:
    settings = call.arguments
    loss_type = settings["loss_type"]
    low, high = settings["epsilon_low"], settings["epsilon_high"]
    if loss_type in CLIPPED:
        capped = ratio if settings.get("delta") is None else ratio.clamp(max=settings["delta"])
        return -torch.minimum(capped * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if loss_type == "cispo":
        return -ratio.clamp(max=high).detach() * advantages * new
    if loss_type == "sapo":
        pos, neg = (advantages.new_tensor(settings[f"sapo_temperature_{sign}"]) for sign in ("pos", "neg"))
        temperature = torch.where(advantages > 0, pos, neg)
        return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages
    if loss_type == "vespo":
        # Clamped as in the authors' code, so that the weight of a far-off sequence is a number.
        whole = (log_ratio.detach().clamp(-20, 20) * mask).sum(-1, keepdim=True).clamp(math.log(1e-8), 20)

        def by_sign(name: str) -> Tensor:
            pos, neg = (advantages.new_tensor(settings[f"vespo_{name}_{sign}"]) for sign in ("pos", "neg"))
            return torch.where(advantages >= 0, pos, neg)

        k, rate = by_sign("k"), by_sign("lambda")
        return -torch.exp(rate + k * whole - rate * whole.exp()) * advantages * new
    raise KeyError(loss_type)


def _inverse_normaliser(call: LossInputs, mask: Tensor, lengths: Tensor) -> Tensor:
    """What a token's loss is multiplied by: one over the loss's normaliser."""
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
