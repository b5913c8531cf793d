"""Health of a GPU and the memory of processes on it, by NVML (nvidia-ml-py)."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

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
