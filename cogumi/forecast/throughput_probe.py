"""How many steps and tokens a run is, how long it takes and what it costs.

The time comes from ten steps made here (`--probe`), or else it is estimated. The estimate divides the FLOP of a token
by REACHED of the card's peak. A rollout by transformers reads all weights once for every token that it adds to its
documents. The estimate takes the card's full bandwidth for that.
"""

import json
import logging
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogumi.config.schema import RunConfig
from cogumi.core.formatting import format_duration
from cogumi.data.selection import held_out_rows
from cogumi.forecast.data_sample import DataSample
from cogumi.forecast.memory_forecast import Target
from cogumi.forecast.preflight_report import Line
from cogumi.forecast.training_step import StepShape
from cogumi.health.flags_sft import ENOUGH_ROWS
from cogumi.methods.dpo import ReferencePass
from cogumi.telemetry.throughput import TokenFlops as Arithmetic

REACHED = 0.4  # of the card's dense bf16 peak, in hardware FLOP (PaLM, arXiv:2204.02311, appendix B: 46 to 58 % there)
PROBED = 10


@dataclass(frozen=True)
class TimeForecast:
    """steps: optimizer steps. tokens: of all of them, without padding. seconds: None where nothing says how fast.

    measured: steps that were made to know, 0 where it is an estimate. whole: the steps of the whole training, where
    `cogumi.sanity` ends it earlier; None where it does not. reference: of the seconds, those before the first step that
    dpo's reference takes (`train.precompute_ref_log_probs`).
    """

    steps: int
    tokens: int
    seconds: float | None
    measured: int = 0
    whole: int | None = None
    reference: float = 0.0


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps that were made, and the seconds they took in all; and those of dpo's reference before them."""

    steps: int
    seconds: float
    reference: float = 0.0


def steps_of(run: RunConfig, work: StepShape, found: DataSample) -> int:
    """Optimizer steps: `train.max_steps`, or those of the epochs (transformers' 3 by default; TRL's GRPO has 3 too)."""
    if said := configured_steps(run):
        return said
    epochs = float(run.train.get("num_train_epochs") or 3)
    rows = found.trained / (found.packed.examples_per_row if found.packed else 1)
    if run.cogumi.method == "gspo":
        rows *= int(run.train.get("num_generations") or 8)
    return max(1, math.ceil(epochs * rows / (work.rows * work.micro_batches)))


def steps_to_make(run: RunConfig, work: StepShape, found: DataSample) -> tuple[int, int | None]:
    """(steps that will be made, steps of the whole training where `cogumi.sanity` makes fewer)."""
    sanity = run.cogumi.sanity
    if not (found.looked_at or configured_steps(run)):
        return sanity or 0, None
    whole = steps_of(run, work, found)
    return (sanity, whole) if sanity is not None and sanity < whole else (whole, None)


def configured_steps(run: RunConfig) -> int:
    """`train.max_steps`, 0 where it is left to the epochs."""
    return max(0, int(run.train.get("max_steps") or 0))


def tokens_of_a_step(run: RunConfig, work: StepShape, found: DataSample) -> float:
    """Of the mean example; of a rollout with completions as long as they may be."""
    rows = work.rows * work.micro_batches
    if run.cogumi.method == "gspo":
        return rows * (found.mean + work.completion)
    if found.packed:
        return rows * found.packed.examples_per_row * found.mean
    return rows * found.mean * (2 if run.cogumi.method == "dpo" else 1)


def estimate_time(
    run: RunConfig, work: StepShape, found: DataSample, arithmetic: Arithmetic, target: Target, weights: int
) -> TimeForecast:
    """weights: bytes of the base as it is loaded."""
    (steps, whole), tokens = steps_to_make(run, work, found), tokens_of_a_step(run, work, found)
    if not steps:
        return TimeForecast(0, 0, None)
    card, train = target.card, run.train
    if card is None or card.peak is None:
        return TimeForecast(steps, round(steps * tokens), None, whole=whole)
    context, reference = found.mean + work.completion, 0.0
    passes = arithmetic.hardware(context, recomputed=train.get("gradient_checkpointing") is not False)
    if run.cogumi.method == "dpo" and train.get("precompute_ref_log_probs"):
        pairs = found.trained + held_out_rows(found.rows, run.data.eval_rows)
        reference = 2 * pairs * found.mean * arithmetic.forward(context) / (REACHED * card.peak)
    elif run.cogumi.method == "dpo":
        passes += arithmetic.forward(context)
    seconds = tokens * passes / (REACHED * card.peak)
    if work.rollout:
        documents = work.rows * work.micro_batches
        seconds += documents / work.rollout * work.completion * weights / card.bandwidth
    return TimeForecast(steps, round(steps * tokens), steps * seconds + reference, whole=whole, reference=reference)


def extrapolate_time(run: RunConfig, work: StepShape, found: DataSample, probe: MeasuredSteps) -> TimeForecast:
    steps, whole = steps_to_make(run, work, found)
    tokens = round(steps * tokens_of_a_step(run, work, found))
    seconds = steps * probe.seconds / probe.steps + probe.reference
    return TimeForecast(steps, tokens, seconds, probe.steps, whole, probe.reference)


def measure_steps(run: RunConfig, train: Callable[..., Any], config: Any, overrides: dict[str, Any]) -> MeasuredSteps:
    """Ten steps of the run itself in a directory that is removed; downloads and loads the model."""
    log = logging.getLogger("cogumi")
    level = log.level
    with tempfile.TemporaryDirectory(prefix="cogumi-probe-") as scratch:
        place = Path(scratch) / "run"
        ten = {
            "train__max_steps": min(PROBED, configured_steps(run) or PROBED),
            "train__save_strategy": "no",
            "train__eval_strategy": "no",
            "cogumi__merge": False,
            "cogumi__preflight": "off",
            "cogumi__max_cost": None,
            "cogumi__max_hours": None,
            "cogumi__run_dir": str(place),
            "cogumi__samples_every": 0,
            "cogumi__sanity": None,
        }
        log.setLevel(logging.WARNING)  # the directory that it would speak of will be gone
        try:
            train(config, **{**overrides, **ten})
        finally:
            log.setLevel(level)
        figures = json.loads((place / "metrics.json").read_text(encoding="utf-8"))
    return MeasuredSteps(figures["steps"], figures["step_seconds"], figures["seconds"].get(ReferencePass.STAGE, 0.0))


def describe_time(pace: TimeForecast, run: RunConfig, target: Target) -> list[Line]:
    """The line on time and cost; red where the budget ends the run before its steps do."""
    price = run.cogumi.price_per_hour
    unpriced = "; cost: not known (set cogumi.price_per_hour)" if price is None else ""
    if not pace.steps:
        said = f"how many steps are in the data is not known{unpriced}"
        return [Line("time", said, "unknown", "set train.max_steps to plan with")]
    ends = "" if pace.whole is None else f" of {pace.whole:,}, after which cogumi.sanity ends the run"
    said = f"{pace.steps:,} steps{ends}, about {pace.tokens:,} tokens"
    if pace.seconds is None:
        limits = {"cogumi.max_hours": run.cogumi.max_hours, "cogumi.max_cost": run.cogumi.max_cost}
        unjudged = "".join(f", nor what {name} allows" for name, limit in limits.items() if limit is not None)
        said += f"; how fast is not known for {target.machine.name}{unjudged}{unpriced}"
        return [Line("time", said, "unknown", "" if target.named else "--probe makes ten steps and says")]
    how = f"if it reaches {REACHED:.0%} of the card's peak, not measured"
    if pace.measured:
        how = f"by {pace.measured} step{'s' * (pace.measured != 1)} made here"
    said += f": {format_duration(pace.seconds)} of training"
    if pace.reference:
        said += f", {format_duration(pace.reference)} of them for the reference before the first step"
    if price is not None:
        cost = pace.seconds / 3600 * price
        said += f", {f'${cost:,.2f}' if cost >= 0.01 else 'less than a cent'} at ${price:g} an hour"
    said += f" ({how}){unpriced}"
    allowed = {}
    if run.cogumi.max_hours is not None:
        allowed["cogumi.max_hours"] = run.cogumi.max_hours * 3600
    if run.cogumi.max_cost is not None and price:
        allowed["cogumi.max_cost"] = run.cogumi.max_cost / price * 3600
    limit = min(allowed, key=lambda name: allowed[name], default="")
    if not limit or allowed[limit] >= pace.seconds:
        return [Line("time", said)]
    share = (allowed[limit] - pace.reference) / (pace.seconds - pace.reference)
    steps = max(1, int(share * pace.steps))
    said += f"; {limit} ends it at about step {steps:,}"
    if pace.whole is not None and steps < ENOUGH_ROWS:  # a check of so few steps is refused
        return [Line("time", said, "red", f"raise {limit}")]
    key = "train.max_steps" if pace.whole is None else "cogumi.sanity"
    return [Line("time", said, "red", f"set {key}: {steps}, or raise {limit}", {key: steps})]
