"""What `import cogumi` costs: a notebook's first cell, and every `cogumi status`."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.harness import ROOT, Row, interleave, row

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "polars", "pandas")
# Above a bare interpreter, so that a slow machine's start-up is not charged to us.
LIMIT_MS = 100.0


def _python(code: str) -> str:
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if said.returncode != 0:
        raise RuntimeError(f"python -c {code!r}: {said.stderr.strip().splitlines()[-1]}")
    return said.stdout


def run(quick: bool = False) -> list[Row]:
    times = interleave(
        {"pass": lambda: _python("pass"), "import cogumi": lambda: _python("import cogumi")},
        repeats=5 if quick else 21,
    )
    # The difference of adjacent pairs, as in harness.ratio: both felt the same load.
    extra = [1e3 * (ours - bare) for bare, ours in zip(times["pass"], times["import cogumi"], strict=True)]
    loaded = _python(f"import sys, cogumi; print(*[name for name in {HEAVY!r} if name in sys.modules])").split()
    return [
        row(
            "importing",
            "import cogumi, over python -c pass",
            "time",
            statistics.median(extra),
            "ms",
            spread=(min(extra), max(extra)),
            target=f"<= {LIMIT_MS:g}",
        ),
        row(
            "importing",
            "import cogumi",
            "heavy modules loaded",
            len(loaded),
            target="<= 0",
            note=f"{', '.join(loaded) or 'none'} of {', '.join(HEAVY)}",
        ),
    ]
