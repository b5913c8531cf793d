"""The status of a run, read in milliseconds from its directory and the process table, without torch."""

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
from cogumi.checkpoints.snapshots import list_snapshots
from cogumi.checkpoints.verify import list_checkpoints
from cogumi.core import run_directory
from cogumi.core.durability import lock_directory
from cogumi.core.errors import UsageError
from cogumi.core.formatting import escape_controls, flag_sentence, format_duration, format_memory

AT_WORK = ("starting", "running", "paused")  # also in the status.json of a run that was killed
HUNG = "hung"
BROKEN_OFF = ("interrupted", "failed", "stopped", "died", HUNG)
# States of runs that cogumi itself ended.
SANITY_CHECKED = "sanity checked"
STOPPED = "stopped by a red flag"
NON_FINITE = "stopped by non-finite numbers"
BUDGET_SPENT = "budget spent"
FRESH_SECONDS = 300.0  # a run on another machine counts as alive while its last sign of life is no older
TAIL_BYTES = 65536
MAX_HINTED_RUNS = 3


@dataclass(frozen=True)
class Status:
    """A run as it was at one look. Times are seconds since 1970; None is what the run does not tell (yet).

    state: as in status.json, or died (the process disappeared), or refused (at its start; there is no run). cause, fix: of a
    known failure that ended it. retriable: another try may succeed. gpu_memory: bytes by PID, when it failed. alive: None if
    this machine cannot tell. began: when the process did. last_sign: when the run last wrote its status or heartbeat.
    trackers: URLs. snapshots: steps of adapters. latest, latest_steps: last values of metrics, and their steps. log: a file.
    """

    run_dir: str
    state: str
    stage: str | None
    step: int | None
    steps: int | None
    eta_seconds: float | None
    reason: str | None
    cause: str | None
    fix: str | None
    retriable: bool | None
    gpu_memory: dict[str, int] | None
    trackers: dict[str, str] | None
    alive: bool | None
    pid: int | None
    host: str | None
    began: float | None
    last_sign: float | None
    checkpoint: str | None
    snapshots: list[int]
    heartbeat: dict[str, Any]
    latest: dict[str, Any]
    latest_steps: dict[str, int]
    log: str

    def __str__(self) -> str:
        return format_sentence(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # the value of a notebook cell
        printer.text(str(self))

    @property
    def process(self) -> dict[str, Any]:
        return {"pid": self.pid, "host": self.host, "began": self.began}

    @property
    def ended(self) -> bool:
        return self.state not in AT_WORK or self.alive is False

    @property
    def passed(self) -> bool:
        """Return whether the run came to its end and every check of its verdict passed."""
        verdict = read_json_or_empty(Path(self.run_dir) / "verdict.json")
        return self.ended and self.state not in (*BROKEN_OFF, "refused") and verdict.get("passed") is True

    def as_dict(self) -> dict[str, Any]:
        return run_directory.jsonable_numbers({**asdict(self), "ended": self.ended, "passed": self.passed})


def status_of(run_dir: Path) -> Status:
    record, started = read_json_or_empty(run_dir / "status.json"), read_json_or_empty(run_dir / run_directory.START)
    if not record and not started:
        if not is_run(run_dir):
            raise UsageError(f"no run there{hint_of_runs(run_dir)}", place=run_dir)
        record = {"state": "starting"}  # the directory was just made
    beat = read_json_or_empty(run_dir / "heartbeat.json")
    last_sign = max((entry["time"] for entry in (record, started, beat) if "time" in entry), default=None)
    detached = bool(started) and run_directory.same_process(started, record)
    # A start without a status of its own yet counts, whatever was before it.
    begins = bool(started) and not detached and started["time"] > record.get("time", 0)
    newest = started if begins else record
    alive = is_alive(run_dir, newest, last_sign)
    state, reason = record.get("state", "starting"), record.get("reason")
    # Its training process ends or has ended, and the one that starts it again (`cogumi.restarts`) lives.
    restarts = not begins and bool(started.get("restarts") and run_directory.is_running(started))
    if restarts and (record.get("retriable") or (state in AT_WORK and not alive)):
        newest, alive, state, reason = started, True, "starting", "its process has ended, and may be started again"
    if begins:
        state, reason = state_of_start(state if record else None, started, alive)
    elif state in AT_WORK and alive is False:
        state, reason = "died", describe_death(started if detached else {}, record.get("stage") or state)
    beat = {} if begins and state in AT_WORK else beat  # of the process before
    saved = list_checkpoints(run_dir / "checkpoints")
    latest, latest_steps = latest_metrics(run_dir / "metrics.jsonl")
    # The heartbeat is written at most once a second: the last step of a run that was stopped is in its metrics, or saved.
    reached = [source["step"] for source in (beat, latest) if "step" in source] + [step_of(path) for path in saved[:1]]
    if state in AT_WORK and beat.get("steps") is None:  # before it trains a resumed part has no step of its own
        reached = []
    return Status(
        run_dir=str(run_dir),
        state=state,
        stage=record.get("stage") if state in AT_WORK and not begins else None,
        step=max(reached, default=None),
        steps=beat.get("steps"),
        eta_seconds=beat.get("eta_seconds") if state in AT_WORK else None,
        reason=reason,
        **{key: newest.get(key) for key in ("cause", "fix", "retriable", "gpu_memory", "trackers")},
        alive=alive,
        **{key: newest.get(key) for key in ("pid", "host", "began")},
        last_sign=last_sign,
        checkpoint=saved[0].name if saved else None,
        snapshots=list(list_snapshots(run_dir / "checkpoints")),
        heartbeat=beat,
        latest=latest,
        latest_steps=latest_steps,
        # A detached process prints its errors into console.log too.
        log=str(run_dir / (run_directory.CONSOLE if detached or begins else "run.log")),
    )


def state_of_start(before: str | None, started: dict[str, Any], alive: bool | None) -> tuple[str, str | None]:
    """Return state and reason while the newest record is that of a start. before: the state of the run it resumes."""
    if started.get("refused"):
        return before or "refused", f"the last start was refused: {started['refused']}"
    if started.get("exit") == 128 + Signals.SIGTERM:
        return before or "stopped", "it was stopped before it had begun"
    if alive is False:
        return (before if before and before not in AT_WORK else "died"), describe_death(started, "starting")
    return "starting", None


def describe_death(started: dict[str, Any], during: str) -> str:
    """Describe the end of a process that recorded none, from what its supervisor saw."""
    code = started.get("exit")
    if code is None:
        return f"its process disappeared without an exit record (during: {during}): killed, or the machine went down"
    if code >= 0:
        return f"its process ended with exit status {code} (during: {during})"
    by = ", as the kernel does when memory runs out, or as kill -9 does" if -code == Signals.SIGKILL else ""
    return f"its process was ended by {Signals(-code).name} (during: {during}){by}"


def is_alive(run_dir: Path, record: dict[str, Any], last_sign: float | None) -> bool | None:
    """Whether the process of a record lives. Where its number does not tell, whether a process holds the directory's lock."""
    known = run_directory.is_running(record)
    if known is not None or run_directory.is_empty(run_dir):
        return known
    with lock_directory(run_dir) as ours:
        if ours is False:
            return True
        if ours and record.get("host") in (None, run_directory.hostname()):
            return False
    # Not every network filesystem passes locks on from machine to machine.
    return None if last_sign is not None and time.time() - last_sign < FRESH_SECONDS else False


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no file, or nothing in it yet."""
    try:
        return dict(run_directory.read_json(path)) if path.stat().st_size else {}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def latest_metrics(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the last value of each metric in the tail of metrics.jsonl, and its step."""
    latest: dict[str, Any] = {}
    steps: dict[str, int] = {}
    for line in tail_lines(path):
        row = {key: value for key, value in json.loads(line).items() if value is not None}
        latest |= row
        steps |= dict.fromkeys(row, row.get("step", 0))
    return latest, steps


def tail_lines(path: Path, size: int = TAIL_BYTES) -> list[str]:
    try:
        with path.open("rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - size)
            file.seek(begin)
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    return lines[1 if begin else 0 : -1]


def is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("status.json", run_directory.START, run_directory.CONSOLE))


def run_above(place: Path) -> Path | None:
    """Return the run that a directory is or is a part of, such as its adapter, merged model, checkpoint or snapshot."""
    return next((path for path in (place, *place.resolve().parents[:3]) if place.exists() and is_run(path)), None)


def runs_in(path: Path) -> list[Path]:
    """Return the run in a directory, or those below it. Raises UsageError with a hint if there is none."""
    runs = [path] if is_run(path) else runs_below(path)
    if not runs:
        raise UsageError(f"no run there{hint_of_runs(path)}", place=path)
    return runs


def runs_below(directory: Path) -> list[Path]:
    """Return the run directories below a directory, by name: one or two levels down, as the stages of a project are."""
    places = [f"{depth}/{mark}" for depth in ("*", "*/*") for mark in ("status.json", run_directory.START)]
    return sorted({path.parent for place in places for path in directory.glob(place)})


def hint_of_runs(run_dir: Path) -> str:
    """Return a hint for a path that is no run: the runs below it, else the one it nearly names, else those beside it."""
    if below := runs_below(run_dir):
        return f"; below it there is {', '.join(map(str, below[:MAX_HINTED_RUNS]))}"
    beside = {path.name: path for path in runs_below(run_dir.parent) if path.parent == run_dir.parent}
    names = ([] if run_dir.exists() else difflib.get_close_matches(run_dir.name, beside, n=1)) or list(beside)
    return f"; there is {', '.join(str(beside[name]) for name in names[:MAX_HINTED_RUNS])}" if names else ""


# -------------------------------------------------------------------------------------------------------------- in words

LOG_LINES = 8
# Metrics that are shown, in this order; the rest is in metrics.jsonl.
RESULTS = ("loss", "eval_loss", "reward", "reward_std", "rewards/margins", "rewards/accuracies")
SHOWN = (*RESULTS, "grad_norm", "learning_rate", "entropy", "kl")


def format_headline(status: Status) -> str:
    parts = [f"{relative_path(status.run_dir)}: {format_state(status)}"]
    if status.step is not None and status.steps is not None:
        parts.append(f"step {status.step}/{status.steps}")
    if status.eta_seconds is not None and not status.ended:
        parts.append(f"{format_duration(status.eta_seconds)} to go")
    if status.alive and not status.ended:
        parts.append(f"process {status.pid}")
    return escape_controls(", ".join(parts))


def format_sentence(status: Status) -> str:
    """Return the headline with what was checked, why the run ended and what it would resume from."""
    counted, made, merged = count_flags(status), checks(status), Path(status.run_dir) / "merged"
    missed = [check for check in failed_checks(made) if check["figure"] not in (status.reason or "")]
    parts = [
        format_headline(status),
        *map(format_missed_check, missed),
        count_checks(made, reds(status)) if made and counted else "",
        f"flags: {counted}" if status.ended and counted else "",
        " ".join((status.reason or "").split()),
        format_cause(status),
        describe_resume(status),
        f"the merged model is {relative_path(str(merged))}" if status.ended and merged.is_dir() else "",
    ]
    return escape_controls("; ".join(filter(None, parts)))


def format_cause(status: Status) -> str:
    """Return cause and fix of a known failure, and whether to try again; "" for another run."""
    known = f"known cause: {status.cause} Fix: {status.fix}" if status.cause else ""
    held = ", ".join(f"{format_memory(size)} by process {pid}" for pid, size in (status.gpu_memory or {}).items())
    again = "another try may succeed" if status.retriable else ""
    return "; ".join(filter(None, (known.rstrip("."), held and f"GPU memory then: {held}", again)))


def describe_resume(status: Status) -> str:
    """Describe what an interrupted run has saved, and what starting it again does; "" for another run."""
    if status.state not in BROKEN_OFF:
        return ""
    if not status.checkpoint:
        return "there is no checkpoint yet; the same command starts the run again"
    return f"the newest checkpoint is {status.checkpoint}; the same command resumes from it"


def format_screen(status: Status) -> str:
    signed = status.last_sign is not None and (status.state == "died" or not status.ended)
    heartbeat = {} if status.state == "died" else status.heartbeat
    log = tail_lines(Path(status.log), size=LOG_LINES * 1000)[-LOG_LINES:]
    lines = [
        format_headline(status),
        " ".join((status.reason or "").split()),
        format_cause(status),
        f"last sign of life {format_duration(time.time() - (status.last_sign or 0))} ago" if signed else "",
        format_metrics(status),
        format_machine(heartbeat),
        str(heartbeat.get("stalled") or ""),
        *(
            f"{flag['level']}: {flag['name']}: {flag_sentence(flag)}"
            for flag in flags(status)
            if flag["level"] != "green"
        ),
        describe_resume(status),
        *(f"{name}: {url}" for name, url in (status.trackers or {}).items()),
        f"newest checkpoint: {status.checkpoint}" if status.checkpoint and status.state not in BROKEN_OFF else "",
        f"adapters of steps {', '.join(map(str, status.snapshots))}: checkpoints/adapters/step-N"
        if status.snapshots
        else "",
    ]
    for check in failed_checks(checks(status)):
        fix = f"; {check['fix']}" if check.get("fix") else ""
        lines.append(f"FAIL  {check['name']}: {check['figure']}{fix}")
    end = [f"--- {relative_path(status.log)}", *log] if log else []
    return escape_controls("\n".join([*filter(None, lines), *end]))


def format_state(status: Status) -> str:
    if status.alive is None and not status.ended:
        return f"{status.state} on {status.host or 'another machine'} (whether it still is cannot be seen from here)"
    return f"{status.state} ({status.stage})" if status.stage else status.state


def format_metrics(status: Status) -> str:
    """Return the last values; one that is older than the newest is followed by its step."""
    steps = {key: status.latest_steps[key] for key in SHOWN if key in status.latest}
    newest = max(steps.values(), default=0)
    older = {key: f" (step {step})" if step < newest else "" for key, step in steps.items()}
    return "  ".join(f"{key} {format_value(status.latest[key])}{step}" for key, step in older.items())


def format_machine(heartbeat: dict[str, Any]) -> str:
    gpu, memory, disk = (heartbeat.get(key) or {} for key in ("gpu", "memory", "disk"))
    values = {
        "{:,.0f} tokens/s": heartbeat.get("tokens_per_second"),
        "MFU {:.0%}": heartbeat.get("mfu"),
        "${:.2f} so far": heartbeat.get("cost_so_far"),
        "${:.2f} at the end": heartbeat.get("cost_at_end"),
        "GPU {:.0f} %": gpu.get("utilization_percent"),
        "{:.0f} °C": gpu.get("temperature"),
        "GPU memory {:.0%}": gpu and gpu["used"] / gpu["total"],
        "memory {:.0%}": memory and memory["used"] / memory["total"],
        "{:.0f} GB of disk free": disk and disk["free"] / 1e9,
    }
    return "  ".join(words.format(value) for words, value in values.items() if isinstance(value, int | float))


def flags(status: Status) -> list[dict[str, Any]]:
    return list(read_json_or_empty(Path(status.run_dir) / "flags.json").get("flags", []))


def reds(status: Status) -> list[str]:
    return [str(flag["name"]) for flag in flags(status) if flag["level"] == "red"]


def count_flags(status: Status) -> str:
    """Count the flags: `12 green`, or `RED loss trend, 1 yellow, 10 green`; "" before a judgement."""
    counts = Counter(flag["level"] for flag in flags(status))
    red = [f"RED {' and '.join(reds(status))}"] if counts["red"] else []
    return ", ".join([*red, *(f"{counts[level]} {level}" for level in ("yellow", "green") if counts[level])])


def checks(status: Status) -> list[dict[str, Any]]:
    return list(read_json_or_empty(Path(status.run_dir) / "verdict.json").get("checks", [])) if status.ended else []


def failed_checks(verdict_checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [check for check in verdict_checks if not check["passed"]]


def format_missed_check(check: dict[str, Any]) -> str:
    """Return a failed check in one clause: its name and its fix, or the figure if there is no fix."""
    return f"FAIL {check['name']}: {check.get('fix') or check['figure']}"


def count_checks(verdict_checks: list[dict[str, Any]], red: list[str]) -> str:
    """Return how many checks passed, and the names of the red flags."""
    met = f"{sum(check['passed'] for check in verdict_checks)} of {len(verdict_checks)} checks"
    return f"{met} are met, but {' and '.join(red)} {'is' if len(red) == 1 else 'are'} RED" if red else f"{met} passed"


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def relative_path(path: str) -> str:
    short = os.path.relpath(path)
    return path if short.startswith("..") else short
