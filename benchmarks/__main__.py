"""`python -m benchmarks [NAME|cpu] [--quick] [--json PATH]`, and `python -m benchmarks gpu --help`

Exit status: 0 everything ran and met its target, 1 something failed or missed its target, 2 wrong usage (an unknown name,
`gpu` without a CUDA device).
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Row

# Name -> module and function, which is imported only when asked for: a broken import costs only itself.
CPU = {
    "importing": "commands:importing",
    "smoke": "commands:smoke",
} | {name: f"{name}:run" for name in ("gspo_step", "gspo_learning", "overhead", "panel", "sandbox")}
# Not in `cpu`: six minutes to half an hour each; merge takes 14 GB of disk, faults and data 10 GB, merge_check 7 GB.
ALONE = {
    name: f"{name}:run"
    for name in ("merge", "faults", "data", "stages", "rollouts", "gspo_clip", "ratio_noise", "merge_check", "real")
} | {"first_runs": "real:first_runs"}
NAMES = ("cpu", "gpu", *CPU, *ALONE)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["gpu"]:
        from benchmarks import gpu

        return gpu.main(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure; print a table; save a JSON.")
    parser.add_argument("name", nargs="?", default="cpu", help=f"cpu (default), {', '.join(NAMES[1:])}")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer cases: does it run, not how fast")
    parser.add_argument("--json", type=Path, help="where to save, instead of a dated file under benchmarks/results")
    options = parser.parse_args(argv)

    if options.name not in NAMES:
        print(f"unknown benchmark {options.name!r}: one of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    about, start = harness.machine(), time.monotonic()
    rows: list[Row] = []
    for name in CPU if options.name == "cpu" else (options.name,):
        print(f"{name} ...", file=sys.stderr, flush=True)
        for row in harness.attempt(name, "-", partial(entry, name, options.quick)):
            rows.append(row)
            harness.print_row(row)  # at once: a run that is cut off has printed what it measured

    title = options.name + (" (quick)" if options.quick else "")
    # A quick run's numbers must not replace a full one's.
    path = options.json or harness.result_path(options.name + ("-quick" if options.quick else ""), about, gpu=False)
    harness.save(title, rows, time.monotonic() - start, about, path)
    bad = harness.report(rows, title, about, start, path)
    for row in bad:
        print(f"  {row['benchmark']}, {row['case']}, {row['metric']}: {row['note'] or row['target']}")
    if options.quick:  # checks that it runs; on a busy machine it misses its targets
        bad = [row for row in bad if row["value"] is None]
    return 1 if bad else 0


def entry(name: str, quick: bool) -> Iterable[Row]:
    module, function = (CPU | ALONE)[name].split(":")
    rows: Iterable[Row] = getattr(importlib.import_module(f"benchmarks.{module}"), function)(quick=quick)
    return rows


if __name__ == "__main__":
    sys.exit(main())
