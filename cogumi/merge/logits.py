"""The logits of a merged model against the live, unmerged adapter, with a tolerance that is predicted, not chosen."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch

from cogumi.errors import UsageError
from cogumi.merge.stream import ieee_matmul
from cogumi.merge.verify import MANTISSA, half_ulp

# How many times the predicted rounding noise the logits may differ. Measured on tiny models the ratio is 0.9 to 1.8.
LOGIT_GATE = 3.0


@dataclass(frozen=True)
class LogitCheck:
    """How far the merged model's logits are from the live adapter's, and how far rounding may take them.

    All figures are in logits, over every position and vocabulary entry: `measured` is the rms difference and
    `measured_max` the largest; `predicted` is the rms that rounding the touched weights once should cause; `bound` is
    what passes; `base_distance` is the rms difference between merged and base.
    """

    measured: float
    measured_max: float
    predicted: float
    bound: float
    base_distance: float

    @property
    def passed(self) -> bool:
        return self.measured <= self.bound

    def __str__(self) -> str:
        verdict = "logits agree" if self.passed else "LOGITS DIFFER"
        return (
            f"{verdict}: merged is {self.measured:.3g} rms (max {self.measured_max:.3g}) from the live adapter, "
            f"rounding explains {self.predicted:.3g}, allowed {self.bound:.3g}; merged is {self.base_distance:.3g} from the base"
        )


def check_logits(
    live: Any,
    merged: Any,
    input_ids: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    draws: int = 4,
    seed: int = 0,
) -> LogitCheck:
    """Compare the reloaded merged model with the live, unmerged PEFT model on the same tokens.

    input_ids: int64 [batch, sequence]. dtype: what the merged weights were rounded to; by default the dtype that the
    merged model is loaded in, so pass it when a bfloat16 checkpoint was loaded as float32.

    Everything runs in float32 (weights upcast, which is exact), so that what remains is the one rounding of the touched
    weights. Its size is predicted rather than chosen: those weights are moved by uniform noise of +-half an ulp,
    `draws` times, and the rms change of the logits is the prediction; the bound is LOGIT_GATE times that. Where the
    dtype is float32 itself, the order of float32 sums matters as much as the rounding: the noise is then added in
    float64, where half a float32 ulp is representable, and the difference between the float32 and the float64 forward
    (sqrt(2) of it: live and merged each have their own) is added in quadrature.

    Works on copies: needs memory for one float32 (float64) copy of a model at a time and leaves the given ones alone.
    Raises UsageError when live is not a PEFT LoRA model with its adapter applied and unmerged.
    """
    names = touched_weights(live, merged)
    dtype = dtype or merged.get_parameter(names[0]).dtype
    if dtype not in MANTISSA:
        raise UsageError(f"merged model holds {dtype} weights; the check knows {[str(kind) for kind in MANTISSA]}")
    with ieee_matmul(), torch.inference_mode():
        working = precise_copy(live, torch.float32)
        live_logits = forward(working, input_ids)
        with working.disable_adapter():
            base_logits = forward(working, input_ids)
        working = precise_copy(merged, torch.float32)
        merged_logits = forward(working, input_ids)
        centre, noise = merged_logits, 0.0
        if dtype == torch.float32:
            working = precise_copy(merged, torch.float64)
            centre = forward(working, input_ids)
            noise = math.sqrt(2) * rms(merged_logits - centre)
        predicted = math.hypot(rounding_effect(working, names, input_ids, centre, dtype, draws, seed), noise)
        del working
    difference = live_logits - merged_logits
    return LogitCheck(
        rms(difference),
        difference.abs().max().item(),
        predicted,
        LOGIT_GATE * predicted,
        rms(merged_logits - base_logits),
    )


def touched_weights(live: Any, merged: Any) -> list[str]:
    """Names, in the merged model, of the weights that the live model's adapter changes."""
    from peft import PeftModel
    from peft.tuners.lora.layer import LoraLayer

    if not isinstance(live, PeftModel):
        raise UsageError(f"live should be a PEFT model with its adapter applied, not a {type(live).__name__}")
    names = []
    for name, module in live.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            if module.merged or module.disable_adapters:
                raise UsageError(f"live model: {name} has its adapter merged or disabled; pass it applied, unmerged")
            names.append(f"{name}.weight")
    parameters = dict(merged.named_parameters())
    missing = [name for name in names if name not in parameters]
    if missing or not names:
        raise UsageError(f"merged model has no {missing[0] if missing else 'weight that live touches'}; wrong model?")
    return names


def precise_copy(model: Any, dtype: torch.dtype) -> Any:
    """A copy in another dtype that runs its own weights.

    TRL and accelerate replace `forward` on the instance by a closure over the original model; a copy would inherit that
    closure and run the original's weights, in the original's dtype. The class's own forward is what is wanted.
    """
    copied = copy.deepcopy(model)
    for module in copied.modules():
        vars(module).pop("forward", None)
    return copied.to(dtype).eval()


def forward(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits [batch, sequence, vocabulary] as float64."""
    return model(input_ids=input_ids.to(model.device), use_cache=False).logits.double()


def rounding_effect(
    model: Any,
    names: list[str],
    input_ids: torch.Tensor,
    centre: torch.Tensor,
    dtype: torch.dtype,
    draws: int,
    seed: int,
) -> float:
    """The rms change of the logits when the named weights move by uniform +-half an ulp of `dtype`. `model` is ours."""
    originals = {name: model.get_parameter(name).detach().clone() for name in names}
    squares = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        for name, weight in originals.items():
            unit = torch.rand(weight.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
            exact = weight.double()
            moved = exact + unit.to(weight.device) * half_ulp(exact, dtype)
            model.get_parameter(name).copy_(moved)
        squares.append(rms(forward(model, input_ids) - centre) ** 2)
    return math.sqrt(sum(squares) / len(squares))


def rms(values: torch.Tensor) -> float:
    return values.double().square().mean().sqrt().item()
