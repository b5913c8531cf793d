"""What every benchmark uses: interleaved timing, peak memory, the machine, one row format, one table, one JSON file.

A benchmark is a module in this folder with `run(quick: bool = False)` that returns (or yields, so that what was
measured before a failure is kept) rows made by `row(...)`. `python -m benchmarks` prints and saves them.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# The libraries whose version decides what a number means.
LIBRARIES = (
    "accelerate",
    "bitsandbytes",
    "datasets",
    "flash-attn",
    "numpy",
    "peft",
    "polars",
    "rapidfuzz",
    "tokenizers",
    "torch",
    "torchvision",
    "transformers",
    "triton",
    "trl",
    "unsloth",
    "xformers",
)

Row = dict[str, Any]


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
    """One measurement. `spread` is (lowest, highest) in the same unit as `value`.

    `target` such as "<= 1.5" or ">= 400" is compared with `value` to fill `ok`, unless `ok` is given; any other wording
    is only shown. A `value` of None means not measured here, and `note` says why ("missing: trl", "skipped: out of
    time", "failed: ..."). A value that is not finite is a failure: it fits no JSON and means that nothing was measured.
    """
    if isinstance(value, float) and not math.isfinite(value):
        value, spread, ok, note = None, None, False, f"failed: {value} {note}".strip()
    if ok is None and isinstance(value, (int, float)):
        ok = _meets(value, target)
    return {
        "benchmark": benchmark,
        "case": case,
        "metric": metric,
        "value": value,
        "unit": unit,
        "spread": None if spread is None else list(spread),
        "target": target,
        "ok": ok,
        "note": note,
    }


def _meets(value: float, target: str) -> bool | None:
    found = re.match(r"(<=|>=|<|>)\s*([0-9.eE+-]+)", target)
    if found is None:
        return None
    bound = float(found[2])
    return {"<=": value <= bound, ">=": value >= bound, "<": value < bound, ">": value > bound}[found[1]]


def missing(benchmark: str, case: str, what: str) -> Row:
    """The row that says a comparison could not be made here."""
    return row(benchmark, case, "-", None, note=f"missing: {what}")


# ---------------------------------------------------------------------------------------------------------------- time


def synchronize() -> None:
    """Wait for the GPU, where there is one; torch is never imported for it, as nothing runs there without torch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def interleave(functions: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each call, run as a, b, a, b, ... so that a neighbour's load on a shared machine falls on both.

    `warmup` rounds of all functions come first and are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], ours: str, peer: str) -> tuple[float, float, float]:
    """(median, lowest, highest) of ours/peer over adjacent pairs: below 1 means ours is faster.

    Pairs ran next to each other, so their ratio holds on a loaded machine where the two medians may not be comparable.
    """
    pairs = [a / b for a, b in zip(times[ours], times[peer], strict=True)]
    return statistics.median(pairs), min(pairs), max(pairs)


def summary(times: list[float]) -> tuple[float, tuple[float, float]]:
    """(median, (lowest, highest)): the `value` and `spread` of a row."""
    return statistics.median(times), (min(times), max(times))


@dataclass
class Budget:
    """Wall-clock seconds shared by several cases; a case that would start too late is reported and not run."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)


# -------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class PeakRss:
    """Resident bytes of a fresh process: `before` the call (interpreter and imports) and at the `peak` of it."""

    before: int
    peak: int

    @property
    def grown(self) -> int:
        return self.peak - self.before


def peak_rss(function: Callable[..., object], *args: object) -> PeakRss:
    """Peak resident memory of `function(*args)` in a fresh process; function and args must be picklable (module level).

    Raises RuntimeError with the child's error when the call fails.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_report_peak, args=(theirs, function, args))
    child.start()
    theirs.close()
    try:
        reply = ours.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the measured process ended with exit status {child.exitcode}") from None
    child.join()
    if isinstance(reply, str):
        raise RuntimeError(reply)
    return PeakRss(*reply)


def _report_peak(pipe: Connection, function: Callable[..., object], args: tuple[object, ...]) -> None:
    before = high_water_mark()
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - handed to the parent, which raises it
        pipe.send(one_line(error))
    else:
        pipe.send((before, high_water_mark()))


def high_water_mark() -> int:
    """Peak resident bytes of this process.

    VmHWM, because ru_maxrss survives exec: a child of a big parent starts with the parent's number. Where /proc does
    not say (macOS, some sandboxes), ru_maxrss is what there is.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class TreeRun:
    """One run of a command: exit status, wall seconds, peak resident bytes of it and its descendants, its output."""

    returncode: int
    seconds: float
    peak_bytes: int
    output: str


def run_tree(
    command: list[str], *, env: dict[str, str] | None = None, timeout: float, log: Path, interval: float = 0.05
) -> TreeRun:
    """Run `command`, sampling the resident memory of its process tree every `interval` seconds; output goes to `log`.

    The sum counts shared pages once per process, so it is an upper bound; a peak shorter than `interval` can be missed.
    Raises subprocess.TimeoutExpired after killing the tree.
    """
    start, peak = time.perf_counter(), 0
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
        tree = psutil.Process(process.pid)
        try:
            while process.poll() is None:
                peak = max(peak, sum(_resident(each) for each in _family(tree)))
                if time.perf_counter() - start > timeout:
                    raise subprocess.TimeoutExpired(command, timeout)
                time.sleep(interval)
        finally:  # late, or interrupted from the keyboard: nothing of it stays behind
            if process.poll() is None:
                for each in reversed(_family(tree)):
                    _kill(each)
                process.wait()
    return TreeRun(process.returncode, time.perf_counter() - start, peak, log.read_text(errors="replace"))


def _family(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return [tree, *tree.children(recursive=True)]
    except psutil.NoSuchProcess:  # it ended between two looks
        return []


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):  # as above
        process.kill()


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # as above
        return 0


# ------------------------------------------------------------------------------------------------------ failure, kept


def attempt(benchmark: str, case: str, work: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of `work()`; if it raises, those that came before and then one row that says so.

    This is where a broken case is kept from costing the others: the row has ok=False, so the run ends with status 1.
    """
    try:
        yield from work()
    except Exception as error:  # noqa: BLE001 - shown in the table and in the exit status
        yield row(benchmark, case, "-", None, ok=False, note=f"failed: {one_line(error)}")


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def failed(rows: Iterable[Row]) -> list[Row]:
    """Rows that raised or missed their target."""
    return [each for each in rows if each["ok"] is False]


# ------------------------------------------------------------------------------------------------------------- machine


def machine() -> dict[str, Any]:
    """CPU, memory, GPU, driver and the load at this moment. What cannot be read is None."""
    gpu = _nvidia_smi()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu[0] if gpu else None,
        "driver": gpu[1] if gpu else None,
        "gpu_memory": gpu[2] if gpu else None,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _nvidia_smi() -> list[str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=30)
    if said.returncode != 0 or not said.stdout.strip():
        return None
    return [part.strip() for part in said.stdout.splitlines()[0].split(",")]


def versions() -> dict[str, str | None]:
    """Installed version of each of LIBRARIES; None where it is not installed."""
    return {name: version_of(name) for name in LIBRARIES}


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, Any]:
    """{"commit", "dirty"} of the checkout; None where this is not one. Results themselves do not make it dirty."""
    if shutil.which("git") is None:
        return {"commit": None, "dirty": None}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode != 0:
        return {"commit": None, "dirty": None}
    changed = ["git", "status", "--porcelain", "--", ".", ":!benchmarks/results"]
    status = subprocess.run(changed, cwd=ROOT, capture_output=True, text=True, check=True)
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def slug(about: dict[str, Any], gpu: bool) -> str:
    """What ran it, as part of a file name: the card for GPU results, else the processor and its cores."""
    words = about["gpu"] if gpu and about["gpu"] else f"{about['cpu']} {about['cores']}c"
    words = re.sub(r"\((r|tm)\)|\b(cpu|processor|@)\b|@", " ", words.lower())
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-")


# -------------------------------------------------------------------------------------------------------------- output


def show(rows: list[Row], title: str, console: Console | None = None) -> None:
    """One table; a missed target or a failure says NO and is red."""
    table = Table(title=title)
    for column in ("benchmark", "case", "metric", "value", "spread", "target", "ok", "note"):
        right = column in ("value", "spread")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=right)
    shown: tuple[str, ...] = ("", "")
    for each in rows:
        where = (each["benchmark"], each["case"])
        # Said once: the same words on every line hide the one that differs.
        first = ("" if where[0] == shown[0] else where[0], "" if where == shown else where[1])
        shown = where
        spread = "" if each["spread"] is None else " .. ".join(_number(x) for x in each["spread"])
        verdict = {True: "yes", False: "NO", None: ""}[each["ok"]]
        value = f"{_number(each['value'])} {each['unit']}".strip()
        cells = (*first, each["metric"], value, spread, each["target"], verdict, each["note"])
        style = "red" if each["ok"] is False else "dim" if each["value"] is None else ""
        table.add_row(*(escape(str(cell)) for cell in cells), style=style)
    # rich takes a pipe to be 80 columns wide, which is too narrow to read a case in a log.
    (console or Console(width=None if sys.stdout.isatty() else 170)).print(table)


def _number(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return str(value)
    if value == 0 or not math.isfinite(value):
        return str(value)
    # Four significant digits: more would pretend to a precision that no timing here has.
    return f"{value:.0f}" if abs(value) >= 1e4 and abs(value) < 1e7 else f"{value:.4g}"


def document(name: str, rows: list[Row], seconds: float, about: dict[str, Any]) -> dict[str, Any]:
    """What is saved: the rows and everything needed to read them a year later."""
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "machine": about,
        "load_average_after": [round(load, 2) for load in os.getloadavg()],
        "versions": versions(),
        "git": git_state(),
        "rows": rows,
    }


def result_path(name: str, about: dict[str, Any], gpu: bool) -> Path:
    return RESULTS / f"{date.today().isoformat()}-{name}-{slug(about, gpu)}.json"


def save(saved: dict[str, Any], path: Path) -> Path:
    """Write `document(...)` as JSON; ValueError on a number that is not finite, for which it has no word."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved, indent=1, allow_nan=False) + "\n")
    return path
