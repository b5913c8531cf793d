"""A command as a score (`--score "command:./judge.sh"`): JSON lines on its standard input, a number for each on its output."""

import json
import math
import os
import shlex
import signal
import subprocess
import tempfile
from contextlib import suppress
from itertools import islice
from shutil import which
from threading import Timer
from typing import Any

from cogumi.core.errors import UsageError
from cogumi.data.chat import text_of

COMMAND = "command:"
START_SECONDS, ROW_SECONDS = 60, 10  # that a judge may take, to start and for each row
LINE_CHARACTERS = 200  # of a line of its output, at most
FIX = f"write {COMMAND}PROGRAM ARGUMENTS, which reads JSON lines and prints one number for each"


def judge_of(score: str) -> Any:
    """Return a reward function that asks the command of a score. Raises UsageError where there is no such program."""

    def judge(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        columns = {name: values for name, values in columns.items() if isinstance(values, list)}
        columns |= {"prompt": prompts, "completion": list(map(text_of, completions))}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        try:
            return ask(words, rows)
        except (OSError, ValueError) as error:
            raise UsageError(f"{error}", key=f"--score {score}", fix=FIX) from None

    try:
        words = shlex.split(score.removeprefix(COMMAND))
        if not words or which(words[0]) is None:
            raise ValueError(f"there is no program {' '.join(words[:1])!r} that can be run")
    except ValueError as error:
        raise UsageError(f"{error}", key=f"--score {score}", fix=FIX) from None
    return judge


def ask(words: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Give rows to a command and return its numbers. Raises ValueError for all else that it prints, and for a failure.

    At its end, or that of its time, all processes of its group are killed.
    """
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "errors": "replace", "start_new_session": True}
    with tempfile.TemporaryFile("w+") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
        file.seek(0)
        with subprocess.Popen(words, stdin=file, **options) as process:

            def kill() -> None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            timer, output = Timer(seconds := START_SECONDS + ROW_SECONDS * len(rows), kill), process.stdout
            timer.start()
            assert output is not None
            try:
                lines = list(islice(iter(lambda: output.readline(LINE_CHARACTERS), ""), len(rows) + 1))
                status = 0 if len(lines) > len(rows) else process.wait()
            finally:
                timer.cancel()
                kill()
    if status == -signal.SIGKILL:
        raise ValueError(f"it was killed, after its limit of {seconds} s for {len(rows)} rows or by the system")
    if status:
        raise ValueError(f"it ended with status {status}")
    if len(lines) != len(rows):
        count = f"more than {len(rows)}" if len(lines) > len(rows) else len(lines)
        raise ValueError(f"it printed {count} lines for {len(rows)} rows")
    for number, line in enumerate(lines, 1):
        with suppress(ValueError):
            if math.isfinite(float(line)):
                continue
        raise ValueError(f"line {number} of its output is {line.strip()!r}, and no number")
    return list(map(float, lines))
