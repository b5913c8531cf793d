"""`cogumi.train`, `cogumi.preview` and `cogumi.preflight`: what is refused and chosen before torch is imported comes first."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogumi.core.errors import UsageError
from cogumi.core.notices import show_import
from cogumi.stack.compiled_code import keep_compiled_code
from cogumi.stack.gpus import count_launched, count_processes, refuse_missing_gpus, refuse_ranks, use_one_gpu

if TYPE_CHECKING:
    from cogumi.config.schema import RunConfig
    from cogumi.forecast.preflight_report import PreflightReport
    from cogumi.methods.preview import Preview
    from cogumi.training import RunResult

Config = str | os.PathLike[str] | Mapping[str, Any]
NO_PATH = re.compile(r"cogumi:.*|[\w.-]+(/[\w.-]+)?")  # a model of cogumi's, or what may be a hub id


def train(config: Config, **overrides: Any) -> "RunResult":
    """Run one configuration in this process and return what it left behind.

    `config` is a YAML path or a mapping; `overrides` are dotted names with `__` for the dot (`train__max_steps=5`). A
    run directory that holds this run, unfinished, is resumed from its last good checkpoint. Where the machine has
    several GPUs, the one with the most free memory is used. With `cogumi.processes` the run has as many processes, each
    with a GPU, unless torchrun or accelerate started them. Raises UsageError, before anything is written, for a mistake in
    the configuration, the data or the run directory. Raises RunFailed where one of several processes died.
    """
    run = refuse_mistakes(config, overrides, trains=True)
    if (count := count_processes(run.cogumi.processes, os.environ)) > 1:
        from cogumi.methods.step_split import refuse_unshared

        refuse_unshared(run, count)
        if not count_launched(os.environ):
            from cogumi.runs.rank_launcher import train_in_processes

            refuse_missing_gpus(count, os.environ)
            return train_in_processes(config, overrides, run.run_dir, count)
    with libraries(run):
        from cogumi.training import train as train_here

    return train_here(config, **overrides)


def preview(config: Config, examples: int = 3, **overrides: Any) -> "Preview":
    """What `cogumi.train` would train on with the same words. Raises UsageError as it does, for the data and its tokenizer.

    examples: how many are shown, the first ones.
    """
    with libraries(refuse_mistakes(config, overrides)):
        from cogumi.methods.preview import preview as preview_here

    return preview_here(config, examples, **overrides)


def preflight(config: Config, card: str | None = None, probe: bool = False, **overrides: Any) -> "PreflightReport":
    """Whether `cogumi.train` with the same words would fit, and what to change where it would not.

    card: plan for this card ("H100 SXM", "A100 80GB"; `cogumi.stack.gpus`) instead of this machine. probe: make ten steps
    here to know the time, which downloads and loads the model. Of a model on the hub its config and tokenizer are fetched
    and no weights; of a data set there, the files. Raises UsageError for a mistake in the configuration.
    """
    with libraries(refuse_mistakes(config, overrides, trains=probe), elsewhere=card is not None):
        from cogumi.forecast.run_forecast import forecast_run

    return forecast_run(config, card, train if probe else None, overrides)


@contextmanager
def libraries(run: "RunConfig", elsewhere: bool = False) -> Iterator[None]:
    """For a block that imports torch, trl or peft: one GPU is chosen, and unsloth, where the run takes it, patches them first.

    elsewhere: the run is to train on another machine, so that unsloth need not be installed here.
    """
    use_one_gpu()
    keep_compiled_code()
    with show_import():
        from cogumi.models.unsloth_models import choose_backend
        from cogumi.patches import unsloth_rl

        unsloth_rl.apply("auto" if elsewhere else choose_backend(run).name)
        yield


def refuse_mistakes(config: Config, overrides: Mapping[str, Any], trains: bool = False) -> "RunConfig":
    """The configuration. Raises UsageError for what is known to be wrong without the seconds of importing torch and trl."""
    # Imported here: attaching to a run needs no schema.
    from cogumi.config.binding import nearest
    from cogumi.config.schema import read_config
    from cogumi.data.sources import refuse_missing

    run, origins = read_config(config, overrides)
    if trains:
        refuse_ranks(os.environ, run.cogumi.processes, format_command(sys.argv))
    if (name := run.model.name) and not NO_PATH.fullmatch(name) and not Path(name).is_dir():
        near = nearest(Path(name).name, (each.name for each in Path(name).parent.glob("*/")))
        hint = f"; there is {Path(name).parent / near}" if near else ""
        fix = "give a directory that is there, or a hub id (owner/name)"
        raise origins.error(f"no model at {name!r}: there is no such directory{hint}", "model.name", fix)
    for key, source in (("source", run.data.source), *(("mix", each.source) for each in run.data.mix)):
        try:
            if source is not None:
                refuse_missing(source)
        except UsageError as error:
            raise origins.error(f"{error.place}: {error.message}", f"data.{key}", error.fix) from None
    return run


def format_command(arguments: list[str]) -> str:
    """What started this process, as it is typed without a launcher."""
    program, words = Path(arguments[0]), arguments[1:]
    own = program.name == "cogumi" or program.parts[-2:] == ("cogumi", "__main__.py")
    return shlex.join(["cogumi", *words] if own else ["python", str(program), *words])
