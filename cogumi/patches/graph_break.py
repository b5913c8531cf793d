"""bitsandbytes' 4-bit layers under Dynamo: the least change that lets them compile, found by trying.

The ladder, mildest first. `none`: it compiles as it is. `branchless`: an expert without rows ends the graph, so
`bitsandbytes.matmul_4bit` gets a form that does not ask for them. `break_experts`: the graph breaks around the block of
experts. `break_linear`: the graph breaks around each 4-bit layer, where Dynamo cannot trace one at all (torch 2.7). A
break skips everything below it: without that Dynamo compiles the layer's body as frames of their own, which was the slowest.

Each probe compiles a few lines with fullgraph and the aot_eager backend, forward and backward, and compares with eager
execution. Dynamo's configuration and counters, the random numbers and `.grad` are as before afterwards.
"""

import functools
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch.nn import ModuleList

from cogumi.core.errors import UsageError
from cogumi.patches import PatchStatus
from cogumi.patches.branchless_4bit import Branchless4bit, fused_takes_no_rows, is_training_case
from cogumi.patches.torch_internals import (
    DYNAMO,
    EXPERT_ROWS,
    dynamo_counts,
    dynamo_left_as_found,
    dynamo_switched_off_by,
    first_line,
    with_code_of_its_own,
)

NAME = "graph_break"
STRATEGIES = ("none", "branchless", "break_experts", "break_linear")
CHOICES = ("auto", "off", *STRATEGIES)
UNDO = "cogumi.patches.graph_break.undo()"
WAITS = "which blocks are experts is seen in a model: cogumi.patches.graph_break.apply('break_experts', model)"
WIDTH = 64  # a multiple of bitsandbytes' block: 0.50.2 quantizes other widths wrongly on a CPU
ROWS, EXPERTS = 6, 3
_ABSENT = object()
_replaced: list["Replacement"] = []
_verdict: "ProbeVerdict | None" = None


@dataclass(frozen=True)
class CompileProbe:
    """What came of one. error: the first line of it, "" where it passed."""

    name: str
    passed: bool
    error: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {'one graph' if self.passed else self.error} ({self.seconds:.1f} s)"


@dataclass(frozen=True)
class ProbeVerdict:
    """What was decided, and by what. strategy: one of STRATEGIES, or "" where nothing was to be decided."""

    strategy: str
    reason: str
    probes: tuple[CompileProbe, ...] = ()
    patched: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replacement:
    """One attribute of another package, its value now, and its value before."""

    owner: Any
    name: str
    ours: Any
    original: Any


def apply(choice: str = "auto", model: Any = None) -> PatchStatus:
    """Find the mildest strategy that compiles and put it in place; applying twice is applying once.

    choice: "auto" probes, "off" changes nothing, a name of STRATEGIES is put in place untried. model: whose 4-bit layers
    and experts it is about; without one there may be experts. Compiled code is dropped where something changes. Raises
    UsageError for another choice, where another strategy is in place already, and where another package's patch is in its way.
    """
    global _verdict
    if choice not in CHOICES:
        raise UsageError(f"graph_break={choice!r} is not one of {', '.join(CHOICES)}")
    reason = find_obstacle(choice, model)
    if reason:
        _verdict = _verdict if _replaced else ProbeVerdict("", reason)
        if _replaced:
            return replace(status(), reason=f"{status().reason}; it stays until {UNDO}")
        return status()
    if _verdict is not None and _replaced:
        if choice not in ("auto", _verdict.strategy):
            raise UsageError(
                f"graph_break={choice!r}: {_verdict.strategy} is in place", fix=f"{UNDO} takes it away first"
            )
        for each in filter(is_configuration, _replaced):  # this thread may have a configuration of its own
            setattr(each.owner, each.name, each.ours)
        if _verdict.strategy == "break_experts" and model is not None:
            apply_strategy("break_experts", model)
        return status()
    decided = decide(model) if choice == "auto" else ProbeVerdict(choice, "chosen by name, untried")
    apply_strategy(decided.strategy, model)
    _verdict = decided
    return status()


def undo() -> PatchStatus:
    """Put back what was found. Raises RuntimeError, changing nothing, where another package has patched on top."""
    global _verdict
    for each in _replaced:
        present = attribute_of(each.owner, each.name)
        if present is not each.ours and not is_configuration(each):
            theirs = qualified_name(present)
            raise RuntimeError(f"{NAME}: {format_place(each)} was since replaced by {theirs}; take that away first")
    if _replaced:
        torch.compiler.reset()  # graphs of before would still be run
    while _replaced:
        restore_attribute(_replaced.pop())
    _verdict = None
    return status()


def status() -> PatchStatus:
    """What is in place, and why."""
    if _verdict is None:
        return PatchStatus(NAME, False, "not applied: 4-bit layers compile as far as bitsandbytes lets them")
    foreign = foreign_patches()
    beside = f"; patched by others as well: {', '.join(foreign)}" if foreign else ""
    if not _replaced:
        strategy = f"{_verdict.strategy}: " if _verdict.strategy else ""
        waits = f"; {WAITS}" if _verdict.strategy == "break_experts" else ""
        return PatchStatus(NAME, False, f"{strategy}{_verdict.reason}{waits}{beside}")
    where = ", ".join(dict.fromkeys(format_place(each) for each in _replaced))
    return PatchStatus(NAME, True, f"{_verdict.strategy} on {where}: {_verdict.reason}{beside}")


def verdict() -> ProbeVerdict | None:
    """What `apply` decided, with its probes; None before it."""
    return None if _verdict is None else replace(_verdict, patched=tuple(format_place(each) for each in _replaced))


def find_obstacle(choice: str, model: Any) -> str:
    """Why no strategy is wanted here, in words; "" where one is."""
    if choice == "off":
        return "off: left as it is"
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed, so there are no 4-bit layers"
    if model is not None and not any(is_linear_4bit(module) for module in model.modules()):
        return "the model has no 4-bit layers"
    if by := dynamo_switched_off_by():
        return f"Dynamo is switched off by {by}: nothing is compiled; unset it to compile"
    return ""


def decide(model: Any) -> ProbeVerdict:
    """Climb the ladder until a probe passes. What is tried for it is put back."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if model is not None:
        device = next(module.weight.device for module in model.modules() if is_linear_4bit(module))
    straight = probe_linear(device)
    if not straight.passed:
        why = "Dynamo cannot take a 4-bit layer into a graph"
        if foreign := describe_foreign():  # another package's patch of it, not Dynamo
            why = f"{foreign}; with that a 4-bit layer does not compile ({straight.error}); without that patch it may"
        return ProbeVerdict("break_linear", why, (straight,))
    if model is not None and not expert_blocks(model):
        return ProbeVerdict("none", "4-bit layers compile as they are, and the model has no 4-bit experts", (straight,))
    experts = probe_zero_rows(device)
    found = (straight, experts)
    if experts.passed:
        return ProbeVerdict("none", "4-bit layers compile as they are, experts without rows too", found)
    why = "an expert without rows ends the graph"
    if "bitsandbytes.matmul_4bit" in foreign_functions():
        return ProbeVerdict("break_experts", f"{why}, and {describe_foreign()} already", found)
    make_branchless()
    try:
        again = probe_zero_rows(device)
    finally:
        restore_attribute(_replaced.pop())
        restore_attribute(_replaced.pop())
    again = replace(again, name=f"{again.name}, branchless")
    if again.passed:
        return ProbeVerdict("branchless", why, (*found, again))
    beside = f" ({foreign})" if (foreign := describe_foreign()) else ""
    return ProbeVerdict("break_experts", f"{why}, and without the branch too{beside}", (*found, again))


def is_linear_4bit(module: Any) -> bool:
    import bitsandbytes

    return isinstance(module, bitsandbytes.nn.Linear4bit)


def expert_blocks(model: Any) -> list[Any]:
    """The modules that choose among experts with 4-bit layers: those that own a ModuleList of them.

    A list of a transformer's layers is one as well, and its layers are not experts.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    def holds_experts(modules: Any) -> bool:
        below = list(modules.modules())
        layers = any(isinstance(each, GradientCheckpointingLayer) for each in below)
        return isinstance(modules, ModuleList) and not layers and any(is_linear_4bit(each) for each in below)

    found = []
    for module in model.modules():
        own_forward = type(module).forward is not ModuleList.forward
        children = [module] if isinstance(module, ModuleList) and own_forward else list(module.children())
        if own_forward and any(holds_experts(child) for child in children):
            found.append(module)
    return found


def probe_linear(device: torch.device) -> CompileProbe:
    """A straight line of two Linear4bit layers."""
    return probe("a 4-bit layer", lambda layers: lambda x: layers[1](layers[0](x).relu()), device)


def probe_zero_rows(device: torch.device) -> CompileProbe:
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
) -> CompileProbe:
    began = time.perf_counter()
    with torch.random.fork_rng(), dynamo_left_as_found(), torch.enable_grad():
        torch.manual_seed(0)
        function = build([four_bit_layer(device) for _ in range(EXPERTS)])
        x = torch.randn(ROWS, WIDTH, device=device)
        try:
            expected = value_and_gradient(function, x)
        except Exception as error:  # noqa: BLE001  a foreign patch may raise anything; it is reported
            return CompileProbe(name, False, f"uncompiled, too: {first_line(error)}", time.perf_counter() - began)
        try:
            found = value_and_gradient(
                torch.compile(with_code_of_its_own(function), backend="aot_eager", fullgraph=True), x
            )
        except Exception as error:  # noqa: BLE001  what a compiler raises is what the probe is for; it is reported
            return CompileProbe(name, False, first_line(error), time.perf_counter() - began)
        captured = dynamo_counts()[0]
    seconds = time.perf_counter() - began
    if not captured:
        return CompileProbe(name, False, "Dynamo compiled nothing and said nothing", seconds)
    if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
        return CompileProbe(name, False, "compiled, and its result or gradient differs from the eager one", seconds)
    return CompileProbe(name, True, "", seconds)


def four_bit_layer(device: torch.device) -> Any:
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(WIDTH, WIDTH, bias=True, compute_dtype=torch.float32, quant_type="nf4").to(device)
    layer.support_avx512bf16_for_cpu = False  # such CPUs repack the weights in a forward without gradients
    return layer.requires_grad_(False)


def value_and_gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]


def apply_strategy(strategy: str, model: Any) -> None:
    if strategy == "branchless":
        make_branchless()
    elif strategy == "break_linear":
        import bitsandbytes

        break_around(bitsandbytes.nn.Linear4bit)
    elif strategy == "break_experts":
        for block in {type(each) for each in expert_blocks(model)} if model is not None else ():
            if not any(each.owner is block for each in _replaced):
                break_around(block)
    if _replaced:
        torch.compiler.reset()  # graphs of before would still be run


def make_branchless() -> None:
    import bitsandbytes

    if "bitsandbytes.matmul_4bit" in foreign_functions():
        raise UsageError(f"graph_break='branchless': {describe_foreign()} already", fix="take that away first")
    original: Callable[..., Any] = bitsandbytes.matmul_4bit
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    fused = {kind: fused_takes_no_rows(torch.device(kind)) for kind in kinds}

    @functools.wraps(original)
    def matmul_4bit(A: Any, B: Any, quant_state: Any, out: Any = None, bias: Any = None) -> Any:
        if not is_training_case(A, out, quant_state):
            return original(A, B, quant_state, out=out, bias=bias)
        return Branchless4bit.apply(A, B.view(-1, 1), bias, quant_state, fused.get(A.device.type, False))

    replace_attribute(bitsandbytes, "matmul_4bit", matmul_4bit)
    replace_attribute(DYNAMO, EXPERT_ROWS, True)


def break_around(owner: Any) -> None:
    """Have Dynamo leave `owner.forward` and everything below it alone."""
    replace_attribute(owner, "forward", torch.compiler.disable(owner.forward))


def replace_attribute(owner: Any, name: str, value: Any) -> None:
    original = attribute_of(owner, name)
    setattr(owner, name, value)
    _replaced.append(Replacement(owner, name, value, original))


def is_configuration(each: Replacement) -> bool:
    """Whether it is of Dynamo's configuration, which each thread, and each cell of a notebook, may have of its own."""
    return each.owner is DYNAMO


def attribute_of(owner: Any, name: str) -> Any:
    """What stands at a place itself, not what a class inherits there."""
    return vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name)


def restore_attribute(each: Replacement) -> None:
    if each.original is _ABSENT:
        delattr(each.owner, each.name)
    elif not is_configuration(each) or attribute_of(each.owner, each.name) is each.ours:
        setattr(each.owner, each.name, each.original)


def foreign_patches() -> list[str]:
    """What others have replaced of bitsandbytes' 4-bit layers, and by what: the probes say whether that compiles."""
    if sys.modules.get("bitsandbytes") is None:
        return []
    import bitsandbytes

    found = [f"{place} by {module_of(present)}" for place, present in foreign_functions().items()]
    if "__torch_function__" not in vars(bitsandbytes.nn.Params4bit):  # unsloth_zoo takes it away
        found.append("Params4bit.__torch_function__ is gone")
    return found


def foreign_functions() -> dict[str, Any]:
    """What stands at bitsandbytes' 4-bit matmul and layer, where neither bitsandbytes nor cogumi wrote it, by place."""
    import bitsandbytes

    layer: Any = bitsandbytes.nn.Linear4bit
    places = {"bitsandbytes.matmul_4bit": bitsandbytes.matmul_4bit, "Linear4bit.forward": layer.forward}
    if layer.__module__.partition(".")[0] != "bitsandbytes":  # a class of theirs in the place of the class
        places["bitsandbytes.nn.Linear4bit"] = layer
    ours = [each.ours for each in _replaced]
    return {
        place: present
        for place, present in places.items()
        if not any(present is each for each in ours) and module_of(present).partition(".")[0] != "bitsandbytes"
    }


def describe_foreign() -> str:
    """The same in words; "" where there is nothing."""
    return ", ".join(f"{place} is {qualified_name(present)}" for place, present in foreign_functions().items())


def module_of(function: Any) -> str:
    """The module in which a function was written: a wrapper calls itself by another one's name."""
    return str(getattr(function, "__globals__", {}).get("__name__", function.__module__))


def qualified_name(function: Any) -> str:
    return f"{module_of(function)}.{getattr(function, '__qualname__', repr(function))}"


def format_place(each: Replacement) -> str:
    owner = each.owner
    return f"{getattr(owner, '__name__', None) or type(owner).__name__}.{each.name}"


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "bitsandbytes") if importlib.util.find_spec(name) is not None}
