"""What commands cost a user, each in a process of its own: `import cogumi` and the smoke run.

`importing`: a notebook's first cell, and every `cogumi status`. `smoke`: as a newcomer runs it, cold cache, with memory of the
whole process tree.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial

from benchmarks.harness import Row, interleave, last_line, python, row, run_process, values_row

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "polars", "pandas")
# Above a bare interpreter, so that a slow machine's start-up is not charged to us.
LIMIT_MS = 100.0
SMOKE_SECONDS, SMOKE_GIB = 120.0, 3.0


def importing(quick: bool = False) -> Iterator[Row]:
    contenders = {code: partial(run_process, python(code)) for code in ("pass", "import cogumi")}
    times = interleave(contenders, 5 if quick else 21)
    # The difference of adjacent pairs, as in harness.ratio: both felt the same load.
    extra = [1e3 * (ours - bare) for bare, ours in zip(*times.values(), strict=True)]
    case = "import cogumi, over python -c pass"
    yield values_row("importing", case, "time", extra, "ms", target=f"<= {LIMIT_MS:g}")
    names = f"import sys, cogumi; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    loaded = run_process(python(names)).output.split()
    note = f"{', '.join(loaded) or 'none'} of {', '.join(HEAVY)}"
    yield row("importing", "import cogumi", "heavy modules loaded", len(loaded), target="<= 0", note=note)


def smoke(quick: bool = False) -> Iterator[Row]:
    for case, flags in {"cold cache": [], "--quick, cold cache": ["--quick"]}.items():
        if quick and not flags:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "cogumi.smoke", "--run-dir", f"{folder}/run", *flags]
            # The limit is past the target, so that a miss is a number.
            cache = {"XDG_CACHE_HOME": f"{folder}/cache"}
            ran = run_process(command, env=os.environ | cache, timeout=5 * SMOKE_SECONDS, check=False)
        passed = ran.returncode == 0
        note = "" if passed else last_line(ran.output)[:200]
        yield row("smoke", case, "exit status", ran.returncode, ok=passed, note=note)
        # A run that failed was cut short: its time and memory would flatter it.
        if passed:
            target = "" if flags else f"<= {SMOKE_SECONDS:g}"
            yield row("smoke", case, "wall time", ran.seconds, "s", target=target)
            yield row("smoke", case, "peak RSS, process tree", ran.resident / 2**30, "GiB", target=f"<= {SMOKE_GIB:g}")
