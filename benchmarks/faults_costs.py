"""Cost of a safe checkpoint: 1 GB saved by cogumi and by plain Trainer in turn."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults_training import HUNG_SECONDS, Job, Running, start
from benchmarks.harness import Row, ratio_row, row, values_row
from cogumi.core.durability import sync_path

MANIFEST_NAME = "cogumi-manifest.json"
# 84 million parameters: 12 bytes each with AdamW's state.
LARGE = (("hidden_size", 1024), ("intermediate_size", 4096), ("num_hidden_layers", 5), ("num_attention_heads", 16))
SMALL = (("hidden_size", 128), ("intermediate_size", 512), ("num_hidden_layers", 5), ("num_attention_heads", 2))
DISK_BYTES = 10 << 30
TOUCHED_BYTES = 3 << 29  # more than a save


def save_rows(quick: bool) -> Iterator[Row]:
    """Run two trainings that save after every step, each when told to.

    The first saves, which prune nothing, and the last, which is followed by no step, are not counted.
    """
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
    """Let one save and the next step happen; return the seconds that the training was held, and until all was on the disk."""

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
    """Leave free pages that the machine has: a virtual machine's host takes unused ones back, and getting them takes long."""
    path, block = directory.with_name("touched"), bytes(1 << 24)
    with path.open("wb") as file:
        for _ in range(TOUCHED_BYTES // len(block)):
            file.write(block)
    path.unlink()
