"""What SFT and GSPO change on the quickstart's task: held-out renamings that are exactly right, seed by seed.

`python -m benchmarks stages` runs configs/smoke/chat-sft.yaml, then chat-gspo.yaml on its merged model, for five seeds. All
models complete the same held-out prompts greedily. Wanted: SFT at least 10 points above the base, GSPO 3 above SFT.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row, mean_row, quiet, row
from cogumi.config.schema import load_config
from cogumi.evaluation.comparison import compare_models
from cogumi.runs.entry import train

SEEDS = (1, 2, 3, 4, 5)
ROWS = 200
QUICK = {"sft": 4, "gspo": 2}  # optimizer steps
GAINS = {("base", "SFT"): ">= 0.1", ("SFT", "GSPO"): ">= 0.03"}


def run(quick: bool = False) -> Iterator[Row]:
    quiet()
    exact: dict[str, list[float]] = {"base": [], "SFT": [], "GSPO": []}
    right: list[float] = []
    for seed in SEEDS[:1] if quick else SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            steps = {name: {"train__max_steps": count} if quick else {} for name, count in QUICK.items()}
            sft = train("smoke/chat-sft", train__seed=seed, cogumi__run_dir=Path(folder, "sft"), **steps["sft"])
            start = {"model__name": str(sft.merged), "cogumi__run_dir": Path(folder, "gspo")}
            gspo = train("smoke/chat-gspo", train__seed=seed, **start, **steps["gspo"])
            models = {"base": "cogumi:small-base", "SFT": str(sft.merged), "GSPO": str(gspo.merged)}
            result = compare_models(models, load_config("smoke/chat-gspo", model__name=str(sft.merged)), ROWS)
        for name in models:
            exact[name].append(result.mean("exact_answer", name))
        right.append(sum(result.scores["exact_answer"]["GSPO"][shown] for shown in result.shown(5)))
    for name, shares in exact.items():
        yield mean_row("stages", name, "exactly right", shares)
    for (before, after), target in GAINS.items():
        gains = [b - a for a, b in zip(exact[before], exact[after], strict=True)]
        yield mean_row("stages", f"{after} - {before}", "exactly right", gains, target="" if quick else target)
        yield row("stages", f"{after} - {before}", "seeds in which it rose", sum(gain > 0 for gain in gains))
    yield mean_row("stages", "GSPO", "of the five prompts shown, exactly right", right)
