"""What SFT and GSPO change on the quickstart's task: held-out renamings that are exactly right, seed by seed.

`python -m benchmarks stages` runs configs/smoke/chat-sft.yaml, then chat-gspo.yaml on its merged model, for five seeds. All
models complete the same held-out prompts greedily. Wanted: SFT at least 10 points above the base, GSPO 3 above SFT. The
control is the same SFT with the right answer in every demonstration: what SFT alone reaches on data without mistakes.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row, row

SEEDS = (1, 2, 3, 4, 5)
ROWS = 200
QUICK = {"sft": 4, "gspo": 2}  # optimizer steps
CONTROL = "SFT, every demonstration right"
GAINS = {("base", "SFT"): 0.10, ("SFT", "GSPO"): 0.03}


def run(quick: bool = False) -> Iterator[Row]:
    from transformers.utils.logging import disable_progress_bar

    from cogumi.runs import train

    disable_progress_bar()
    logging.getLogger("cogumi").addHandler(logging.NullHandler())  # a run's log is in its directory, not on the screen
    exact: dict[str, list[float]] = {"base": [], "SFT": [], "GSPO": [], CONTROL: []}
    close: dict[str, list[float]] = {name: [] for name in exact}
    right: list[int] = []
    from cogumi.methods.comparison import compare_models

    for seed in SEEDS[:1] if quick else SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            steps = {name: {"train__max_steps": count} if quick else {} for name, count in QUICK.items()}
            sft = train("smoke/chat-sft", train__seed=seed, cogumi__run_dir=Path(folder, "sft"), **steps["sft"])
            start = {"model__name": str(sft.merged), "cogumi__run_dir": Path(folder, "gspo")}
            gspo = train("smoke/chat-gspo", train__seed=seed, **start, **steps["gspo"])
            right_only = {"data__source": write_right_answers(folder), "cogumi__run_dir": Path(folder, "control")}
            control = train("smoke/chat-sft", train__seed=seed, **right_only, **steps["sft"])
            merged = {"SFT": sft.merged, "GSPO": gspo.merged, CONTROL: control.merged}
            models = {"base": "cogumi:small-base"} | {name: str(path) for name, path in merged.items()}
            found = compare_models(models, "smoke/chat-gspo", ROWS)
        for name in models:
            exact[name].append(found.exact(name))
            close[name].append(found.similarity(name))
        right.append(sum(found.written["GSPO"][row].strip() == found.answers[row] for row in found.shown(5)))
    for name in exact:
        yield over_seeds(name, "exactly right", exact[name])
        yield over_seeds(name, "mean edit similarity", close[name])
    for (before, after), wanted in GAINS.items():
        gains = [b - a for a, b in zip(exact[before], exact[after], strict=True)]
        target = "" if quick else f">= {wanted}"
        yield over_seeds(f"{after} - {before}", "exactly right", gains, target)
        yield row("stages", f"{after} - {before}", "seeds in which it rose", sum(gain > 0 for gain in gains))
    yield over_seeds("GSPO", "of the five prompts shown, exactly right", [float(each) for each in right])


def write_right_answers(folder: str) -> str:
    """The noisy sample's prompts, all of them with the right answer."""
    import polars as pl

    from cogumi.data.stdlib_sample import chat_path, noisy_chat_path

    asked = pl.read_parquet(noisy_chat_path(), columns=["prompt"])
    path = Path(folder, "right.parquet")
    asked.join(pl.read_parquet(chat_path()), on="prompt").select("messages").write_parquet(path)
    return str(path)


def over_seeds(case: str, metric: str, values: list[float], target: str = "") -> Row:
    note = ", ".join(f"{value:.3g}" for value in values)
    return row(
        "stages", case, metric, statistics.fmean(values), spread=(min(values), max(values)), target=target, note=note
    )
