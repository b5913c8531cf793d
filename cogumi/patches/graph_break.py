"""bitsandbytes' 4-bit layers under Dynamo: the least change that lets them compile, found by trying.

The ladder, mildest first. `none`: it compiles as it is. `branchless`: an expert without rows ends the graph, so
`bitsandbytes.matmul_4bit` gets a form that does not ask for them. `break_linear`: the graph breaks around each 4-bit
layer, where Dynamo cannot trace one at all (torch 2.7). Each probe compiles a few lines with fullgraph, forward and
backward, and compares with eager execution. It leaves Dynamo, the random numbers and `.grad` as they were.
"""

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import ModuleList

from cogumi.core.errors import UsageError
from cogumi.patches import PatchStatus, torch_internals

NAME = "graph_break"
STRATEGIES = ("none", "branchless", "break_linear")
CHOICES = ("auto", "off", *STRATEGIES)
UNDO = "cogumi.patches.graph_break.undo()"
WIDTH = 64  # a multiple of bitsandbytes' block: 0.50.2 quantizes other widths wrongly on a CPU
ROWS, EXPERTS = 6, 3
NESTED_BLOCK = 256  # the only block size of the scales' own quantization that bitsandbytes' kernels know
_replaced: list["Replacement"] = []
_verdict: "ProbeVerdict | None" = None


@dataclass(frozen=True)
class CompileProbe:
    """Result of a probe. error: its first line, "" if it passed."""

    name: str
    error: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {self.error or 'one graph'} ({self.seconds:.1f} s)"


@dataclass(frozen=True)
class ProbeVerdict:
    """Chosen strategy and its reason. strategy: one of STRATEGIES, or "" if there was nothing to decide."""

    strategy: str
    reason: str
    probes: tuple[CompileProbe, ...] = ()


@dataclass(frozen=True)
class Replacement:
    """One attribute of another package, its value now, and its value before."""

    owner: Any
    name: str
    ours: Any
    original: Any

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', None) or type(self.owner).__name__}.{self.name}"


def apply(choice: str = "auto", model: Any = None) -> PatchStatus:
    """Find the mildest strategy that compiles and put it in place; applying twice is applying once.

    choice: "auto" probes, "off" changes nothing, one of STRATEGIES is put in place untried. model: whose 4-bit layers it
    is about; without one there may be experts. Raises UsageError for another choice, and where a patch is in its way.
    """
    global _verdict
    if choice not in CHOICES:
        raise UsageError(f"graph_break={choice!r} is not one of {', '.join(CHOICES)}")
    if reason := find_obstacle(choice, model):
        if _replaced:
            return replace(status(), reason=f"{status().reason}; it stays until {UNDO}")
        _verdict = ProbeVerdict("", reason)
    elif _verdict is not None and _replaced:
        if choice not in ("auto", _verdict.strategy):
            in_place = f"graph_break={choice!r}: {_verdict.strategy} is in place"
            raise UsageError(in_place, fix=f"{UNDO} takes it away first")
        for replacement in filter(is_configuration, _replaced):  # this thread may have a configuration of its own
            setattr(replacement.owner, replacement.name, replacement.ours)
    else:
        decided = decide(model) if choice == "auto" else ProbeVerdict(choice, "chosen by name, untried")
        put_in_place(decided.strategy)
        if _replaced:
            torch.compiler.reset()  # graphs of before would still be run
        _verdict = decided
    return status()


def undo() -> PatchStatus:
    """Put back what was found. Raises RuntimeError, changing nothing, where another package has patched on top."""
    global _verdict
    for replacement in _replaced:
        present = getattr(replacement.owner, replacement.name)
        if present is not replacement.ours and not is_configuration(replacement):
            raise RuntimeError(
                f"{NAME}: {replacement} was since replaced by {qualified_name(present)}; take that away first"
            )
    if _replaced:
        torch.compiler.reset()
    restore()
    _verdict = None
    return status()


def status() -> PatchStatus:
    """Return the strategy in place and its reason."""
    if _verdict is None:
        return PatchStatus(NAME, False, "not applied: 4-bit layers compile as far as bitsandbytes lets them")
    where = f" on {', '.join(map(str, _replaced))}" if _replaced else ""
    strategy = f"{_verdict.strategy}{where}: " if _verdict.strategy else ""
    foreign = foreign_patches()
    beside = f"; patched by others as well: {', '.join(foreign)}" if foreign else ""
    return PatchStatus(NAME, bool(_replaced), f"{strategy}{_verdict.reason}{beside}")


def verdict() -> ProbeVerdict | None:
    """Return what `apply` decided, with its probes; None before it."""
    return _verdict


def find_obstacle(choice: str, model: Any) -> str:
    """Return why no strategy is wanted here, in words; "" where one is."""
    if choice == "off":
        return "off: left as it is"
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed, so there are no 4-bit layers"
    if model is not None and not holds_4bit(model):
        return "the model has no 4-bit layers"
    if by := torch_internals.dynamo_switched_off_by():
        return f"Dynamo is switched off by {by}: nothing is compiled; unset it to compile"
    return ""


def holds_4bit(model: Any) -> bool:
    import bitsandbytes

    return any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules())


def holds_4bit_experts(model: Any) -> bool:
    """Return whether there is a list of modules with 4-bit layers that are not a transformer's own layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return any(
        isinstance(module, ModuleList)
        and holds_4bit(module)
        and not any(isinstance(below, GradientCheckpointingLayer) for below in module.modules())
        for module in model.modules()
    )


def decide(model: Any) -> ProbeVerdict:
    """Climb the ladder until a probe passes. What is tried for it is put back."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if model is not None:
        device = next(model.parameters()).device
    straight = probe_linear(device)
    if straight.error:
        why = "Dynamo cannot take a 4-bit layer into a graph"
        if foreign := ", ".join(foreign_patches()):  # another package's patch of it, not Dynamo
            why = f"{foreign}; with that a 4-bit layer does not compile ({straight.error}); without that patch it may"
        return ProbeVerdict("break_linear", why, (straight,))
    if model is not None and not holds_4bit_experts(model):
        return ProbeVerdict("none", "4-bit layers compile as they are, and the model has no 4-bit experts", (straight,))
    experts = probe_zero_rows(device)
    if not experts.error:
        return ProbeVerdict("none", "4-bit layers compile as they are, experts without rows too", (straight, experts))
    why = "an expert without rows ends the graph"
    try:
        put_in_place("branchless")
        again = probe_zero_rows(device)
    except UsageError as error:  # another package's patch is in the way
        return ProbeVerdict("break_linear", f"{why}, and {error.message}", (straight, experts))
    finally:
        restore()
    probes = (straight, experts, replace(again, name=f"{again.name}, branchless"))
    if not again.error:
        return ProbeVerdict("branchless", why, probes)
    return ProbeVerdict("break_linear", f"{why}, and without the branch too", probes)


def probe_linear(device: torch.device) -> CompileProbe:
    """Compile two Linear4bit layers in sequence."""
    return probe("a 4-bit layer", lambda layers, x: layers[1](layers[0](x).relu()), device)


def probe_zero_rows(device: torch.device) -> CompileProbe:
    """Compile a loop over experts, one of which gets no row."""
    chosen = torch.arange(ROWS, device=device) % (EXPERTS - 1)

    def experts(layers: list[Any], x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number, layer in enumerate(layers):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, layer(x[rows]))
        return out

    return probe("an expert without rows", experts, device)


def probe(name: str, block: Callable[[list[Any], torch.Tensor], torch.Tensor], device: torch.device) -> CompileProbe:
    from bitsandbytes.nn import Linear4bit

    began, error = time.perf_counter(), ""
    with torch.random.fork_rng(), torch_internals.dynamo_left_as_found(), torch.enable_grad():
        torch.manual_seed(0)
        settings = {"bias": True, "compute_dtype": torch.float32, "quant_type": "nf4"}
        layers: list[Any] = [Linear4bit(WIDTH, WIDTH, **settings).to(device) for _ in range(EXPERTS)]
        for layer in layers:
            layer.requires_grad_(False)
            layer.support_avx512bf16_for_cpu = False  # such CPUs repack the weights in a forward without gradients
        x, where = torch.randn(ROWS, WIDTH, device=device), "uncompiled, too: "

        def function(x: torch.Tensor) -> torch.Tensor:
            return block(layers, x)

        try:
            expected = value_and_gradient(function, x)
            where = ""
            compiled = torch.compile(
                torch_internals.with_code_of_its_own(function), backend="aot_eager", fullgraph=True
            )
            actual = value_and_gradient(compiled, x)
            if not torch_internals.dynamo_counts()["graphs"]:
                error = "Dynamo compiled nothing and said nothing"
            elif not all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)):
                error = "compiled, and its result or gradient differs from the eager one"
        except Exception as failure:  # noqa: BLE001  what a compiler or a foreign patch raises is what the probe is for
            error = f"{where}{torch_internals.first_line(failure)}"
    return CompileProbe(name, error, time.perf_counter() - began)


def value_and_gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]


def put_in_place(strategy: str) -> None:
    if strategy == "none":
        return
    import bitsandbytes

    if strategy == "break_linear":
        kinds = bitsandbytes.nn.Linear4bit.__mro__
        # Another class may stand for it.
        kind: Any = next(candidate for candidate in kinds if "forward" in vars(candidate))
        replace_attribute(kind, "forward", torch.compiler.disable(kind.forward))
        return
    if foreign := [candidate for candidate in foreign_patches() if "matmul_4bit" in candidate]:
        raise UsageError(f"graph_break='branchless': {foreign[0]} already", fix="take that away first")
    original: Callable[..., Any] = bitsandbytes.matmul_4bit

    @functools.wraps(original)
    def matmul_4bit(A: Any, B: Any, quant_state: Any, out: Any = None, bias: Any = None) -> Any:
        is_training_case = (
            out is None
            and quant_state is not None
            and not getattr(quant_state, "packing_format_for_cpu", False)
            and len(quant_state.shape) == 2
            and A.shape[-1] == quant_state.shape[1]
            and (not quant_state.nested or quant_state.state2.blocksize == NESTED_BLOCK)
        )
        if not is_training_case:
            return original(A, B, quant_state, out=out, bias=bias)
        return Branchless4bit.apply(A, B.view(-1, 1), bias, quant_state)

    replace_attribute(bitsandbytes, "matmul_4bit", matmul_4bit)
    replace_attribute(torch_internals.DYNAMO, torch_internals.EXPERT_ROWS, True)


def replace_attribute(owner: Any, name: str, value: Any) -> None:
    _replaced.append(Replacement(owner, name, value, getattr(owner, name)))
    setattr(owner, name, value)


def restore() -> None:
    while _replaced:
        replacement = _replaced.pop()
        if not is_configuration(replacement) or getattr(replacement.owner, replacement.name) is replacement.ours:
            setattr(replacement.owner, replacement.name, replacement.original)


def is_configuration(replacement: Replacement) -> bool:
    """Return whether it belongs to Dynamo's configuration, which is per thread and per cell of a notebook."""
    return replacement.owner is torch_internals.DYNAMO


def foreign_patches() -> list[str]:
    """List patches of bitsandbytes' 4-bit matmul and layer by packages other than bitsandbytes and cogumi."""
    if sys.modules.get("bitsandbytes") is None:
        return []
    import bitsandbytes

    places: dict[str, Any] = {
        "bitsandbytes.matmul_4bit": bitsandbytes.matmul_4bit,
        "Linear4bit.forward": bitsandbytes.nn.Linear4bit.forward,
    }
    ours = [replacement.ours for replacement in _replaced]
    return [
        f"{place} is {qualified_name(present)}"
        for place, present in places.items()
        if not any(present is replacement for replacement in ours)
        and not qualified_name(present).startswith("bitsandbytes.")
    ]


def qualified_name(function: Any) -> str:
    """With the module in which a function was written: a wrapper calls itself by another one's name."""
    module = getattr(function, "__globals__", {}).get("__name__", function.__module__)
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


class Branchless4bit(torch.autograd.Function):
    """y = x W^T + b for a 4-bit W that is not trained, by `gemm_4bit`. x: (..., K), W: (N, K), y: (..., N).

    bitsandbytes 0.50 asks `A.numel() == 0` (autograd/_functions.py). The number of rows that an expert gets is data, so
    the question ends the graph.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, state: Any) -> torch.Tensor:
        ctx.packed, ctx.state = packed, state
        ctx.bias_dtype = None if bias is None else bias.dtype
        doubly = state.nested
        scales = state.state2.absmax if doubly else state.absmax
        nested = (state.absmax, state.state2.code, state.offset) if doubly else (None, None, None)
        return torch.ops.cogumi.gemm_4bit(
            x, packed, state.shape, scales, state.blocksize, state.quant_type, bias, *nested
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        from bitsandbytes.functional import dequantize_4bit

        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        of_x = torch.matmul(grad, dequantize_4bit(ctx.packed, ctx.state).to(grad.dtype)) if wants_x else None
        of_bias = grad.flatten(0, -2).sum(0, dtype=ctx.bias_dtype) if wants_bias else None
        return of_x, None, of_bias, None


def gemm_4bit(x: torch.Tensor, packed: torch.Tensor, shape: Sequence[int], *settings: Any) -> torch.Tensor:
    """Bitsandbytes' operator of this name, and (..., 0 rows, N) for zero rows, of which its CUDA kernel makes an error.

    An operator of its own, so that Dynamo does not look inside: the question is asked when it runs.
    """
    if x.numel() == 0:
        return result_of_gemm(x, packed, shape)
    absmax, blocksize, quant_type, bias, *nested = settings
    names = ("absmax_8bit", "absmax_code", "absmax_offset")
    return torch.ops.bitsandbytes.gemm_4bit.default(
        x, packed, shape, absmax, blocksize, quant_type, bias=bias, **dict(zip(names, nested, strict=True))
    )


def result_of_gemm(x: torch.Tensor, packed: torch.Tensor, shape: Sequence[int], *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


if not hasattr(torch.ops.cogumi, "gemm_4bit"):  # a module may be loaded twice, an operator defined once
    torch.library.define(
        "cogumi::gemm_4bit",
        "(Tensor x, Tensor packed, SymInt[] shape, Tensor absmax, int blocksize, str quant_type, Tensor? bias, "
        "Tensor? absmax_8bit, Tensor? absmax_code, Tensor? absmax_offset) -> Tensor",
    )
    torch.library.impl("cogumi::gemm_4bit", "CompositeExplicitAutograd", gemm_4bit)
    torch.library.register_fake("cogumi::gemm_4bit", result_of_gemm)
