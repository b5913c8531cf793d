"""The preflight as a stage of a run: with its own data and choices, before its model is fetched or loaded."""

import logging
from typing import Any

import torch

from cogumi.config.schema import RunConfig
from cogumi.core.errors import RefusedAtSetup, UsageError
from cogumi.core.run_directory import FORECAST, write_section
from cogumi.data.cache import Data
from cogumi.forecast import data_sample, stack_line
from cogumi.forecast.preflight_report import Line, PreflightReport
from cogumi.forecast.preflight_worker import apart
from cogumi.forecast.run_forecast import Asked
from cogumi.forecast.target import target_of

log = logging.getLogger("cogumi")


def is_wanted(run: RunConfig) -> bool:
    """Where there is a GPU, unless the config says otherwise: on a CPU a run takes seconds to load, and memory is cheap."""
    return run.cogumi.preflight == "on" or (run.cogumi.preflight == "auto" and torch.cuda.is_available())


def before_training(run: RunConfig, base: str, of_base: Any, data: Data, tokenizer: Any) -> None:
    """Log what is ahead of a run whose choices are made, and keep it. Raises RefusedAtSetup for what cannot fit.

    What may not fit goes on with a warning: refused is what is larger before anything is allowed for, see
    `cogumi.forecast.memory_forecast`.
    """
    target = target_of(None)
    log.info("preflight: one step is forecast, without weights, in a process of its own")
    try:
        lines, figures = apart(Asked(run, base, of_base, data_sample.whole(run, data, tokenizer), target))
    except UsageError as error:
        raise RefusedAtSetup.like(error) from error
    except RuntimeError as error:
        log.warning("preflight: %s; the run goes on without it", error)
        return
    report = PreflightReport(str(target), (stack_line.line(), *lines), figures)
    write_section(run.run_dir / FORECAST, "preflight", report.as_dict())
    for line in report.lines:
        level, mark = (logging.WARNING, "RED: ") if line.state == "red" else (logging.INFO, "")
        log.log(level, "preflight: %s%s", mark, in_words(line))
    memory = figures.get("memory")
    if memory is not None and memory["tensors"] > memory["free"]:
        red = next(line for line in lines if line.stage == "memory")
        raise RefusedAtSetup(f"{in_words(red)} (or cogumi.preflight: off, which starts it all the same)")


def in_words(line: Line) -> str:
    if line.state != "red":
        return f"{line.stage}: {line.figure}"
    return f"{line.stage}: {line.figure}; {line.fix}"
