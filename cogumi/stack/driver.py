"""The NVIDIA driver, asked through its management library (NVML) without torch; and what it means for the wheels here."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p, create_string_buffer
from pathlib import Path
from typing import Any

from cogumi.core.errors import Finding, UsageError
from cogumi.stack.lanes import lane_for

LIBRARY = "libnvidia-ml.so.1"
# nvmlReturn_t of nvml.h
NOT_LOADED, MISMATCH = 9, 18
OTHER_HOST = "rent another host: a driver cannot be repaired from inside a container"
NO_LIBRARIES = (
    "start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility; else take another host"
)


class Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class NvmlError(Exception):
    """(code, message) of a call that failed."""


def ask_nvml() -> dict[str, Any]:
    """What NVML says, as JSON: {"missing": why} without the library, {"error", "message"} where a call fails.

    Else version, such as "580.95.05", and cuda, the newest CUDA release that it runs, such as (13, 0). cards has the
    name, the bytes of memory and the compute capability of each. To be called in a process of its own: with a broken
    driver it may hang. nvidia-ml-py is a wrapper of these same calls, which torch does not bring.
    """
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return {"missing": str(error)}
    nvml.nvmlErrorString.restype = c_char_p

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(nvml, name)(*arguments):
            raise NvmlError(code, (nvml.nvmlErrorString(c_int(code)) or b"").decode(errors="replace"))

    try:
        call("nvmlInit_v2")
        text, number = create_string_buffer(96), c_int()
        call("nvmlSystemGetDriverVersion", text, c_uint(len(text)))
        version = text.value.decode(errors="replace")
        call("nvmlSystemGetCudaDriverVersion_v2", byref(number))
        cuda = (number.value // 1000, number.value % 1000 // 10)
        count, cards = c_uint(), []
        call("nvmlDeviceGetCount_v2", byref(count))
        for index in range(count.value):
            handle, memory, major, minor = c_void_p(), Memory(), c_int(), c_int()
            call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle))
            call("nvmlDeviceGetName", handle, text, c_uint(len(text)))
            call("nvmlDeviceGetMemoryInfo", handle, byref(memory))
            call("nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor))
            cards.append((text.value.decode(errors="replace"), memory.total, (major.value, minor.value)))
    except NvmlError as error:
        code, message = error.args
        return {"error": code, "message": message}
    return {"version": version, "cuda": cuda, "cards": cards}


def find_gpu_sign(system: Path = Path("/")) -> str:
    """By what the kernel shows an NVIDIA GPU, without any of the driver's libraries; "" where it shows none."""
    for place in ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvidia0"):
        if (system / place).exists():
            return f"/{place}"
    for device in (system / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue  # taken away meanwhile, or not to be read
        if vendor == "0x10de" and kind.startswith("0x03"):  # NVIDIA; a display controller
            return f"PCI device {device.name}"
    return ""


def check_driver(answer: dict[str, Any] | None, error: str, torch_cuda: str | None) -> Iterator[Finding]:
    """What NVML's answer (None: none came, because of `error`) means for a torch built for `torch_cuda`, as "13.0"."""
    if answer is None:
        cause = "the driver does not answer: a GPU that fell off the bus, or a broken installation"
        yield Finding("driver", "fatal", f"NVML: {error}", cause, OTHER_HOST)
    elif "missing" in answer:
        yield describe_missing_library()
    elif "error" in answer:
        yield describe_error(answer["error"], answer["message"])
    else:
        yield check_cuda_version(answer["version"], tuple(answer["cuda"]), torch_cuda)
        if not answer["cards"]:
            cause = "the driver is there, but this container was given no GPU"
            fix = "start the container with --gpus all, or rent a box with a GPU"
            yield Finding("GPU", "warning", "none", cause, fix)
        for index, (name, memory, (major, minor)) in enumerate(answer["cards"]):
            yield Finding(f"GPU {index}", "ok", f"{name}, {memory / 2**30:.1f} GiB, sm_{major}{minor}")


def describe_missing_library() -> Finding:
    if sign := find_gpu_sign():
        cause = f"there is an NVIDIA GPU ({sign}), but none of its driver's libraries: {LIBRARY} is not found"
    elif tool := shutil.which("nvidia-smi"):
        cause = f"{tool} is there, but no {LIBRARY}: the driver belongs to another machine, or half of it is missing"
    else:
        return Finding("driver", "note", "no NVIDIA GPU; everything runs on the CPU")
    return Finding("driver", "fatal", f"no {LIBRARY}", cause, NO_LIBRARIES)


def describe_error(code: int, message: str) -> Finding:
    said = f"NVML: {message}"
    if code == MISMATCH:
        cause = (
            "the driver's libraries are of another version than its kernel module: it was upgraded without a restart"
        )
        return Finding("driver", "fatal", said, cause, "restart the host; on a rented box take another one")
    if code == NOT_LOADED and not find_gpu_sign():
        cause = "the driver's libraries are installed, but no NVIDIA kernel module runs: a machine without a GPU"
        return Finding("driver", "warning", said, cause, "rent a box with a GPU; the CPU lane works without one")
    return Finding("driver", "fatal", f"{said} ({code})", "the driver cannot be used", OTHER_HOST)


def check_cuda_version(version: str, cuda: tuple[int, int], torch_cuda: str | None) -> Finding:
    """CUDA's releases of one major version run on any driver of that major: torch for 13.x needs a driver for 13.0."""
    figure = f"{version}, runs CUDA up to {cuda[0]}.{cuda[1]}"
    if torch_cuda is None or int(torch_cuda.split(".")[0]) <= cuda[0]:
        return Finding("driver", "ok", figure)
    cause = f"torch here is built for CUDA {torch_cuda}, and this driver is too old for that"
    fix = "another host (driver 580 or newer)"
    with suppress(UsageError):  # older than every lane
        lane = lane_for(version).name
        fix += f", or the lane {lane} in a new environment: rm -r .venv; sh requirements/install.sh"
    compat = next(iter(sorted(Path("/usr/local").glob("cuda*/compat/libcuda.so.1"))), None)
    if compat is not None:
        cause = f"{cause}, unless {compat.parent} bridges it, which datacenter GPUs alone allow"
        return Finding("driver", "warning", figure, cause, fix)
    return Finding("driver", "fatal", figure, cause, fix)
