"""The sandbox: trivial programs a minute at each level of isolation, time of one call, memory of the pool; `python -c` beside."""

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil

from benchmarks.harness import Row, attempt, interleave, row, values_row
from cogumi.rewards.unit_tests import unit_tests
from cogumi.sandbox import Sandbox

LEVELS: tuple[Any, ...] = ("bubblewrap", "limits")
PROGRAM = "print(1)"
WORKERS = 2


def run(quick: bool = False) -> Iterator[Row]:
    """`quick`: a tenth of the programs."""
    programs = 100 if quick else 1000
    for level in LEVELS:
        yield from attempt("sandbox", level, partial(at_level, level, programs))
    yield from attempt("sandbox", "the reward", partial(rewarded, programs // 5))
    alone = partial(subprocess.run, [sys.executable, "-c", PROGRAM], stdout=subprocess.DEVNULL, check=True)
    times = [1000 * seconds for seconds in interleave({"alone": alone}, programs // 10)["alone"]]
    yield values_row("sandbox", "python -c, without isolation", "time of one program", times, "ms")


def at_level(level: Any, programs: int) -> Iterator[Row]:
    began = time.perf_counter()
    with Sandbox(WORKERS, isolation=level) as sandbox:
        sandbox.run(PROGRAM)
        figure = partial(row, "sandbox", level)
        yield figure("from nothing to the first result, with the trial", time.perf_counter() - began, "s")
        sandbox.run_all([PROGRAM] * 2 * WORKERS)
        used = sum(proportional_bytes(worker.process) for worker in sandbox._workers.values())
        began = time.perf_counter()
        results = sandbox.run_all([PROGRAM] * programs)
        rate = 60 * programs / (time.perf_counter() - began)
        whole = all((result.status, result.output) == ("finished", "1\n") for result in results)
        note = f"{WORKERS} workers, {programs} programs" if whole else "not all programs printed 1"
        yield figure("trivial programs a minute", rate, target=">= 1500", ok=rate >= 1500 and whole, note=note)
        times = interleave({"call": partial(sandbox.run, PROGRAM)}, programs // 10)["call"]
        yield values_row("sandbox", level, "time of one call", [1000 * seconds for seconds in times], "ms")
        yield figure(f"memory of {WORKERS} workers (PSS)", used / 2**20, "MiB")


def proportional_bytes(process: subprocess.Popen[bytes]) -> int:
    """Of a worker and of the process outside its namespaces."""
    whole = psutil.Process(process.pid)
    return sum(each.memory_full_info().pss for each in (whole, *whole.children(recursive=True)))


def rewarded(completions: int) -> Iterator[Row]:
    code, tests = "def double(x): return 2 * x", "assert double(2) == 4"
    unit_tests(completions=[code] * 4, tests=[tests] * 4)
    began = time.perf_counter()
    scores = unit_tests(completions=[code] * completions, tests=[tests] * completions)
    milliseconds = 1000 * (time.perf_counter() - began) / completions
    ok = scores == [1.0] * completions
    yield row("sandbox", "the reward `unit_tests`", "time of a completion", milliseconds, "ms", ok=ok)
