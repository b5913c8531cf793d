"""What safety costs: a checkpoint of 1 GB saved by cogumi and plain Trainer in turn; the disk monitor's share of a step."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import cogumi
from benchmarks.faults_training import HUNG_SECONDS, Changes, Job, Running, make_trainer, start
from benchmarks.harness import OwnTime, Row, ratio_row, row, values_row
from cogumi.core.durability import sync_path

MANIFEST_NAME = "cogumi-manifest.json"
# 84 million parameters: 12 bytes each with AdamW's state.
LARGE = (("hidden_size", 1024), ("intermediate_size", 4096), ("num_hidden_layers", 5), ("num_attention_heads", 16))
SMALL = (("hidden_size", 128), ("intermediate_size", 512), ("num_hidden_layers", 5), ("num_attention_heads", 2))
DISK_BYTES = 10 << 30
TOUCHED_BYTES = 3 << 29  # more than a save
STEP_SECONDS = 0.1


def save_rows(quick: bool) -> Iterator[Row]:
    """Two trainings that save after every step, each when told to. Not counted: the first saves, which prune nothing, and
    the last, which is followed by no step."""
    shape, rounds, warmup = (SMALL, 2, 3) if quick else (LARGE, 8, 3)
    with tempfile.TemporaryDirectory(prefix="cogumi-saves-") as name:
        folder, steps = Path(name), warmup + rounds + 1
        if not quick and shutil.disk_usage(folder).free < DISK_BYTES:
            yield row("faults", "cost of a save", "-", None, note=f"skipped: needs {DISK_BYTES >> 30} GiB in TMPDIR")
            return
        running = {}
        for how in ("plain", "cogumi"):
            papers = folder / f"{how}-journal", folder / f"{how}-words"
            job = Job(how, False, folder / how, *papers, each_save_asks=True, shape=shape, steps=steps, save_every=1)
            running[how] = start(job)
        saves: dict[str, list[tuple[float, float]]] = {how: [] for how in running}
        for turn in range(1, steps + 1):
            # Each comes first in half of the turns: what the other one leaves of the machine's memory counts.
            for how, training in list(running.items())[:: 1 if turn % 2 else -1]:
                saves[how].append(one_save(training, folder / how, turn, steps))
        size = sum(path.stat().st_size for path in (folder / "cogumi" / f"checkpoint-{steps}").iterdir())
    case, kept = f"save of {size / 1e9:.2f} GB", slice(warmup, -1)
    held = {how: [save[0] for save in each[kept]] for how, each in saves.items()}
    # A quick run's save is too small to judge: what does not grow with it is most of it.
    metric, target = "training held, cogumi / plain", "" if quick else "<= 1.15"
    yield ratio_row("faults", case, metric, held, "cogumi", "plain", unit="", target=target)
    for how, seconds in held.items():
        yield values_row("faults", case, f"training held, {how}", seconds, "s")
    durable = [save[1] for save in saves["cogumi"][kept]]
    yield values_row("faults", case, "until on the disk, cogumi", durable, "s")


def one_save(training: Running, directory: Path, step: int, last: int) -> tuple[float, float]:
    """Let one save happen, and the training's next step, so that nothing of it runs in the other one's turn.

    Returns two numbers of seconds. Held: the training thread did nothing else, in the save and in the callbacks after the
    next step. Durable: until the checkpoint was whole and on the disk, for which plain Trainer does not wait.
    """

    def await_message(what: str, of_step: int) -> float:
        if not training.until(what, of_step):
            raise RuntimeError(f"the training in {directory} ended before {what} of step {of_step}")
        return float(training.messages[-1][3])

    if step == 1:
        await_message("saving", step)
    final, protected = directory / f"checkpoint-{step}", directory.name == "cogumi"
    touch_memory(directory)
    training.answer()
    began = time.monotonic()
    while protected and not (final / MANIFEST_NAME).exists():
        time.sleep(0.001)
        if time.monotonic() - began > HUNG_SECONDS:
            raise RuntimeError(f"no {final} after {HUNG_SECONDS:.0f} s")
    durable = time.monotonic() - began
    held = await_message("saved", step)
    for path in () if protected else (*final.iterdir(), final):
        sync_path(path)  # in its own turn
    if step == last:
        training.finish()
    else:
        held += await_message("saving", step + 1)
    return held, durable


def touch_memory(directory: Path) -> None:
    """Leave free pages behind that the machine has: on a virtual one, whose host takes unused ones back, writing a file
    into others took four times as long, and it was a matter of luck whose save came upon them."""
    path, block = directory.with_name("touched"), bytes(1 << 24)
    with path.open("wb") as file:
        for _ in range(TOUCHED_BYTES // len(block)):
            file.write(block)
    path.unlink()


def monitor_rows(quick: bool) -> Iterator[Row]:
    """A real training with steps of 100 ms, in which the calls of the callback's per-step methods are timed.

    Their sum is far below what two trainings differ by on any machine, so it is not taken from such a difference.
    """
    steps = 20 if quick else 300
    ours, theirs = multiprocessing.Pipe()
    monitor, timed = cogumi.DiskMonitorCallback(), OwnTime()
    timed.wrap(monitor, "on_step_end", "on_log")  # its other methods are called once, or do nothing
    with tempfile.TemporaryDirectory(prefix="cogumi-monitor-") as name:
        folder = Path(name)
        paths = folder / "training", folder / "journal", folder / "words"
        job = Job("plain", False, *paths, steps=steps, save_every=steps + 1)
        trainer = make_trainer(job, Changes(job, theirs), theirs)
        step = trainer.training_step

        def lasting_step(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = step(*arguments, **keywords)
            time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - start)))
            return result

        trainer.training_step = lasting_step
        trainer.add_callback(monitor)
        begun = time.perf_counter()
        with redirect_stdout(StringIO()):  # transformers prints each log
            trainer.train()
        seconds = time.perf_counter() - begun
    ours.close()
    case = f"DiskMonitorCallback, {steps} steps of {STEP_SECONDS * 1e3:.0f} ms, a log each, a look every 10 s"
    note = f"{timed.wall / steps * 1e6:.1f} microseconds a step"
    yield row("faults", case, "share of a step", timed.wall / seconds * 100, "%", target="<= 0.1", note=note)
