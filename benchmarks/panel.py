"""Time and memory to open the panel of a run with a million logged rows, and its share of a core while it follows a run.

Both in a real kernel, less what the kernel takes without a panel.
"""

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from benchmarks.harness import Row, row
from cogumi.core.run_directory import append_jsonl, this_process, write_json

ROWS, GROWING_FROM = 1_000_000, 2_000
ROWS_A_SECOND = 5
WATCHED_SECONDS = 40
METRICS = {
    "loss": 2.5, "grad_norm": 0.84114316166169, "learning_rate": 1.999998e-4, "entropy": 0.25891675029296335,
    "num_tokens": 4096, "mean_token_accuracy": 0.5112747213686085, "epoch": 0.333, "perf/cost": 0.01,
    "perf/tokens_per_second": 10040.493413745042, "perf/mfu": 0.4, "perf/gpu_memory_gb": 61.2,
}  # fmt: skip
OPEN = """
import time, re
began = time.monotonic()
import cogumi
cogumi.attach({run!r}).dashboard()
from cogumi.notebook.panel import open_panels
panel, = open_panels.values()
while "<img" not in panel.parts[1].value:
    time.sleep(0.01)
print(time.monotonic() - began, int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024)
"""
BUSY = """
import time
began, used = time.monotonic(), time.process_time()
time.sleep({seconds})
print((time.process_time() - used) / (time.monotonic() - began))
"""


def run(quick: bool = False) -> Iterator[Row]:
    """`quick`: a tenth of the rows, and a few seconds."""
    rows, seconds = (ROWS // 10, 6) if quick else (ROWS, WATCHED_SECONDS)
    with tempfile.TemporaryDirectory(prefix="cogumi-benchmark-") as place:
        yield from opened(rows, run_with(Path(place, "long"), rows))
        yield from followed(seconds, run_with(Path(place, "growing"), GROWING_FROM))


def logged(step: int, at: float) -> dict[str, float]:
    """A row whose values are others than the last one's."""
    return {"step": step, "time": at} | {name: value * (1 + step % 7 / 100) for name, value in METRICS.items()}


def run_with(directory: Path, rows: int) -> Path:
    """The directory of a run of this process that has logged so many rows."""
    directory.mkdir()
    with (directory / "metrics.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(logged(step, 1.8e9 + step))}\n" for step in range(1, rows + 1))
    write_json(directory / "status.json", {"state": "running", "stage": "train", "time": time.time(), **this_process()})
    return directory


def opened(rows: int, directory: Path) -> Iterator[Row]:
    said = in_a_kernel([OPEN.format(run=str(directory))])[0].split()
    size = (directory / "metrics.jsonl").stat().st_size / 1e6
    case = f"{rows:,} logged rows ({size:.0f} MB)"
    yield row("panel", case, "import, attach, dashboard() to its plots", float(said[0]), "s", target="<= 2")
    yield row("panel", case, "peak memory of the whole kernel", int(said[1]) / 1e6, "MB", target="<= 200")


def followed(seconds: float, directory: Path) -> Iterator[Row]:
    """A run that logs several rows a second, beats each second, and is watched."""
    over = threading.Event()

    def train() -> None:
        step = GROWING_FROM
        while not over.wait(1 / ROWS_A_SECOND):
            step += 1
            append_jsonl(directory / "metrics.jsonl", logged(step, time.time()))
            if step % ROWS_A_SECOND == 0:
                beat = {"stage": "train", "step": step, "steps": 100_000, "time": time.time(), "eta_seconds": 3600.0}
                write_json(directory / "heartbeat.json", beat)

    training = threading.Thread(target=train)
    training.start()
    try:
        busy = BUSY.format(seconds=seconds)
        alone, _, watched = in_a_kernel([busy, OPEN.format(run=str(directory), rows=GROWING_FROM), busy])
    finally:
        over.set()
        training.join()
    case = f"a run that logs {ROWS_A_SECOND} rows a second, {seconds:.0f} s"
    share = 100 * (float(watched) - float(alone))
    note = f"the kernel without it {100 * float(alone):.2f} %"
    yield row("panel", case, "of one core", share, "%", target="<= 1", note=note)


def in_a_kernel(cells: list[str]) -> list[str]:
    """What cells print, one after the other, in one kernel."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300).execute()
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
