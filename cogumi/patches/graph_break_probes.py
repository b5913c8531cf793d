"""Does Dynamo take bitsandbytes' 4-bit layers into one graph, with the right gradients? Tried, never looked up by version.

Each probe compiles a few lines with fullgraph and the aot_eager backend, forward and backward, and compares with eager
execution. Dynamo's configuration and counters, the random numbers and `.grad` are as before afterwards.
"""

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

WIDTH = 64  # a multiple of bitsandbytes' block: 0.50.2 quantizes other widths wrongly on a CPU
ROWS, EXPERTS = 6, 3


@dataclass(frozen=True)
class Probe:
    """What came of one. error: the first line of it, "" where it passed."""

    name: str
    passed: bool
    error: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {'one graph' if self.passed else self.error} ({self.seconds:.1f} s)"


def probe_linear(device: torch.device) -> Probe:
    """A straight line of two Linear4bit layers."""
    return probe("a 4-bit layer", lambda layers: lambda x: layers[1](layers[0](x).relu()), device)


def probe_zero_rows(device: torch.device) -> Probe:
    """A loop over experts, of which one gets no row."""

    def build(layers: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        chosen = torch.arange(ROWS, device=device) % (EXPERTS - 1)

        def experts(x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            for number, layer in enumerate(layers):
                rows = torch.where(chosen == number)[0]
                out = out.index_add(0, rows, layer(x[rows]))
            return out

        return experts

    return probe("an expert without rows", build, device)


def probe(
    name: str, build: Callable[[list[Any]], Callable[[torch.Tensor], torch.Tensor]], device: torch.device
) -> Probe:
    began = time.perf_counter()
    with torch.random.fork_rng(), left_as_found(), torch.enable_grad():
        torch.manual_seed(0)
        function = build([four_bit_layer(device) for _ in range(EXPERTS)])
        x = torch.randn(ROWS, WIDTH, device=device)
        try:
            expected = value_and_gradient(function, x)
        except Exception as error:  # noqa: BLE001  a foreign patch may raise anything; it is reported
            return Probe(name, False, f"uncompiled, too: {first_line(error)}", time.perf_counter() - began)
        try:
            found = value_and_gradient(torch.compile(anew(function), backend="aot_eager", fullgraph=True), x)
        except Exception as error:  # noqa: BLE001  what a compiler raises is what the probe is for; it is reported
            return Probe(name, False, first_line(error), time.perf_counter() - began)
        captured = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seconds = time.perf_counter() - began
    if not captured:
        return Probe(name, False, "Dynamo compiled nothing and said nothing", seconds)
    if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
        return Probe(name, False, "compiled, and its result or gradient differs from the eager one", seconds)
    return Probe(name, True, "", seconds)


def anew(function: Any) -> Any:
    """The same function with code of its own: what Dynamo made of it in an earlier probe hangs on the code."""
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, closure=function.__closure__
    )


def four_bit_layer(device: torch.device) -> Any:
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(WIDTH, WIDTH, bias=True, compute_dtype=torch.float32, quant_type="nf4").to(device)
    layer.support_avx512bf16_for_cpu = False  # such CPUs repack the weights in a forward without gradients
    return layer.requires_grad_(False)


def value_and_gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]


@contextmanager
def left_as_found() -> Iterator[None]:
    """Dynamo set so that a failure is raised and experts can be captured; afterwards it is as it was, counters included."""
    import torch._dynamo

    counted = torch._dynamo.utils.counters
    before = copy.deepcopy(dict(counted))
    counted.clear()
    try:
        with torch._dynamo.config.patch(suppress_errors=False, capture_dynamic_output_shape_ops=True):
            yield
    finally:
        counted.clear()
        counted.update(before)


def switched_off_by() -> str:
    """What keeps Dynamo from compiling anything in this process, in words; "" where nothing does."""
    import torch._dynamo

    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1"
    if torch._dynamo.config.disable:
        by_variable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
        return "TORCH_COMPILE_DISABLE=1" if by_variable else "torch._dynamo.config.disable"
    return ""


def first_line(error: BaseException) -> str:
    """What a compiler's error says first, with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "backend='inductor' raised:", and what it raised stands below.
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return f"{type(error).__name__}: {said}"[:300]
