"""The preflight of a run: stack, data, memory, time and money, disk; and the config that fits."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from cogumi.config.schema import RunConfig, load_config
from cogumi.config.yaml_text import edit_yaml, parse_sections
from cogumi.core import worker
from cogumi.core.errors import UsageError
from cogumi.core.formatting import one_line
from cogumi.core.notices import show_seconds
from cogumi.core.run_directory import write_atomic
from cogumi.forecast import data_sample, disk_lines, memory_forecast, throughput_probe
from cogumi.forecast.memory_forecast import Target, find_target, weights_dtype
from cogumi.forecast.preflight_report import Line, PreflightReport
from cogumi.forecast.training_step import StepShape, planned_trainer
from cogumi.methods import gspo
from cogumi.methods.auto_settings import MOMENTS, Choice, Load, choose, load_of, with_values
from cogumi.methods.building import load_run_tokenizer, refuse_blind_check, refuse_impossible
from cogumi.models import warm_start
from cogumi.models.adapters import refuse_unmatched
from cogumi.models.loading import refuse_quantized_already, resolve_model
from cogumi.rl.patching import patch
from cogumi.stack.installed import check_lane, distributions
from cogumi.telemetry.throughput import flops_of

# What PEFT, TRL and transformers raise for a setting they refuse, or a model that cannot be built of shapes alone.
REFUSALS = (ValueError, ImportError, RuntimeError)
LIMIT = 600.0  # seconds; a model of which every layer is run takes minutes
ROUNDS = 6  # of changing a config that does not fit

Config = str | os.PathLike[str] | Mapping[str, Any]
ForecastLines = tuple[list[Line], dict[str, Any]]
"""The lines on memory, time and disk, and the figures behind them."""


@dataclass(frozen=True)
class ForecastRequest:
    """A forecast to make. base, of_base: a directory or hub id, and its config. probe: what was measured."""

    run: RunConfig
    base: str
    of_base: Any
    found: data_sample.DataSample
    target: Target
    probe: throughput_probe.MeasuredSteps | None = None


@show_seconds("preflight: data, memory, time and disk of the run are being worked out")
def preflight(
    config: Config, card: str | None = None, train: Callable[..., Any] | None = None, **overrides: Any
) -> PreflightReport:
    """`cogumi.preflight`, where torch may be imported (`cogumi.runs`)."""
    return forecast_run(config, card, train, overrides, forecast_in_worker)


def forecast_run(
    config: Config,
    card: str | None,
    train: Callable[..., Any] | None,
    overrides: dict[str, Any],
    ahead: Callable[[ForecastRequest], ForecastLines],
) -> PreflightReport:
    """`preflight`, with `forecast_lines` in this process or apart. train: `cogumi.train`, where ten steps are to be made."""
    run, target = load_config(config, **overrides), find_target(card)
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
    if data_sample.has_no_tokenizer(base):
        found = data_sample.assume_longest(run)
    else:
        found = data_sample.sample_data(run, load_run_tokenizer(run, base), of_base)
    tried = throughput_probe.measure_steps(run, train, config, overrides) if train is not None else None
    first = [] if card is not None else [describe_stack()]
    lines, figures = ahead(ForecastRequest(run, base, of_base, found, target, tried))
    return PreflightReport(
        str(target), (*first, data_sample.describe_data(found, run), *lines), {"data": found.as_dict(), **figures}
    )


def describe_stack() -> Line:
    """Is what is installed what was tried together? The doctor's finding on the lane."""
    (found,) = check_lane(distributions())
    figure = f"{found.figure}; {found.cause}" if found.cause else found.figure
    return Line("stack", figure, "green" if found.state == "ok" else "yellow", found.fix)


def forecast_in_worker(asked: ForecastRequest) -> ForecastLines:
    """`forecast_lines` in another process, which sees no GPU and leaves nothing behind in this one.

    Libraries cache tensors, which would be fake ones, and accelerate keeps settings for the whole process. Beside a GPU
    the trainer would be unsloth's, whose kernels take no fake tensors. A later training in this process must meet none
    of it. Raises the UsageError of `forecast_lines`, and RuntimeError for a process that broke or took too long.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    found: ForecastLines = worker.call("the forecast", forecast_lines, asked, environment=environment, timeout=LIMIT)
    return found


def forecast_in_process(asked: ForecastRequest) -> ForecastLines:
    """`forecast_lines` for a process that does nothing else, apart only where it sees a GPU."""
    return forecast_in_worker(asked) if torch.cuda.is_available() else forecast_lines(asked)


def forecast_lines(asked: ForecastRequest) -> ForecastLines:
    """Builds trainers in this process, whose settings are the process's; `forecast_in_worker` has one for it."""
    patch(graph_break="off")  # without it TRL takes no gspo, and its losses need a GPU
    of_base, found, target = asked.of_base, asked.found, asked.target
    lines: list[Line] = []
    figures: dict[str, Any] = {}
    chosen_run, load, chosen = choose_for_target(asked.run, asked.base, target)
    try:
        free = target.free - load.weights - MOMENTS * load.trained
        run, work = plan_work(chosen_run, of_base, found, target, free)
        step = memory_forecast.forecast_step(run, of_base, work, target)
    except UsageError as error:
        lines.append(Line("memory", str(error), "red"))
    except REFUSALS as error:
        lines.append(Line("memory", f"the step cannot be run without weights: {one_line(error)}", "unknown"))
    else:
        lines.append(memory_forecast.describe_memory(step, chosen_run, chosen))  # its keys are those of the YAML
        figures["memory"] = step.as_dict()
        if asked.probe is not None:
            how_long = throughput_probe.extrapolate_time(run, work, found, asked.probe)
        else:
            dtype = weights_dtype(target, run.model.dtype)
            model = planned_trainer(run, of_base, dtype, run.model.attn_implementation).model
            weights = sum(p.numel() for p in model.parameters() if not p.requires_grad) * dtype.itemsize
            how_long = throughput_probe.estimate_time(run, work, found, flops_of(model), target, weights)
        lines += throughput_probe.describe_time(how_long, run, target)
        figures["time"] = vars(how_long)
    try:
        return lines + disk_lines.describe_disks(disk_lines.forecast_disks(asked.run)), figures
    except (ValueError, ImportError) as error:  # of a setting that the libraries look at when it is first used
        raise UsageError(one_line(error), key="train") from error


def choose_for_target(run: RunConfig, base: str, target: Target) -> tuple[RunConfig, Load, list[Choice]]:
    """The run with what it leaves open decided as it would be there; what it asks; and what was decided."""
    there = run.model_copy(deep=True)
    if there.model.dtype == "auto":
        there.model.dtype = "bfloat16" if target.machine.bf16 else "float32"
    load = load_of(there, base)
    choices = choose(there, target.machine, load)
    return with_values(run, choices), load, choices


def plan_work(
    run: RunConfig, config: Any, found: data_sample.DataSample, target: Target, free: int
) -> tuple[RunConfig, StepShape]:
    """What goes through at once, GSPO's batch planned as the run plans it. free: bytes left for activations."""
    longest = found.longest
    if run.cogumi.method == "gspo":
        if gspo.is_planned(run):
            batch = gspo.batch_for(run, config, weights_dtype(target, run.model.dtype).itemsize, longest, free)
            run = gspo.with_batch(run, batch.arguments)
        return run, memory_forecast.planned_work(run, longest)
    limit = run.train.get("max_length")
    packed = found.packed.at_once if found.packed and limit else None
    # The sample may not hold the longest example of all.
    return run, memory_forecast.planned_work(run, int(limit or longest), packed)


def fit_config(config: Config, card: str | None = None, **overrides: Any) -> tuple[PreflightReport, dict[str, Any]]:
    """(the last report, the dotted keys that were changed): the red lines' changes made until nothing is left to change."""
    changes: dict[str, Any] = {}
    report = forecast_run(config, card, None, overrides, forecast_in_process)
    for _ in range(ROUNDS):
        more = {key: value for key, value in report.changes.items() if changes.get(key) != value}
        if report.fits or not more:
            break
        changes |= more
        words = {key.replace(".", "__"): value for key, value in changes.items()}
        report = forecast_run(config, card, None, {**overrides, **words}, forecast_in_process)
    return report, changes


def write_fitted_config(source: Path, out: Path, changes: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """The YAML of `source` with the changes, its comments kept, at `out`. Raises UsageError for a file that is there."""
    if out.exists():
        raise UsageError("there is such a file already", key=f"--fix {out}", fix="name another, or remove it")
    text = source.read_text(encoding="utf-8")
    document = parse_sections(text)
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    for key, value in {**given, **changes}.items():
        section = document
        *above, name = key.split(".")
        for each in above:
            section = section.setdefault(each, {})
        section[name] = value
    changed = "".join(f"#   {key}: {value}\n" for key, value in changes.items())
    head = f"# {source.name}, changed by cogumi preflight --fix:\n{changed}"
    try:
        write_atomic(out, head + edit_yaml(text, document)[0])
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise UsageError(reason, key=f"--fix {out}", fix="name another place") from None
