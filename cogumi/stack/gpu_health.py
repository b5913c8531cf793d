"""Health of a GPU and the memory of processes on it, by NVML (nvidia-ml-py)."""

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil

from cogumi.core.formatting import format_memory
from cogumi.stack.gpus import VARIABLE, count_launched, cuda_has_started

log = logging.getLogger("cogumi")
GONE = "one that is gone or not of this container"
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


@cache
def wait_for_gpus() -> str:
    """Wait until the driver has taken back the memory of a dead run, once a process and before CUDA starts in it.

    Returns who holds memory then; "" where nobody does, CUDA has started, or a launcher's parent has waited already.
    """
    if count_launched(os.environ) > 1 or cuda_has_started():
        return ""
    try:
        import pynvml

        pynvml.nvmlInit()
        return wait_for_memory(pynvml, os.environ.get(VARIABLE))
    except Exception:  # noqa: BLE001 (NVML's own, where its package is there): without it nothing is known, as on a CPU
        return ""


def wait_for_memory(nvml: Any, visible: str | None, patience: float = PATIENCE_SECONDS, pause: float = 1.0) -> str:
    """Wait while a dead or dying process holds memory of the GPUs; describe who holds over a GB then, "" if nobody does.

    Args:
        nvml: The module pynvml, initialized.
        visible: The value of CUDA_VISIBLE_DEVICES; None for all GPUs.
        patience: Seconds.
        pause: Seconds between two looks.
    """
    names = map(str, range(nvml.nvmlDeviceGetCount())) if visible is None else filter(None, visible.split(","))
    by = {True: lambda name: nvml.nvmlDeviceGetHandleByIndex(int(name)), False: nvml.nvmlDeviceGetHandleByUUID}
    gpus = {name: by[name.strip().isdigit()](name.strip()) for name in names}
    deadline, waited = time.monotonic() + patience, ""
    while True:
        found = {(p.pid, gpu): p for gpu, at in gpus.items() for p in nvml.nvmlDeviceGetComputeRunningProcesses(at)}
        held = {key: process.usedGpuMemory or 0 for key, process in found.items() if key[0] != os.getpid()}
        owners = {key: name_process(key[0]) for key, size in held.items() if size > MIN_HELD}
        if all(owners.values()) or time.monotonic() >= deadline:
            break
        if not waited:
            waited = f" after {patience:.0f} s"
            log.info("a process that is gone still holds GPU memory: waiting up to %.0f s", patience)
        time.sleep(pause)
    lines = (
        f"{format_memory(held[pid, gpu])} of GPU {gpu} by {name or GONE} (process {pid})"
        for (pid, gpu), name in owners.items()
    )
    return f"other processes hold GPU memory{waited}: {', '.join(lines)}" if owners else ""


def name_process(pid: int) -> str:
    """Return the name of a process; "" for one that is dead or dying, or of another PID namespace."""
    try:
        process = psutil.Process(pid)
        return "" if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else process.name()
    except psutil.NoSuchProcess:
        return ""
