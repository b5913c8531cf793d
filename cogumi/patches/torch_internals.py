"""Private names of torch that cogumi uses, each once: Dynamo's state, a module's compiled call, fake tensors."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.utils
from torch import Tensor, nn
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["FakeTensorMode", "TorchDispatchMode", "tree_iter"]

PACKAGE = Path(__file__).parents[1]
DYNAMO: Any = torch._dynamo.config
EXPERT_ROWS = "capture_dynamic_output_shape_ops"  # whose rows `torch.where` finds: their number is data


def dynamo_counts() -> dict[str, Any]:
    """Count graphs, operations, breaks by reason, recompiles and seconds of compilation in this process."""
    utils: Any = torch._dynamo.utils
    # Not from the list of compilations, of which Dynamo keeps the last 64.
    recompiles = sum(times - 1 for times in FRAME_COMPILE_COUNTER.values())
    stats, breaks = utils.counters["stats"], dict(utils.counters["graph_break"])
    return {
        "graphs": stats["unique_graphs"],
        "operations": stats["calls_captured"],
        "breaks": breaks,
        "recompiles": recompiles,
        "seconds": utils.calculate_time_spent()["total_wall_time"],
    }


def compiled_functions() -> tuple[dict[str, int], dict[str, str]]:
    """Count compilations of each function among Dynamo's last 64, and collect the errors of those that failed.

    Where `suppress_errors` is on, as unsloth sets it, a function that failed runs uncompiled and nothing else says so.
    """
    compiled: dict[str, int] = {}
    failed: dict[str, str] = {}
    for metrics in torch._dynamo.utils.get_compilation_metrics():
        if metrics.co_name is None or metrics.co_filename is None or Path(metrics.co_filename).is_relative_to(PACKAGE):
            continue  # of cogumi's own there are probes
        name = f"{Path(metrics.co_filename).stem}.{metrics.co_name}"
        if metrics.fail_type is None:
            compiled[name] = compiled.get(name, 0) + 1
        else:
            failed[name] = f"{metrics.fail_type}: {' '.join((metrics.fail_reason or '').split())[:300]}"
    return compiled, failed


@contextmanager
def dynamo_left_as_found() -> Iterator[None]:
    """Dynamo set so that a failure is raised and experts can be captured; afterwards it is as it was, counters included."""
    counted = torch._dynamo.utils.counters
    before = copy.deepcopy(dict(counted))
    counted.clear()
    try:
        with DYNAMO.patch(suppress_errors=False, **{EXPERT_ROWS: True}):
            yield
    finally:
        counted.clear()
        counted.update(before)


def dynamo_switched_off_by() -> str:
    """Return what keeps Dynamo from compiling anything in this process, in words; "" where nothing does."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1"
    if DYNAMO.disable:
        by_variable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
        return "TORCH_COMPILE_DISABLE=1" if by_variable else "torch._dynamo.config.disable"
    return ""


def first_line(error: BaseException) -> str:
    """Return type and first line of a compiler's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "backend='inductor' raised:", and what it raised stands below.
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return f"{type(error).__name__}: {text}"[:300]


def with_code_of_its_own(function: Any) -> Any:
    """Copy a function with its code object, on which Dynamo stores what it compiled."""
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, closure=function.__closure__
    )


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return what calling the module runs where nothing is compiled, hooks included."""
    return module._call_impl


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `call` stand for the module's call, but not a copy's; None for its own."""
    module._compiled_call_impl = call


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors of one storage, also for fake tensors."""
    return tensor.untyped_storage()._cdata
