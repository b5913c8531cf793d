"""What `cogumi doctor` says of one thing it looked at."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warning", "fatal", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    state: "ok"; "note": worth knowing, nothing wrong; "warning": something is wrong; "fatal": nothing can train before this
    is mended; "skipped": not looked at, or not there. figure: what was found. cause and fix: "" where nothing is wrong.
    """

    what: str
    state: State
    figure: str = ""
    cause: str = ""
    fix: str = ""
