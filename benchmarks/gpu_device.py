"""What the gpu benchmarks know about the card: is there one, its peak rate, its memory, and what does not fit in it."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.harness import Row, one_line, row, synchronize

# Dense bf16 FLOP/s with fp32 accumulation, from the vendors' data sheets (not the doubled "with sparsity" figure).
# A name that matches none is unknown: PCIe and NVL variants, laptop chips and MIG slices run at other rates.
PEAK_FLOPS = (
    (r"H100 (80GB HBM3|SXM)", 989e12),
    (r"\bH200(?! NVL)", 989e12),
    (r"A100", 312e12),
    (r"L40S", 362e12),
    (r"RTX 4090$", 165e12),
)


Result = TypeVar("Result")


def no_cuda() -> str | None:
    """Why there is no CUDA device to measure, or None when there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no usable device"
    return None


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a card by the name torch gives it; None when unknown, rather than a wrong guess."""
    if "MIG" in device_name:
        return None
    return next((rate for pattern, rate in PEAK_FLOPS if re.search(pattern, device_name)), None)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def peak_memory(device: str, work: Callable[[], Result]) -> tuple[Result, int | None]:
    """What `work()` returns, and the bytes the CUDA allocator held at most meanwhile, what was there before included.

    None for the bytes off CUDA.
    """
    if not device.startswith("cuda"):
        return work(), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated()


def memory_row(benchmark: str, case: str, metric: str, peak: int | None) -> Row:
    if peak is None:
        return row(benchmark, case, metric, None, note="missing: the CUDA allocator's statistics")
    return row(benchmark, case, metric, peak / 2**30, "GiB")


def release() -> None:
    """Give cached blocks back, so that the next case does not run out of memory that nothing uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_run(benchmark: str, case: str, work: Callable[[], object]) -> Row | None:
    """Run `work()` once. None when it ran, else the row that says why it is not measured; the others still are."""
    try:
        work()
        synchronize()
    except torch.cuda.OutOfMemoryError:
        # Not ok=False: a small card that cannot hold a big shape is a finding, not a defect.
        problem = row(benchmark, case, "-", None, note="out of memory on this card")
    except Exception as error:  # noqa: BLE001 - shown in the table and in the exit status
        problem = row(benchmark, case, "-", None, ok=False, note=f"failed: {one_line(error)}")
    else:
        return None
    # Outside of the handlers: inside, the traceback would keep the very tensors that did not fit.
    release()
    return problem


def out_of_time(benchmark: str, case: str) -> Row:
    return row(benchmark, case, "-", None, note="skipped: out of time")
