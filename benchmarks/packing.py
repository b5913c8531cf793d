"""Packing on the sample data: how full the rows are, and the time of an epoch over the same epoch unpacked.

Each side is `cogumi.train` for one epoch of the standard library's functions as conversations: the same examples, and the
same number of them in a step, up to what whole rows allow. Unpacked, a batch is padded to its longest example; beside it
the same with batches of like lengths (transformers' `group_by_length`), which is what one would do without packing. The
time is that of the steps as the run's own metrics.json has it; model and attention are of the small base on a CPU.
"""

import itertools
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import cogumi
from benchmarks.harness import Row, interleave, ratio_row, row
from cogumi.core.run_directory import DECISIONS, read_json, read_section

LENGTH, PER_STEP = 256, 16
SIDES: dict[str, dict[str, Any]] = {
    "packed": {"packing": True},
    "unpacked": {},
    "unpacked, grouped by length": {"train_sampling_strategy": "group_by_length"},
}


def run(quick: bool = False) -> Iterator[Row]:
    """`quick`: one epoch of 400 rows a side instead of three of the whole."""
    case = f"SFT, conversations of the standard library, rows of {LENGTH}"
    last: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        numbers = itertools.count()

        def step_seconds(name: str) -> float:
            last[name] = epoch(Path(folder, str(next(numbers))), SIDES[name], 400 if quick else None)
            return float(last[name]["step_seconds"])

        seconds = interleave({name: partial(step_seconds, name) for name in SIDES}, 1 if quick else 3, warmup=0)
    packing = last["packed"]["packing"]
    asked = f"{packing['examples_per_step']:.2f} of {packing['asked_per_step']} examples in a step"
    slots = "slots of the rows that hold a token"
    yield row("packing", case, slots, 100 * packing["efficiency"], "%", target=">= 97", note=asked)
    lost = max(abs(last[name]["tokens"] - last["packed"]["tokens"]) for name in SIDES)
    yield row("packing", case, "tokens of an epoch that only one side trained on", lost, target="<= 0")
    for name in list(SIDES)[1:]:
        target = "< 1" if name == "unpacked" else ""
        note = f"{median(seconds['packed']):.0f} s and {median(seconds[name]):.0f} s"
        metric = f"time per epoch, packed / {name}"
        yield ratio_row("packing", case, metric, seconds, "packed", name, unit="", target=target, note=note)


def epoch(run_dir: Path, train: dict[str, Any], rows: int | None) -> dict[str, Any]:
    """One epoch; what its metrics.json says, and how its rows were packed."""
    config = {
        "model": {"name": "cogumi:small-base"},
        "lora": {"r": 16},
        "data": {"source": "cogumi:stdlib-chat", "format": "chat", "max_rows": rows},
        "train": {
            "chat_template_path": "cogumi:tulu",
            "num_train_epochs": 1,
            "max_length": LENGTH,
            "per_device_train_batch_size": PER_STEP // 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            **train,
        },
        "cogumi": {"method": "sft", "merge": False, "compile": "off", "run_dir": str(run_dir)},
    }
    cogumi.train(config)
    return read_json(run_dir / "metrics.json") | {"packing": read_section(run_dir / DECISIONS, "packing")}
