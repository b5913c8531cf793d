"""Exception types and doctor findings."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self

from cogumi.core.formatting import install_command, one_line

log = logging.getLogger("cogumi")
TRAINING_PACKAGES = ("datasets", "polars", "pyarrow", "trl")  # the extra "train" of pyproject.toml


class UsageError(Exception):
    """Bad input from the user, as one line `place: key: message; fix`.

    The command line prints that line without a traceback and exits with status 2; a notebook shows it alone as well.

    Args:
        message: What is wrong.
        place: The file, with its line if known, or the directory.
        key: The configuration key or the option.
        fix: What the user does next.
    """

    def __init__(self, message: str, *, place: Path | str = "", key: str = "", fix: str = "") -> None:
        first = message.partition(" ")[0].rstrip(":")
        # As in "train.max_steps = 0: ...", and in the place "override train.max_steps".
        named = first == key or f"`{key}" in message or str(place) == f"override {key}"
        subject = ": ".join(str(part) for part in (place, "" if named else key, message) if part)
        super().__init__(f"{subject}; {fix}" if fix else subject)
        self.message, self.place, self.key, self.fix = message, str(place), key, fix

    @classmethod
    def like(cls, error: "UsageError") -> Self:
        """Return an error of this class with the same content."""
        return cls(error.message, place=error.place, key=error.key, fix=error.fix)

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints in place of a traceback."""
        return [f"cogumi: {self}"]


class RefusedAtSetup(UsageError):
    """A library refuses a setting before the first step; the run leaves no directory."""


class NothingToMerge(UsageError):
    """All updates of an adapter are zero."""


class DiskFull(UsageError):
    """Something does not fit on the disk of the directory `place`; needed: its bytes, 0 if unknown."""

    def __init__(self, text: str, place: Path, needed: int = 0) -> None:
        super().__init__(text)
        self.place, self.needed = str(place), needed


class RunFailed(Exception):
    """A run in another process ended before it began to train, or one of its processes died. retriable: try again."""

    def __init__(self, text: str, retriable: bool = False) -> None:
        super().__init__(text)
        self.retriable = retriable


class UserCodeError(RuntimeError):
    """The user's own code raised an error in a run; the message names the function, the file and the line."""


class EndedByWatch(SystemExit):
    """The watch of a run ends it: its budget is spent, or it hangs. state, reason: as in status.json."""

    def __init__(self, code: int, state: str, reason: str) -> None:
        super().__init__(code, state, reason)  # all of them, for pickle
        self.code = self.status = code
        self.state, self.reason = state, reason


class MergeError(Exception):
    """A merge produced something that is not W + delta, or a merged directory is not what was written."""


def require_extra(module: str, extra: str, key: str = "") -> None:
    """Raise UsageError if a module is not installed. extra: the one of pyproject.toml that has it. key: what needs it."""
    if find_spec(module) is None:
        raise UsageError(f"{module} is not installed", key=key, fix=f"run: {install_command(extra)}")


@contextmanager
def best_effort(action: str, *expected: type[Exception]) -> Iterator[None]:
    """Log an error of the block as "cannot ACTION: ..." instead of raising it. expected: its types; none for any."""
    kinds = expected or (Exception,)
    try:
        yield
    except kinds as error:
        log.error("cannot %s: %s", action, one_line(error))


def ends_by_signal(error: BaseException) -> bool:
    """Tell the exit of a SIGTERM or SIGHUP handler from an exit that the user's own code calls."""
    return isinstance(error, SystemExit) and error.code in (128 + signal.SIGTERM, 128 + signal.SIGHUP)


# Begins the note of an error that a run has logged with its known cause: the command line prints this note alone.
TRACEBACK_IN = "the traceback is in "
# What KeyboardInterrupt says when a training was ended in good order. (A subclass would not give exit status 130.)
FINISHED_AND_SAVED = "ended after its last finished step; the lines above say what was saved"


State = Literal["ok", "note", "warning", "fatal", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One result of `cogumi doctor`.

    state: "note": worth knowing, nothing wrong; "warning": something is wrong; "fatal": nothing can train before this is
    repaired; "skipped": not examined, or missing. cause and fix: "" if nothing is wrong.
    """

    what: str
    state: State
    figure: str = ""
    cause: str = ""
    fix: str = ""
