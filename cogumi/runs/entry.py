"""`cogumi.train`, `cogumi.preview` and `cogumi.preflight`: validation and choices that come before torch is imported."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogumi.config.source import Config
from cogumi.core.errors import UsageError
from cogumi.core.formatting import format_command
from cogumi.core.notices import show_import
from cogumi.stack import gpus
from cogumi.stack.gpu_health import wait_for_gpus

if TYPE_CHECKING:
    from cogumi.config.schema import RunConfig
    from cogumi.forecast.preflight_report import PreflightReport
    from cogumi.methods.preview import Preview
    from cogumi.training import RunResult

HUB_NAME = re.compile(r"cogumi:.*|[\w.-]+(/[\w.-]+)?")  # a model of cogumi's, or what may be a hub id


def train(config: Config, **overrides: Any) -> "RunResult":
    """Run one configuration in this process and return what it left behind.

    `config` is a YAML path or a mapping; `overrides` are dotted names with `__` for the dot (`train__max_steps=5`). A
    run directory that holds this run, unfinished, is resumed from its last good checkpoint. Where the machine has
    several GPUs, the one with the most free memory is used. With `cogumi.processes` the run has as many processes, each
    with a GPU, unless torchrun or accelerate started them. Raises UsageError, before anything is written, for a mistake in
    the configuration, the data or the run directory. Raises RunFailed where one of several processes died.
    """
    return train_run(validate_config(config, overrides, for_training=True))


def train_run(run: "RunConfig") -> "RunResult":
    """`cogumi.train` with a configuration that is read and validated."""
    if (count := gpus.count_processes(run.cogumi.processes, os.environ)) > 1:
        from cogumi.methods.step_split import refuse_unshared

        refuse_unshared(run, count)
    if (count > 1 or run.cogumi.restarts) and not gpus.count_launched(os.environ):
        from cogumi.runs.restarts import train_with_restarts

        if count > 1:
            gpus.refuse_missing_gpus(count, os.environ)
        return train_with_restarts(run, count)
    return train_here(run)


def train_here(run: "RunConfig") -> "RunResult":
    """Train in this process, as the only one or as one of those that a launcher started."""
    gpus.use_one_gpu()
    wait_for_gpus()  # the run looks again and logs it
    with import_backend(run):
        from cogumi.training import train as train_in_process

    return train_in_process(run)


def preview(config: Config, examples: int = 3, **overrides: Any) -> "Preview":
    """Show what `cogumi.train` would train on. Raises UsageError as it does, for the data and its tokenizer.

    Args:
        config: As for `cogumi.train`.
        examples: How many of the first examples are shown.
        overrides: As for `cogumi.train`.
    """
    run = validate_config(config, overrides)
    with import_backend(run):
        from cogumi.methods.preview import preview as preview_here

    return preview_here(run, examples)


def preflight(config: Config, card: str | None = None, probe: bool = False, **overrides: Any) -> "PreflightReport":
    """Forecast whether `cogumi.train` would fit, and what to change if not.

    Of a model on the hub its config and tokenizer are downloaded and no weights; of a data set there, the files. Raises
    UsageError for a mistake in the configuration.

    Args:
        config: As for `cogumi.train`.
        card: Plan for this card ("H100 SXM", "A100 80GB"; `cogumi.stack.gpus`) instead of this machine.
        probe: Make ten steps here to measure the time, which downloads and loads the model.
        overrides: As for `cogumi.train`.
    """
    run = validate_config(config, overrides, for_training=probe)
    with import_backend(run, other_machine=card is not None):
        from cogumi.forecast.run_forecast import forecast_run

    return forecast_run(run, card, train_run if probe else None)


@contextmanager
def import_backend(run: "RunConfig", other_machine: bool = False) -> Iterator[None]:
    """Choose one GPU, and let unsloth patch torch, trl and peft before the block imports them, if the run uses it.

    Args:
        run: The configuration.
        other_machine: The run will train on another machine, so unsloth need not be installed here.
    """
    gpus.use_one_gpu()
    gpus.keep_compiled_code()
    gpus.share_cores()
    with show_import():
        from cogumi.models.unsloth_models import choose_backend
        from cogumi.patches import unsloth_rl

        unsloth_rl.apply("auto" if other_machine else choose_backend(run).name)
        yield


def validate_config(config: Config, overrides: Mapping[str, Any], for_training: bool = False) -> "RunConfig":
    """Return the configuration. Raises UsageError for mistakes that can be found without importing torch and trl."""
    # Imported here: attaching to a run needs no schema.
    from cogumi.config.binding import nearest
    from cogumi.config.schema import read_config
    from cogumi.data.source_files import refuse_missing

    run, origins = read_config(config, overrides)
    if for_training:
        gpus.refuse_ranks(os.environ, run.cogumi.processes, format_command(sys.argv))
    if (name := run.model.name) and not HUB_NAME.fullmatch(name) and not Path(name).is_dir():
        near = nearest(Path(name).name, (path.name for path in Path(name).parent.glob("*/")))
        hint = f"; there is {Path(name).parent / near}" if near else ""
        fix = "give a directory that is there, or a hub id (owner/name)"
        raise origins.error(f"no model at {name!r}: there is no such directory{hint}", "model.name", fix)
    own_files = (("source", run.data.source), ("eval_source", run.data.eval_source))
    for key, source in (*own_files, *(("mix", part.source) for part in run.data.mix)):
        try:
            if source is not None:
                refuse_missing(source)
        except UsageError as error:
            raise origins.error(f"{error.place}: {error.message}", f"data.{key}", error.fix) from None
    return run
