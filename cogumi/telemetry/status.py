"""How a run stands, from its directory and the table of processes alone: milliseconds, no torch, nothing changed."""

import difflib
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from cogumi.checkpoints.manifest import step_of
from cogumi.checkpoints.retention import list_checkpoints
from cogumi.core.durability import lock_directory
from cogumi.core.errors import UsageError
from cogumi.core.formatting import escape_controls, flag_sentence, format_duration
from cogumi.core.run_directory import (
    CONSOLE,
    START,
    hostname,
    is_empty,
    is_running,
    jsonable_numbers,
    read_json,
    same_process,
)

AT_WORK = ("starting", "running", "paused")  # a run that was killed says so too
BROKEN_OFF = ("interrupted", "failed", "stopped", "died")
# What cogumi itself ended.
SANITY_CHECKED = "sanity checked"
STOPPED = "stopped by a red flag"
NON_FINITE = "stopped by non-finite numbers"
BUDGET_SPENT = "budget spent"
FRESH_SECONDS = 300.0  # a run on another machine counts as living as long as its last sign of life is no older
TAIL_BYTES = 65536
NAMED = 3  # of the runs that a hint could name


@dataclass(frozen=True)
class Status:
    """One look at a run. Times are seconds since 1970; what the run does not say (yet) is None.

    state: as in status.json, or died (its process is gone without a word), or refused (its start; there is no run). alive:
    None where this machine cannot say. began: when the process did. last_sign: when the run last wrote its status or
    heartbeat. latest, latest_steps: the last value of each metric and its step. log: the file with the run's messages.
    """

    run_dir: str
    state: str
    stage: str | None
    step: int | None
    steps: int | None
    eta_seconds: float | None
    reason: str | None
    alive: bool | None
    pid: int | None
    host: str | None
    began: float | None
    last_sign: float | None
    checkpoint: str | None
    heartbeat: dict[str, Any]
    latest: dict[str, Any]
    latest_steps: dict[str, int]
    log: str

    def __str__(self) -> str:
        return format_sentence(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # as the last word of a cell
        printer.text(str(self))

    @property
    def process(self) -> dict[str, Any]:
        return {"pid": self.pid, "host": self.host, "began": self.began}

    @property
    def ended(self) -> bool:
        return self.state not in AT_WORK or self.alive is False

    @property
    def passed(self) -> bool:
        """Whether the run came to its end and every check of its verdict passed."""
        verdict = read_json_or_empty(Path(self.run_dir) / "verdict.json")
        return self.ended and self.state not in (*BROKEN_OFF, "refused") and verdict.get("passed") is True

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = jsonable_numbers({**asdict(self), "ended": self.ended, "passed": self.passed})
        return values


def status_of(run_dir: Path) -> Status:
    said, started = read_json_or_empty(run_dir / "status.json"), read_json_or_empty(run_dir / START)
    if not said and not started:
        if not is_run(run_dir):
            raise UsageError(f"no run there{hint_of_runs(run_dir)}", place=run_dir)
        said = {"state": "starting"}  # a directory that is just being begun
    beat = read_json_or_empty(run_dir / "heartbeat.json")
    last_sign = max((each["time"] for each in (said, started, beat) if "time" in each), default=None)
    detached = bool(started) and same_process(started, said)
    # A start that has no status of its own yet is what there is to tell, whatever was before it.
    begins = bool(started) and not detached and started["time"] > said.get("time", 0)
    newest = started if begins else said
    alive = is_alive(run_dir, newest, last_sign)
    state, reason = said.get("state", "starting"), said.get("reason")
    if begins:
        state, reason = state_of_start(state if said else None, started, alive)
    elif state in AT_WORK and alive is False:
        state, reason = "died", describe_death(started if detached else {}, said.get("stage") or state)
    there = list_checkpoints(run_dir / "checkpoints")
    latest, latest_steps = latest_metrics(run_dir / "metrics.jsonl")
    # The heartbeat is written at most once a second: the last step of a run that was stopped is in its metrics, or saved.
    reached = [each["step"] for each in (beat, latest) if "step" in each] + [step_of(path) for path in there[:1]]
    return Status(
        run_dir=str(run_dir),
        state=state,
        stage=said.get("stage") if state in AT_WORK and not begins else None,
        step=max(reached, default=None),
        steps=beat.get("steps"),
        eta_seconds=beat.get("eta_seconds") if state in AT_WORK else None,
        reason=reason,
        alive=alive,
        **{key: newest.get(key) for key in ("pid", "host", "began")},
        last_sign=last_sign,
        checkpoint=there[0].name if there else None,
        heartbeat=beat,
        latest=latest,
        latest_steps=latest_steps,
        # A detached process prints its errors into console.log too.
        log=str(run_dir / (CONSOLE if detached or begins else "run.log")),
    )


def state_of_start(before: str | None, started: dict[str, Any], alive: bool | None) -> tuple[str, str | None]:
    """State and reason while the newest word is that of a start. before: the state of the run that it was to resume."""
    if started.get("refused"):
        return before or "refused", f"the last start was refused: {started['refused']}"
    if started.get("exit") == 128 + Signals.SIGTERM:
        return before or "stopped", "it was stopped before it had begun"
    if alive is False:
        return (before if before and before not in AT_WORK else "died"), describe_death(started, "starting")
    return "starting", None


def describe_death(started: dict[str, Any], during: str) -> str:
    """Of a process that left no word itself: what its supervisor saw, or what is left to think."""
    code = started.get("exit")
    if code is None:
        return f"its process is gone without a word (during: {during}): killed, or the machine went down"
    if code >= 0:
        return f"its process ended with exit status {code} (during: {during})"
    by = ", as the kernel does when memory runs out, or as kill -9 does" if -code == Signals.SIGKILL else ""
    return f"its process was ended by {Signals(-code).name} (during: {during}){by}"


def is_alive(run_dir: Path, record: dict[str, Any], last_sign: float | None) -> bool | None:
    """Whether the process of a record lives. Where its number does not tell, whether a process holds the directory's lock."""
    known = is_running(record)
    if known is not None or is_empty(run_dir):
        return known
    with lock_directory(run_dir) as ours:
        if ours is False:
            return True
        if ours and record.get("host") in (None, hostname()):
            return False
    # Not every network filesystem passes locks on from machine to machine.
    return None if last_sign is not None and time.time() - last_sign < FRESH_SECONDS else False


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is no file, or nothing in it yet."""
    try:
        return dict(read_json(path)) if path.stat().st_size else {}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def latest_metrics(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The last value of each metric in the end of a file of metrics, which may be long, and the step that it is of."""
    latest: dict[str, Any] = {}
    steps: dict[str, int] = {}
    for line in tail_lines(path):
        row = {key: value for key, value in json.loads(line).items() if value is not None}
        latest |= row
        steps |= dict.fromkeys(row, row.get("step", 0))
    return latest, steps


def tail_lines(path: Path, size: int = TAIL_BYTES) -> list[str]:
    """The whole lines in the last `size` bytes of a file; none where there is no file."""
    try:
        with path.open("rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - size)
            file.seek(begin)
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    return lines[1 if begin else 0 : -1]


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run, be it one that is just being begun."""
    return any((directory / name).exists() for name in ("status.json", START, CONSOLE))


def runs_in(path: Path) -> list[Path]:
    """The run in a directory, or those below it. Raises UsageError, with what is near, where there is none."""
    found = [path] if is_run(path) else runs_below(path)
    if not found:
        raise UsageError(f"no run there{hint_of_runs(path)}", place=path)
    return found


def runs_below(directory: Path) -> list[Path]:
    """The run directories below a directory, by name: right below it, and one further down, as stages of one project."""
    places = [f"{depth}/{mark}" for depth in ("*", "*/*") for mark in ("status.json", START)]
    return sorted({path.parent for place in places for path in directory.glob(place)})


def hint_of_runs(run_dir: Path) -> str:
    """A hint for a path that is no run: the runs below it, else the one that it nearly names, else those beside it."""
    if below := runs_below(run_dir):
        return f"; below it there is {', '.join(map(str, below[:NAMED]))}"
    beside = {path.name: path for path in runs_below(run_dir.parent) if path.parent == run_dir.parent}
    found = ([] if run_dir.exists() else difflib.get_close_matches(run_dir.name, beside, n=1)) or list(beside)
    return f"; there is {', '.join(str(beside[name]) for name in found[:NAMED])}" if found else ""


# -------------------------------------------------------------------------------------------------------------- in words

LOG_LINES = 8
# Of what trainers log, in this order; the rest is in metrics.jsonl.
RESULTS = ("loss", "eval_loss", "reward", "reward_std", "rewards/margins", "rewards/accuracies")
SHOWN = (*RESULTS, "grad_norm", "learning_rate", "entropy", "kl")


def format_headline(status: Status) -> str:
    said = [f"{relative_path(status.run_dir)}: {format_state(status)}"]
    if status.step is not None and status.steps is not None:
        said.append(f"step {status.step}/{status.steps}")
    if status.eta_seconds is not None and not status.ended:
        said.append(f"{format_duration(status.eta_seconds)} to go")
    if status.alive and not status.ended:
        said.append(f"process {status.pid}")
    return escape_controls(", ".join(said))


def format_sentence(status: Status) -> str:
    """The line, with what was checked, why it ended and what it would resume from."""
    counted, merged = count_flags(status), Path(status.run_dir) / "merged"
    missed = [each for each in failed_checks(checks(status)) if each["figure"] not in (status.reason or "")]
    said = [
        format_headline(status),
        format_checks(status) if counted else "",
        f"flags: {counted}" if status.ended and counted else "",
        *map(format_missed_check, missed),
        " ".join((status.reason or "").split()),
        describe_resume(status) if status.state in BROKEN_OFF else "",
        f"the merged model is {relative_path(str(merged))}" if status.ended and merged.is_dir() else "",
    ]
    return escape_controls("; ".join(filter(None, said)))


def describe_resume(status: Status) -> str:
    """Of a run that was broken off: what it has, and what starting it again does."""
    there = f"the newest checkpoint is {status.checkpoint}" if status.checkpoint else "there is no checkpoint yet"
    return f"{there}; the same command {'resumes from it' if status.checkpoint else 'starts the run again'}"


def format_screen(status: Status) -> str:
    """Everything worth a look, as plain text of some twenty lines."""
    signed = status.last_sign is not None and not status.ended
    log = tail_lines(Path(status.log), size=LOG_LINES * 1000)[-LOG_LINES:]
    lines = [
        format_headline(status),
        " ".join((status.reason or "").split()),
        f"last sign of life {format_duration(time.time() - (status.last_sign or 0))} ago" if signed else "",
        format_metrics(status),
        format_machine(status.heartbeat),
        str(status.heartbeat.get("stalled") or ""),
        *(
            f"{each['level']}: {each['name']}: {flag_sentence(each)}"
            for each in flags(status)
            if each["level"] != "green"
        ),
        describe_resume(status) if status.state in BROKEN_OFF else "",
        f"newest checkpoint: {status.checkpoint}" if status.checkpoint and status.state not in BROKEN_OFF else "",
        *(f"FAIL  {format_failed_check(each)}" for each in failed_checks(checks(status))),
    ]
    end = [f"--- {relative_path(status.log)}", *log] if log else []
    return escape_controls("\n".join([*filter(None, lines), *end]))


def format_state(status: Status) -> str:
    if status.alive is None and not status.ended:
        return f"{status.state} on {status.host or 'another machine'} (whether it still is cannot be seen from here)"
    return f"{status.state} ({status.stage})" if status.stage else status.state


def format_metrics(status: Status) -> str:
    """The last values, with the step of each that is older than the newest: beside it, it would read as of now."""
    steps = {key: status.latest_steps[key] for key in SHOWN if key in status.latest}
    newest = max(steps.values(), default=0)
    older = {key: f" (step {step})" if step < newest else "" for key, step in steps.items()}
    return "  ".join(f"{key} {format_value(status.latest[key])}{step}" for key, step in older.items())


def format_machine(heartbeat: dict[str, Any]) -> str:
    """What a heartbeat says beside the step, as far as it does: speed, money, GPU, memory, disk."""
    gpu, memory, disk = (heartbeat.get(key) or {} for key in ("gpu", "memory", "disk"))
    said = {
        "{:,.0f} tokens/s": heartbeat.get("tokens_per_second"),
        "MFU {:.0%}": heartbeat.get("mfu"),
        "${:.2f} so far": heartbeat.get("cost_so_far"),
        "${:.2f} at the end": heartbeat.get("cost_at_end"),
        "GPU {:.0f} %": gpu.get("utilization_percent"),
        "GPU memory {:.0%}": gpu and gpu["used"] / gpu["total"],
        "memory {:.0%}": memory and memory["used"] / memory["total"],
        "{:.0f} GB of disk free": disk and disk["free"] / 1e9,
    }
    return "  ".join(words.format(value) for words, value in said.items() if isinstance(value, int | float))


def flags(status: Status) -> list[dict[str, Any]]:
    return list(read_json_or_empty(Path(status.run_dir) / "flags.json").get("flags", []))


def reds(status: Status) -> list[str]:
    return [str(each["name"]) for each in flags(status) if each["level"] == "red"]


def count_flags(status: Status) -> str:
    """The flags in a few words: `12 green`, or `RED loss trend, 1 yellow, 10 green`; "" where nothing was judged yet."""
    counts = Counter(each["level"] for each in flags(status))
    red = [f"RED {' and '.join(reds(status))}"] if counts["red"] else []
    return ", ".join([*red, *(f"{counts[level]} {level}" for level in ("yellow", "green") if counts[level])])


def checks(status: Status) -> list[dict[str, Any]]:
    return list(read_json_or_empty(Path(status.run_dir) / "verdict.json").get("checks", [])) if status.ended else []


def failed_checks(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in found if not each["passed"]]


def format_missed_check(check: dict[str, Any]) -> str:
    """A check that was missed in one clause: its name and its fix, or the figure where nothing is to be done."""
    return f"FAIL {check['name']}: {check.get('fix') or check['figure']}"


def format_failed_check(check: dict[str, Any]) -> str:
    return "; ".join(filter(None, (f"{check['name']}: {check['figure']}", check.get("fix"))))


def format_checks(status: Status) -> str:
    """`9 of 9 checks passed`, or "" before there is a verdict. While a flag is red, nothing is said to have passed."""
    return count_checks(found, reds(status)) if (found := checks(status)) else ""


def count_checks(found: list[dict[str, Any]], red: list[str]) -> str:
    """How many of the checks of a verdict passed, beside the names of the red flags."""
    met = f"{sum(each['passed'] for each in found)} of {len(found)} checks"
    return f"{met} are met, but {' and '.join(red)} {'is' if len(red) == 1 else 'are'} RED" if red else f"{met} passed"


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def relative_path(path: str) -> str:
    """A path below the working directory as one would type it."""
    short = os.path.relpath(path)
    return path if short.startswith("..") else short
