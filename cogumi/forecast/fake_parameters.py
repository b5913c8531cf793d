"""A model of fake tensors that computes on a CPU what it would on a card.

* Attention: scaled_dot_product_attention never holds the scores. Forward it keeps query, key, value, mask, output and one
  float32 a head and token; backward it makes three gradients, a float32 accumulator as large as the query, one more
  float32 a head and token, and keys and values of every query head where heads share them
  (csrc/flash_attn/flash_api.cpp, mha_bwd, in PyTorch's third_party). With a mask PyTorch takes its memory-efficient kernel,
  which keeps and makes the same, and wants keys and values of every head from the start.
* TRL's losses: its own chunked head (trl/kernels/chunked_logprob.py), with its launches of Triton kernels left out.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cogumi.forecast.allocation_tracker import Live
from cogumi.patches import fused_head, replaced
from cogumi.patches.trl_internals import KERNEL_PRODUCT

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
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = parameter, fake(module, parameter, live, trained)
            setattr(module, name, made[id(parameter)][1])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            with live.making(WEIGHTS):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


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


# ------------------------------------------------------------------------------------------------------- cuda emulation


class Attention(torch.autograd.Function):
    """The shapes of fused attention: query (batch, heads, tokens, width), key and value (batch, their heads, tokens, width)."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        batch, heads, tokens, _ = query.shape
        output = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        ctx.save_for_backward(
            query, key, value, mask, output, query.new_empty((batch, heads, tokens), dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:  # type: ignore[override]
        query, key, value, _, _, per_token = ctx.saved_tensors
        held = [torch.empty_like(per_token), torch.empty_like(query, dtype=torch.float32)]
        made = [torch.empty_like(each) for each in (query, key, value)]
        if key.shape[1] != query.shape[1]:
            held += [each.new_empty((each.shape[0], query.shape[1], *each.shape[2:])) for each in (key, value)]
        del held
        return *made, None


@contextmanager
def as_on_a_card() -> Iterator[None]:
    """Attention and TRL's losses are a card's, for the length of a block. Backward passes belong into it."""
    upstream: Any = importlib.import_module("trl.trainer.utils")
    # Not a TorchFunctionMode: what gradient checkpointing computes again is computed without it.
    ours = replaced(upstream, {fused_head.KERNEL: trls_head()})
    with ours, replaced(functional, {"scaled_dot_product_attention": attention}):
        yield


@contextmanager
def batches_are(padded: bool) -> Iterator[None]:
    """Transformers makes attention masks as of such batches, for the length of a block.

    It looks whether there is padding, and asks nothing of fake tensors: it takes them for a graph that is traced.
    """
    masking: Any = importlib.import_module("transformers.masking_utils")
    with replaced(masking, {"is_tracing": lambda tensor=None: False, "fast_all": lambda mask: not padded}):
        yield


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **_: Any) -> Any:
    return Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


def trls_head() -> Any:
    """TRL's ChunkedLogProbFunction, from a copy of its module whose kernels do nothing and whose sums are a card's.

    On a card `acc += a @ b` reads its factors in their own dtype; elsewhere TRL makes float32 copies of both.
    """
    import trl

    place = Path(trl.__file__).parent / "kernels" / "chunked_logprob.py"
    spec = importlib.util.spec_from_file_location("trl.kernels.chunked_logprob_without_kernels", place)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with without_triton():
        spec.loader.exec_module(module)
    setattr(module, KERNEL_PRODUCT, lambda total, left, right: None)
    # One tile of logits after another is computed in the same memory: the first is as good as all.
    module.range = lambda *bounds: range(*bounds)[:1]
    return module.ChunkedLogProbFunction


class Launch:
    """What `@triton.jit` makes of a kernel: launched with a grid, it does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


@contextmanager
def without_triton() -> Iterator[None]:
    """`import triton` finds a module that compiles nothing, for the length of a block."""
    stub, language = ModuleType("triton"), ModuleType("triton.language")
    stub.jit = lambda function: Launch()  # type: ignore[attr-defined]
    stub.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    stub.language = language  # type: ignore[attr-defined]
    language.constexpr = object  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in ("triton", "triton.language")}
    sys.modules.update({"triton": stub, "triton.language": language})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
