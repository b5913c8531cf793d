"""Everything there is to measure on a card, under one time budget: what comes too late is reported as skipped."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import gpu_forecast, gpu_head, gpu_probes, gpu_steps, gspo_step
from benchmarks.harness import Budget, Row, attempt

# A rented or lent card is often given in slices of ten minutes; this leaves one for start-up and copying.
SECONDS = 540.0


def run(quick: bool = False, device: str = "cuda", budget: Budget | None = None) -> Iterator[Row]:
    budget = budget or Budget(SECONDS)
    yield from attempt("gpu_probes", "-", lambda: gpu_probes.run(quick, device, budget))
    yield from attempt("gpu_head", "-", lambda: gpu_head.run(quick, device, budget))
    yield from attempt("gpu_steps", "-", lambda: gpu_steps.run(quick, device, budget))
    yield from attempt("gpu_forecast", "-", lambda: gpu_forecast.run(quick, device, budget))
    yield from attempt("gspo_step", "-", lambda: gspo_step.run(quick, device, budget))
