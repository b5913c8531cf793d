"""What compiling costs and brings on a real model: operations captured, graphs and breaks, one layer tried both ways."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from cogumi.compile.layers import adapted_parameters, decoder_of, leave_out_adapted_parameters, parts_of

REGION = "Torch-Compiled Region"
TRIES = 3


@dataclass(frozen=True)
class Counts:
    """What Dynamo did in this process. breaks: reason -> how often. seconds: spent compiling, forward and backward."""

    graphs: int
    breaks: dict[str, int] = field(default_factory=dict)
    recompiles: int = 0
    seconds: float = 0.0

    def since(self, before: "Counts") -> "Counts":
        breaks = {reason: n - before.breaks.get(reason, 0) for reason, n in self.breaks.items()}
        return Counts(
            self.graphs - before.graphs,
            {reason: n for reason, n in breaks.items() if n},
            max(0, self.recompiles - before.recompiles),  # which a reset sets back
            self.seconds - before.seconds,
        )


def counts() -> Counts:
    import torch._dynamo.utils as dynamo
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

    return Counts(
        dynamo.counters["stats"]["unique_graphs"],
        dict(dynamo.counters["graph_break"]),
        # Not from the list of compilations, of which Dynamo keeps the last 64.
        sum(times - 1 for times in FRAME_COMPILE_COUNTER.values()),
        dynamo.calculate_time_spent()["total_wall_time"],
    )


# -------------------------------------------------------------------------------------------------- operations captured


def count_next_forward(module: nn.Module, told: Callable[[int], None]) -> None:
    """In the module's next forward pass with gradients in which nothing is compiled, count the operations outside compiled
    code, and tell how many: calls of aten's and of other operators that no operator makes."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler writes of its own beginning and end to stderr
    profiler: profile | None = None
    compiled = 0.0

    def start(*_: Any) -> None:
        nonlocal profiler, compiled
        if torch.is_grad_enabled():
            profiler, compiled = profile(activities=[ProfilerActivity.CPU], acc_events=True), counts().seconds
            profiler.start()

    def stop(*_: Any) -> None:
        nonlocal profiler
        if profiler is None:
            return
        profiler.stop()
        if counts().seconds == compiled:  # else the compiler's own operations are among them
            before.remove()
            after.remove()
            told(sum(outside_compiled(event for event in profiler.events() if event.cpu_parent is None)))
        profiler = None

    before = module.register_forward_pre_hook(start)
    after = module.register_forward_hook(stop)


def count_as_written(model: nn.Module, told: Callable[[int], None]) -> None:
    """The same for all operations: the next forward pass with gradients is made twice, first with nothing compiled."""
    decoder, parts = decoder_of(model), parts_of(model)

    def twice(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        compiled = [part._compiled_call_impl for part in parts]
        for part in parts:
            part._compiled_call_impl = None
        count_next_forward(module, told)
        with torch.random.fork_rng():
            module(*args, **kwargs)
        for part, call in zip(parts, compiled, strict=True):
            part._compiled_call_impl = call

    handle = decoder.register_forward_pre_hook(twice, with_kwargs=True)


def outside_compiled(events: Iterable[Any]) -> Iterator[int]:
    """1 for each operator that no other operator calls, compiled code not looked into."""
    for event in events:
        if event.name.startswith(REGION):
            continue
        if "::" in event.name:
            yield 1
        else:  # a range of the profiler's own, or of a Python-side function
            yield from outside_compiled(event.cpu_children)


# ------------------------------------------------------------------------------------------------------- one layer, tried


@dataclass(frozen=True)
class Trial:
    """A layer's forward and backward on inputs that it had in training, in seconds; compile: what the first call took more."""

    eager: float
    compiled: float
    compile: float
    counts: Counts

    @property
    def gain(self) -> float:
        return self.eager - self.compiled


def try_layer(layer: nn.Module, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial:
    """Run a layer as it is written and through `compiled`. Gradients, random numbers and the layer are as before.

    Raises what compiling raises.
    """
    before = counts()
    with torch.random.fork_rng():
        seconds_of(layer, args, kwargs)
        eager = min(seconds_of(layer, args, kwargs) for _ in range(TRIES))
        layer._compiled_call_impl = compiled
        leave_out_adapted_parameters(layer)
        try:
            first = seconds_of(layer, args, kwargs)
            after = min(seconds_of(layer, args, kwargs) for _ in range(TRIES))
        finally:
            for module in [layer, *adapted_parameters(layer)]:
                module._compiled_call_impl = None
    return Trial(eager, after, max(0.0, first - after), counts().since(before))


def seconds_of(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """One forward and backward pass; `.grad` is not touched."""
    tensors = [each.detach().requires_grad_(each.requires_grad) if torch.is_tensor(each) else each for each in args]
    wanted = [each for each in tensors if torch.is_tensor(each) and each.requires_grad]
    wanted += [each for each in layer.parameters() if each.requires_grad]
    synchronize(layer)
    began = time.perf_counter()
    with torch.enable_grad():
        result = layer(*tensors, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        torch.autograd.grad(first.float().square().sum(), wanted, allow_unused=True)
    synchronize(layer)
    return time.perf_counter() - began


def synchronize(layer: nn.Module) -> None:
    if any(each.is_cuda for each in layer.parameters()):
        torch.cuda.synchronize()


@dataclass
class Seen:
    """What a layer was called with in training: the arguments of the last call, and how many calls there were."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    calls: int = 0


@contextmanager
def watched(layer: nn.Module) -> Iterator[Seen]:
    """Note a layer's training calls in the block: with a gradient, and without a cache."""
    seen = Seen()

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and kwargs.get("past_key_values") is None:
            seen.args = tuple(
                each.detach().requires_grad_(each.requires_grad) if torch.is_tensor(each) else each for each in args
            )
            seen.kwargs, seen.calls = dict(kwargs), seen.calls + 1

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
