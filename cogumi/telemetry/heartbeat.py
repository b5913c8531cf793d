"""heartbeat.json says once a second, in every stage, what a run does, how long it still takes and what it costs.
metrics.json says at the end what the run came to, whether it finished or not."""

import logging
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from cogumi.core.disk_space import format_bytes
from cogumi.core.errors import RefusedAtSetup
from cogumi.core.formatting import one_line, pip_command
from cogumi.core.run_directory import FORECAST, read_jsonl, read_section, write_json
from cogumi.telemetry.throughput import HEARTBEAT, Meter, Throughput

log = logging.getLogger("cogumi")
HEARTBEAT_SECONDS = 1.0
SUMMARY = "metrics.json"
FINAL = ("loss", "eval_loss", "reward")


class MachineUse:
    """Reads what the machine is doing, about a millisecond a time. Utilization, temperature and power come from NVML
    (nvidia-ml-py). Where it is not installed or does not answer, they are left out, and one line of log says so."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first call starts the interval of the next
        psutil.cpu_percent()
        self.nvml = torch.cuda.is_available() and has_nvml()

    def now(self) -> dict[str, Any]:
        """Bytes are bytes, percentages 0 to 100; `cpu.process_percent` is of one core, so 8 busy cores are 800."""
        cpu, process = psutil.cpu_percent(), self.process.cpu_percent()
        memory, disk, rss = psutil.virtual_memory(), shutil.disk_usage(self.directory), self.process.memory_info().rss
        return {
            "gpu": self.gpu(),
            "cpu": {"percent": cpu, "process_percent": process, "cores": psutil.cpu_count()},
            "memory": {"used": memory.total - memory.available, "total": memory.total, "process": rss},
            "disk": {"free": disk.free, "total": disk.total},
        }

    def gpu(self) -> dict[str, Any] | None:
        """None without one. `used` is everybody's, the peaks are of this process."""
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info()
        found = {"name": torch.cuda.get_device_name(), "used": total - free, "total": total, **gpu_peaks()}
        if self.nvml:
            found["utilization_percent"] = torch.cuda.utilization()
            found["temperature_celsius"] = torch.cuda.temperature()
            found["power_watts"] = torch.cuda.power_draw() / 1000
        return found


def has_nvml() -> bool:
    try:
        import pynvml

        torch.cuda.utilization(), torch.cuda.temperature(), torch.cuda.power_draw()
    except ImportError:
        why = f"nvidia-ml-py is not installed ({pip_command('install nvidia-ml-py')})"
    except (pynvml.NVMLError, RuntimeError) as error:
        why = f"NVML does not answer: {error}"
    else:
        return True
    log.info("no GPU utilization in heartbeat.json: %s", why)
    return False


def gpu_peaks() -> dict[str, int]:
    """Bytes that torch has held at most since the run began; {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {"peak_allocated": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()}


@dataclass
class Progress:
    """How far the training is. Written by the thread that trains, read by the one that beats.

    step_time: when the last step ended, which stands still when the training hangs. eta_seconds: to the end of the training,
    as of `step_time`. of_a_stage: these are steps and seconds of one stage before the training (`dpo.ReferencePass`).
    """

    step: int = 0
    steps: int | None = None
    step_time: float | None = None
    eta_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    of_a_stage: bool = False


class Heartbeat:
    """`with Heartbeat(run_dir, meter) as heart:` beats in a thread of its own until the block ends, and once more then.

    The thread holds the interpreter for about a millisecond a beat and waits for nothing but the disk. `time` says that
    the process lives; a training that hangs keeps its `step_time`, and one that holds the interpreter keeps its `time`.
    """

    def __init__(self, run_dir: Path, meter: Meter) -> None:
        self.run_dir, self.meter = run_dir, meter
        self.progress = Progress()
        self.throughput: Throughput | None = None
        self.stalled: Callable[[], str] = str  # what a mirror says that falls behind, "" where it does not
        self.failing = False
        self.over = threading.Event()
        self.use = MachineUse(run_dir)
        self.thread = threading.Thread(target=self.run, name="cogumi heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.beat()

    def run(self) -> None:
        self.beat()
        while not self.over.wait(HEARTBEAT_SECONDS):
            self.beat()

    def beat(self) -> None:
        """A beat that fails is told once, and ends nothing: a disk may have room again, and a lost GPU ends the training."""
        try:
            write_json(self.run_dir / HEARTBEAT, self.now())
        except Exception as error:  # noqa: BLE001
            if not self.failing:
                log.error("heartbeat.json is not written: %s", one_line(error))
            self.failing = True
        else:
            self.failing = False

    def now(self) -> dict[str, Any]:
        progress, meter = self.progress, self.meter
        left = progress.eta_seconds
        return {
            "stage": meter.stage,
            "step": progress.step,
            "steps": progress.steps,
            "time": time.time(),
            "step_time": progress.step_time,
            "started": meter.started,
            "elapsed_seconds": meter.elapsed(),
            "eta_seconds": left,
            "cost_so_far": meter.cost(),
            "cost_at_end": None if left is None or progress.of_a_stage else meter.cost(left),
            "tokens_per_second": progress.tokens_per_second,
            "mfu": progress.mfu,
            "seconds": meter.seconds(),
            "counts": meter.counts,
            "stalled": self.stalled() or None,
            **self.use.now(),
        }


# -------------------------------------------------------------------------------------------------------- metrics.json


@contextmanager
def measure_run(run_dir: Path, meter: Meter) -> Iterator[Heartbeat]:
    """The run's heart beats in the block. metrics.json then says what the run came to, unless setup refused it."""
    meter.resume_from(run_dir)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    heart = Heartbeat(run_dir, meter)
    try:
        with heart:
            yield heart
        if heart.throughput is not None:
            heart.throughput.read()
    except RefusedAtSetup:  # nothing was measured, and the directory goes unless there was something in it
        raise
    except BaseException:
        write_summary(heart)
        raise
    write_summary(heart)


def write_summary(heart: Heartbeat) -> None:
    found = summary(heart)
    peak, forecast = (found["memory"].get(key) for key in ("gpu_peak_allocated", "gpu_peak_forecast"))
    if peak and forecast:
        more = 100 * (forecast / peak - 1)
        log.info("GPU memory: %s at its peak, %s forecast (%+.1f %%)", format_bytes(peak), format_bytes(forecast), more)
    try:
        write_json(heart.run_dir / SUMMARY, found)
    except OSError as error:  # what went wrong first is what the run ends with
        log.error("%s could not be written: %s", heart.run_dir / SUMMARY, error.strerror)


def summary(heart: Heartbeat) -> dict[str, Any]:
    """Seconds, tokens, cost: of all parts of the run. Rates: of its steps. Memory: of this process.

    `gpu_peak_forecast` is what the preflight said that `gpu_peak_allocated` would be; `peak_rss` is of the whole process.
    """
    meter, progress, throughput = heart.meter, heart.progress, heart.throughput
    found: dict[str, Any] = {
        "steps": progress.step,
        "max_steps": progress.steps,
        "elapsed_seconds": round(meter.elapsed(), 3),
        "seconds": {stage: round(seconds, 3) for stage, seconds in meter.seconds().items()},
        "price_per_hour": meter.price_per_hour,
        "cost": meter.cost(),
    }
    if throughput is not None:
        found |= rates(throughput)
    rows = read_jsonl(heart.run_dir / "metrics.jsonl")
    found["final"] = {key: next((row[key] for row in rows[::-1] if row.get(key) is not None), None) for key in FINAL}
    # getrusage(2): kilobytes on Linux, bytes on macOS
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found["memory"] = {"peak_rss": rss, **{f"gpu_{key}": value for key, value in gpu_peaks().items()}}
    forecast = read_section(heart.run_dir / FORECAST, "preflight").get("figures", {}).get("memory")
    if forecast is not None:
        found["memory"] |= {"gpu_peak_forecast": forecast["tensors"] + forecast["workspace"]}
    return found


def rates(throughput: Throughput) -> dict[str, Any]:
    done = throughput.total
    found: dict[str, Any] = {
        "tokens": int(done.tokens),
        "tokens_with_padding": int(done.padded_tokens),
        "tokens_per_second": throughput.tokens_per_second(done),
        "step_seconds": round(done.step_seconds, 3),
    }
    if throughput.work is not None and done.tokens:
        context = done.squared / done.tokens
        found |= {
            "mean_context": round(context, 1),
            "flop_per_token": throughput.work.model(context),
            "weights_per_token": throughput.work.weights,
            "trained_weights_per_token": throughput.work.trained,
        }
    found |= {"peak_flops": throughput.peak, "mfu": throughput.mfu(done)}
    if throughput.no_mfu:
        found["no_mfu"] = throughput.no_mfu
    if done.rollout_seconds:
        found["rollout_seconds"] = round(done.rollout_seconds, 3)
        found["update_seconds"] = round(done.step_seconds - done.rollout_seconds, 3)
        found["completions"] = int(done.completions)
        found["completions_per_second"] = done.completions / done.rollout_seconds
    return found
