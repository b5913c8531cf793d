"""Does the verdict tell broken runs from whole ones, and by their cause: the suite of benchmarks/verdict_runs.py.

`python -m benchmarks verdict` trains every case for at most a hundred steps on a CPU. A broken run is right where the
first flag that turns red is the one that explains it; a whole one where none does. The last rows are what watching costs.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row, row
from benchmarks.verdict_runs import BROKEN, HELD_OUT, WHOLE, Case, Outcome, cost, judged

QUICK = ("sft, NaN in the base", "sft, adapter frozen", "gspo, dead reward")
STEP_SECONDS = 0.1  # of the step that the cost is a share of


def run(quick: bool = False) -> Iterator[Row]:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("cogumi").addHandler(logging.NullHandler())
    right = {True: 0, False: 0}
    cases = [*BROKEN, *WHOLE, *HELD_OUT] if not quick else [case for case in BROKEN if case.name in QUICK] + [WHOLE[0]]
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(cases):
            found = judged(case, Path(folder) / str(i), "stop" if case.broken else "warn")
            right[case.broken] += found.right
            yield case_row(case, found)
        for broken, what in ((True, "broken runs flagged with their cause"), (False, "whole runs without a red flag")):
            of = sum(case.broken is broken for case in cases)
            yield row("verdict", "all", what, right[broken], f"of {of}", target=f">= {of}")
        per_step = cost(Path(folder) / "cost")
    yield row(
        "verdict",
        "a step",
        "time of the sentinel",
        per_step * 1e3,
        "ms",
        note="the rules included, at every fifth step and from step 25 on at every tenth",
    )
    share = per_step / STEP_SECONDS
    yield row("verdict", "a step of 100 ms", "share of the sentinel", 100 * share, "%", target="<= 0.5")


def case_row(case: Case, found: Outcome) -> Row:
    said = "; ".join(f"step {step}: {flag.name} ({flag.cause})" for step, flag in found.reds) or "no red flag"
    kind = "broken" if case.broken else "whole"
    at = found.reds[0][0] if found.reds else None
    note = f"{said}; yellow: {', '.join(found.yellow) or 'none'}; {found.seconds:.0f} s"
    return row(
        "verdict", f"{kind}: {case.name}", "red at step", "never" if at is None else at, ok=found.right, note=note
    )
