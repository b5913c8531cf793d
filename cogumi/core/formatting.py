"""Figures, flags and text as a person reads them in a line of log."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Control characters but newline and tab, bidi overrides, and what Python makes of bytes that are not UTF-8.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""Show control characters in text that others wrote, as in `\x1b[31m`, so that a terminal does not obey them."""
    return CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text.replace("\r\n", "\n"))


def python_command() -> str:
    """This environment's Python as a shell takes it: below the current directory, or as a whole path."""
    python = Path(sys.executable or "python")
    with suppress(OSError):  # the current directory was removed
        if python.is_relative_to(Path.cwd()):
            return shlex.quote(str(python.relative_to(Path.cwd())))
    return shlex.quote(str(python))


def pip_command(words: str) -> str:
    """A command of pip for this environment, whatever `pip` and `python` are in the shell that it is typed into."""
    return f"{python_command()} -m pip {words}"


def install_command(extra: str) -> str:
    """The command that installs an extra of pyproject.toml."""
    return pip_command(f'install "cogumi[{extra}]"')


def is_command(program: str) -> bool:
    """Tell whether a process was started as the command line of cogumi."""
    return Path(program).name == "cogumi" or Path(program).parts[-2:] == ("cogumi", "__main__.py")


def format_command(arguments: Sequence[str]) -> str:
    """Return the command that started a process, without a launcher."""
    program, *words = arguments
    return shlex.join(["cogumi", *words] if is_command(program) else ["python", program, *words])


def format_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `1 h 05 min`, `2 d 3 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_bytes(count: float) -> str:
    """Bytes of a disk or a file, in decimal units to three figures: 252 GB, 13.5 GB, 240 kB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.{0 if abs(count) >= 99.95 * size else 1}f} {unit}"
    return f"{count:.0f} B"


def format_memory(count: float) -> str:
    """Bytes of memory, in binary units as the driver and torch give them: 1.5 GiB, 12 MiB, 1.2 MiB."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**20:.1f} MiB"


def format_share(count: int, total: int) -> str:
    """In percent; what is there is never 0.0%."""
    return "< 0.1%" if 0 < count < total / 1000 else f"{count / max(1, total):.1%}"


def flag_sentence(flag: Mapping[str, Any]) -> str:
    """A flag that is not green in one sentence: its likely cause, the figures, the key to change."""
    cause, knob = (str(flag.get(key) or "") for key in ("cause", "knob"))
    sentence = ": ".join(filter(None, (cause, str(flag["evidence"]))))
    return f"{sentence}; change {knob}" if knob else sentence


def join_names(names: Sequence[str], limit: int = 12) -> str:
    """Join the first `limit` names, and count the rest."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line; its type if the text is empty."""
    return " ".join(f"{error}".split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; its type if the text is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1].strip()
