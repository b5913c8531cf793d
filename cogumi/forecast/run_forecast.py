"""The preflight of a run on one card: stack, data, memory, time and money, disk.

The time comes from ten steps made here (`--probe`), or else it is estimated. The estimate divides the FLOP of a token
by REACHED of the card's peak, and adds the rollouts of transformers (`rollout_seconds`), but not vLLM's.
"""

import logging
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from cogumi.config.schema import RunConfig
from cogumi.core import worker
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_duration, format_memory, one_line, pip_command
from cogumi.core.notices import show_seconds
from cogumi.core.run_directory import read_json
from cogumi.forecast import data_sample, memory_forecast
from cogumi.forecast.data_sample import DataSample
from cogumi.forecast.disk_forecast import describe_disks
from cogumi.forecast.memory_forecast import Target, find_target, layer_period, peaks_of_depth, weights_dtype
from cogumi.forecast.preflight_report import Line, PreflightReport
from cogumi.forecast.training_step import StagePeak, StepShape, count_decoding, forecast_weights, planned_trainer
from cogumi.forecast.vllm_forecast import choose_with_engine, describe_sampler, forecast_rollout
from cogumi.health.rules import FEW_LOSS_ROWS
from cogumi.merge.logits import WORKING_BYTES
from cogumi.merge.preflight import refuse_missing_weights
from cogumi.methods import gspo, preparation
from cogumi.methods.auto_settings import MOMENTS, Choice, Load, choose_packing, load_of, with_values
from cogumi.methods.dpo import REFERENCE
from cogumi.methods.examples import longest_example
from cogumi.methods.sampler import sampler_settings
from cogumi.methods.step_split import is_planned, split_step
from cogumi.models.base import RunBase, meta_model
from cogumi.models.quantized_bases import quantization_of
from cogumi.models.unsloth_models import FAMILIES, choose_backend, needs_exact_ratios
from cogumi.patches import recurrent_kernels, unsloth_rl
from cogumi.rl.memory_plan import engine_bytes
from cogumi.rl.patching import patch
from cogumi.stack.gpus import count_processes, refuse_missing_gpus, without_launcher
from cogumi.stack.lanes import check_lane
from cogumi.telemetry.throughput import flops_of

# Errors of PEFT, TRL and transformers for a setting they refuse, or a model that cannot be built from shapes.
REFUSALS = (ValueError, ImportError, RuntimeError)
LIMIT = 600.0  # seconds; a model of which every layer is run takes minutes
REACHED = 0.4  # of the card's dense bf16 peak, in hardware FLOP (PaLM, arXiv:2204.02311, appendix B: 46 to 58 % there)
KERNEL_SECONDS = 8e-6  # that eager PyTorch takes to launch one; assumed (docs/preflight.md)
PROBED = 10  # steps
SLOWER = ", which others measured at 1.7 to 5.7 times the time"  # docs/preflight.md has the sources
UNKNOWN_FACTOR = ", how much slower is not known"

ForecastLines = tuple[list[Line], dict[str, Any]]
"""The lines on memory, time and disk, and the figures behind them."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a step with dpo's reference, before the first step, and of a rollout. measured: how many steps were timed."""

    step: float
    before: float = 0.0
    measured: int = 0
    rollout: float | None = None


@show_seconds("preflight: data, memory, time and disk of the run are being worked out")
def forecast_run(
    run: RunConfig, card: str | None, train: Callable[[RunConfig], Any] | None, apart: bool = True
) -> PreflightReport:
    """Run `cogumi.preflight` in a process that may import torch.

    card: by name, None for this machine. train: trains a run, where ten steps are to be timed. apart: False in a process
    that does nothing else, which may keep the settings of planned trainers if it sees no GPU.
    """
    requested, here = run, card is None
    if not here and run.cogumi.processes == "all":
        problem = "all are the GPUs of the machine that trains, and --card names a card of another one"
        raise UsageError(problem, key="cogumi.processes", fix="say how many, as in cogumi.processes=8")
    if not here and train is not None:
        raise UsageError("card and probe: ten steps made here say nothing of another card", fix="use one of the two")
    count = count_processes(run.cogumi.processes, os.environ)
    if here:
        refuse_missing_gpus(count, os.environ)
    run = run.model_copy(deep=True)
    run.cogumi.processes = count
    run = split_step(run, count)
    target = find_target(card, run)
    preparation.check_settings(run, on_this_machine=here)
    if run.cogumi.method == "gspo":
        sampler_settings(run)
    run, base = preparation.prepare_base(run)
    if here:  # for another machine's card the configuration is enough
        refuse_missing_weights(base)
    preparation.check_base(run, base)
    try:
        original = preparation.find_merge_base(run, base)
        merge_base = [] if original is None else [Line("base", str(original))]
    except UsageError as error:
        original, merge_base = None, [Line("base", f"{error.key}: {error.message}", "red", error.fix)]
    preparation.check_merge(run, base, original)
    sample = data_sample.assume_longest(run, base.name)
    if sample is None:
        sample = data_sample.sample_data(run, preparation.load_run_tokenizer(run, base), base.config)
    measured = measure_steps(requested, train) if train is not None else None
    lines = [describe_stack()] if here else []
    lines.append(describe_backend(run, base.config, other_machine=not here))
    if run.cogumi.method == "sft" and not lines[-1].figure.startswith("trl"):
        run.train.setdefault("packing", False)  # unsloth may train, for which packing is not chosen
    apart = apart or torch.cuda.is_available() or unsloth_rl.is_in_place()
    forecast = forecast_in_worker if apart else forecast_lines
    forecast_of_run, figures = forecast(run, base, sample, target, measured)
    lines += [*merge_base, data_sample.describe_data(sample, run), *forecast_of_run]
    return PreflightReport(str(target), tuple(lines), {"data": sample.as_dict(), **figures})


def describe_stack() -> Line:
    """Compare the installed packages with the lane's pins, as the doctor does."""
    finding = check_lane()
    figure = f"{finding.figure}; {finding.cause}" if finding.cause else finding.figure
    return Line("stack", figure, "green" if finding.state == "ok" else "yellow", finding.fix)


def describe_backend(run: RunConfig, base_config: Any, other_machine: bool) -> Line:
    """Describe the backend that will train. other_machine: the run trains on another one, whose packages are unknown."""
    if not other_machine:
        return Line("backend", "{}: {}".format(*choose_backend(run)))
    backend = run.cogumi.backend
    if run.cogumi.process_count > 1 and backend == "unsloth":
        fix = "set cogumi.backend: trl, or cogumi.processes: 1"
        return Line("backend", "unsloth trains in one process", "red", fix)
    if run.cogumi.process_count > 1:
        return Line("backend", "trl: several processes train by stock TRL")
    if backend != "auto":
        return Line("backend", f"{backend}: cogumi.backend")
    if base_config.model_type not in FAMILIES:
        return Line("backend", "trl: unsloth has no kernels for it")
    if run.train.get("use_vllm") or needs_exact_ratios(run):
        return Line("backend", "trl: several steps a rollout, or vLLM, by unsloth are not confirmed on a card")
    return Line("backend", "unsloth if it is installed there, else trl")


def forecast_in_worker(*arguments: Any) -> ForecastLines:
    """Run `forecast_lines` in another process, which sees no GPU and leaves nothing behind in this one.

    Libraries cache tensors, which would be fake ones, and accelerate keeps settings for the whole process. Beside a GPU
    the trainer would be unsloth's. In a training of several processes it would wait for the others. Raises RuntimeError
    for a process that broke or took too long.
    """
    environment = without_launcher(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    name = "the forecast"
    return worker.call(name, forecast_lines, *arguments, environment=environment, timeout=LIMIT)


def forecast_lines(
    yaml_run: RunConfig, base: RunBase, sample: DataSample, target: Target, probe: Pace | None = None
) -> ForecastLines:
    """Forecast memory, time and disk with trainers built in this process, whose settings are the process's.

    yaml_run: with the keys of its YAML; of several processes, as each of them trains it (`split_step`). probe: the pace that was
    measured.
    """
    patch(graph_break="off", backend="trl")  # without it TRL takes no gspo, and its losses need a GPU
    base_config, processes = base.config, yaml_run.cogumi.process_count
    if not target.on_card:  # main memory, which the processes share
        target = replace(target, free=target.free // processes)
    lines: list[Line] = []
    figures: dict[str, Any] = {}
    if processes > 1:
        text = f"several processes are not forecast: the figures are for one of {processes}"
        lines.append(Line("processes", f"{text}, without what they exchange", "unknown"))
    if yaml_run.cogumi.method == "gspo":
        lines.append(Line("rollout", str(gspo.rollout_size(yaml_run))))
    lines += describe_kernels(yaml_run, base_config, target)
    recurrent_kernels.counts_kernels = target.on_card
    holds_share = processes > 1 and yaml_run.cogumi.sharding != "none"
    chosen_run, load, choices = choose_for_target(yaml_run, base, sample, target)
    if yaml_run.model.quantization_config is not None or quantization_of(base_config) is not None:
        dtype = weights_dtype(target.machine, yaml_run.model.dtype)
        lines.append(describe_weights(base_config, dtype, yaml_run.model.quantization_config))
    try:
        free = target.free - load.weights - MOMENTS * load.trained - engine_bytes(chosen_run.train, target.total)
        run, work = plan_work(chosen_run, base_config, sample, target, free)
        memory = None if holds_share else memory_forecast.forecast_step(run, base_config, work, target)
    except UsageError as error:
        rollout = forecast_rollout(chosen_run, base_config, load, target, sample.longest)
        fix = "set cogumi.tuning: lora; LoRA instead of every weight" if yaml_run.cogumi.tuning == "full" else ""
        if rollout is not None and rollout.step <= rollout.free:  # without the engine it does fit
            fix = rollout.fix
        lines.append(Line("memory", str(error), "red", fix))
        rollout = rollout and replace(rollout, free=target.free)
        lines += describe_sampler(chosen_run, base_config, rollout, target, sample.longest)
    except REFUSALS as error:
        lines.append(Line("memory", f"the step cannot be run without weights: {one_line(error)}", "unknown"))
    else:
        if memory is None:
            text = f"not forecast: with cogumi.sharding: {run.cogumi.sharding} a process holds a share of the model"
            lines.append(Line("memory", text, "unknown"))
        else:
            rollout = forecast_rollout(run, base_config, memory, target, sample.longest)
            fix = rollout.fix if rollout is not None else ""
            lines.append(memory_forecast.describe_memory(memory, chosen_run, choices, fix))
            lines += describe_sampler(run, base_config, rollout, target, sample.longest)
            figures["memory"] = memory.as_dict()
            if rollout is not None:
                figures["vllm"] = rollout.as_dict()
        if sample.looked_at or configured_steps(run):
            pace = probe or estimate_pace(run, base_config, work, sample, target)
            time = forecast_time(run, work, sample, pace)
            lines.append(describe_time(time, run, target))
            figures["time"] = vars(time)
        else:
            fix = "set train.max_steps to plan with"
            lines.append(Line("time", "how many steps are in the data is not known", "unknown", fix))
    return lines + describe_merge_check(yaml_run, base, target) + describe_disks(yaml_run), figures


def describe_merge_check(run: RunConfig, base: RunBase, target: Target) -> list[Line]:
    """Return a line where the merged model fits neither the target nor main memory: its logits will not be compared."""
    if not run.cogumi.merge or run.cogumi.tuning == "full":
        return []
    parameters = sum(parameter.numel() for parameter in meta_model(base.config).parameters())
    needed = parameters * weights_dtype(target.machine, run.model.dtype).itemsize + WORKING_BYTES
    room = target.free if target.named else max(target.free, psutil.virtual_memory().total)
    if needed <= room:
        return []
    figure = f"{format_memory(needed)} of {format_memory(room)} for the merged model: its logits will not be compared"
    fix = "compare on a larger machine: cogumi merge ADAPTER OUT --verify logits"
    return [Line("merge check", figure, "yellow", fix)]


def describe_kernels(run: RunConfig, base_config: Any, target: Target) -> list[Line]:
    """Return a line on the kernels of a base's recurrent layers, where it has some and is trained on a card."""
    kernels = recurrent_kernels.apply(meta_model(base_config)) if target.on_card else frozenset()
    hub = (run.train.get("model_init_kwargs") or {}).get("use_kernels")
    missing = " ".join(sorted({name for name, loaded in kernels if not hub and (target.named or not loaded)}))
    if not missing:
        text = "the hub's" if hub else ", ".join(sorted({name for name, _ in kernels}))
        return [Line("kernels", f"of recurrent layers: {text}")] if kernels else []
    text = f"recurrent layers call {missing.replace(' ', ', ')}, {'if installed there' if target.named else 'not installed'}"
    text += f"; without, PyTorch's loops run{SLOWER if 'flash-linear-attention' in missing else UNKNOWN_FACTOR}"
    fix = f"{pip_command(f'install {missing}')}, or set train.model_init_kwargs: {{use_kernels: true}} for the hub's"
    if target.named:
        fix = "lanes for cards have flash-linear-attention; set train.model_init_kwargs: {use_kernels: true} for the others"
    return [Line("kernels", text, "green" if target.named else "yellow", fix)]


def describe_weights(base_config: Any, dtype: torch.dtype, quantization: dict[str, Any] | None) -> Line:
    """Return how much of a base is, or will be, quantized. dtype: of what is not."""
    count, fix = forecast_weights(base_config, dtype, quantization), ""
    if count.quantized < 0.5 and (quantization or {}).get("load_in_8bit"):
        fix = "set load_in_4bit, which quantizes stacked experts too, or take a card for what stays"
    return Line("weights", str(count), "yellow" if count.quantized < 0.5 else "green", fix)


def choose_for_target(
    run: RunConfig, base: RunBase, sample: DataSample, target: Target
) -> tuple[RunConfig, Load, list[Choice]]:
    """Return the run with its open settings chosen as the target would; its load; and the choices."""
    run_there = run.model_copy(deep=True)
    if run_there.model.dtype == "auto" and run_there.cogumi.tuning != "full":  # every weight is trained in float32 then
        run_there.model.dtype = "bfloat16" if target.machine.bf16 else "float32"
    load = load_of(run_there, base).with_prompts(run, sample.longest)
    choices = choose_with_engine(run_there, target.machine, load, base.config, lambda: sample.longest)
    choices += choose_packing(with_values(run, choices), base.config, sample.lengths, sample.trained)
    return with_values(run, choices), load, choices


def plan_work(
    run: RunConfig, config: Any, sample: DataSample, target: Target, free: int
) -> tuple[RunConfig, StepShape]:
    """Return the run and its micro-batch, GSPO's planned as the run plans it. free: bytes left for activations."""
    longest = sample.longest
    if run.cogumi.method == "gspo":
        if is_planned(run):
            batch, _ = gspo.batch_for(
                run, config, weights_dtype(target.machine, run.model.dtype).itemsize, longest, free
            )
            run = gspo.with_batch(run, batch)
        return run, memory_forecast.planned_work(run, longest)
    packed = sample.examples_per_row
    limit = run.train.get("max_length") or (longest if packed is None else longest_example(run))
    # The sample may not hold the longest example of all.
    return run, memory_forecast.planned_work(run, int(limit), packed)


# --------------------------------------------------------------------------------------------------------- time and money


@dataclass(frozen=True)
class TimeForecast:
    """steps: optimizer steps. tokens: of all of them, without padding. seconds: None where the pace is not known.

    measured: how many steps were timed, 0 for an estimate. whole: the steps of the whole training, where `cogumi.sanity`
    ends it earlier; None where it does not. rollout: forecast seconds of each.
    """

    steps: int
    tokens: int
    seconds: float | None
    measured: int = 0
    whole: int | None = None
    rollout: float | None = None


def configured_steps(run: RunConfig) -> int:
    """Return `train.max_steps`, 0 where it is left to the epochs."""
    return max(0, int(run.setting("max_steps")))


def steps_of(run: RunConfig, work: StepShape, sample: DataSample) -> int:
    """Return the optimizer steps: `train.max_steps`, or those of the epochs."""
    if steps := configured_steps(run):
        return steps
    epochs = run.setting("num_train_epochs")
    rows = sample.trained / (sample.examples_per_row or 1)
    if run.cogumi.method == "gspo":
        rows *= run.setting("num_generations")
    return max(1, math.ceil(epochs * rows / (work.rows * work.micro_batches * run.cogumi.process_count)))


def forecast_time(run: RunConfig, work: StepShape, sample: DataSample, pace: Pace | None) -> TimeForecast:
    """Return the time of all steps. pace: None where it is not known."""
    steps, all_steps = steps_of(run, work, sample), None
    if run.cogumi.sanity is not None and run.cogumi.sanity < steps:
        steps, all_steps = run.cogumi.sanity, steps
    tokens = round(steps * tokens_of_a_step(run, work, sample))
    if pace is None:
        return TimeForecast(steps, tokens, None, whole=all_steps)
    return TimeForecast(steps, tokens, steps * pace.step + pace.before, pace.measured, all_steps, pace.rollout)


def tokens_of_a_step(run: RunConfig, work: StepShape, sample: DataSample) -> float:
    """Return the tokens of all processes, by the mean example; completions are as long as they may be."""
    rows = work.rows * work.micro_batches * run.cogumi.process_count
    if run.cogumi.method == "gspo":
        return rows * (sample.mean + work.completion)
    examples = sample.examples_per_row or (2 if run.cogumi.method == "dpo" else 1)
    return rows * examples * sample.mean


def estimate_pace(run: RunConfig, config: Any, work: StepShape, sample: DataSample, target: Target) -> Pace | None:
    """Estimate the pace by the model's arithmetic; None for a card of unknown speed."""
    card = target.card
    if card is None or card.peak is None:
        return None
    dtype = weights_dtype(target.machine, run.model.dtype)
    arithmetic = flops_of(planned_trainer(run, config, dtype).model)
    context = sample.mean + work.completion
    passes = arithmetic.hardware(context, recomputed=run.train.get("gradient_checkpointing") is not False)
    if run.cogumi.method == "dpo":
        passes += arithmetic.forward(context)
    seconds = tokens_of_a_step(run, work, sample) / run.cogumi.process_count * passes / (REACHED * card.peak)
    if not work.rollout:
        return Pace(seconds)
    rollout = rollout_seconds(run, config, dtype, work, card.bandwidth)
    steps = run.setting("num_iterations") * work.rollout / (work.rows * work.micro_batches)
    return Pace(seconds + rollout / steps, rollout=rollout)


def rollout_seconds(run: RunConfig, config: Any, dtype: torch.dtype, work: StepShape, bandwidth: float) -> float:
    """Sum max(bytes / bandwidth, kernels * KERNEL_SECONDS) over the tokens of a rollout in which no row ends early."""

    def count(layers: int | None) -> tuple[StagePeak, ...]:
        return count_decoding(planned_trainer(run, config, dtype, layers), work)

    first, last = peaks_of_depth(count, config.get_text_config().num_hidden_layers, layer_period(config))
    size = torch.linspace(first.by_kind["bytes"], last.by_kind["bytes"], work.completion, dtype=torch.float64)
    return float((size / bandwidth).clamp(min=first.by_kind["kernels"] * KERNEL_SECONDS).sum())


def measure_steps(run: RunConfig, train: Callable[[RunConfig], Any]) -> Pace:
    """Time ten steps of the run itself in a directory that is removed. Downloads and loads the model."""
    log = logging.getLogger("cogumi")
    level = log.level
    with tempfile.TemporaryDirectory(prefix="cogumi-probe-") as scratch:
        run_dir = Path(scratch) / "run"
        probe = run.model_copy(deep=True)
        probe.train |= {"max_steps": min(PROBED, configured_steps(run) or PROBED)}
        probe.train |= {"save_strategy": "no", "eval_strategy": "no"}
        options = {"run_dir": run_dir, "preflight": "off", "merge": False, "samples_every": 0}
        options |= dict.fromkeys(("max_cost", "max_hours", "sanity"))
        probe.cogumi = probe.cogumi.model_copy(update=options)
        log.setLevel(logging.WARNING)  # the directory that it would name will be gone
        try:
            train(probe)
        finally:
            log.setLevel(level)
        figures = read_json(run_dir / "metrics.json")
    return Pace(figures["step_seconds"] / figures["steps"], figures["seconds"].get(REFERENCE, 0.0), figures["steps"])


def describe_time(pace: TimeForecast, run: RunConfig, target: Target) -> Line:
    """Return the line on time and cost; red where the budget ends the run before its steps do."""
    price, limits = run.cogumi.price_per_hour, run.cogumi.model_dump(include={"max_hours", "max_cost"})
    budgets = {f"cogumi.{key}": limit for key, limit in limits.items() if limit is not None}
    unpriced = "; cost: not known (set cogumi.price_per_hour)" if price is None else ""
    ends = "" if pace.whole is None else f" of {pace.whole:,}, after which cogumi.sanity ends the run"
    text = f"{pace.steps:,} steps{ends}, about {pace.tokens:,} tokens"
    if pace.seconds is None:
        unjudged = "".join(f", nor what {key} allows" for key in budgets)
        text += f"; how fast is not known for {target.machine.name}{unjudged}{unpriced}"
        return Line("time", text, "unknown", "" if target.named else "--probe makes ten steps and says")
    several = f" in {run.cogumi.process_count} processes" if run.cogumi.process_count > 1 else ""
    text += f": {format_duration(pace.seconds)} of training{several}"
    if price is not None:
        cost = pace.seconds / 3600 * price
        text += f", {f'${cost:,.2f}' if cost >= 0.01 else 'less than a cent'} at ${price:g} an hour"
    how = f"if it reaches {REACHED:.0%} of the card's peak, not measured"
    if pace.rollout is not None:
        how = f"a rollout up to {pace.rollout:,.0f} s; {how}"
    elif run.train.get("use_vllm"):
        how = f"vLLM's rollouts left out; {how}"
    if pace.measured:
        how = f"by {pace.measured} step{'s' * (pace.measured != 1)} made here"
    text += f" ({how}){unpriced}"
    # In seconds. Without a price a limit on the cost is refused before.
    allowed = {
        key: 3600 * budget / ((price or 1) if key == "cogumi.max_cost" else 1) for key, budget in budgets.items()
    }
    limit = min(allowed, key=lambda key: allowed[key], default="")
    if not limit or allowed[limit] >= pace.seconds:
        return Line("time", text)
    steps = max(1, int(allowed[limit] / pace.seconds * pace.steps))
    text += f"; {limit} ends it at about step {steps:,}"
    if pace.whole is not None and steps < FEW_LOSS_ROWS:  # a check of so few steps is refused
        return Line("time", text, "red", f"raise {limit}")
    key = "train.max_steps" if pace.whole is None else "cogumi.sanity"
    return Line("time", text, "red", f"set {key}: {steps}, or raise {limit}")
