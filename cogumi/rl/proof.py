"""Which loss ran: the first optimizer step's loss and gradient against the formula, before the weights are moved.

A loss that is bypassed, scaled twice or called with somebody else's epsilon trains on without a word. So the loss that
was asked for is computed once more, in float64, from the log-probabilities that the loss itself was given, and both the
value it returned and the gradient that reached those log-probabilities must agree.
"""

import hashlib
import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cogumi.rl.reference import loss_and_gradient
from cogumi.rl.seam import LossCall, sequence_log_ratio

TOLERANCE = 1e-4  # relative; the losses are computed in float32 from sums of up to thousands of terms
BOUNDARY = 1e-6  # a ratio this close to the clip may fall on either side of it in another precision


class WrongLossError(RuntimeError):
    """The loss that ran is not the loss that was asked for."""


class LossProof:
    """Compares the micro-batches of the first optimizer step, and describes what it found."""

    def __init__(self, asked_for: dict[str, Any], token_ratio: bool, unproven: list[str]) -> None:
        """`asked_for`: the settings the loss must have been called with; `unproven`: terms the formula leaves out."""
        self.asked_for, self.token_ratio, self.unproven = asked_for, token_ratio, unproven
        self.calls: list[LossCall] = []
        self.losses: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}

    def add(self, call: LossCall, loss: Tensor) -> None:
        """One micro-batch: what went in, what came out; its gradient is noted when it passes."""
        index = len(self.calls)

        def note(gradient: Tensor) -> None:
            self.gradients[index] = gradient.detach()

        if call.new.requires_grad:
            call.new.register_hook(note)
        self.calls.append(replace(call, new=call.new.detach(), entropy=None))  # no graph: backward frees it
        self.losses.append(loss.detach())

    def check(self, scale: float = 1.0) -> dict[str, Any]:
        """The record of the comparison, for `loss.json`; `scale` is the gradient scaler's, 1 without one.

        Raises WrongLossError when a setting, the value or the gradient is not what was asked for.
        """
        if not self.calls:
            raise WrongLossError(
                "the trainer's compute_loss made a step without asking for the new log-probabilities: it is not the loss "
                "that was asked for"
            )
        function = self.calls[0].function
        record: dict[str, Any] = {
            "function": f"{function.__module__}.{function.__qualname__}",
            "source": source_of(function),
            "arguments": {name: plain(value) for name, value in self.calls[0].arguments.items()},
            "micro_batches": len(self.calls),
            "unproven": self.unproven,
            **first_ratios(self.calls),
        }
        self._check_settings()
        if not self.unproven:
            differences = [self._differences(i, scale) for i in range(len(self.calls))]
            record["relative_difference"] = {"tolerance": TOLERANCE}
            for name in ("loss", "gradient"):
                found = [difference[name] for difference in differences]
                worst = math.nan if any(map(math.isnan, found)) else max(found)
                if not worst <= TOLERANCE:
                    raise WrongLossError(
                        f"the {name} of the first step is not that of the loss that was asked for: {worst:.2g} apart "
                        f"(relative; at most {TOLERANCE:g}). {record['function']} ran with {record['arguments']}"
                    )
                record["relative_difference"][name] = worst
        record["asserted"] = not self.unproven
        return record

    def _check_settings(self) -> None:
        for name, wanted in self.asked_for.items():
            found = self.calls[0].arguments.get(name)
            same = math.isclose(found, wanted) if isinstance(wanted, float) and found is not None else found == wanted
            if not same:
                raise WrongLossError(f"the loss ran with {name}={found!r}, and {wanted!r} was asked for")

    def _differences(self, index: int, scale: float) -> dict[str, float]:
        call, loss, gradient = self.calls[index], self.losses[index], self.gradients.get(index)
        expected, size, slope = loss_and_gradient(call, self.token_ratio)
        tiny = torch.finfo(torch.float32).tiny
        apart = {"loss": ((loss.double() - expected).abs() / size.clamp(min=tiny)).item(), "gradient": math.nan}
        if gradient is not None:
            difference = (gradient.double() / scale - slope)[~at_the_clip(call)].abs()
            apart["gradient"] = (
                (difference.max() / slope.abs().max().clamp(min=tiny)).item() if len(difference) else 0.0
            )
        return apart


def at_the_clip(call: LossCall) -> Tensor:
    """(B,) rows whose sequence ratio is on a bound of the clip, up to rounding."""
    ratio = sequence_log_ratio(call).double().exp()
    low, high = 1 - call.arguments["epsilon_low"], 1 + call.arguments["epsilon_high"]
    return ((ratio - low).abs() < BOUNDARY) | ((ratio - high).abs() < BOUNDARY)


def first_ratios(calls: list[LossCall]) -> dict[str, float]:
    """How far the ratios of the first step are from 1: nothing has been learned yet, so it is numerics.

    `ratio_max_deviation` is max |R - 1| over the step's sequences, `ratio_outside_clip` the share beyond the clip.
    """
    nonempty = [call.mask.sum(-1) > 0 for call in calls]
    pairs = zip(calls, nonempty, strict=True)
    deviation = torch.cat([sequence_log_ratio(call).double().exp()[rows] - 1 for call, rows in pairs])
    low, high = calls[0].arguments["epsilon_low"], calls[0].arguments["epsilon_high"]
    if not deviation.numel():
        return {"ratio_max_deviation": math.nan, "ratio_outside_clip": math.nan}
    outside = (deviation < -low) | (deviation > high)
    return {
        "ratio_max_deviation": deviation.abs().amax().item(),
        "ratio_outside_clip": outside.double().mean().item(),
    }


def unproven_terms(trainer: Any) -> list[str]:
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


def source_of(function: Any) -> dict[str, Any]:
    """Where the code that ran is, and its hash: a cache generated yesterday is not the library installed today."""
    lines, first = inspect.getsourcelines(function)
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return {"file": inspect.getsourcefile(function), "line": first, "sha256": digest}


def plain(value: Any) -> Any:
    """A JSON value: tensors of one element as numbers, what is not data by its name."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"tensor{tuple(value.shape)}"
    return value if isinstance(value, (int, float, str, bool, type(None))) else getattr(value, "__name__", str(value))
