"""Packing on the sample data: how full the rows are, and the time of an epoch over the same epoch unpacked.

Each side is `cogumi.train` for one epoch of the standard library's functions as conversations: the same examples, and the
same number of them in a step, up to what whole rows allow. Unpacked, a batch is padded to its longest example; beside it
the same with batches of like lengths (transformers' `group_by_length`), which is what one would do without packing. The
time is that of the steps as the run's own metrics.json has it; model and attention are of the small base on a CPU.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Row, ratio_row, row
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
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    last: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1 if quick else 3):
            for name in SIDES if turn % 2 == 0 else reversed(SIDES):
                run_dir = Path(folder) / f"{name} {turn}"
                last[name] = epoch(run_dir, SIDES[name], 400 if quick else None)
                seconds[name].append(last[name]["step_seconds"])
                if name == "packed":
                    packing = read_section(run_dir / DECISIONS, "packing")
    asked = f"{packing['examples_per_step']:.2f} of {packing['asked_per_step']} examples in a step"
    slots = "slots of the rows that hold a token"
    yield row("packing", case, slots, 100 * packing["efficiency"], "%", target=">= 97", note=asked)
    for name in SIDES:
        tokens, share = last[name]["tokens"], last[name]["tokens"] / last[name]["tokens_with_padding"]
        note = f"{tokens:,} tokens in {last[name]['steps']} steps"
        yield row("packing", case, f"{name}: tokens that went through and are no padding", 100 * share, "%", note=note)
    lost = max(abs(last[name]["tokens"] - last["packed"]["tokens"]) for name in SIDES)
    yield row("packing", case, "tokens of an epoch that only one side trained on", lost, target="<= 0")
    for name in list(SIDES)[1:]:
        target = "< 1" if name == "unpacked" else ""
        note = f"{median(seconds['packed']):.0f} s and {median(seconds[name]):.0f} s"
        metric = f"time per epoch, packed / {name}"
        yield ratio_row("packing", case, metric, seconds, "packed", name, unit="", target=target, note=note)


def epoch(run_dir: Path, train: dict[str, Any], rows: int | None) -> dict[str, Any]:
    """One epoch; what its metrics.json says."""
    import cogumi

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
    return dict(read_json(run_dir / "metrics.json"))
