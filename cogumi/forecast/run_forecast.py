"""The preflight of a run: stack, data, memory, time and money, disk."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from cogumi.config.schema import RunConfig, load_config
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.forecast import data_sample, disk_lines, stack_line, throughput_probe, vram
from cogumi.forecast.meta_trainer import planned_trainer
from cogumi.forecast.preflight_report import Line, PreflightReport
from cogumi.forecast.target import Target, dtype_of, target_of
from cogumi.forecast.training_step import Work
from cogumi.methods import gspo
from cogumi.methods.auto_settings import MOMENTS, Choice, Load, choose, decided, load_of
from cogumi.methods.building import refuse_blind_check, refuse_impossible, tokenizer_of
from cogumi.models import warm_start
from cogumi.models.adapters import refuse_unmatched
from cogumi.models.loading import refuse_quantized_already, resolve_model
from cogumi.rl.patching import patch
from cogumi.telemetry.throughput import work_of

# What PEFT, TRL and transformers raise for a setting they refuse, or a model that cannot be built of shapes alone.
REFUSALS = (ValueError, ImportError, RuntimeError)


def foresee(
    config: str | os.PathLike[str] | Mapping[str, Any],
    card: str | None,
    train: Callable[..., Any] | None,
    overrides: dict[str, Any],
    ahead: "Callable[[Asked], Ahead]",
) -> PreflightReport:
    """`preflight`, with `look_ahead` in this process or apart. train: `cogumi.train`, where ten steps are to be made."""
    run, target = load_config(config, **overrides), target_of(card)
    refuse_impossible(run.cogumi)
    refuse_blind_check(run)
    if train is not None and card is not None:
        raise UsageError("card and probe: ten steps made here say nothing of another card", fix="use one of the two")
    if run.model.adapter is not None:
        run.lora = warm_start.lora_of(run.model.adapter, run.lora)
    base = resolve_model(run.model.name, run.model.revision)
    of_base = AutoConfig.from_pretrained(base, revision=run.model.revision)
    if run.cogumi.tuning == "lora":
        refuse_unmatched(run.lora, of_base)
    if run.model.quantization_config is not None:
        refuse_quantized_already(base, of_base)
    found = (
        data_sample.assumed(run)
        if data_sample.has_no_tokenizer(base)
        else data_sample.sample(run, tokenizer_of(run, base), of_base)
    )
    tried = throughput_probe.probed(run, train, config, overrides) if train is not None else None
    first = [] if card is not None else [stack_line.line()]
    lines, figures = ahead(Asked(run, base, of_base, found, target, tried))
    return PreflightReport(
        str(target), (*first, data_sample.line_of(found, run), *lines), {"data": found.as_dict(), **figures}
    )


Ahead = tuple[list[Line], dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    """What is to be looked ahead to. base, of_base: a directory or hub id, and its config. probe: what was measured."""

    run: RunConfig
    base: str
    of_base: Any
    found: data_sample.Sample
    target: Target
    probe: throughput_probe.Probe | None = None


def look_ahead(asked: Asked) -> Ahead:
    """The lines on memory, time and disk, and the figures behind them.

    Builds trainers in this process, whose settings are the process's; `cogumi.forecast.preflight_worker` makes one for it.
    """
    patch(graph_break="off")  # without it TRL takes no gspo, and its losses need a GPU
    of_base, found, target = asked.of_base, asked.found, asked.target
    lines: list[Line] = []
    figures: dict[str, Any] = {}
    run, load, chosen = on_the_target(asked.run, asked.base, target)
    try:
        chosen_run = run
        run, work = work_on(run, of_base, found, target, target.free - load.weights - MOMENTS * load.trained)
        step = vram.step_on(run, of_base, work, target)
    except UsageError as error:
        lines.append(Line("memory", str(error), "red"))
    except REFUSALS as error:
        lines.append(Line("memory", f"the step cannot be run without weights: {one_line(error)}", "unknown"))
    else:
        lines.append(vram.line_of(step, chosen_run, chosen))  # its keys are those of the YAML
        figures["memory"] = step.as_dict()
        if asked.probe is not None:
            how_long = throughput_probe.continued(run, work, found, asked.probe)
        else:
            how_long = estimate(run, of_base, found, work, target)
        lines += throughput_probe.lines_of(how_long, run, target)
        figures["time"] = vars(how_long)
    try:
        return lines + disk_lines.lines_of(disk_lines.outlook_of(asked.run)), figures
    except (ValueError, ImportError) as error:  # of a setting that the libraries look at when it is first used
        raise UsageError(one_line(error), key="train") from error


def on_the_target(run: RunConfig, base: str, target: Target) -> tuple[RunConfig, Load, list[Choice]]:
    """The run with what it leaves open decided as it would be there; what it asks; and what was decided."""
    there = run.model_copy(deep=True)
    if there.model.dtype == "auto":
        there.model.dtype = "bfloat16" if target.machine.bf16 else "float32"
    load = load_of(there, base)
    choices = choose(there, target.machine, load)
    return decided(run, choices), load, choices


def work_on(
    run: RunConfig, config: Any, found: data_sample.Sample, target: Target, free: int
) -> tuple[RunConfig, Work]:
    """What goes through at once, GSPO's batch planned as the run plans it. free: bytes left for activations."""
    longest = found.longest
    if run.cogumi.method == "gspo":
        if gspo.is_planned(run):
            batch = gspo.batch_for(run, config, dtype_of(target, run.model.dtype).itemsize, longest, free)
            run = gspo.with_batch(run, batch.arguments)
        return run, vram.planned_work(run, longest)
    limit = run.train.get("max_length")
    if found.packed and limit:
        return run, vram.planned_work(run, int(limit), found.packed.at_once)
    # The sample may not hold the longest example of all.
    return run, vram.planned_work(run, int(limit or longest))


def estimate(
    run: RunConfig, config: Any, found: data_sample.Sample, work: Work, target: Target
) -> throughput_probe.Pace:
    dtype = dtype_of(target, run.model.dtype)
    model = planned_trainer(run, config, dtype, run.model.attn_implementation).model
    weights = sum(p.numel() for p in model.parameters() if not p.requires_grad) * dtype.itemsize
    return throughput_probe.estimated(run, work, found, work_of(model), target, weights)
