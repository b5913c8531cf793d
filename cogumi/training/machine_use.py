"""What a run takes of the machine: GPU, CPU, memory, disk. Nothing here waits for the GPU."""

import importlib.util
import logging
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from cogumi.words import pip

log = logging.getLogger("cogumi")


class MachineUse:
    """Reads what the machine is doing, about a millisecond a time. Made in the thread that asks.

    Utilization, temperature and power come from NVML (nvidia-ml-py), and are left out, with one line of log, where it
    is not installed or does not answer, as in some containers.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first call starts the interval of the next
        psutil.cpu_percent()
        self.nvml = torch.cuda.is_available() and nvml_answers()

    def now(self) -> dict[str, Any]:
        """Bytes are bytes, percentages 0 to 100; `cpu.process_percent` is of one core, so 8 busy cores are 800."""
        memory, disk = psutil.virtual_memory(), shutil.disk_usage(self.directory)
        return {
            "gpu": self.gpu(),
            "cpu": {
                "percent": psutil.cpu_percent(),
                "process_percent": self.process.cpu_percent(),
                "cores": psutil.cpu_count(),
            },
            "memory": {"used": memory.total - memory.available, "total": memory.total, "process": self.process.memory_info().rss},
            "disk": {"free": disk.free, "total": disk.total},
        }  # fmt: skip

    def gpu(self) -> dict[str, Any] | None:
        """None without one. `used` is everybody's, `allocated` and `reserved` are of this process."""
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info()
        found = {"name": torch.cuda.get_device_name(), "used": total - free, "total": total, **gpu_peaks()}
        if self.nvml:
            found |= {
                "utilization_percent": torch.cuda.utilization(),
                "temperature_celsius": torch.cuda.temperature(),
                "power_watts": torch.cuda.power_draw() / 1000,
            }
        return found


def nvml_answers() -> bool:
    if importlib.util.find_spec("pynvml") is None:
        install = pip("install nvidia-ml-py")
        log.info("no GPU utilization in heartbeat.json: nvidia-ml-py is not installed (%s)", install)
        return False
    import pynvml

    try:
        torch.cuda.utilization(), torch.cuda.temperature(), torch.cuda.power_draw()
    except (pynvml.NVMLError, RuntimeError) as error:
        log.info("no GPU utilization in heartbeat.json: NVML does not answer: %s", error)
        return False
    return True


def gpu_peaks() -> dict[str, int]:
    """Bytes that torch has held at most since the run began; {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def peak_rss() -> int:
    """The most memory this process has had resident, in bytes, over its whole life."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
