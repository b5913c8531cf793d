"""The logits of a merged model against the live, unmerged adapter, with a tolerance that is predicted, not chosen.

Rounding moves each element of a touched weight by at most half an ulp. Moving the merged weights by that much at random
says how far the logits of a right merge may be from the live adapter's; LOGIT_GATE times that passes. Measured over
predicted, on tiny random models in bfloat16 (tests/test_merge_logits.py prints them): LoRA 0.88, rsLoRA 0.89, DoRA
1.16, lora_bias 0.80, bias=all 0.91, modules_to_save 1.01, trained tokens 0.92 (tied 1.03), embedding 0.99, head 1.00,
experts of Qwen3-MoE 0.98, Mixtral 0.99, gpt-oss 0.91; of a Llama of 201 M 0.97.

The check sees a wrong share x of the update when x * base_distance > bound. A faint update, of the size of the
rounding, can be wrong by much before its logits tell; the element bound (verify.py) is what excludes that.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cogumi.core.errors import UsageError
from cogumi.merge.arithmetic import ieee_matmul
from cogumi.merge.element_check import MANTISSA, half_ulp

# How many times the predicted rounding noise the logits may differ.
LOGIT_GATE = 3.0
# How much of what the adapter does, KL(live || base), may be lost: KL(live || merged) at most this share of it.
KL_SHARE = 0.01
BLOCK_ELEMENTS = 1 << 20  # float64 temporaries of 8 MB each while weights are moved
POSITIONS_AT_ONCE = 64  # float64 statistics of [64, vocabulary] logits: 80 MB a copy where the vocabulary is 150 000


@dataclass(frozen=True)
class LogitCheck:
    """How far the merged model's logits are from the live adapter's, and how far rounding may take them.

    In logits, over every position and vocabulary entry: `measured` is the rms difference and `measured_max` the
    largest; `predicted` is the rms that rounding the touched weights once should cause; `bound` is what passes;
    `base_distance` is the rms difference between merged and base.

    In nats, means over positions: `kl` is KL(live || merged), `predicted_kl` what rounding should cause, `base_kl`
    KL(live || base), which is what the adapter does, and `kl_bound` what passes: 1 % of `base_kl`, or LOGIT_GATE**2
    times `predicted_kl` (KL goes with the square of a small difference) where the adapter does so little that rounding
    to the output dtype loses more than that 1 %. Then the merge is as good as it can be and `kl > 0.01 * base_kl` says
    that it is not good: choose a wider dtype.

    `rerouted`: of a mixture of experts, the share of routing decisions in which merged, left alone, chooses another set
    of experts than live does; 0 for other models. The figures above are taken with live's choices, see check_logits.
    """

    measured: float
    measured_max: float
    predicted: float
    bound: float
    base_distance: float
    kl: float
    predicted_kl: float
    kl_bound: float
    base_kl: float
    rerouted: float

    @property
    def passed(self) -> bool:
        return self.measured <= self.bound and self.kl <= self.kl_bound

    def __str__(self) -> str:
        verdict = "logits agree" if self.passed else "LOGITS DIFFER"
        routes = f"; {self.rerouted:.2%} of routing decisions differ" if self.rerouted else ""
        return (
            f"{verdict}: merged is {self.measured:.3g} rms (max {self.measured_max:.3g}) from the live adapter, "
            f"rounding explains {self.predicted:.3g}, allowed {self.bound:.3g}; merged is {self.base_distance:.3g} from the "
            f"base; KL {self.kl:.3g} nats, allowed {self.kl_bound:.3g}, adapter against base {self.base_kl:.3g}{routes}"
        )


@dataclass(frozen=True)
class Difference:
    """Between two sets of logits: root mean square, largest, and mean KL(one || other) over positions, in nats."""

    rms: float
    largest: float
    kl: float


@dataclass(frozen=True)
class Live:
    """What is kept of the live model once it is out of memory.

    logits, base_logits: float32 [batch, sequence, vocabulary]. choices: the experts each router chose, one int64 tensor
    per decision in the order they were made. adapted: merged names of the parameters that get a low-rank update. rows:
    for every parameter of the model by its merged name, row_hashes of what live has there apart from such updates.
    """

    logits: torch.Tensor
    base_logits: torch.Tensor
    choices: list[torch.Tensor]
    adapted: set[str]
    rows: dict[str, torch.Tensor]


class Routing(TorchFunctionMode):
    """While active, records the indices of every topk, which is how routers choose experts, and can impose others.

    given: the indices of an earlier forward of the same model on the same tokens; they are then what topk returns, with
    the values that its own input has there, so that a weight that differs still shows.
    """

    def __init__(self, given: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.given = given
        self.own: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        place = len(self.own)
        self.own.append(result.indices.cpu())
        if self.given is None:
            return result
        if place >= len(self.given) or self.given[place].shape != result.indices.shape:
            raise UsageError(
                "merged model routes to experts where live does not", fix="is it the merge of the same base?"
            )
        values = args[0] if args else kwargs["input"]
        indices = self.given[place].to(values.device)
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return torch.return_types.topk((values.gather(dim, indices), indices))


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

    input_ids: int64 [batch, sequence]. dtype: what the merged weights were rounded to; by default the dtype that each
    parameter of the merged model is loaded in, so pass it when a bfloat16 checkpoint was loaded as float32.

    Everything runs in float32 (weights upcast, which is exact), so that what remains is the one rounding of the touched
    weights. Its size is predicted rather than chosen: those weights are moved by uniform noise of +-half an ulp,
    `draws` times, and the rms change of the logits is the prediction; the bound is LOGIT_GATE times that. Where the
    dtype is float32 itself, the order of float32 sums matters as much as the rounding: the noise is then added in
    float64, where half a float32 ulp is representable, and the difference between the float32 and the float64 forward
    (sqrt(2) of it: live and merged each have their own) is added in quadrature.

    In a mixture of experts a rounding can tip a near-tie between two experts, which moves the logits by much more than
    the rounding itself, in few and unpredictable places. So merged and its noisy copies run with the experts that live
    chose (weighted by their own router), and how often they would have chosen others is reported apart.

    Base logits are live's with the adapter disabled. PEFT cannot give back the biases that bias="all" or "lora_only"
    trained, so there `base_kl` and `base_distance` leave them out.

    Works on copies: needs memory for one float32 (float64) copy of a model at a time and leaves the given ones alone.
    Raises UsageError when live is not a PEFT model with its adapter applied and unmerged, or merged is another model.
    """
    refuse_unless_applied(live)
    with ieee_matmul(), torch.no_grad():
        working = precise_copy(live, torch.float32)
        with working.disable_adapter():
            base_logits = forward(working, input_ids)
        seen = observe(working, input_ids, base_logits)
        del working
        return compare(
            seen,
            lambda kind: precise_copy(merged, kind),
            lambda name: dtype or merged.get_parameter(name).dtype,
            input_ids,
            draws,
            seed,
        )


def refuse_unless_applied(live: Any) -> None:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if not isinstance(live, PeftModel):
        raise UsageError(f"live should be a PEFT model with its adapter applied, not a {type(live).__name__}")
    for name, module in live.get_base_model().named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise UsageError(f"live model: {name} has its adapter merged", fix="pass it unmerged")
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and module.disable_adapters:
            raise UsageError(f"live model: {name} has its adapter disabled", fix="pass it applied")


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
    """Logits [batch, sequence, vocabulary] on the CPU, in the model's dtype."""
    return model(input_ids=input_ids.to(model.device), use_cache=False).logits.cpu()


def observe(live: Any, input_ids: torch.Tensor, base_logits: torch.Tensor) -> Live:
    """Run the live model (float32, ours) and note its logits, its choices of experts, and its weights."""
    with Routing() as routing:
        logits = forward(live, input_ids)
    adapted, rows = set(), {}
    model = live.get_base_model()
    for name, module in model.named_modules():
        adapted |= set(adapted_parameters(name, module))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        merged_name = name_without_adapter(name, live.active_adapters)
        if merged_name is not None:
            rows[merged_name] = row_hashes(parameter)
    return Live(logits, base_logits, routing.own, adapted, rows)


def adapted_parameters(name: str, module: Any) -> Iterator[str]:
    """Merged names of the parameters that the module called `name` in the live model changes by a low-rank update."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    if not isinstance(module, LoraLayer):
        return
    owner = name.replace(".base_layer", "")
    if isinstance(module, ParamWrapper):  # LoRA on a bare parameter: the experts of a mixture
        yield f"{owner}.{module.parameter_name}"
    else:
        yield f"{owner}.weight"
        if any(module.lora_bias.values()):
            yield f"{owner}.bias"


def name_without_adapter(name: str, active: list[str]) -> str | None:
    """The merged model's name of a parameter of the live model; None for what only the live model has."""
    parts = name.split(".")
    if any(part.startswith("lora_") or part in ("original_module", "trainable_tokens_delta") for part in parts):
        return None
    if "modules_to_save" in parts:
        place = parts.index("modules_to_save")
        if parts[place + 1] not in active:
            return None
        del parts[place : place + 2]
    return ".".join(part for part in parts if part not in ("base_layer", "token_adapter"))


def as_rows(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A view [rows, columns] of a parameter of any shape: experts' matrices one below the other, a vector as a column."""
    if not parameter.is_contiguous():
        parameter.data = parameter.data.contiguous()
    return parameter.data.view(-1, parameter.shape[-1] if parameter.dim() > 1 else 1)


def blocks(matrix: torch.Tensor) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, matrix.shape[1]))
    for first in range(0, len(matrix), step):
        yield slice(first, first + step)


def row_hashes(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A 64-bit hash of the bits of each row of a float32 parameter (see as_rows), int64 [rows].

    The live model's weights are gone when the merged model's arrive; 8 bytes a row still tell which rows differ.
    """
    matrix = as_rows(parameter)
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (matrix.shape[1],), generator=generator).mul_(2).add_(1).to(matrix.device)
    bits = matrix.view(torch.int32)
    return torch.cat([(bits[block].long() * odd).sum(dim=1) for block in blocks(matrix)]).cpu()


def touched_rows(live: Live, merged: Any) -> dict[str, torch.Tensor]:
    """Merged name -> bool [rows] of the rows that were rounded: wholly where there is a low-rank update (which may be
    too small to show), else where merged differs from live, as in trained tokens, biases and modules_to_save."""
    names = {name for name, _ in merged.named_parameters(remove_duplicate=False)}
    for name in sorted(live.adapted - names):
        raise UsageError(
            f"merged model has no {name}, which live's adapter changes", fix="is it the merge of the same base?"
        )
    touched = {}
    for name, parameter in merged.named_parameters():
        rows = row_hashes(parameter)
        before = live.rows.get(name)
        if before is not None and before.shape != rows.shape:
            raise UsageError(
                f"merged model has {name} in another shape than live", fix="is it the merge of the same base?"
            )
        changed = torch.ones_like(rows, dtype=torch.bool) if before is None or name in live.adapted else rows != before
        if bool(changed.any()):
            touched[name] = changed
    return touched


def compare(
    live: Live,
    load_merged: Callable[[torch.dtype], Any],
    dtype_of: Callable[[str], torch.dtype],
    input_ids: torch.Tensor,
    draws: int,
    seed: int,
) -> LogitCheck:
    """dtype_of: what a parameter of the merged model was rounded to, by its name."""
    model = load_merged(torch.float32)
    touched = touched_rows(live, model)
    dtypes = {name: dtype_of(name) for name in touched}
    for name, dtype in dtypes.items():
        if dtype not in MANTISSA:
            raise UsageError(
                f"merged model holds {name} in {dtype}", fix=f"the check knows {[str(kind) for kind in MANTISSA]}"
            )
    with Routing(live.choices) as routing:
        logits = forward(model, input_ids)
    found = difference(live.logits, logits)
    from_base = difference(logits, live.base_logits)
    base_kl = difference(live.logits, live.base_logits).kl
    centre, noise, noise_kl = logits, 0.0, 0.0
    if torch.float32 in dtypes.values():
        del model
        model = load_merged(torch.float64)
        with Routing(live.choices):
            centre = forward(model, input_ids)
        arithmetic = difference(logits, centre)
        noise, noise_kl = math.sqrt(2) * arithmetic.rms, 2 * arithmetic.kl
    effects = rounding_effects(model, touched, dtypes, live.choices, input_ids, centre, draws, seed)
    predicted = math.hypot(math.sqrt(sum(effect.rms**2 for effect in effects) / draws), noise)
    predicted_kl = sum(effect.kl for effect in effects) / draws + noise_kl
    return LogitCheck(
        measured=found.rms,
        measured_max=found.largest,
        predicted=predicted,
        bound=LOGIT_GATE * predicted,
        base_distance=from_base.rms,
        kl=found.kl,
        predicted_kl=predicted_kl,
        kl_bound=max(KL_SHARE * base_kl, LOGIT_GATE**2 * predicted_kl),
        base_kl=base_kl,
        rerouted=share_rerouted(live.choices, routing.own),
    )


def rounding_effects(
    model: Any,
    touched: dict[str, torch.Tensor],
    dtypes: dict[str, torch.dtype],
    choices: list[torch.Tensor],
    input_ids: torch.Tensor,
    centre: torch.Tensor,
    draws: int,
    seed: int,
) -> list[Difference]:
    """How the logits move when the touched weights do, by uniform +-half an ulp. `model` is ours and is left moved.

    Each draw goes on from where the last one left the weights, and is compared with the logits there: a few half ulps
    from the start the effect of the next is the same, and no copy of the weights is needed to go back.
    """
    effects = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        for name, rows in touched.items():
            matrix = as_rows(model.get_parameter(name))
            for block in blocks(matrix):
                exact = matrix[block].double()
                unit = torch.rand(exact.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
                unit *= rows[block][:, None]
                matrix[block] = exact + unit.to(exact.device) * half_ulp(exact, dtypes[name])
        with Routing(choices):
            moved = forward(model, input_ids)
        effects.append(difference(centre, moved))
        centre = moved
    return effects


def difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    """Between logits [batch, sequence, vocabulary], in float64; over the first entries where one vocabulary is longer."""
    vocabulary = min(one.shape[-1], other.shape[-1])
    squares, largest, divergence, positions = 0.0, [], 0.0, one.shape[:-1].numel()
    pairs = zip(one.flatten(0, -2).split(POSITIONS_AT_ONCE), other.flatten(0, -2).split(POSITIONS_AT_ONCE), strict=True)
    for ours, theirs in pairs:
        p, q = ours[:, :vocabulary].double(), theirs[:, :vocabulary].double()
        squares += (p - q).square().sum().item()
        largest.append((p - q).abs().max())
        p, q = p.log_softmax(dim=-1), q.log_softmax(dim=-1)
        divergence += (p.exp() * (p - q)).sum().item()
    return Difference(
        math.sqrt(squares / (positions * vocabulary)),
        torch.stack(largest).max().item(),
        max(divergence / positions, 0.0) if math.isfinite(divergence) else divergence,
    )


def share_rerouted(live: list[torch.Tensor], merged: list[torch.Tensor]) -> float:
    """Of all routing decisions, those whose set of experts differs."""
    if not live:
        return 0.0
    differs = [
        (one.sort(dim=-1).values != other.sort(dim=-1).values).any(dim=-1).flatten()
        for one, other in zip(live, merged, strict=True)
    ]
    return torch.cat(differs).double().mean().item()
