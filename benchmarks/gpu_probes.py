"""Does the installed stack work on this card? The probes of `cogumi.stack.probes`, as rows.

A package that is not installed is a "missing" row; one that is installed and does not work is a failed row.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Budget, Row, missing, row
from cogumi.stack.probes import PROBES, TIMEOUT, run_probe


def probe(name: str, device: str, timeout: float = TIMEOUT) -> list[Row]:
    """The rows of one probe."""
    done = run_probe(name, device, timeout)
    if done.missing:
        return [missing("gpu_probes", name, done.missing)]
    if done.error:
        return [row("gpu_probes", name, "-", None, ok=False, note=f"failed: {done.error}")]
    return [row("gpu_probes", name, metric, value, unit, note=note) for metric, value, unit, note in done.readings]


def run(quick: bool = False, device: str = "cuda", budget: Budget | None = None) -> Iterator[Row]:
    for name in PROBES:
        timeout = TIMEOUT if budget is None else min(TIMEOUT, budget.left())
        if timeout < 15:  # less than it takes to import torch and open the device on a slow disk
            yield row("gpu_probes", name, "-", None, note="skipped: out of time")
        else:
            yield from probe(name, device, timeout)
