"""Settings that a run leaves open, and its forecast, before anything is downloaded."""

import logging
from typing import Any

import torch

from cogumi.config.schema import RunConfig
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.core.run_directory import FORECAST, write_section
from cogumi.data.cache import Data
from cogumi.forecast import data_sample
from cogumi.forecast.memory_forecast import find_target
from cogumi.forecast.preflight_report import PreflightReport
from cogumi.forecast.run_forecast import describe_stack, forecast_in_worker
from cogumi.forecast.vllm_forecast import choose_with_engine
from cogumi.methods.auto_settings import Choice, Load, Machine, apply_choices, choose_packing, with_values
from cogumi.methods.sft import is_packing_chosen
from cogumi.models.base import RunBase

log = logging.getLogger("cogumi")


def wants_preflight(run: RunConfig) -> bool:
    """Default to a preflight on a GPU: on a CPU a run takes seconds to load, and memory is cheap."""
    return run.cogumi.preflight == "on" or (run.cogumi.preflight == "auto" and torch.cuda.is_available())


def make_choices(run: RunConfig, base: RunBase, data: Data, tokenizer: Any) -> RunConfig:
    """Return the run with open settings decided; if vLLM samples, for all its prompts."""

    def decide(run: RunConfig, machine: Machine, load: Load) -> list[Choice]:
        is_gspo = run.cogumi.method == "gspo"
        longest = max(data_sample.prompt_lengths(run, list(data.dataset["prompt"]), tokenizer)) if is_gspo else 0
        load = load.with_prompts(run, longest)
        choices = choose_with_engine(run, machine, load, base.config, lambda: longest)
        return choices + choose_packing(with_values(run, choices), base.config, data.lengths, len(data.dataset))

    return apply_choices(run, base, decide)


def run_preflight(run: RunConfig, base: RunBase, data: Data, tokenizer: Any) -> None:
    """Log what is ahead of a run whose choices are made, and keep it.

    Raises RefusedAtSetup for what cannot fit before anything is allowed for (`cogumi.forecast.memory_forecast`); what
    may not fit is warned of.
    """
    target = find_target(None, run)
    if run.cogumi.method == "sft":  # chosen packing is chosen by the forecast, too
        packing = None if is_packing_chosen(run) else run.train.get("packing", False)
        run = run.model_copy(update={"train": run.train | {"packing": packing}})
    log.info("preflight: one step is forecast, without weights, in a process of its own")
    try:
        sample = data_sample.measure_data(run, data, tokenizer)
        lines, figures = forecast_in_worker(run, base, sample, target)
    except UsageError as error:
        raise RefusedAtSetup.like(error) from error
    except RuntimeError as error:
        log.warning("preflight: %s; the run continues without it", error)
        return
    report = PreflightReport(str(target), (describe_stack(), *lines), figures)
    write_section(run.run_dir / FORECAST, "preflight", report.as_dict())
    for line in report.lines:
        if line.state == "red":
            log.warning("preflight: RED: %s: %s; %s", line.stage, line.figure, line.fix)
        else:
            log.info("preflight: %s: %s", line.stage, line.figure)
    engine, memory = figures.get("vllm"), figures.get("memory")
    awake = engine["engine"] if engine is not None and not engine["sleeps"] else 0
    for stage, exceeded in (
        ("vllm", engine is not None and engine["cannot_start"]),
        ("memory", memory is not None and memory["tensors"] + awake > memory["free"]),
    ):
        if exceeded:
            red = next(line for line in lines if line.stage == stage)
            fix = f"{red.fix} (or cogumi.preflight: off, which starts it anyway)"
            raise RefusedAtSetup(f"{stage}: {red.figure}", fix=fix)
