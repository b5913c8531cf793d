"""What telemetry takes of a training step: metrics, heartbeat, budget, token counts, TensorBoard; a row logged every step.

`share of a step` is of CPU seconds, which a neighbour's load hardly moves: those spent inside telemetry's functions and
TensorBoard's `on_log`, over those of the training thread in the same steps; and what the heartbeat's thread takes of a core. By
the clock it is more where cores are scarce, since TensorBoard's `on_log` waits for the thread that writes its file.

A step is SFT with TRL's trainer on a small model. Telemetry takes as long for any model: on a longer step it is less.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.integrations import TensorBoardCallback

import cogumi
from benchmarks.harness import OwnTime, Row, quiet, values_row
from benchmarks.models import SMALL, build
from cogumi.config.schema import CogumiSection
from cogumi.models.small_base import small_base_path
from cogumi.telemetry import trackers
from cogumi.telemetry.heartbeat import Heartbeat
from cogumi.telemetry.recorder import Telemetry
from cogumi.telemetry.throughput import Meter
from cogumi.training.loop import ControlCallback

ROWS, LENGTH = 4, 256  # of a step


def make_trainer(folder: Path, steps: int, reporters: str) -> Any:
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

    def __init__(self, *timed: OwnTime) -> None:
        self.ends: list[tuple[float, float]] = []
        self.timed = timed

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append((time.thread_time(), time.perf_counter()))
        for each in self.timed if len(self.ends) == 1 else ():
            each.cpu = each.wall = 0.0

    def seconds(self) -> tuple[float, float]:
        """Of CPU, and by the clock."""
        (cpu, wall), (cpu_at_end, wall_at_end) = self.ends[0], self.ends[-1]
        return cpu_at_end - cpu, wall_at_end - wall


def with_telemetry(folder: Path, steps: int, reporters: str, timed: OwnTime, beating: OwnTime) -> Steps:
    """Steps with telemetry as a run has it."""
    folder.mkdir()
    trainer, counted = make_trainer(folder / "checkpoints", steps, reporters), Steps(timed, beating)
    meter = Meter(price_per_hour=2.5)
    heart = Heartbeat(folder, meter)
    telemetry = Telemetry(trainer, heart, "sft")
    trackers.set_tensorboard_directory(folder, trainer)
    options = CogumiSection(method="sft", price_per_hour=2.5, max_hours=10.0, max_cost=25.0)
    control = ControlCallback(trainer, options, telemetry)
    for callback in (control, counted):
        trainer.add_callback(callback)
    beating.wrap(heart, "beat")
    timed.wrap(telemetry, "on_step_end", "on_log")
    timed.wrap(telemetry.throughput, "add")
    timed.wrap(control, "on_step_end")
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback):
            timed.wrap(callback, "on_log")
    with heart:
        meter.enter("train")
        trainer.train()
    telemetry.close()
    return counted


def run(quick: bool = False) -> Iterator[Row]:
    cogumi.patch(graph_break="off")  # where no Triton runs TRL's losses want a PyTorch head
    quiet()
    steps, repeats = (4, 1) if quick else (12, 3)
    reporters = trackers.default_reporter()
    case = f"SFT, {SMALL.name}, {ROWS} x {LENGTH} tokens, {reporters}"
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(1 + repeats):
        timed, beating = OwnTime(), OwnTime()
        with tempfile.TemporaryDirectory() as scratch:
            counted = with_telemetry(Path(scratch) / "run", steps, reporters, timed, beating)
        if turn == 0:  # warms up
            continue
        cpu, wall = counted.seconds()
        shares = timed.cpu / cpu, beating.cpu / wall  # the second beats by the clock
        found["step", "ms"].append(1e3 * wall / (steps - 1))
        found["telemetry on the training thread", "CPU ms/step"].append(1e3 * timed.cpu / (steps - 1))
        found["heartbeat's thread", "% of a core"].append(100 * shares[1])
        found["share of a step", "%"].append(100 * sum(shares))
        found["share of a step by the clock", "%"].append(100 * timed.wall / wall)
    for (metric, unit), values in found.items():
        target = "<= 1" if metric == "share of a step" else ""
        yield values_row("telemetry", case, metric, values, unit, target=target)
