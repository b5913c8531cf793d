"""Writing the merged shards: threads write runs of rows and verify them, others hash and sync each shard behind them.

float32 arithmetic and one rounding to the output dtype. The output's bits do not depend on the number of threads: the
blocks are fixed, and each is computed on one thread.
"""

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm.auto import tqdm

from cogumi.core.durability import drop_from_memory, sync_path
from cogumi.core.errors import MergeError
from cogumi.core.notices import is_notebook
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, as_bytes, matrix_shape, read_into, write_at, write_header
from cogumi.merge.arithmetic import (
    BLOCK_ELEMENTS,
    COPY_BYTES,
    Weights,
    apply_update,
    ieee_matmul,
    load_update,
    one_thread_each,
    open_weights,
    read_rows,
    row_blocks,
    scratch,
)
from cogumi.merge.element_check import ElementCheck, verify_header, verify_run
from cogumi.merge.plan import MergePlan, RowRange, ShardPlan

# The unit of work of a thread: long enough that opening files and loading factors do not show, short enough to share out.
RUN_ELEMENTS = 32 * BLOCK_ELEMENTS
# What was just read or written is hashed in pieces that stay in a core's cache.
HASH_BYTES = 1 << 18
# How much of a shard is hashed before the disk is asked to take it.
SYNC_BYTES = 1 << 26

Advance = Callable[[int], None]


@contextmanager
def progress_bar(wanted: bool, name: str, total: int) -> Iterator[Advance]:
    """A bar over `total` bytes in a terminal or a notebook; yields a function that takes the bytes just done."""
    shown = wanted and (is_notebook() or sys.stderr.isatty())
    with tqdm(desc=name, total=total, unit="B", unit_scale=True, leave=is_notebook(), disable=not shown) as bar:
        yield bar.update


def available_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def thread_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that, when the block fails, drops what has not begun and waits for what has. A new thread does not know
    of torch.set_num_threads until it is asked for: matrix products would bring in OpenMP threads."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="cogumi-merge", initializer=torch.get_num_threads)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class DeltaStats:
    """What the updates of one tensor did, over all its runs. max_abs_delta: the largest change before rounding. The others
    come from a sample, the first block of each run. along_delta: the sum of rounding error times delta."""

    max_abs_delta: float = 0.0
    delta_squares: float = 0.0
    weight_squares: float = 0.0
    along_delta: float = 0.0

    def add(self, other: "DeltaStats") -> None:
        self.max_abs_delta = max(self.max_abs_delta, other.max_abs_delta)
        self.delta_squares += other.delta_squares
        self.weight_squares += other.weight_squares
        self.along_delta += other.along_delta

    @property
    def ratio(self) -> float | None:
        """Frobenius |delta| / |W| of the sample; None for a weight that is all zero."""
        return math.sqrt(self.delta_squares / self.weight_squares) if self.weight_squares else None

    @property
    def retained(self) -> float | None:
        """The share of delta that arrived, <out - W, delta> / <delta, delta>, of the sample; None where delta is zero."""
        return 1 + self.along_delta / self.delta_squares if self.delta_squares else None


@dataclass
class Outcome:
    """Statistics by updated tensor, checks by tensor with arithmetic, sha256 by shard: the output's and the base's."""

    stats: dict[str, DeltaStats] = field(default_factory=dict)
    checks: dict[str, ElementCheck] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)


# What a run gives: statistics where it updates, and its check.
Merged = tuple[DeltaStats | None, ElementCheck]


def write_and_verify(plan: MergePlan, directory: Path, workers: int, advance: Advance) -> Outcome:
    """Write, check, hash and sync every shard into `directory`, where the files exist in full size. advance: called
    with the bytes just done, from any thread."""
    outcome = Outcome()
    # The writers come last, as the first to stop when something fails: the others wait for them.
    with (
        ieee_matmul(),
        one_thread_each(),
        open_weights(plan) as weights,
        thread_pool(1) as disk,
        thread_pool(workers) as followers,
        thread_pool(workers) as pool,
    ):

        def merge(run: RowRange) -> Merged:
            stats = write_run(run, directory, weights)
            check = verify_run(run, directory, weights)
            advance(run.bytes)
            return stats, check

        merging, hashing = [], []
        for shard in plan.shards:
            write_header(directory / shard.name, shard.header)
            runs = [(run, pool.submit(merge, run)) for run in runs_of(shard)]
            merging += runs
            source = plan.base.path / shard.name
            hashing.append((shard, followers.submit(hash_and_sync, directory / shard.name, source, runs, disk)))
        for run, merged in merging:
            name, (stats, check) = run.tensor.target.name, merged.result()
            if stats is not None:
                outcome.stats.setdefault(name, DeltaStats()).add(stats)
            if check.elements:
                outcome.checks.setdefault(name, ElementCheck()).add(check)
        for shard, hashed in hashing:
            outcome.digests[shard.name], outcome.inputs[shard.name] = hashed.result()
            verify_header(shard, directory)
    return outcome


class FileDigest:
    """The sha256 of a file, as far as it was worked out: `position` bytes. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.digest = hashlib.sha256()

    def extend(self, end: int) -> None:
        """Continue to byte `end`, if it is not there yet."""
        buffer = torch.empty(max(0, min(HASH_BYTES, end - self.position)), dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            while self.position < end:
                piece = buffer[: end - self.position]
                self.digest.update(as_bytes(read_into(file, self.position, piece)))
                self.position += len(piece)

    def finish(self) -> str:
        """The digest of the whole file, as `sha256sum` prints it."""
        self.extend(self.path.stat().st_size)
        return self.digest.hexdigest()


def hash_and_sync(
    path: Path, source: Path, runs: list[tuple[RowRange, Future[Merged]]], disk: ThreadPoolExecutor
) -> tuple[str, str]:
    """The sha256 of a shard and of its source, worked out behind the writers while both are in memory."""
    target, base = FileDigest(path), FileDigest(source)
    settled, waiting = 0, []
    for run, merged in runs:
        merged.result()
        target.extend(run.end)
        base.extend(run.source_end(source))
        if target.position - settled >= SYNC_BYTES:
            settled = target.position
            waiting.append(disk.submit(sync_and_drop, path, settled, source, base.position))
    digests = target.finish(), base.finish()
    waiting.append(disk.submit(sync_and_drop, path, 0, source, 0))
    for each in waiting:
        each.result()
    return digests


def sync_and_drop(path: Path, length: int, source: Path, used: int) -> None:
    """Wait until a shard is on the disk. Then drop its first `length` bytes, and `used` bytes of its source, from the
    page cache (0: all). Otherwise the kernel must find new pages for two models, which takes longer than the arithmetic."""
    sync_path(path)
    drop_from_memory(path, length)
    drop_from_memory(source, used)


def verify_shards(plan: MergePlan, directory: Path, workers: int, advance: Advance) -> int:
    """Check every shard of a finished directory again; the number of elements compared."""
    with ieee_matmul(), one_thread_each(), open_weights(plan) as weights, thread_pool(workers) as pool:

        def check(run: RowRange) -> int:
            found = verify_run(run, directory, weights)
            advance(run.bytes)
            return found.elements

        for shard in plan.shards:
            verify_header(shard, directory)
        return sum(pool.map(check, (run for shard in plan.shards for run in runs_of(shard))))


def runs_of(plan: ShardPlan) -> Iterator[RowRange]:
    """A shard's work, in file order, cut at places that depend on the shapes alone."""
    for tensor in plan.tensors:
        columns = matrix_shape(tensor.source.shape)[1]
        step = max(1, BLOCK_ELEMENTS // max(1, columns)) * (RUN_ELEMENTS // BLOCK_ELEMENTS)
        for piece in tensor.pieces:
            change = piece.change
            whole = change is not None and change.magnitude is not None and change.terms[0].transposed
            length = piece.place.last - piece.place.first if whole else step  # norms of columns need every row
            for first in range(piece.place.first, piece.place.last, max(1, length)):
                yield RowRange(tensor, piece, first, min(first + length, piece.place.last))


def write_run(run: RowRange, directory: Path, weights: Weights) -> DeltaStats | None:
    """Write one run's rows into the shard, which exists in its full size; the statistics of an update."""
    tensor = run.tensor
    with (
        tensor.source.path.open("rb", buffering=0) as source,
        (directory / tensor.target.path).open("r+b", buffering=0) as target,
        torch.inference_mode(),
    ):
        if run.piece.change is not None:
            return merge_run(run, source, target, weights)
        if isinstance(tensor.source, Span) and tensor.source.dtype == tensor.target.dtype:
            copy_run(run, tensor.source, source, target)
            return None
        for first, last in row_blocks(run.first, run.last, matrix_shape(tensor.source.shape)[1]):
            block = read_rows(tensor.source, first, last, source, FLOAT_DTYPES[tensor.target.dtype])
            write_at(target, tensor.target.start + first * tensor.row_bytes, block)
    return None


def merge_run(run: RowRange, source: BinaryIO, target: BinaryIO, weights: Weights) -> DeltaStats:
    """The update in float32, rounded once (to nearest even) to the output dtype."""
    tensor, width = run.tensor, run.tensor.row_bytes
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
    """Add a block's statistics, in float32. weight and merged are used up. sample: more than the largest change, which
    costs more than the merge and needs no more than a few blocks."""
    if sample:
        stats.weight_squares += torch.dot(weight.view(-1), weight.view(-1)).item()
    delta = torch.sub(merged, weight, out=weight).view(-1)
    low, high = torch.aminmax(delta)
    # What is not a number is neither smaller nor larger than anything, so it has to be asked for.
    change = max(-low.item(), high.item())
    stats.max_abs_delta = max(stats.max_abs_delta, change) if math.isfinite(change) else math.nan
    if sample:
        stats.delta_squares += torch.dot(delta, delta).item()
        stats.along_delta += torch.dot(torch.sub(out, merged, out=merged).view(-1), delta).item()


def copy_run(run: RowRange, span: Span, source: BinaryIO, target: BinaryIO) -> None:
    """Copy bytes without decoding them."""
    width, shift = run.tensor.row_bytes, run.tensor.target.start - span.start
    begin, end = span.start + run.first * width, span.start + run.last * width
    for start in range(begin, end, COPY_BYTES):
        copied = scratch("out", 1, min(COPY_BYTES, end - start), torch.uint8)
        write_at(target, start + shift, read_into(source, start, copied))
