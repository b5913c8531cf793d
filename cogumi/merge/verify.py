"""Proof that a merge did what it says: every element of the written files, and the logits of the reloaded model."""

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from cogumi.merge.plan import BLOCK_ELEMENTS, ShardPlan, TensorPlan
from cogumi.merge.stream import COPY_BYTES, load_factors, read_block, row_blocks
from cogumi.merge.tensorfile import FLOAT_DTYPES, element_count, read_bytes

# Stored mantissa bits and smallest normal exponent. (float64 is never an output dtype.)
MANTISSA = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float32: (23, -126)}
# Half a float32 ulp, relative: what one float32 operation can be off by.
UNIT = 2.0**-24


class MergeError(Exception):
    """The merge produced something that is not W + delta. Nothing was committed."""


@dataclass(frozen=True)
class ElementCheck:
    """One updated tensor, re-read from disk.

    bound_used: the largest |out - (W + delta)| as a share of what rounding allows that element (1 is the limit).
    delta_retained: how much of delta arrived, <out - W, delta> / <delta, delta>; None where delta is zero.
    """

    bound_used: float
    delta_retained: float | None


def half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the spacing of `dtype` at each of `values` (float64, any shape): the most one rounding can move them.

    Exact, subnormals included: the exponent bits of a float64, alone, are the power of two below it.
    """
    bits, smallest = MANTISSA[dtype]
    binade = (values.contiguous().view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return binade.clamp_(min=2.0**smallest).mul_(2.0 ** (-bits - 1))


def verify_shard(
    plan: ShardPlan, directory: Path, adapter: Path, advance: Callable[[int], None]
) -> tuple[str, dict[str, ElementCheck]]:
    """Re-read one written shard and compare every element with base and adapter.

    Updated tensors: |out - (W + delta)|, in float64, is at most half an ulp of the output dtype at W + delta, plus the
    float32 arithmetic's own error, see arithmetic_bound. Other tensors: the same bytes as the base, or within half an
    ulp where the dtype was converted.

    Returns the sha256 of the whole file and the checks by tensor name. Raises MergeError naming the tensor.
    """
    path = directory / plan.name
    checks: dict[str, ElementCheck] = {}
    with (
        plan.source.open("rb") as source,
        path.open("rb") as written,
        safe_open(adapter, framework="pt") as weights,
        torch.inference_mode(),
    ):
        # The pages just written would answer from memory; drop them, so that the disk is what is read.
        if sys.platform == "linux":
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(written.fileno()).st_size
        if size != plan.bytes:
            raise MergeError(f"{plan.name} has {size} bytes on disk where {plan.bytes} were written; nothing committed")
        digest = hashlib.sha256()
        header = read_bytes(written, 0, len(plan.header))
        digest.update(header)
        if header != plan.header:
            raise MergeError(f"{plan.name}: the header on disk is not the one written; nothing committed")
        for tensor in plan.tensors:
            if tensor.update is not None:
                checks[tensor.target.name] = check_merged(source, written, tensor, weights, digest, advance)
            elif tensor.source.dtype == tensor.target.dtype:
                check_copied(source, written, tensor, digest, advance)
            else:
                check_converted(source, written, tensor, digest, advance)
    return digest.hexdigest(), checks


def read_written(
    written: BinaryIO, tensor: TensorPlan, first: int, count: int, digest: Any, advance: Callable[[int], None]
) -> torch.Tensor:
    """`count` elements of the written tensor as flat float64; their bytes go into the digest."""
    kind = FLOAT_DTYPES[tensor.target.dtype]
    data = read_bytes(written, tensor.target.start + first * kind.itemsize, count * kind.itemsize)
    digest.update(data)
    advance(len(data))
    return torch.frombuffer(data, dtype=kind).double()


def check_merged(
    source: BinaryIO, written: BinaryIO, tensor: TensorPlan, weights: Any, digest: Any, advance: Callable[[int], None]
) -> ElementCheck:
    update = tensor.update
    assert update is not None
    left, right = load_factors(weights, update, torch.float64)
    left = update.scaling * left
    columns = tensor.source.shape[1]
    arithmetic = arithmetic_bound(left, right)
    used, along_delta, delta_squares = 0.0, 0.0, 0.0
    for first, last in row_blocks(tensor.source.shape):
        start, count = first * columns, (last - first) * columns
        weight = read_block(source, tensor.source.start, tensor.source.dtype, start, count).double()
        out = read_written(written, tensor, start, count, digest, advance)
        delta = (left[first:last] @ right).flatten()
        used = max(used, check_bound(tensor, out, weight + delta, arithmetic[first:last], start))
        along_delta += torch.dot(out - weight, delta).item()
        delta_squares += torch.dot(delta, delta).item()
    return ElementCheck(used, along_delta / delta_squares if delta_squares else None)


def arithmetic_bound(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How far float32 arithmetic may carry an element of each row from W + delta, beyond a share of W + delta itself.

    left [rows, r] (scaled) and right [r, columns] are float64; the result is [rows]. A dot product of length r, in any
    order, is off by at most r u sum |l||r| with u = 2**-24 (Higham, Accuracy and Stability of Numerical Algorithms,
    section 3.1), the scaling and its own rounding add 2 u, and the sum with W adds u (|W| + |delta|); sum |l||r| is at
    most the product of the two vectors' norms. Eight in place of three covers |W| <= |W + delta| + |delta|.
    """
    return (left.shape[1] + 8) * UNIT * left.norm(dim=1) * right.norm(dim=0).max()


def check_bound(
    tensor: TensorPlan, out: torch.Tensor, expected: torch.Tensor, arithmetic: torch.Tensor, start: int
) -> float:
    """The largest share of the bound that an element of this block uses. Raises MergeError where it is above 1.

    out, expected: float64 [n], the elements from `start` on; arithmetic: float64 [rows], for n / rows elements each.
    The factor on half an ulp is the float32 sum's 2 u |expected|, as |expected| < 2**(mantissa bits + 2) half ulps.
    """
    dtype = FLOAT_DTYPES[tensor.target.dtype]
    bound = half_ulp(expected, dtype).mul_(1 + 2.0 ** (MANTISSA[dtype][0] - 21))
    bound.view(len(arithmetic), -1).add_(arithmetic[:, None])
    error = (out - expected).abs_()
    if not bool((error <= bound).all()):  # NaN is not <= anything
        bad = ~((error <= bound) | (out == expected))  # two equal infinities have no difference
        if bool(bad.any()):
            where = int(bad.nonzero()[0])
            position = divmod(start + where, tensor.target.shape[-1] if tensor.target.shape else 1)
            raise MergeError(
                f"{tensor.target.name}: element {position} is {out[where].item():.9g} where W + delta is "
                f"{expected[where].item():.9g} and {tensor.target.dtype} rounding allows {bound[where].item():.3g}; "
                f"{int(bad.sum())} of {bad.numel()} elements of this block are off; nothing was committed"
            )
    return error.div_(bound).max().item()


def check_copied(
    source: BinaryIO, written: BinaryIO, tensor: TensorPlan, digest: Any, advance: Callable[[int], None]
) -> None:
    shift = tensor.target.start - tensor.source.start
    for start in range(tensor.source.start, tensor.source.end, COPY_BYTES):
        length = min(COPY_BYTES, tensor.source.end - start)
        data = read_bytes(written, start + shift, length)
        digest.update(data)
        if data != read_bytes(source, start, length):
            raise MergeError(f"{tensor.target.name} should be the base's bytes and is not; nothing was committed")
        advance(length)


def check_converted(
    source: BinaryIO, written: BinaryIO, tensor: TensorPlan, digest: Any, advance: Callable[[int], None]
) -> None:
    total = element_count(tensor.source.shape)
    for first in range(0, total, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, total - first)
        expected = read_block(source, tensor.source.start, tensor.source.dtype, first, count).double()
        out = read_written(written, tensor, first, count, digest, advance)
        check_bound(tensor, out, expected, torch.zeros(1, dtype=torch.float64), first)
