"""`cogumi doctor` and `cogumi preflight`: what is wrong with this machine, and whether a run fits its card, disk and budget."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cogumi.core.errors import UsageError
from cogumi.core.output import print_report, print_text, show_waiting

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def doctor(
    as_json: AsJson = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Instead: say what a traceback or log means; - reads standard input."),
    ] = None,
) -> None:
    """What is wrong with this machine and this environment, and the fix. Exit status 1 if something is."""
    if explain is not None:
        from cogumi.diagnostics.signatures import explain_text

        found = explain_text(read_text(explain))
        print_report(found, as_json)
        raise typer.Exit(0 if found.diagnoses else 1)
    from cogumi.diagnostics.checkup import doctor as examine

    with show_waiting("checking the machine, its packages and what they compute"):
        report = examine()
    print_report(report, as_json)
    raise typer.Exit(0 if report.passed else 1)


def read_text(place: str) -> str:
    """The text to explain. Raises UsageError where there is none."""
    key = f"--explain {place}"
    try:
        content = sys.stdin.buffer.read() if place == "-" else Path(place).read_bytes()
    except OSError as error:
        raise UsageError(f"{error.strerror}", key=key, fix="name a file with the traceback, or - to paste it") from None
    text = content.decode("utf-8", errors="replace")
    wrong = f"there is nothing in {'standard input' if place == '-' else place}" if not text.strip() else ""
    if 20 * (text.count("\ufffd") + text.count("\0")) > len(text):
        wrong = "that is no text"
    if wrong:
        raise UsageError(wrong, key=key, fix="it takes the whole traceback or log")
    return text


def preflight(
    config: Annotated[Path, typer.Argument(help="A YAML; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.max_length=4096")] = None,
    card: Annotated[str | None, typer.Option(help="Plan for this card, as in 'h100 sxm' or t4.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Make ten steps here, to know the time. Loads the model.")
    ] = False,
    fix: Annotated[Path | None, typer.Option(help="Write a config that fits there.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Say before any download whether a run fits the card, the disk and the budget, and what would make it fit."""
    from cogumi.config.schema import parse_overrides

    words = parse_overrides(overrides or [])
    if probe and (fix is not None or card is not None):
        wrong = f"{'--card' if fix is None else '--fix'} and --probe: ten steps are made here, of this config"
        raise UsageError(wrong, fix="use one of the two")
    if fix is not None and not fix.parent.is_dir():
        raise UsageError(f"no such directory as {fix.parent}", key=f"--fix {fix}", fix="make it, or name another place")
    if fix is not None and fix.exists():
        raise UsageError("there is such a file already", key=f"--fix {fix}", fix="name another, or remove it")
    from cogumi.runs import libraries, refuse_mistakes, train

    refuse_mistakes(config, words, trains=probe)
    with show_waiting("forecasting memory, time and disk"), libraries():
        from cogumi.forecast.run_forecast import fit_config, forecast_in_process, forecast_run, write_fitted_config

        if fix is None:
            changes: dict[str, object] = {}
            report = forecast_run(config, card, train if probe else None, words, forecast_in_process)
        else:
            report, changes = fit_config(config, card, **words)
    print_report(report, as_json)
    if fix is not None and report.fits:
        write_fitted_config(config, fix, changes, words)
        said = ", ".join(f"{key}: {value}" for key, value in changes.items()) or "nothing had to be changed"
        print_text(f"{fix}: {said}", to_error=as_json)
    elif fix is not None:
        print_text(f"{fix} is not written: no change of the config that is known here makes this fit", to_error=True)
    raise typer.Exit(0 if report.fits else 1)
