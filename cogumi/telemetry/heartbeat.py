"""heartbeat.json: stage, step, time left and cost, once a second; metrics.json: the totals at the end of any run."""

import logging
import resource
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from cogumi.core.errors import RefusedAtSetup
from cogumi.core.formatting import one_line
from cogumi.core.run_directory import FORECAST, read_jsonl, read_section, write_json
from cogumi.stack.gpu_health import GpuHealth, read_gpu_health
from cogumi.telemetry.throughput import HEARTBEAT, Meter, Throughput, TokenCounts

log = logging.getLogger("cogumi")
HEARTBEAT_SECONDS = 1.0
SUMMARY = "metrics.json"
FINAL = ("loss", "eval_loss", "reward")


@dataclass
class Progress:
    """The progress of the training. step_time: when the last step ended. eta_seconds: from then to its end."""

    step: int = 0
    steps: int | None = None
    step_time: float | None = None
    eta_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None


class Heartbeat:
    """Writes heartbeat.json from a thread of its own until the block ends, and once more then.

    A training that hangs keeps its `step_time`, and one that holds the interpreter keeps its `time`.
    """

    def __init__(self, run_dir: Path, meter: Meter) -> None:
        self.run_dir, self.meter = run_dir, meter
        self.progress = Progress()
        self.throughput: Throughput | None = None
        self.stalled: Callable[[], str] = str  # describes a mirror that falls behind; "" if none does
        self.mirror_lag: Callable[[], dict[str, float]] = dict  # of the same mirror, for the metrics
        self.watch: Any = None  # the Watchdog of the whole run, if it has one
        self.failing = False
        self.looks: deque[GpuHealth] = deque(maxlen=600)  # since the last logged row
        self.over = threading.Event()
        self.has_nvml = torch.cuda.is_available()
        try:
            if self.has_nvml:
                torch.cuda.utilization()
        except Exception as error:  # noqa: BLE001 (NVML's own, where its package is there)
            log.info("no GPU utilization in heartbeat.json: %s", one_line(error))
            self.has_nvml = False
        psutil.cpu_percent()  # the first call starts the interval of the next
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
        """Write heartbeat.json; log a failure once and go on, as a disk may have room again."""
        try:
            write_json(self.run_dir / HEARTBEAT, self.now())
        except Exception as error:  # noqa: BLE001
            if not self.failing:
                log.error("heartbeat.json is not written: %s", one_line(error))
            self.failing = True
        else:
            self.failing = False

    def now(self) -> dict[str, Any]:
        """Return the values. Bytes are bytes, percentages 0 to 100; without NVML, GPU memory is this process's alone."""
        meter, left = self.meter, self.progress.eta_seconds
        memory, disk = psutil.virtual_memory(), shutil.disk_usage(self.run_dir)
        return {
            "stage": meter.stage,
            "time": time.time(),
            **asdict(self.progress),
            "started": meter.started,
            "elapsed_seconds": meter.elapsed(),
            "cost_so_far": meter.cost(),
            "cost_at_end": None if left is None else meter.cost(left),
            "seconds": meter.seconds(),
            "counts": meter.counts,
            "stalled": self.stalled() or None,
            "gpu": self.gpu(),
            "cpu": {"percent": psutil.cpu_percent(), "cores": psutil.cpu_count()},
            "memory": {"used": memory.total - memory.available, "total": memory.total},
            "disk": {"free": disk.free, "total": disk.total},
        }

    def gpu(self) -> dict[str, Any] | None:
        if not torch.cuda.is_available():
            return None
        # Not cudaMemGetInfo: a call of the CUDA runtime breaks a graph that the main thread may be capturing.
        used = torch.cuda.device_memory_used() if self.has_nvml else torch.cuda.memory_reserved()
        utilization = torch.cuda.utilization() if self.has_nvml else None
        name, card = torch.cuda.get_device_name(), torch.cuda.get_device_properties()
        known = {"name": name, "used": used, "total": card.total_memory, "utilization_percent": utilization}
        if (health := read_gpu_health(card.uuid)) is None:
            return known
        self.looks.append(health)
        return {**known, **asdict(health)}

    def gpu_row(self) -> dict[str, float | None]:
        """Return what the looks at the GPU since the last logged row show."""
        looks = [self.looks.popleft() for _ in range(len(self.looks))]
        if not looks:
            return {}
        return {
            "perf/gpu_temperature": max((look.temperature for look in looks if look.temperature), default=None),
            "perf/gpu_slowed": sum(bool(look.slowdowns) for look in looks) / len(looks),
            "perf/gpu_ecc_errors": looks[-1].ecc_errors,
            "perf/gpu_others_gb": None if looks[-1].others is None else looks[-1].others / 1e9,
        }


@contextmanager
def measure_run(run_dir: Path, meter: Meter) -> Iterator[Heartbeat]:
    """Emit heartbeats for the duration of the block, then write metrics.json, unless setup refused the run."""
    meter.resume_from(run_dir)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    heart = Heartbeat(run_dir, meter)
    try:
        with heart:
            yield heart
        if heart.throughput is not None:
            heart.throughput.read()
    except RefusedAtSetup:  # nothing was measured, and a new directory is removed
        raise
    except BaseException:
        write_summary(heart)
        raise
    write_summary(heart)


def compare_rollouts(run_dir: Path, done: TokenCounts) -> dict[str, float | None]:
    """Return the mean seconds of a rollout, rewards included, and the preflight's forecast if it made one."""
    figures = read_section(run_dir / FORECAST, "preflight").get("figures", {})
    forecast, measured = figures.get("time", {}).get("rollout"), done.rollout_seconds / done.rollouts
    return {"forecast_seconds": forecast, "measured_seconds": measured, "factor": forecast and measured / forecast}


def write_summary(heart: Heartbeat) -> None:
    """Write metrics.json. Seconds, tokens and cost cover all parts of a resumed run, memory this process."""
    meter, throughput, path = heart.meter, heart.throughput, heart.run_dir / SUMMARY
    summary: dict[str, Any] = {
        "steps": heart.progress.step,
        "max_steps": heart.progress.steps,
        "elapsed_seconds": round(meter.elapsed(), 3),
        "seconds": {stage: round(seconds, 3) for stage, seconds in meter.seconds().items()},
        "cost": meter.cost(),
    }
    if throughput is not None:
        done = throughput.total
        summary |= {
            "tokens": int(done.tokens),
            "tokens_per_second": throughput.tokens_per_second(done),
            "step_seconds": round(done.step_seconds, 3),
            "mfu": throughput.mfu(done),
        }
        if done.rollouts:
            summary["rollout"] = compare_rollouts(heart.run_dir, done)
    rows = read_jsonl(heart.run_dir / "metrics.jsonl")
    summary["final"] = {key: next((row[key] for row in rows[::-1] if row.get(key) is not None), None) for key in FINAL}
    # getrusage(2): kilobytes on Linux, bytes on macOS
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    memory = summary["memory"] = {"peak_rss": rss}
    if torch.cuda.is_available():
        memory["gpu_peak_allocated"] = torch.cuda.max_memory_allocated()
        memory["gpu_peak_reserved"] = torch.cuda.max_memory_reserved()
    forecast = read_section(heart.run_dir / FORECAST, "preflight").get("figures", {}).get("memory")
    if forecast is not None:
        memory["gpu_peak_forecast"] = forecast["tensors"] + forecast["workspace"] + forecast.get("vllm", 0)
    try:
        write_json(path, summary)
    except OSError as error:  # must not replace the run's own error
        log.error("%s could not be written: %s", path, error.strerror)
