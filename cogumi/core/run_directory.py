"""The run directory, which a run writes and everything else reads. docs/architecture.md lists its files.

A run is resumed by what status.json says, so it is apart from heartbeat.json, which a thread replaces each second. Files
are replaced whole (temporary file, fsync, rename); a `.jsonl` line is one write. A reader never sees half of either.
"""

import errno
import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError

# What a detached process keeps in the directory of its run, from before there is a run in it.
CONSOLE, START = "console.log", "start.json"
DECISIONS, FORECAST = "decisions.json", "forecast.json"  # read and written by sections
SETTINGS = "settings"  # of decisions.json: what was chosen, which a resumed run keeps
SAMPLES_FILE = "samples.jsonl"  # completions of held-out prompts, before the training, on the way and at its end
ROLLOUTS = "rollouts.jsonl"
COMPARISON, COMPARED = "comparison.json", "comparison"  # with cogumi.compare_with, and the check of the verdict
# What somebody asks of a run under way, by putting a file there; and what says that it waits.
CHECKPOINT, PAUSE, PAUSED = "CHECKPOINT", "PAUSE", "PAUSED"
STOP = "STOP"  # `cogumi stop --kill-after` killed the run: it is not started again
# Start times use wall-clock time, which may be adjusted; PIDs are not reused that quickly.
CLOCK_SECONDS = 5.0
NUMBERS = re.compile(r"\[\n\s*((?:-?[\d.eE+-]+,\s*)*-?[\d.eE+-]+)\n\s*\]")  # as json.dumps writes them with an indent


def create_run_dir(path: Path) -> Path:
    """Make an empty run directory, or raise UsageError if there is a run in it or it cannot be written."""
    try:
        refuse_occupied(path)
        path.mkdir(parents=True, exist_ok=True)
        # Created by one process only: of two that start at once, the second is told.
        os.close(os.open(path / "status.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        write_atomic(path / "status.json", json.dumps({"state": "starting", "time": time.time(), **this_process()}))
    except FileExistsError:
        raise UsageError(
            "another run is being started there", place=path, fix="set cogumi.run_dir to a new directory"
        ) from None
    except OSError as error:
        raise unwritable_error(path, error) from None
    return path


def unwritable_error(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write the run directory: {error.strerror}", place=path, fix="make it writable, or set cogumi.run_dir"
    )


def is_empty(path: Path) -> bool:
    """Tell whether the directory is missing, empty, or only has the files of a detached start. Raises UsageError for a file."""
    try:
        if os.path.lexists(path) and not path.is_dir():
            raise UsageError(f"{path} is a file, not a directory", fix="set cogumi.run_dir to a new directory")
        return not path.is_dir() or all(entry.name in (CONSOLE, START) for entry in path.iterdir())
    except OSError as error:  # its name is too long, or it cannot be read
        raise unwritable_error(path, error) from None


def refuse_occupied(path: Path) -> None:
    """Raise UsageError when there is a run, or anything else, in the directory."""
    if not is_empty(path):
        status = path / "status.json"
        begun = status.exists() and status.stat().st_size
        content = f"a run ({read_json(status).get('state', 'unknown')})" if begun else "files"
        fix = "set cogumi.run_dir to a new directory, or delete this one"
        raise UsageError(f"{path} already holds {content}", fix=fix)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` so that a reader, a crash, a second writer or a full disk leaves the old file or the new one."""
    # Not mkstemp, whose files only their owner may read.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value to be read by people as well: a list of numbers is one line."""
    text = json.dumps(jsonable_numbers(value), indent=2, ensure_ascii=False)
    text = NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    write_atomic(path, text + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of a run. Raises UsageError if it is damaged; cogumi itself writes these files whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"it holds no JSON ({error})", place=path, fix="put it back as it was, or remove it") from None


def config_of(run: Path) -> dict[str, Any]:
    """Return the resolved configuration of a run, {} where there is none yet."""
    import yaml  # here, as the doctor imports this module where packages are missing

    path = run / "config.yaml"
    return (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}


def failed_check_names(run: Path, of_merge: bool = True) -> list[str]:
    """Return the checks that a run's verdict failed. of_merge: also those of its merge."""
    names = [check["name"] for check in read_json(run / "verdict.json")["checks"] if not check["passed"]]
    return [name for name in names if of_merge or not name.startswith("merge")]


def describe_failure(run: Path, of_merge: bool = True) -> str:
    """Describe the `cogumi.gate` that a run has not met, with the figure of its comparison, else the checks that it failed.

    Returns "" for a run that failed nothing, also for one without a verdict. of_merge: also checks of its merge.
    """
    gate, has_verdict = (config_of(run).get("cogumi") or {}).get("gate"), (run / "verdict.json").exists()
    checks = read_json(run / "verdict.json")["checks"] if gate and has_verdict else []
    check = next((check for check in checks if check["name"] == COMPARED), {"figure": "the run has no comparison"})
    if gate and not check.get("passed"):
        return f"cogumi.gate: {gate} is not met: {check['figure']}"
    failed = failed_check_names(run, of_merge) if has_verdict else []
    return f"failed checks: {', '.join(failed)}" if failed else ""


def write_section(path: Path, name: str, value: Any) -> None:
    """Set one section of a JSON object in a file, which only the run's main thread writes."""
    write_json(path, {**(read_json(path) if path.exists() else {}), name: value})


def read_section(path: Path, name: str) -> Any:
    """One section of a JSON object in a file; {} where there is none yet."""
    return read_json(path).get(name, {}) if path.exists() else {}


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Add one line. Raises OSError, with the file as it was, where only a part of it fits on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before, line = os.fstat(descriptor).st_size, json_line(row).encode()
        if os.write(descriptor, line) != len(line):
            os.ftruncate(descriptor, before)
            raise OSError(errno.ENOSPC, "only part of a line fits on the disk", str(path))
    finally:
        os.close(descriptor)


def json_line(row: dict[str, Any]) -> str:
    return json.dumps(jsonable_numbers(row), ensure_ascii=False) + "\n"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file, if it exists. Ignore a final partial line: the writer was interrupted."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def jsonable_numbers(value: Any) -> Any:
    """NaN and infinities as strings: JSON has no word for them, and a metric that is NaN must stay visible."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: jsonable_numbers(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable_numbers(v) for v in value]
    return value


@cache
def hostname() -> str:
    return socket.gethostname()


def this_process() -> dict[str, Any]:
    """Return a record of this process: its PID, the machine, and when it began (seconds since 1970)."""
    import psutil  # here, as the doctor imports this module where packages are missing

    return {"pid": os.getpid(), "host": hostname(), "began": psutil.Process().create_time()}


def is_running(record: Mapping[str, Any]) -> bool | None:
    """Tell whether the process of a record is running. A zombie is not.

    None for a record of another machine or without a pid, and where the process with that pid began at another time.
    """
    if record.get("pid") is None or record.get("host") != hostname():
        return None
    import psutil

    try:
        process = psutil.Process(record["pid"])
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return True if abs(process.create_time() - record["began"]) <= CLOCK_SECONDS else None
    except psutil.NoSuchProcess:
        return False


def same_process(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two records are of the same process. A record without a pid never is."""
    return one.get("pid") is not None and all(one.get(key) == other.get(key) for key in ("pid", "host", "began"))
