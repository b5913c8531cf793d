"""Compile a transformer layer by layer, in place, beside checkpointing, PEFT and 4-bit weights.

A whole model compiled at once breaks at the checkpointing and at PEFT's hooks, and captures little. Each layer compiled
on its own is one graph, and layers of one kind share it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from transformers.modeling_layers import GradientCheckpointingLayer

from cogumi.core.errors import UsageError
from cogumi.models.loading import train_on_what_was_loaded
from cogumi.patches.graph_break_probes import first_line, switched_off_by

log = logging.getLogger("cogumi")

REENTRANT = "gradient checkpointing is reentrant, which compiles each layer twice; leave train.gradient_checkpointing_kwargs out"


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model that are checkpointed one by one: of all its stacks, in order."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {id(below) for layer in found for below in layer.modules() if below is not layer}
    return [layer for layer in found if id(layer) not in inside]


def why_not(model: nn.Module) -> str:
    """Why a model's layers are not to be compiled, in words; "" where they can be tried."""
    if by := switched_off_by():
        return f"Dynamo is switched off by {by}; unset it to compile"
    if any(compiled_already(module) for module in model.modules()):
        return "the model is compiled already, and stays as it is"
    layers = decoder_layers(model)
    if not layers:
        return f"{type(model).__name__} has no layers that transformers checkpoints, so there is nothing to compile one by one"
    if any(reentrant(layer) for layer in layers):
        return REENTRANT
    return ""


def compiled_already(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)


def reentrant(layer: Any) -> bool:
    function = getattr(layer, "_gradient_checkpointing_func", None)
    return layer.gradient_checkpointing and bool(getattr(function, "keywords", {}).get("use_reentrant", False))


def compile_layers(model: nn.Module, backend: str = "inductor", rescue: bool = False) -> list[nn.Module]:
    """Have the model's layers, and what stands beside them, run compiled, except while a text is generated. Returns them.

    Nothing is compiled yet. Generation calls with another length each time, and with a cache. rescue: a part that turns out
    not to compile runs as it is written, said once as an error; else that is raised. Raises UsageError in `why_not`'s words.
    """
    if reason := why_not(model):
        raise UsageError(f"compile: {reason}")
    layers = decoder_layers(model)
    for part in parts_of(model):
        part._compiled_call_impl = but_for_generation(part, backend, rescue, with_gradient_only=part not in layers)
    leave_out_adapted_parameters(model)
    return layers


def leave_out_adapted_parameters(model: nn.Module) -> None:
    for module in adapted_parameters(model):
        module._compiled_call_impl = torch.compiler.disable(module._call_impl)


def adapted_parameters(model: nn.Module) -> list[nn.Module]:
    """The outermost of PEFT's wrappers of parameters (`target_parameters`, as for experts), which are not compiled.

    Each parametrizes the module below it anew in every forward pass: Dynamo ends a graph at that several times, and compiles
    again as often. One end of a graph around all of it costs less.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(module.base_layer) for module in wrappers}
    return [module for module in wrappers if id(module) not in inner]


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that calls the first of a model's layers: whose own operations are the rest of the forward pass."""
    first = decoder_layers(model)[0]
    return [module for module in model.modules() if any(first in list(each.children()) for each in module.children())][
        -1
    ]


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The layers, and what their decoder calls once in a forward pass: the rotary embedding, the last norm."""
    beside = [part for part in decoder_of(model).children() if not isinstance(part, nn.ModuleList | nn.Embedding)]
    return [*decoder_layers(model), *beside]


def but_for_generation(
    part: nn.Module, backend: str, rescue: bool = False, with_gradient_only: bool = False
) -> Callable[..., Any]:
    """What to call in a part's place. with_gradient_only: it is not given the cache by which generation is told."""
    compiled, gone = torch.compile(part._call_impl, backend=backend), False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal gone
        generating = kwargs.get("past_key_values") is not None or (with_gradient_only and not torch.is_grad_enabled())
        if gone or generating:
            return part._call_impl(*args, **kwargs)
        try:
            with failures_raised():
                return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            if not rescue:
                raise
            gone = True
            log.error(
                "compile: %s does not compile and runs as it is written (%s)", type(part).__name__, first_line(error)
            )
            return part._call_impl(*args, **kwargs)

    return call


@contextmanager
def failures_raised() -> Iterator[None]:
    """What fails to compile is raised, also where unsloth has set that it runs uncompiled in silence."""
    before = torch._dynamo.config.suppress_errors
    torch._dynamo.config.suppress_errors = False
    try:
        yield
    finally:
        torch._dynamo.config.suppress_errors = before


def uncompile_layers(model: nn.Module) -> None:
    """Have the layers run as they are written, and drop what was compiled in this process."""
    for part in [*parts_of(model), *adapted_parameters(model)]:
        part._compiled_call_impl = None
    torch.compiler.reset()


# ----------------------------------------------------------------------------------------------------- what stands in the way


def prepare(model: nn.Module) -> list[str]:
    """Mend what makes 4-bit layers break a graph or train on nothing. Returns what was done, a line each."""
    if not is_four_bit(model):
        return []
    from bitsandbytes.nn import Linear4bit

    biases = 0
    for module in model.modules():
        if not isinstance(module, Linear4bit):
            continue
        bias, dtype = module.bias, module.compute_dtype
        if bias is not None and dtype is not None and bias.dtype != dtype:
            bias.data = bias.data.to(dtype)  # bitsandbytes would do so in its forward, and end the graph there
            biases += 1
    repacking = train_on_what_was_loaded(model)
    done = {
        f"{biases} biases of 4-bit layers cast to the dtype they compute in": biases,
        f"{repacking} 4-bit layers keep their weights as they are: after a forward without gradients bitsandbytes "
        "would repack them for AVX512, and training would get no gradient": repacking,
    }
    return [line for line, count in done.items() if count]


def is_four_bit(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("bitsandbytes") for module in model.modules())
