"""bitsandbytes' 4-bit layers under Dynamo: the graph is broken around them only where a trial shows that it must be.

`none`: they compile as they are, as on every torch since 2.8. `break_linear`: the graph breaks around each 4-bit layer,
because Dynamo cannot trace it, which another package's patch of it causes. The trial compiles two layers with fullgraph,
forward and backward, and compares with eager execution. It leaves Dynamo, the random numbers and `.grad` as they were.
"""

import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cogumi.core.errors import UsageError
from cogumi.patches import PatchStatus
from cogumi.patches.torch_internals import (
    dynamo_counts,
    dynamo_left_as_found,
    dynamo_switched_off_by,
    first_line,
    with_code_of_its_own,
)

NAME = "graph_break"
STRATEGIES = ("none", "break_linear")
CHOICES = ("auto", "off", *STRATEGIES)
UNDO = "cogumi.patches.graph_break.undo()"
WIDTH, ROWS = 64, 6  # a multiple of bitsandbytes' block: 0.50.2 quantizes other widths wrongly on a CPU
_replaced: "Replacement | None" = None
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
    """The class whose `forward` was replaced, our function, and the one before."""

    owner: Any
    ours: Any
    original: Any

    def __str__(self) -> str:
        return f"{self.owner.__name__}.forward"


def apply(choice: str = "auto", model: Any = None) -> PatchStatus:
    """Find the mildest strategy that compiles and put it in place; applying twice is applying once.

    choice: "auto" probes, "off" changes nothing, one of STRATEGIES is put in place untried. model: whose 4-bit layers it
    is about. Raises UsageError for another choice, and for "none" where the graph is broken already.
    """
    global _verdict
    if choice not in CHOICES:
        raise UsageError(f"graph_break={choice!r} is not one of {', '.join(CHOICES)}")
    if _replaced is not None:
        if choice == "none":
            raise UsageError("graph_break='none': break_linear is in place", fix=f"{UNDO} takes it away first")
        return status()
    if reason := find_obstacle(choice, model):
        _verdict = ProbeVerdict("", reason)
    else:
        _verdict = decide(model) if choice == "auto" else ProbeVerdict(choice, "chosen by name, untried")
        if _verdict.strategy == "break_linear":
            break_around_layers()
    return status()


def undo() -> PatchStatus:
    """Put back what was found. Raises RuntimeError, changing nothing, where another package has patched on top."""
    global _replaced, _verdict
    if _replaced is not None:
        present = _replaced.owner.forward
        if present is not _replaced.ours:
            raise RuntimeError(
                f"{NAME}: {_replaced} was since replaced by {qualified_name(present)}; take that away first"
            )
        torch.compiler.reset()
        _replaced.owner.forward = _replaced.original
    _replaced = _verdict = None
    return status()


def status() -> PatchStatus:
    """Return the strategy in place and its reason."""
    if _verdict is None:
        return PatchStatus(NAME, False, "not applied: 4-bit layers compile as far as bitsandbytes lets them")
    where = f" on {_replaced}" if _replaced is not None else ""
    strategy = f"{_verdict.strategy}{where}: " if _verdict.strategy else ""
    foreign = foreign_patches()
    beside = f"; patched by others as well: {', '.join(foreign)}" if foreign else ""
    return PatchStatus(NAME, _replaced is not None, f"{strategy}{_verdict.reason}{beside}")


def verdict() -> ProbeVerdict | None:
    """Return what `apply` decided, with its probes; None before it."""
    return _verdict


def find_obstacle(choice: str, model: Any) -> str:
    """Return why no strategy is wanted here, in words; "" where one is."""
    if choice == "off":
        return "off: left as it is"
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed, so there are no 4-bit layers"
    import bitsandbytes

    if model is not None and not any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules()):
        return "the model has no 4-bit layers"
    if by := dynamo_switched_off_by():
        return f"Dynamo is switched off by {by}: nothing is compiled; unset it to compile"
    return ""


def decide(model: Any) -> ProbeVerdict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if model is not None:
        device = next(model.parameters()).device
    probe = probe_linear(device)
    if not probe.error:
        return ProbeVerdict("none", "4-bit layers compile as they are", (probe,))
    why = "Dynamo cannot take a 4-bit layer into a graph"
    if foreign := ", ".join(foreign_patches()):  # another package's patch of it, not Dynamo
        why = f"{foreign}; with that a 4-bit layer does not compile ({probe.error}); without that patch it may"
    return ProbeVerdict("break_linear", why, (probe,))


def probe_linear(device: torch.device) -> CompileProbe:
    """Compile two Linear4bit layers in sequence."""
    from bitsandbytes.nn import Linear4bit

    began, error = time.perf_counter(), ""
    with torch.random.fork_rng(), dynamo_left_as_found(), torch.enable_grad():
        torch.manual_seed(0)
        settings = {"bias": True, "compute_dtype": torch.float32, "quant_type": "nf4"}
        layers: list[Any] = [Linear4bit(WIDTH, WIDTH, **settings).to(device) for _ in range(2)]
        for layer in layers:
            layer.requires_grad_(False)
            layer.support_avx512bf16_for_cpu = False  # such CPUs repack the weights in a forward without gradients
        x, where = torch.randn(ROWS, WIDTH, device=device), "uncompiled, too: "

        def function(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = layers[1](layers[0](x).relu())
            return result

        try:
            expected = value_and_gradient(function, x)
            where = ""
            compiled = torch.compile(with_code_of_its_own(function), backend="aot_eager", fullgraph=True)
            actual = value_and_gradient(compiled, x)
            if not dynamo_counts()["graphs"]:
                error = "Dynamo compiled nothing and said nothing"
            elif not all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)):
                error = "compiled, and its result or gradient differs from the eager one"
        except Exception as failure:  # noqa: BLE001  what a compiler or a foreign patch raises is what the probe is for
            error = f"{where}{first_line(failure)}"
    return CompileProbe("a 4-bit layer", error, time.perf_counter() - began)


def value_and_gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]


def break_around_layers() -> None:
    global _replaced
    import bitsandbytes

    kinds = bitsandbytes.nn.Linear4bit.__mro__  # where another class stands for it, that one
    owner: Any = next(kind for kind in kinds if "forward" in vars(kind))
    _replaced = Replacement(owner, torch.compiler.disable(owner.forward), owner.forward)
    owner.forward = _replaced.ours
    torch.compiler.reset()  # graphs of before would still be run


def foreign_patches() -> list[str]:
    """List patches of bitsandbytes' 4-bit matmul and layer by packages other than bitsandbytes and cogumi."""
    if sys.modules.get("bitsandbytes") is None:
        return []
    import bitsandbytes

    places: dict[str, Any] = {
        "bitsandbytes.matmul_4bit": bitsandbytes.matmul_4bit,
        "Linear4bit.forward": bitsandbytes.nn.Linear4bit.forward,
    }
    ours = None if _replaced is None else _replaced.ours
    return [
        f"{place} is {qualified_name(present)}"
        for place, present in places.items()
        if present is not ours and not qualified_name(present).startswith("bitsandbytes.")
    ]


def qualified_name(function: Any) -> str:
    """With the module in which a function was written: a wrapper calls itself by another one's name."""
    module = getattr(function, "__globals__", {}).get("__name__", function.__module__)
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"
