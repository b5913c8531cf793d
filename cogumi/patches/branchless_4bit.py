"""`bitsandbytes.matmul_4bit` without the question whether there are rows at all, on which Dynamo cannot guard.

bitsandbytes 0.50 asks `A.numel() == 0` in `MatMul4Bit.forward` and where no gradient is wanted (autograd/_functions.py).
The number of rows that an expert gets is data, so the question ends the graph. Its operators answer for zero rows too.
"""

from typing import Any

import torch
from torch.nn.functional import linear

# The only block size of the scales' own quantization that bitsandbytes' kernels know.
NESTED_BLOCK = 256


class Branchless4bit(torch.autograd.Function):
    """y = x W^T + b for a 4-bit W that is not trained, with bitsandbytes' operators. x: (..., K), W: (N, K), y: (..., N)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, state: Any, fused: bool
    ) -> torch.Tensor:
        ctx.packed, ctx.state = packed, state
        ctx.bias_dtype = None if bias is None else bias.dtype
        return fused_linear(x, packed, bias, state) if fused else linear(x, dequantize(packed, state).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        wants_x, _, wants_bias, _, _ = ctx.needs_input_grad
        of_x = torch.matmul(grad, dequantize(ctx.packed, ctx.state).to(grad.dtype)) if wants_x else None
        of_bias = grad.flatten(0, -2).sum(0, dtype=ctx.bias_dtype) if wants_bias else None
        return of_x, None, of_bias, None, None


def is_training_case(x: torch.Tensor, out: torch.Tensor | None, state: Any) -> bool:
    """Whether this is the case that training has: everything else is left to bitsandbytes' own function."""
    return (
        out is None
        and state is not None
        and not getattr(state, "packing_format_for_cpu", False)
        and len(state.shape) == 2
        and x.shape[-1] == state.shape[1]
        and (not state.nested or state.state2.blocksize == NESTED_BLOCK)
    )


def fused_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, state: Any) -> torch.Tensor:
    """One call of bitsandbytes' operator, which decodes and multiplies."""
    doubly = state.nested
    result: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
        x,
        packed,
        state.shape,
        state.state2.absmax if doubly else state.absmax,
        state.blocksize,
        state.quant_type,
        bias=bias,
        absmax_8bit=state.absmax if doubly else None,
        absmax_code=state.state2.code if doubly else None,
        absmax_offset=state.offset if doubly else None,
    )
    return result


def dequantize(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """W, (N, K), as bitsandbytes decodes it in its own backward."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed, state)


def fused_takes_no_rows(device: torch.device) -> bool:
    """Whether bitsandbytes' one operator is there (since 0.50) and answers for zero rows on a device."""
    import bitsandbytes

    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        return False
    packed, state = bitsandbytes.functional.quantize_4bit(torch.zeros(64, 64, device=device), quant_type="nf4")
    try:
        result = fused_linear(torch.zeros(0, 64, device=device), packed.view(-1, 1), None, state)
    except RuntimeError:  # as CUDA says of a launch without blocks
        return False
    return result.shape == (0, 64)
