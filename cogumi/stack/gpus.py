"""One GPU of several for a run: chosen before CUDA starts, by what nvidia-smi prints.

A run trains on one GPU. Where torch sees several, transformers' Trainer would spread a batch over all of them
(`nn.DataParallel`), which is another batch than the one that was asked for.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from cogumi.errors import UsageError

VARIABLE = "CUDA_VISIBLE_DEVICES"
QUERY = ("--query-gpu=index,uuid,memory.free,name", "--format=csv,noheader,nounits")
LIMIT = 60.0  # seconds; without persistence mode the driver is loaded first
HOW_TO_CHOOSE = f"set {VARIABLE} to one of them, before Python starts or the kernel is restarted"


@dataclass(frozen=True)
class Gpu:
    """index: nvidia-smi's. free: MiB of memory that nothing uses, -1 where the driver does not say."""

    index: int
    uuid: str
    free: int
    name: str


@dataclass(frozen=True)
class OneGpu:
    """What the variable is set to, why, and what the user had set it to."""

    value: str
    reason: str
    before: str | None = None


def gpus_listed(text: str) -> list[Gpu]:
    """The GPUs in what `nvidia-smi` with QUERY prints; lines that are no GPU are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", 3)]
        if len(cells) == 4 and cells[0].isdigit():
            found.append(Gpu(int(cells[0]), cells[1], int(cells[2]) if cells[2].isdigit() else -1, cells[3]))
    return found


def choose_gpu(text: str, visible: str | None) -> OneGpu | None:
    """The GPU with the most free memory, of those that CUDA_VISIBLE_DEVICES allows; None where there is nothing to choose.

    text: what nvidia-smi printed. visible: the variable as it is set. An entry of the user's is kept as it is written.
    """
    listed = gpus_listed(text)
    if visible is None:
        allowed = [(gpu.uuid, gpu) for gpu in listed]
    else:
        entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
        allowed = [(entry, gpu) for entry in entries for gpu in listed if is_called(gpu, entry)]
    if len(allowed) < 2:
        return None
    entry, best = max(allowed, key=lambda each: each[1].free)
    free = f", {best.free / 1024:.1f} GiB," if best.free >= 0 else ""
    reason = f"GPU {best.index} ({best.name}) has the most free memory{free} of {len(allowed)}, and a run trains on one"
    return OneGpu(entry, reason, visible)


def is_called(gpu: Gpu, entry: str) -> bool:
    """Whether an entry of the variable means this GPU: its index, or the beginning of its UUID."""
    return entry == str(gpu.index) if entry.isdigit() else gpu.uuid.startswith(entry)


@cache
def use_one_gpu() -> OneGpu | None:
    """Choose one of several GPUs for this process, once, and set the variable; None where there is nothing to choose.

    To be called before anything starts CUDA, best before torch is imported.
    """
    visible, tool = os.environ.get(VARIABLE), shutil.which("nvidia-smi")
    if tool is None or (visible is not None and "," not in visible) or cuda_has_started():
        return None
    try:
        said = subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=LIMIT, check=False).stdout
    except (subprocess.TimeoutExpired, OSError):
        return None  # a broken driver, of which torch and the doctor tell
    chosen = choose_gpu(said, visible)
    if chosen is not None:
        os.environ[VARIABLE] = chosen.value
    return chosen


def as_the_user_set_it(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for another process, which chooses for itself: without what this one has chosen."""
    chosen, others = use_one_gpu() if use_one_gpu.cache_info().currsize else None, dict(environment)
    if chosen is not None and others.pop(VARIABLE, None) is not None and chosen.before is not None:
        others[VARIABLE] = chosen.before
    return others


def cuda_has_started() -> bool:
    """Whether this process has initialised CUDA (`torch.cuda.is_available()` is enough), which reads the variable once."""
    if "torch" not in sys.modules:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0  # 3 before cuInit: CUDA_ERROR_NOT_INITIALIZED


def refuse_several_gpus(count: int) -> None:
    """Raise UsageError where torch sees more than one GPU: CUDA had started, or nvidia-smi did not tell them apart."""
    if count > 1:
        raise UsageError(
            f"torch sees {count} GPUs, and a run trains on one", fix=f"{HOW_TO_CHOOSE}, or use cogumi start"
        )


def refuse_ranks(environment: Mapping[str, str], command: str) -> None:
    """Raise UsageError in a process that torchrun or accelerate started as one of several.

    command: what starts the same without a launcher.
    """
    ranks, local = environment.get("WORLD_SIZE", ""), environment.get("LOCAL_RANK", "-1")
    if (ranks.isdigit() and int(ranks) > 1) or local != "-1":
        rank = environment.get("RANK", local)
        raise UsageError(
            f"this is process {rank} of {ranks or 'several'} that torchrun or accelerate started "
            "(WORLD_SIZE, LOCAL_RANK), and a run is one process on one GPU",
            fix=f"run: {command}",
        )
