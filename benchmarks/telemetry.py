"""What telemetry takes of a training step: metrics, heartbeat, budget, token counts, TensorBoard; a row logged every step.

`share of a step` is of CPU seconds, which a neighbour's load hardly moves: those spent inside telemetry's functions and
TensorBoard's `on_log`, over those of the training thread in the same steps; and what the heartbeat's thread takes of a core. By
the clock it is more where cores are scarce, since TensorBoard's `on_log` waits for the thread that writes its file: that
figure, and the ratio of steps with and without, hold as far as the machine is quiet.

A step is SFT with TRL's trainer on a small model. Telemetry takes as long for any model: on a longer step it is less.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from benchmarks.harness import Row, Timed, ratio_row, values_row
from benchmarks.models import SMALL, build
from cogumi.config.schema import CogumiSection
from cogumi.telemetry import trackers
from cogumi.telemetry.heartbeat import Heartbeat
from cogumi.telemetry.recorder import Telemetry
from cogumi.telemetry.throughput import Meter
from cogumi.training.loop import BudgetCallback

ROWS, LENGTH = 4, 256  # of a step
LIMIT = 0.01


def make_trainer(folder: Path, steps: int, reporters: str) -> Any:
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    from cogumi.models.small_base import small_base_path

    ids = torch.randint(0, SMALL.vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    mask = [[0] * (LENGTH // 2) + [1] * (LENGTH - LENGTH // 2)] * ROWS
    on_gpu = torch.cuda.is_available()
    args = trl.SFTConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=ROWS, logging_steps=1, save_strategy="no",
        report_to=reporters, disable_tqdm=True, completion_only_loss=True, max_length=None, bf16=on_gpu,
        dataloader_pin_memory=on_gpu,
    )  # fmt: skip
    return trl.SFTTrainer(
        model=build(SMALL, "cuda" if on_gpu else "cpu", torch.bfloat16 if on_gpu else torch.float32),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": ids, "completion_mask": mask}),
        processing_class=AutoTokenizer.from_pretrained(small_base_path()),
    )


class Steps(TrainerCallback):
    """From the end of the first step to the end of the last; what was timed before that is forgotten."""

    def __init__(self, *timed: Timed) -> None:
        self.ends: list[tuple[float, float]] = []
        self.timed = timed

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append((time.thread_time(), time.perf_counter()))
        for each in self.timed if len(self.ends) == 1 else ():
            each.cpu = each.wall = 0.0

    @property
    def cpu(self) -> float:
        return self.ends[-1][0] - self.ends[0][0]

    @property
    def wall(self) -> float:
        return self.ends[-1][1] - self.ends[0][1]


def stock(folder: Path, steps: int) -> Steps:
    """The steps of plain TRL that logs into nothing."""
    trainer, counted = make_trainer(folder, steps, "none"), Steps()
    for printing in (PrinterCallback, ProgressCallback):
        trainer.pop_callback(printing)
    trainer.add_callback(counted)
    trainer.train()
    return counted


def with_telemetry(folder: Path, steps: int, reporters: str, timed: Timed, beating: Timed) -> Steps:
    """The same steps with telemetry as a run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer, counted = make_trainer(folder / "checkpoints", steps, reporters), Steps(timed, beating)
    meter = Meter(price_per_hour=2.5)
    heart = Heartbeat(folder, meter)
    telemetry = Telemetry(trainer, heart, "sft")
    trackers.set_tensorboard_directory(folder, trainer)
    options = CogumiSection(method="sft", price_per_hour=2.5, max_hours=10.0, max_cost=25.0)
    budget = BudgetCallback(options, meter, heart.progress)
    for callback in (budget, counted):
        trainer.add_callback(callback)
    beating.wrap(heart, "beat")
    boards = [each for each in trainer.callback_handler.callbacks if isinstance(each, TensorBoardCallback)]
    for following in (telemetry, budget):
        timed.wrap(following, "on_step_end")
    for logging_too in (telemetry, *boards):
        timed.wrap(logging_too, "on_log")
    timed.wrap(telemetry.throughput, "add")
    with heart:
        meter.enter("train")
        trainer.train()
    telemetry.close()
    return counted


def run(quick: bool = False) -> Iterator[Row]:
    import cogumi

    cogumi.patch(graph_break="off")  # where no Triton runs TRL's losses want a PyTorch head
    steps, repeats = (4, 1) if quick else (12, 3)
    reporters = trackers.default_reporter()
    log = logging.getLogger("cogumi")
    level = log.level
    log.setLevel(logging.WARNING)  # its lines are written every half minute, and would be between the rows here
    try:
        with tempfile.TemporaryDirectory() as scratch:
            yield from rows_of(Path(scratch), steps, repeats, reporters)
    finally:
        log.setLevel(level)


def rows_of(scratch: Path, steps: int, repeats: int, reporters: str) -> Iterator[Row]:
    case = f"SFT, {SMALL.name}, {ROWS} x {LENGTH} tokens, {reporters}"
    times: dict[str, list[float]] = {"with": [], "without": []}
    found: dict[str, list[float]] = defaultdict(list)
    for turn in range(1 + repeats):
        without = stock(scratch / f"stock-{turn}", steps)
        timed, beating = Timed(), Timed()
        told = with_telemetry(scratch / f"told-{turn}", steps, reporters, timed, beating)
        if turn == 0:  # warms up
            continue
        times["with"].append(told.wall)
        times["without"].append(without.wall)
        found["step without"].append(1e3 * without.wall / (steps - 1))
        found["telemetry on the training thread"].append(1e3 * timed.cpu / (steps - 1))
        found["heartbeat's thread"].append(100 * beating.cpu / told.wall)
        found["share of a step"].append(100 * (timed.cpu / told.cpu + beating.cpu / told.wall))  # it beats by the clock
        found["share of a step by the clock"].append(100 * timed.wall / told.wall)
    units = {
        "step without": "ms",
        "telemetry on the training thread": "CPU ms/step",
        "heartbeat's thread": "% of a core",
    }
    for metric, values in found.items():
        target = f"<= {100 * LIMIT:g}" if metric == "share of a step" else ""
        yield values_row("telemetry", case, metric, values, units.get(metric, "%"), target=target)
    metric = "steps with over without"
    yield ratio_row("telemetry", case, metric, times, "with", "without", unit="x", note="adjacent pairs")
