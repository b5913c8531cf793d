"""Compile a transformer layer by layer, in place, beside checkpointing, PEFT and 4-bit weights.

A whole model compiled at once breaks at the checkpointing and at PEFT's hooks, and captures little. Each layer compiled
on its own is one graph, and layers of one kind share it.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from cogumi.core.errors import UsageError
from cogumi.models.loading import keep_4bit_unpacked
from cogumi.patches.torch_internals import (
    TorchDynamoException,
    checkpoints_reentrantly,
    dynamo_switched_off_by,
    failures_raised,
    is_compiled,
    plain_call,
    set_call,
)

REENTRANT = "gradient checkpointing is reentrant, which compiles each layer twice; leave train.gradient_checkpointing_kwargs out"


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model that are checkpointed one by one: of all its stacks, in order."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {id(below) for layer in found for below in layer.modules() if below is not layer}
    return [layer for layer in found if id(layer) not in inside]


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that calls the first of a model's layers: whose own operations are the rest of the forward pass."""
    first = decoder_layers(model)[0]
    holders = [each for each in model.modules() if any(first in list(child.children()) for child in each.children())]
    return holders[-1]


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The layers, and what their decoder calls once in a forward pass: the rotary embedding, the last norm."""
    beside = [part for part in decoder_of(model).children() if not isinstance(part, nn.ModuleList | nn.Embedding)]
    return [*decoder_layers(model), *beside]


def adapted_parameters(model: nn.Module) -> list[nn.Module]:
    """The outermost of PEFT's wrappers of parameters (`target_parameters`, as for experts), which are not compiled.

    Each parametrizes the module below it anew in every forward pass: Dynamo ends a graph at that several times, and compiles
    again as often. One end of a graph around all of it costs less.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(module.base_layer) for module in wrappers}
    return [module for module in wrappers if id(module) not in inner]


def find_obstacle(model: nn.Module) -> str:
    """Why a model's layers are not to be compiled, in words; "" where they can be tried."""
    if by := dynamo_switched_off_by():
        return f"Dynamo is switched off by {by}; unset it to compile"
    if any(is_compiled(module) for module in model.modules()):
        return "the model is compiled already, and stays as it is"
    layers = decoder_layers(model)
    if not layers:
        return f"{type(model).__name__} has no layers that transformers checkpoints, so there is nothing to compile one by one"
    return REENTRANT if any(checkpoints_reentrantly(layer) for layer in layers) else ""


def compile_layers(
    model: nn.Module, backend: str = "inductor", failures: list[Exception] | None = None
) -> list[nn.Module]:
    """Have the model's layers, and what stands beside them, run compiled, except while a text is generated. Returns them.

    Nothing is compiled yet. Generation calls with another length each time, and with a cache. failures: gets an error of
    the compiler, after which what is not compiled yet runs as it is written; without it that is raised. Raises UsageError
    in `find_obstacle`'s words.
    """
    if reason := find_obstacle(model):
        raise UsageError(f"compile: {reason}")
    layers = decoder_layers(model)
    for part in parts_of(model):
        set_call(part, compile_for_training(part, backend, failures, with_gradient_only=part not in layers))
    for module in adapted_parameters(model):
        set_call(module, torch.compiler.disable(plain_call(module)))
    return layers


def compile_for_training(
    part: nn.Module, backend: str, failures: list[Exception] | None = None, with_gradient_only: bool = False
) -> Callable[..., Any]:
    """What to call in a part's place. with_gradient_only: it is not given the cache by which generation is told."""
    plain = plain_call(part)
    compiled, ran = torch.compile(plain, backend=backend), False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        generating = kwargs.get("past_key_values") is not None or (with_gradient_only and not torch.is_grad_enabled())
        # A part that ran compiled in this forward pass has to when checkpointing runs it again in the backward.
        if generating or (failures and not ran):
            return plain(*args, **kwargs)
        try:
            with failures_raised():
                result = compiled(*args, **kwargs)
        except TorchDynamoException as error:
            if failures is None:
                raise
            failures.append(error)
            return plain(*args, **kwargs)
        ran = True
        return result

    return call


def uncompile_layers(model: nn.Module) -> None:
    """Have the layers run as they are written, and drop what was compiled in this process."""
    for part in [*parts_of(model), *adapted_parameters(model)]:
        set_call(part, None)
    torch.compiler.reset()


def prepare_four_bit(model: nn.Module) -> list[str]:
    """Change what makes 4-bit layers break a graph or train on nothing. Returns what was done, a line each."""
    if "bitsandbytes" not in sys.modules:
        return []
    kind = sys.modules["bitsandbytes"].nn.Linear4bit
    layers = [module for module in model.modules() if isinstance(module, kind)]
    uneven = [each for each in layers if each.bias is not None and each.compute_dtype not in (None, each.bias.dtype)]
    for layer in uneven:  # bitsandbytes would do so in its forward, and end the graph there
        layer.bias.data = layer.bias.data.to(layer.compute_dtype)
    done = [f"{len(uneven)} biases of 4-bit layers cast to the dtype they compute in"] if uneven else []
    # After a forward without gradients bitsandbytes would repack them for AVX512, and training would get no gradient.
    if layers and (kept := keep_4bit_unpacked(model)):
        done.append(f"{kept} 4-bit layers keep their weights as they are, without repacking for AVX512")
    return done
