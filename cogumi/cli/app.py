"""The command line: a command parses, calls one public function, prints. Exit status 0 good, 1 failed, 2 used wrongly."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cogumi import smoke
from cogumi.cli import check_commands, export_commands, run_commands
from cogumi.cli.disk_commands import disk_app
from cogumi.config.source import copy_template, describe_template, list_templates
from cogumi.core import __version__
from cogumi.core.errors import UsageError
from cogumi.core.output import failures_in_one_line, print_json, print_text, run_command, show_waiting

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("smoke")(smoke.main)
app.command()(check_commands.doctor)
app.add_typer(disk_app, name="disk")
app.command()(check_commands.preflight)
run_commands.add_to(app)
export_commands.add_to(app)


def show_version(asked: bool) -> None:
    if asked:
        print(f"cogumi {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune on one machine: train, merge, check."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A YAML; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.max_steps=5")] = None,
) -> None:
    """Run one configuration: data, training, adapter, checks, merge."""
    from cogumi.config.schema import parse_overrides
    from cogumi.core.output import survive_closed_terminal
    from cogumi.runs import train as run
    from cogumi.telemetry.status import format_sentence, status_of

    words = parse_overrides(overrides or [])
    with show_waiting("working"), survive_closed_terminal():
        result = run(config, **words)
        print_text(format_sentence(status_of(result.run_dir)))
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def preview(
    config: Annotated[Path, typer.Argument(help="A YAML; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as data.max_rows=100")] = None,
    examples: Annotated[int, typer.Option("-n", min=0, help="How many examples to show.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """What a run would train on: examples as the model sees them, lengths, what is left out."""
    from rich.console import Console

    with show_waiting("reading and preparing the data"):
        from cogumi.config.schema import parse_overrides
        from cogumi.runs import preview as look

        found = look(config, examples, **parse_overrides(overrides or []))
    console = Console(soft_wrap=True, highlight=False)
    if as_json:
        print_json(found.as_dict())
    elif console.is_terminal:
        for line in found.lines(colour=True):
            console.print(line)  # made visible piece by piece
    else:
        print_text(found)


@app.command()
def cp(
    name: Annotated[
        str | None, typer.Argument(help="A config, recipe or template; without one they are listed.")
    ] = None,
    destination: Annotated[Path | None, typer.Argument(help="A file or a directory; here by default.")] = None,
) -> None:
    """Copy a config or a recipe, to be changed and run, or the template of an issues log."""
    if name is None:
        known = list_templates()
        width = max(map(len, known))
        print_text("\n".join(f"{each:{width}}  {describe_template(path)}" for each, path in known.items()))
        return
    copy = copy_template(name, destination)
    print_text(f"{copy}")
    if runner := {".yaml": "cogumi train", ".py": "python"}.get(copy.suffix):
        print_text(f"{runner} {copy}")


@app.command()
def merge(
    adapter: Annotated[Path | None, typer.Argument(help="The directory a run saved its adapter to.")] = None,
    out: Annotated[Path | None, typer.Argument(help="A directory that does not exist yet.")] = None,
    base: Annotated[
        str | None, typer.Option(help="The full-precision base, where the adapter does not name it.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="The base's revision on the hub.")] = None,
    base_mode: Annotated[
        str, typer.Option(help="full, or dequant: into the decoded weights of a quantized base.")
    ] = "full",
    dtype: Annotated[str, typer.Option(help="keep, bfloat16, float16 or float32.")] = "keep",
    verify: Annotated[
        str, typer.Option(help="elements; logits: also run both models, in float32 in memory; or none.")
    ] = "elements",
    weight: Annotated[float, typer.Option(help="What the adapter's update is multiplied by.")] = 1.0,
    add: Annotated[
        list[str] | None, typer.Option(help="Another adapter to add, as DIRECTORY=WEIGHT. May be repeated.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; by default one for each core.")] = None,
    export: Annotated[str | None, typer.Option(help="gguf: also convert with llama.cpp's converter.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Check this merged directory again, instead of merging.", metavar="DIR")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Merge an adapter into its full-precision base and check every element written; or check a merged directory."""
    if check is not None:
        if adapter is not None or add or export:
            raise UsageError(f"--check {check} merges nothing", fix=f"leave out {adapter or 'the options of a merge'}")
        with show_waiting("loading the libraries"):
            from cogumi.merge import check_merged

        with errors_in_command_words(), failures_in_one_line():
            found = check_merged(check, workers)
        print_json(asdict(found)) if as_json else print_text(found)
        return
    if adapter is None or out is None:
        raise UsageError(
            "merge needs an ADAPTER directory and an OUT directory, or --check DIR", fix="see cogumi merge --help"
        )
    if export not in (None, "gguf"):
        raise UsageError(f"--export {export} is not known", fix="gguf is")
    with show_waiting("loading the libraries"):
        from cogumi.merge import merge_adapter

    adapters = [(adapter, weight), *(parse_weighted_path(word) for word in add or [])]
    with errors_in_command_words(), failures_in_one_line():
        report = merge_adapter(adapters, out, base, revision, base_mode, dtype, verify, workers=workers)
    print_json(asdict(report)) if as_json else print_text(report)
    if export:
        from cogumi.merge.gguf import export_gguf, gguf_path, install_hint

        if written := export_gguf(out):
            print_text(f"{written}: {written.stat().st_size / 1e9:.2f} GB")
        else:
            print_text("llama.cpp's converter is not installed, so there is no GGUF file yet; this makes it:")
            print_text(install_hint(out, gguf_path(out)))


@contextmanager
def errors_in_command_words() -> Iterator[None]:
    """What Python is to be passed is named in the words of the command line."""
    try:
        yield
    except UsageError as error:
        raise UsageError(to_command_line(str(error))) from error


def to_command_line(text: str) -> str:
    text = re.sub(r"\b(base_mode|verify|dtype)='([a-z0-9]*)'", r"--\1 \2", text).replace("base_revision", "--revision")
    text = re.sub(r"\bbase=(?=\S)", "--base ", text).replace("--base_mode", "--base-mode")
    return text.replace(" base_mode", " --base-mode")


def parse_weighted_path(word: str) -> tuple[Path, float]:
    """DIRECTORY=WEIGHT in two. Raises UsageError for anything else."""
    path, _, number = word.rpartition("=")
    if not path:
        raise UsageError(f"--add {word} is not a directory and a weight", fix="write DIRECTORY=WEIGHT")
    try:
        return Path(path), float(number)
    except ValueError:
        raise UsageError(f"{number!r} is not a number", key=f"--add {word}", fix="write DIRECTORY=WEIGHT") from None


def main() -> None:
    run_command(app)
