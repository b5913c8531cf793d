"""Writing the merged shards, block by block: float32 arithmetic and one rounding to the output dtype."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from cogumi.merge.plan import BLOCK_ELEMENTS, LowRank, ShardPlan, TensorPlan
from cogumi.merge.tensorfile import FLOAT_DTYPES, as_bytes, element_count, read_bytes

COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class DeltaStats:
    """What one update did: the largest |delta| of an element, and the Frobenius norms of delta and of W."""

    max_abs_delta: float
    delta_norm: float
    weight_norm: float

    @property
    def ratio(self) -> float | None:
        """|delta| / |W|; None for a weight that is all zero."""
        return self.delta_norm / self.weight_norm if self.weight_norm else None


@contextmanager
def ieee_matmul() -> Iterator[None]:
    """Real float32 matrix products, whatever the process was set to.

    With torch.set_float32_matmul_precision("medium"), usual in training, oneDNN multiplies float32 in bfloat16 on CPUs
    that can, and CUDA in TF32: errors larger than the rounding that the merge promises.
    """
    settings: list[Any] = [
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.cuda.matmul,
    ]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def load_factors(weights: Any, update: LowRank, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(left [rows, r], right [r, columns]) with left @ right shaped like the stored weight, in `dtype`."""
    a = weights.get_tensor(update.key_a).to(dtype)
    b = weights.get_tensor(update.key_b).to(dtype)
    return (a.T, b.T) if update.transposed else (b, a)


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first, past last) row of each block of a matrix."""
    rows, columns = shape
    step = max(1, BLOCK_ELEMENTS // max(1, columns))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def read_block(file: BinaryIO, start: int, dtype: str, first: int, count: int) -> torch.Tensor:
    """`count` elements from element `first` of the tensor that begins at byte `start`, as a flat tensor."""
    kind = FLOAT_DTYPES[dtype]
    return torch.frombuffer(read_bytes(file, start + first * kind.itemsize, count * kind.itemsize), dtype=kind)


def write_shard(
    plan: ShardPlan, directory: Path, adapter: Path, advance: Callable[[int], None]
) -> dict[str, DeltaStats]:
    """Write one output shard and sync it to disk; return the statistics of its updates by tensor name.

    Memory beyond the factors of one layer is a few blocks of BLOCK_ELEMENTS, independent of tensor and shard size.
    """
    stats: dict[str, DeltaStats] = {}
    with (
        plan.source.open("rb") as source,
        (directory / plan.name).open("xb") as target,
        safe_open(adapter, framework="pt") as weights,
        ieee_matmul(),
        torch.inference_mode(),
    ):
        target.write(plan.header)
        for tensor in plan.tensors:
            if tensor.update is not None:
                stats[tensor.target.name] = write_merged(source, target, tensor, tensor.update, weights, advance)
            elif tensor.source.dtype == tensor.target.dtype:
                copy_span(source, target, tensor, advance)
            else:
                convert_span(source, target, tensor, advance)
        target.flush()
        os.fsync(target.fileno())
    return stats


def write_merged(
    source: BinaryIO,
    target: BinaryIO,
    tensor: TensorPlan,
    update: LowRank,
    weights: Any,
    advance: Callable[[int], None],
) -> DeltaStats:
    """W + scaling * B @ A in float32, rounded once (to nearest even) to the output dtype."""
    left, right = load_factors(weights, update, torch.float32)
    columns = tensor.source.shape[1]
    out_dtype = FLOAT_DTYPES[tensor.target.dtype]
    largest, delta_squares, weight_squares = 0.0, 0.0, 0.0
    for first, last in row_blocks(tensor.source.shape):
        count = (last - first) * columns
        block = read_block(source, tensor.source.start, tensor.source.dtype, first * columns, count).float()
        weight = block.view(last - first, columns)
        delta = (left[first:last] @ right).mul_(update.scaling)
        largest = max(largest, torch.linalg.vector_norm(delta, float("inf")).item())
        # A float32 norm of one block is good to about 1e-6, and the squares of the blocks are summed in double.
        delta_squares += delta.norm().item() ** 2
        weight_squares += weight.norm().item() ** 2
        target.write(as_bytes((weight + delta).to(out_dtype)))
        advance(count * out_dtype.itemsize)
    return DeltaStats(largest, math.sqrt(delta_squares), math.sqrt(weight_squares))


def copy_span(source: BinaryIO, target: BinaryIO, tensor: TensorPlan, advance: Callable[[int], None]) -> None:
    for start in range(tensor.source.start, tensor.source.end, COPY_BYTES):
        length = min(COPY_BYTES, tensor.source.end - start)
        target.write(read_bytes(source, start, length))
        advance(length)


def convert_span(source: BinaryIO, target: BinaryIO, tensor: TensorPlan, advance: Callable[[int], None]) -> None:
    out_dtype = FLOAT_DTYPES[tensor.target.dtype]
    total = element_count(tensor.source.shape)
    for first in range(0, total, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, total - first)
        block = read_block(source, tensor.source.start, tensor.source.dtype, first, count)
        target.write(as_bytes(block.to(out_dtype)))
        advance(count * out_dtype.itemsize)
