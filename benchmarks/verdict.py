"""Does the verdict tell broken runs from whole ones, and by their cause: the suite of benchmarks/verdict_cases.py.

`python -m benchmarks verdict` trains every case for at most a hundred steps on a CPU. A broken run is right where the
first flag that turns red is the one that explains it, or names its cause and key where several may be first; a whole one
where none does; a whole one on one's own data where none turns yellow either. A flat or broken run is never "safe to
scale". The last rows are what watching costs.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row, row
from benchmarks.verdict_cases import BROKEN, HELD_OUT, OWN, WHOLE
from benchmarks.verdict_runs import Case, Outcome, cost, judged

QUICK = ("sft, NaN in the base", "sft, adapter frozen", "gspo, dead reward", "sft", "own chat, large rate")
STEP_SECONDS = 0.1  # of the step that the cost is a share of


def run(quick: bool = False) -> Iterator[Row]:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("cogumi").addHandler(logging.NullHandler())
    kinds = {
        "broken runs flagged with their cause": [case for case in (*BROKEN, *HELD_OUT) if case.broken],
        "whole runs without a red flag": [case for case in (*WHOLE, *HELD_OUT) if not case.broken],
        "whole runs on one's own data without a yellow or red flag": [*OWN],
    }
    if quick:
        kinds = {what: [case for case in cases if case.name in QUICK] for what, cases in kinds.items()}
    unsafe = 0
    with tempfile.TemporaryDirectory() as folder:
        for what, cases in kinds.items():
            right = 0
            for case in cases:
                found = judged(case, Path(folder) / case.name, "stop" if case.broken else "warn")
                right += found.right
                unsafe += case.broken and found.safe.startswith("yes")
                yield case_row(case, found)
            yield row("verdict", "all", what, right, f"of {len(cases)}", target=f">= {len(cases)}")
        yield row("verdict", "all", "broken runs that are safe to scale", unsafe, "", target="<= 0")
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
    note = f"{said}; yellow: {', '.join(found.yellow) or 'none'}; safe to scale: {found.safe}; {found.seconds:.0f} s"
    return row(
        "verdict", f"{kind}: {case.name}", "red at step", "never" if at is None else at, ok=found.right, note=note
    )
