"""`cogumi disk predict`: what a run will want of its disks, from its config before it starts, or from its directory."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cogumi.core.errors import UsageError
from cogumi.core.formatting import visible
from cogumi.core.output import print_json, say, waiting

if TYPE_CHECKING:
    from cogumi.checkpoints.disk_forecast import Outlook


def predict(
    target: Annotated[Path, typer.Argument(metavar="CONFIG|DIR", help="A run's YAML, or its directory.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.save_steps=50")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """What a run will want of its disks. Exit status 1 where it does not fit. Loads and downloads no weights."""
    with disk_failures_in_one_line(), waiting("forecasting the disks"):
        found = of_directory(target, overrides or []) if target.is_dir() else of_config(target, overrides or [])
    if as_json:
        print_json(as_dict(found))
    else:
        show(found)
    raise typer.Exit(0 if found.fits else 1)


def of_directory(directory: Path, words: list[str]) -> "Outlook":
    """Of a run that has begun, by the config in its directory: what it has yet to write."""
    config = directory / "config.yaml"
    if not config.is_file():
        raise UsageError(
            f"{directory} is not a run's directory: it holds no config.yaml",
            fix="`cogumi disk status` says what it takes",
        )
    if words:
        raise UsageError("a run's directory has its config", place=words[0], fix="overrides go with a YAML")
    return of_config(config, [f"cogumi.run_dir={json.dumps(str(directory))}"])


def of_config(path: Path, words: list[str]) -> "Outlook":
    """Of a run that is to start or goes on. Raises UsageError for a mistake in the config, with the file and the line."""
    from cogumi.config.schema import load_config, parse_overrides

    run = load_config(path, **parse_overrides(words))
    from cogumi.forecast.disk_lines import outlook_of

    return outlook_of(run)


def as_dict(found: "Outlook") -> dict[str, Any]:
    """An outlook with what is computed from its fields."""
    disks = [
        {"wanted": disk.wanted, "short": disk.short, "fits": disk.fits, "refusal": disk.refusal, **asdict(disk)}
        for disk in found.disks
    ]
    return {"fits": found.fits, **asdict(found), "disks": disks, "lines": found.lines}


def show(found: "Outlook") -> None:
    from rich.console import Console

    from cogumi.core.disk_space import spoken
    from cogumi.core.output import print_table

    rows = []
    for disk in found.disks:
        mount, free = disk.filesystem.mount, spoken(disk.filesystem.space.free)
        rows.append((disk.parts, mount, spoken(disk.wanted), free, disk.refusal or "fits"))
    print_table("what is wanted of the disks", ["for", "mounted at", ">wanted", ">free", ""], rows)
    console = Console(markup=False, highlight=False, emoji=False)
    for line in found.about_saves:
        console.print(visible(line))


@contextmanager
def disk_failures_in_one_line() -> Iterator[None]:
    """A disk that fails, or a directory that may not be read, is one line and exit status 1."""
    try:
        yield
    except OSError as error:
        say(f"cogumi: {error}", to_error=True)
        raise typer.Exit(1) from error
