"""Output of the commands. Control characters in text of others (data, logs, file names, errors) are made visible."""

import errno
import io
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TextIO

import typer

from cogumi.core.errors import TRACEBACK_IN, TRAINING_PACKAGES, MergeError, RunFailed, UsageError, require_extra
from cogumi.core.formatting import CONTROLS, escape_controls
from cogumi.core.redact import VisibleFormatter
from cogumi.core.signatures import exit_status

log = logging.getLogger(__name__)

# What Ctrl-C leaves behind, by command.
AFTER_INTERRUPT = {
    "train": "; the same command continues the run", "merge": "; nothing is left of the merge",
    "merge --check": "; the directory is as it was", "export": "; nothing is left of the export",
}  # fmt: skip
# Arguments of the Python functions that messages name, as the command line writes them.
AS_OPTIONS = {
    "base=": "--base ", "base_mode=": "--base-mode ", "base_mode": "--base-mode", "base_revision": "--revision",
}  # fmt: skip
BROKEN = (errno.EPIPE, errno.EIO)  # a pipe that nothing reads, a terminal that is closed
STOP_CODES = (129, 130, 143)  # 128 + SIGHUP, SIGINT (what Typer exits with after Ctrl-C), SIGTERM


def print_text(text: object = "", end: str = "\n", to_error: bool = False) -> None:
    """Print text, control characters made visible."""
    print(escape_controls(str(text)), end=end, file=sys.stderr if to_error else sys.stdout, flush=True)


def print_json(value: Any) -> None:
    text = json.dumps(value, default=str, indent=2, ensure_ascii=False)
    print(CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def print_report(report: Any, as_json: bool) -> None:
    """Print a report as text, or its `as_dict` as one JSON object."""
    if as_json:
        print_json(report.as_dict())
    else:
        print_text(report)


@contextmanager
def failures_in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Report a failure as one line and its exit status. kinds: exception types; default: MergeError, OSError, RunFailed."""
    reported = kinds or (MergeError, OSError, RunFailed)
    try:
        yield
    except reported as error:
        print_text(f"cogumi: {error}", to_error=True)
        raise typer.Exit(exit_status(error)) from error


@contextmanager
def show_waiting(activity: str) -> Iterator[None]:
    """Print what the block does to standard error, if that is a terminal."""
    if sys.stderr.isatty():
        print_text(f"{activity} ...", to_error=True)
    yield


def print_table(title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    """A table as wide as the terminal, 80 columns elsewhere. A column named >name is aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=escape_controls(title), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        # Words are not broken, but for paths and reasons, which may be of any length.
        table.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in rows:
        table.add_row(*map(escape_controls, row))
    Console(markup=False, highlight=False, emoji=False).print(table)


def run_command(app: typer.Typer) -> None:
    """Run a Typer app; a mistake of the user is one line and exit status 2, Ctrl-C is 130, what to try again is 75."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # as standard error does where the locale lacks a character
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter("%(message)s"))
    handler.setLevel(logging.INFO)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("cogumi").setLevel(logging.INFO)
    try:
        try:
            app()
        except ModuleNotFoundError as error:
            if error.name in TRAINING_PACKAGES:
                require_extra(error.name, "train")
            raise
    except UsageError as error:
        print_text(f"cogumi: {with_options(str(error), sys.argv[1:])}", to_error=True)
        sys.exit(exit_status(error))
    except Exception as error:  # noqa: BLE001 (whatever a command raises)
        notes = [note for note in getattr(error, "__notes__", []) if note.startswith(TRACEBACK_IN)]
        text = f"cogumi: {notes[0]}\n" if notes else "".join(traceback.format_exception(error))
        print_text(text, end="", to_error=True)
        sys.exit(exit_status(error))
    except SystemExit as stop:
        if stop.code in STOP_CODES:
            with survive_closed_terminal():
                print_text(f"cogumi: interrupted{after_interrupt(sys.argv[1:])}", to_error=True)
        raise


def with_options(message: str, words: list[str]) -> str:
    """Name the options of a merge command in a message that names the Python function's arguments."""
    if words[:1] not in (["merge"], ["inspect"], ["certify"]):
        return message
    return re.sub(
        r"(?<![\w./])(base=|base_mode=|base_mode\b|base_revision\b)", lambda match: AS_OPTIONS[match[0]], message
    )


def after_interrupt(words: list[str]) -> str:
    """Return what Ctrl-C leaves behind of the command with these words."""
    checks = any(word.partition("=")[0] == "--check" for word in words)
    return AFTER_INTERRUPT.get(" ".join([*words[:1], "--check"] if checks else words[:1]), "")


@contextmanager
def survive_closed_terminal() -> Iterator[None]:
    """While in the block, a write to a broken standard output or error raises nothing: the stream is switched off.

    The methods of the streams themselves are replaced, as logging handlers and progress bars hold on to a stream.
    """
    with ExitStack() as undo:
        for name in ("stdout", "stderr"):
            stream: TextIO | None = getattr(sys, name)
            if stream is not None:
                for method in ("flush", "write"):
                    undo.callback(restore, stream, method, vars(stream).get(method))
                    setattr(stream, method, ignore_broken_stream(stream, f"sys.{name}", getattr(stream, method)))
                undo.callback(stream.flush)  # first: what is still in its buffer may be what cannot be written
        yield


def ignore_broken_stream(stream: TextIO, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(do)
    def done(*text: str) -> Any:
        try:
            return do(*text)
        except OSError as error:
            if error.errno not in BROKEN:
                raise
            # All that has the stream's file descriptor, C++ libraries included, writes to nowhere from now on.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
            log.warning("%s is switched off (%s), and the work continues", name, error.strerror)
            return len(*text) if text else None

    return done


def restore(stream: TextIO, method: str, before: Any) -> None:
    delattr(stream, method)
    if before is not None:
        setattr(stream, method, before)
