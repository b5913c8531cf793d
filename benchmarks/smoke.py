"""`python -m cogumi.smoke` as a newcomer runs it: cold cache, whole process tree, wall time and memory."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row, row, run_tree

LIMIT_SECONDS = 120.0
LIMIT_GIB = 3.0


def run(quick: bool = False) -> Iterator[Row]:
    if not quick:
        yield from smoke_case("cold cache", [], seconds_target=f"<= {LIMIT_SECONDS:g}")
    yield from smoke_case("--quick, cold cache", ["--quick"], seconds_target="")


def smoke_case(case: str, flags: list[str], seconds_target: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir, cache = Path(folder, "run"), Path(folder, "cache")
        cache.mkdir()
        ran = run_tree(
            [sys.executable, "-m", "cogumi.smoke", "--run-dir", str(run_dir), *flags],
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
            # Past the target, so that a miss is a number; short of forever, so that a hang is a failure.
            timeout=5 * LIMIT_SECONDS,
            log=Path(folder, "smoke.log"),
        )
    last = (ran.output.strip().splitlines() or ["no output"])[-1].strip()[:200]
    passed = ran.returncode == 0
    yield row("smoke", case, "exit status", ran.returncode, ok=passed, note="" if passed else last)
    # A run that failed was cut short: its time and memory would flatter it.
    if passed:
        yield row("smoke", case, "wall time", ran.seconds, "s", target=seconds_target)
        yield row("smoke", case, "peak RSS, process tree", ran.peak_bytes / 2**30, "GiB", target=f"<= {LIMIT_GIB:g}")
