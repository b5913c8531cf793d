"""`FusedLogProbFunction` in the place of TRL 1.15's head, which is Triton only: nothing trains without a GPU."""

import importlib
import importlib.util
import sys
from importlib.metadata import version
from typing import Any

import torch

from cogumi.patches import PatchStatus
from cogumi.patches.head_logps import FusedLogProbFunction

NAME = "fused_head"
KERNEL = "_ChunkedLogProbFunction"  # of trl.trainer.utils
WRITTEN_FOR = "1.15"
_NOT_REPLACED = object()
_replaced: Any = _NOT_REPLACED  # what stood in TRL before `apply`: TRL's class, or None where triton is not installed


def apply() -> PatchStatus:
    """Replace TRL's kernel where no GPU runs it. Raises RuntimeError for another TRL or another kernel."""
    global _replaced
    if _replaced is not _NOT_REPLACED:
        return status()
    device = triton_device()
    if device is not None:
        return PatchStatus(NAME, False, f"TRL's Triton kernel runs on this {device} device")
    upstream: Any = importlib.import_module("trl.trainer.utils")
    present = upstream._ChunkedLogProbFunction
    if is_unsloth_kernel(present):
        return status()
    check_upstream()
    if present is not None and present.__module__ != "trl.kernels.chunked_logprob":
        raise RuntimeError(f"{NAME}: TRL's head kernel is already replaced by {_name(present)}; undo that first")
    _replaced = present
    upstream._ChunkedLogProbFunction = FusedLogProbFunction
    return status()


def undo() -> PatchStatus:
    """Put back what `apply` found. Raises RuntimeError when another package has replaced the kernel since."""
    global _replaced
    if _replaced is _NOT_REPLACED:
        return status()
    upstream: Any = importlib.import_module("trl.trainer.utils")
    present = upstream._ChunkedLogProbFunction
    if present is not FusedLogProbFunction:
        raise RuntimeError(f"{NAME}: TRL's head kernel was since replaced by {_name(present)}; undo that first")
    upstream._ChunkedLogProbFunction = _replaced
    _replaced = _NOT_REPLACED
    return status()


def status() -> PatchStatus:
    """Whether TRL's losses go through `FusedLogProbFunction` now, and why."""
    upstream: Any = sys.modules.get("trl.trainer.utils")
    if upstream is not None and is_unsloth_kernel(upstream._ChunkedLogProbFunction):
        return PatchStatus(NAME, False, "unsloth has put a head of its own in this place")
    if _replaced is _NOT_REPLACED:
        return PatchStatus(NAME, False, "not applied: TRL's losses need a GPU that runs Triton")
    present = upstream._ChunkedLogProbFunction
    if present is not FusedLogProbFunction:
        return PatchStatus(NAME, False, f"applied, and since replaced by {_name(present)}")
    why = f"no GPU that runs Triton (trl {version('trl')}, written for {WRITTEN_FOR})"
    return PatchStatus(NAME, True, f"TRL's losses use a PyTorch head: {why}")


def is_unsloth_kernel(kernel: Any) -> bool:
    """Whether unsloth, which runs with and without a GPU, has replaced TRL's kernel already."""
    return kernel is not None and kernel.__module__.partition(".")[0] in ("unsloth", "unsloth_zoo")


def triton_device() -> str | None:
    """The kind of device TRL's Triton kernel would run on; None where triton or such a device is missing."""
    if importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.is_available():
        return "CUDA" if torch.version.hip is None else "ROCm"
    return "XPU" if torch.xpu.is_available() else None


def check_upstream() -> None:
    """Raise RuntimeError unless TRL is the release whose kernel and call this has, as tests/test_fused_head.py checks."""
    if not version("trl").startswith(WRITTEN_FOR + "."):
        raise RuntimeError(f"{NAME} is written for trl {WRITTEN_FOR}.x and this is trl {version('trl')}")


def _name(kernel: Any) -> str:
    return "None" if kernel is None else f"{kernel.__module__}.{kernel.__qualname__}"
