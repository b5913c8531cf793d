"""`cogumi doctor`: what is wrong with this machine and this environment, and what a pasted error means."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cogumi.core.errors import UsageError
from cogumi.core.output import show, waiting


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Instead: say what a traceback or log means; - reads standard input."),
    ] = None,
) -> None:
    """What is wrong with this machine and this environment, and how to mend it. Exit status 1 if something is."""
    if explain is not None:
        from cogumi.diagnostics.signatures import explained

        found = explained(text_of(explain))
        show(found, as_json)
        raise typer.Exit(0 if found.diagnoses else 1)
    from cogumi.diagnostics.checkup import doctor as examine

    with waiting("checking the machine, its packages and what they compute"):
        report = examine()
    show(report, as_json)
    raise typer.Exit(0 if report.passed else 1)


def text_of(place: str) -> str:
    """The text to explain. Raises UsageError where there is none."""
    try:
        content = sys.stdin.buffer.read() if place == "-" else Path(place).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{error.strerror}", key=f"--explain {place}", fix="name a file with the traceback, or - to paste it"
        ) from None
    text = content.decode("utf-8", errors="replace")
    if 20 * (text.count("\ufffd") + text.count("\0")) > len(text):
        raise UsageError("that is no text", key=f"--explain {place}", fix="it takes the whole traceback or log")
    if not text.strip():
        where = "standard input" if place == "-" else place
        raise UsageError(
            f"there is nothing in {where}", key=f"--explain {place}", fix="it takes the whole traceback or log"
        )
    return text
