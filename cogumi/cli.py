"""The command line: a command parses, calls one public function, prints. Exit status 0 good, 1 failed, 2 used wrongly."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from cogumi import smoke
from cogumi.errors import UsageError

INTERRUPTED = 130  # 128 + SIGINT, which is what Typer exits with after Ctrl-C

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("smoke")(smoke.main)


@app.callback()
def options() -> None:
    """Fine-tune on one machine: train, merge, check."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A YAML; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.max_steps=5")] = None,
) -> None:
    """Run one configuration: data, training, adapter, checks, merge."""
    from cogumi.config import parse_overrides

    words = parse_overrides(overrides or [])
    from cogumi.training import train as run

    result = run(config, **words)
    print(f"{'done' if result.passed else 'finished, but checks failed'}: {result.run_dir}")
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="The directory a run saved its adapter to.")],
    out: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")],
    base: Annotated[
        str | None, typer.Option(help="The full-precision base, where the adapter does not name it.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="The base's revision on the hub.")] = None,
    dtype: Annotated[str, typer.Option(help="keep, bfloat16, float16 or float32.")] = "keep",
) -> None:
    """Merge an adapter into its full-precision base and check every element written."""
    from cogumi.merge import merge_adapter

    print(merge_adapter(adapter, out, base=base, base_revision=revision, dtype=dtype))


def main() -> None:
    run_command(app)


def run_command(app: typer.Typer) -> None:
    """Run a Typer app; a mistake of the user is one line on standard error and exit status 2, Ctrl-C is 130."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("cogumi").setLevel(logging.INFO)
    try:
        app()
    except UsageError as error:
        print(f"cogumi: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            print("cogumi: interrupted; a run directory, if one was made, says at which stage", file=sys.stderr)
        raise
