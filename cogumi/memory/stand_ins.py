"""A model of shapes becomes a model of fake tensors, with which a training step can run: nothing is allocated."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cogumi.memory.live import Live
from cogumi.patches.replaced import replaced

WEIGHTS, ADAPTER = "weights", "adapter"


@contextmanager
def codes_apart() -> Iterator[None]:
    """Bitsandbytes caches the codes of its 8 bits as a tensor: in the block a fake one, after it what it had before."""
    if importlib.util.find_spec("bitsandbytes") is None:
        yield
        return
    with replaced(importlib.import_module("bitsandbytes.functional"), {"name2qmap": {}}):
        yield


def stand_in(model: nn.Module, live: Live) -> None:
    """Replace every parameter and buffer of a model on the meta device by a fake one, inside a FakeTensorMode and `live`.

    Frozen parameters are counted as weights and trained ones as adapter; where all are trained, they are the weights.
    A parameter that two modules share stays shared.
    """
    made: dict[int, Any] = {}
    trained = ADAPTER if any(not parameter.requires_grad for parameter in model.parameters()) else WEIGHTS
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = parameter, fake(module, parameter, live, trained)
                module._parameters[name] = made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                with live.making(WEIGHTS):
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def fake(module: Any, parameter: Any, live: Live, trained: str) -> nn.Parameter:
    if hasattr(parameter, "quant_state"):
        return four_bit(module, parameter, live)
    with live.making(trained if parameter.requires_grad else WEIGHTS):
        return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad)


def four_bit(layer: Any, like: Any, live: Live) -> Any:
    """bitsandbytes' quantized weight of a linear layer: two elements to a byte, and the scales of its blocks."""
    from bitsandbytes.functional import quantize_4bit

    whole = torch.empty(layer.out_features, layer.in_features, dtype=layer.compute_dtype or torch.bfloat16)
    with live.making(WEIGHTS):
        packed, state = quantize_4bit(
            whole, blocksize=like.blocksize, compress_statistics=like.compress_statistics, quant_type=like.quant_type
        )
    parameter: Any = nn.Parameter(packed, requires_grad=False)  # a fake tensor cannot be bitsandbytes' subclass as well
    for name in ("blocksize", "compress_statistics", "quant_type"):
        setattr(parameter, name, getattr(like, name))
    parameter.quant_state, parameter.bnb_quantized = state, True
    return parameter
