"""Writing the merged shards, run by run: float32 arithmetic and one rounding to the output dtype."""

import errno
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from cogumi.core.errors import MergeError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, matrix_shape, read_into, write_at
from cogumi.merge.arithmetic import BLOCK_ELEMENTS, Weights, apply_update, load_update, read_rows, row_blocks, scratch
from cogumi.merge.plan import Piece, ShardPlan, TensorPlan

# The unit of work of a thread: long enough that opening files and loading factors do not show, short enough to share out.
RUN_ELEMENTS = 32 * BLOCK_ELEMENTS
COPY_BYTES = 1 << 22
# What the kernel says where it cannot copy between two files by itself (other filesystem, or none that supports it).
NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Run:
    """Rows `first` to `last` of one piece of one tensor."""

    tensor: TensorPlan
    piece: Piece
    first: int
    last: int


@dataclass
class DeltaStats:
    """What the updates of one tensor did, added up over its runs.

    max_abs_delta: the largest change of an element before rounding. The rest is of a sample, the first block of each
    run: elements; squares of delta and of W; along_delta, the sum of rounding error times delta.
    """

    max_abs_delta: float = 0.0
    elements: int = 0
    delta_squares: float = 0.0
    weight_squares: float = 0.0
    along_delta: float = 0.0

    def add(self, other: "DeltaStats") -> None:
        self.max_abs_delta = max(self.max_abs_delta, other.max_abs_delta)
        self.elements += other.elements
        self.delta_squares += other.delta_squares
        self.weight_squares += other.weight_squares
        self.along_delta += other.along_delta

    @property
    def ratio(self) -> float | None:
        """Frobenius |delta| / |W| of the sample; None for a weight that is all zero."""
        return math.sqrt(self.delta_squares / self.weight_squares) if self.weight_squares else None

    @property
    def delta_rms(self) -> float:
        return math.sqrt(self.delta_squares / self.elements)

    @property
    def retained(self) -> float | None:
        """The share of delta that arrived, <out - W, delta> / <delta, delta>, of the sample; None where delta is zero."""
        return 1 + self.along_delta / self.delta_squares if self.delta_squares else None


def runs_of(plan: ShardPlan) -> Iterator[Run]:
    """A shard's work, in file order, cut at places that depend on the shapes alone."""
    for tensor in plan.tensors:
        columns = matrix_shape(tensor.source.shape)[1]
        step = max(1, BLOCK_ELEMENTS // max(1, columns)) * (RUN_ELEMENTS // BLOCK_ELEMENTS)
        for piece in tensor.pieces:
            change = piece.change
            whole = change is not None and change.magnitude is not None and change.terms[0].transposed
            length = piece.place.last - piece.place.first if whole else step  # norms of columns need every row
            for first in range(piece.place.first, piece.place.last, max(1, length)):
                yield Run(tensor, piece, first, min(first + length, piece.place.last))


def run_bytes(run: Run) -> int:
    """Bytes of the output that a run is about."""
    return (run.last - run.first) * row_bytes(run.tensor)


def run_end(run: Run) -> int:
    """The byte of the output shard after a run's last one."""
    return run.tensor.target.start + run.last * row_bytes(run.tensor)


def source_end(run: Run, path: Path) -> int:
    """The byte of the base's file `path` after the last one that a run reads of it; 0 where it reads something else."""
    source = run.tensor.source
    if not isinstance(source, Span) or source.path != path:
        return 0
    return source.start + run.last * ((source.end - source.start) // max(1, matrix_shape(source.shape)[0]))


def row_bytes(tensor: TensorPlan) -> int:
    """Bytes of one row of the output tensor, seen as a matrix."""
    rows = matrix_shape(tensor.target.shape)[0]
    return (tensor.target.end - tensor.target.start) // max(1, rows)


def write_run(run: Run, directory: Path, weights: Weights) -> DeltaStats | None:
    """Write one run's rows into the shard, which exists in its full size; the statistics of the update, if there is one.

    Memory beyond the factors is a few blocks of BLOCK_ELEMENTS, independent of tensor and shard size.
    """
    tensor = run.tensor
    source_path = tensor.source.path if isinstance(tensor.source, Span) else tensor.source.weight.path
    with (
        source_path.open("rb", buffering=0) as source,
        (directory / tensor.target.path).open("r+b", buffering=0) as target,
        torch.inference_mode(),
    ):
        if run.piece.change is not None:
            return merge_run(run, source, target, weights)
        if isinstance(tensor.source, Span) and tensor.source.dtype == tensor.target.dtype:
            copy_run(run, tensor.source, source, target)
        else:
            convert_run(run, source, target)
    return None


def merge_run(run: Run, source: BinaryIO, target: BinaryIO, weights: Weights) -> DeltaStats:
    """The update in float32, rounded once (to nearest even) to the output dtype."""
    tensor, width = run.tensor, row_bytes(run.tensor)
    update = load_update(run.piece, tensor, weights, torch.float32, source)
    kind = FLOAT_DTYPES[tensor.target.dtype]
    stats = DeltaStats()
    columns = matrix_shape(tensor.source.shape)[1]
    for first, last in row_blocks(run.first, run.last, columns):
        weight = read_rows(tensor.source, first, last, source, torch.float32)
        merged = scratch("merged", last - first, columns, torch.float32)
        apply_update(weight, update, run.piece, first, merged)
        out = scratch("out", last - first, columns, kind).copy_(merged)
        write_at(target, tensor.target.start + first * width, out)
        measure(stats, weight, merged, out, sample=first == run.first)
    if not math.isfinite(stats.max_abs_delta):
        raise MergeError(f"{tensor.target.name}: base weight or update is not finite; is the base damaged?")
    return stats


def measure(stats: DeltaStats, weight: torch.Tensor, merged: torch.Tensor, out: torch.Tensor, sample: bool) -> None:
    """Add a block's statistics. In float32, of one block at a time: good to about 1e-6. weight and merged are used up.

    sample: more than the largest change, which costs more than the merge and needs no more than a few blocks.
    """
    if sample:
        stats.elements += weight.numel()
        stats.weight_squares += torch.dot(weight.view(-1), weight.view(-1)).item()
    delta = torch.sub(merged, weight, out=weight).view(-1)
    low, high = torch.aminmax(delta)
    # What is not a number is neither smaller nor larger than anything, so it has to be asked for.
    change = max(-low.item(), high.item())
    stats.max_abs_delta = max(stats.max_abs_delta, change) if math.isfinite(change) else math.nan
    if sample:
        stats.delta_squares += torch.dot(delta, delta).item()
        stats.along_delta += torch.dot(torch.sub(out, merged, out=merged).view(-1), delta).item()


def copy_run(run: Run, span: Span, source: BinaryIO, target: BinaryIO) -> None:
    """Copy bytes without decoding them: by the kernel (which shares the blocks where the filesystem can), or by hand."""
    width = row_bytes(run.tensor)
    position, shift = span.start + run.first * width, run.tensor.target.start - span.start
    end = span.start + run.last * width
    while position < end:
        try:
            done = os.copy_file_range(source.fileno(), target.fileno(), end - position, position, position + shift)
        except OSError as error:
            if error.errno not in NO_KERNEL_COPY:
                raise
            done = 0
        if done == 0:
            done = min(COPY_BYTES, end - position)
            write_at(target, position + shift, read_into(source, position, torch.empty(done, dtype=torch.uint8)))
        position += done


def convert_run(run: Run, source: BinaryIO, target: BinaryIO) -> None:
    """Untouched rows in another dtype, rounded once."""
    width, kind = row_bytes(run.tensor), FLOAT_DTYPES[run.tensor.target.dtype]
    for first, last in row_blocks(run.first, run.last, matrix_shape(run.tensor.source.shape)[1]):
        block = read_rows(run.tensor.source, first, last, source, kind)
        write_at(target, run.tensor.target.start + first * width, block)
