"""Health of a GPU and the memory of processes on it, by NVML (nvidia-ml-py)."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from cogumi.core.formatting import format_memory
from cogumi.stack.gpus import VARIABLE

MIN_HELD, PATIENCE_SECONDS = 10**9, 60.0  # a process of less than a GB is a desktop or an idle context

# NVML's reasons for lower clocks that are faults of the machine. SwPowerCap is none: a busy card runs at its limit.
SLOWDOWNS = ("SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "HwSlowdown")


@dataclass(frozen=True)
class GpuHealth:
    """One look at a GPU: degrees Celsius, milliwatts, MHz, bytes. None is what this card or driver does not tell.

    slowdowns: of SLOWDOWNS. ecc_errors: uncorrected, since the driver was loaded. processes: memory by PID. others: memory of
    processes beside this one and its children; None where this one is not listed, as a container may show other numbers.
    """

    temperature: int | None
    power: int | None
    power_limit: int | None
    clock: int | None
    slowdowns: tuple[str, ...]
    ecc_errors: int | None
    processes: dict[int, int]
    others: int | None


def read_gpu_health(uuid: object) -> GpuHealth | None:
    """Look at the GPU of which CUDA says this UUID; None without NVML, or without that GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # noqa: BLE001 (NVML's own, where its package is there)
        return None

    def ask(name: str, *arguments: Any) -> Any:
        with suppress(pynvml.NVMLError, AttributeError):  # an older package lacks some functions
            return getattr(pynvml, f"nvmlDeviceGet{name}")(handle, *arguments)
        return None

    reasons = ask("CurrentClocksEventReasons") or 0
    used = {process.pid: process.usedGpuMemory or 0 for process in ask("ComputeRunningProcesses") or ()}
    others = used.keys() - {os.getpid()}
    if others:
        others -= {child.pid for child in psutil.Process().children(recursive=True)}
    return GpuHealth(
        temperature=ask("Temperature", pynvml.NVML_TEMPERATURE_GPU),
        power=ask("PowerUsage"),
        power_limit=ask("EnforcedPowerLimit"),
        clock=ask("ClockInfo", pynvml.NVML_CLOCK_SM),
        slowdowns=tuple(name for name in SLOWDOWNS if reasons & getattr(pynvml, f"nvmlClocksEventReason{name}", 0)),
        ecc_errors=ask("TotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
        processes=used,
        others=sum(used[pid] for pid in others) if os.getpid() in used else None,
    )


def wait_for_gpus(patience: float = PATIENCE_SECONDS) -> str:
    """Call `wait_for_memory` for the GPUs of this process; "" without NVML. Call it before CUDA starts."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return wait_for_memory(pynvml, os.environ.get(VARIABLE), patience)
    except Exception:  # noqa: BLE001 (NVML's own, where its package is there)
        return ""


def wait_for_memory(nvml: Any, visible: str | None, patience: float, pause: float = 1.0) -> str:
    """Wait while a process that is gone holds over a GB of these GPUs; describe who does at the end, "" if nobody.

    nvml: the module pynvml, initialized. visible: CUDA_VISIBLE_DEVICES, None for all. patience, pause: in seconds.
    """
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if visible is not None:
        chosen = visible.replace(" ", "").split(",")
        gpus = [gpu for index, gpu in enumerate(gpus) if {str(index), nvml.nvmlDeviceGetUUID(gpu)} & {*chosen}]
    deadline = time.monotonic() + patience
    while True:
        listed = [process for gpu in gpus for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
        held = {process.pid: process.usedGpuMemory for process in listed if (process.usedGpuMemory or 0) > MIN_HELD}
        names = {pid: name_process(pid) for pid in held if pid != os.getpid()}
        if all(names.values()) or time.monotonic() >= deadline:
            break
        time.sleep(pause)
    lines = (f"{format_memory(held[pid])} by {name or 'an unseen process'} ({pid})" for pid, name in names.items())
    return f"other processes hold GPU memory: {', '.join(lines)}" if names else ""


def name_process(pid: int) -> str:
    """Return the name of a process; "" for one that is dead or dying, or of another container."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return process.name()
    return ""
