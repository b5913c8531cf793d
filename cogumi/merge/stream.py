"""Writing the merged shards in one pass, through stages that work side by side.

One thread reads the base in runs of rows and hashes it. Others merge a run. One writes it, reads it back, compares and
hashes it. Another waits for the disk. Every stage takes the runs in the order of the files, so a file is hashed from the
bytes that are in memory. The output's bits do not depend on the number of threads: the blocks are fixed, and each is
computed on one thread.
"""

import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from blake3 import blake3
from safetensors import safe_open
from tqdm.auto import tqdm

from cogumi.core.durability import drop_from_memory, sync_path
from cogumi.core.errors import MergeError
from cogumi.core.liveness import beat
from cogumi.core.notices import is_notebook
from cogumi.core.safetensors_file import FLOAT_DTYPES, as_bytes, matrix_shape, read_into, write_at, write_header
from cogumi.merge.arithmetic import (
    BLOCK_ELEMENTS,
    DeltaStats,
    Stored,
    Update,
    Updates,
    apply_update,
    block_rows,
    merge_rows,
    one_thread_each,
    read_stored_rows,
    round_once,
)
from cogumi.merge.plan import MergePlan, RowRange, ShardPlan

# The unit of work of a thread: long enough that opening files and waiting for each other do not show.
RUN_ELEMENTS = 8 * BLOCK_ELEMENTS
# What is hashed of a file that no run has read, such as its header, is read in pieces of this size.
HASH_BYTES = 1 << 20
# How much of a shard is written before the disk is asked to take it.
SYNC_BYTES = 1 << 26

Item = TypeVar("Item")
Result = TypeVar("Result")
Advance = Callable[[int], None]


@contextmanager
def progress_bar(enabled: bool, name: str, total: int) -> Iterator[Advance]:
    """Show a bar over `total` bytes in a terminal or a notebook; yield a function that takes the bytes just done."""
    shown = enabled and (is_notebook() or sys.stderr.isatty())
    with tqdm(desc=name, total=total, unit="B", unit_scale=True, leave=is_notebook(), disable=not shown) as bar:

        def advance(done: int) -> None:
            beat()
            bar.update(done)

        yield advance


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def thread_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool that, when the block fails, drops tasks that have not begun and waits for the others."""
    # A new thread ignores torch.set_num_threads until it is asked for: matrix products would bring in OpenMP threads.
    pool = ThreadPoolExecutor(workers, thread_name_prefix="cogumi-merge", initializer=torch.get_num_threads)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class Outcome:
    """Results of a merge.

    stats: by updated tensor. elements: how many were computed and read back, by tensor. digests, inputs: BLAKE3 of each
    shard of the output and of the base.
    """

    stats: dict[str, DeltaStats] = field(default_factory=dict)
    elements: Counter[str] = field(default_factory=Counter)
    digests: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass
class Work:
    """One run on its way through the stages, or the end of a shard, where `run` is None.

    out: the run's bytes, uint8. elements: how many of them were computed. memory: buffers of `stored` and `out`.
    """

    shard: ShardPlan
    run: RowRange | None
    stored: Stored | None = None
    update: Update | None = None
    out: torch.Tensor | None = None
    stats: DeltaStats | None = None
    elements: int = 0
    memory: list[torch.Tensor] = field(default_factory=list)


def write_and_verify(plan: MergePlan, directory: Path, workers: int | None, advance: Advance) -> Outcome:
    """Write, check, hash and sync every shard into `directory`, where the files exist in full size."""
    outcome = Outcome()
    for shard in plan.shards:
        write_header(directory / shard.name, shard.header)
    for work in merge_runs(plan, directory, workers, outcome):
        if work.run is None:
            continue
        name = work.run.tensor.target.name
        if work.stats is not None:
            outcome.stats.setdefault(name, DeltaStats()).add(work.stats)
        if work.elements:
            outcome.elements[name] += work.elements
        advance(work.run.bytes)
    return outcome


def verify_shards(plan: MergePlan, directory: Path, workers: int | None, advance: Advance) -> int:
    """Check every shard of a finished directory again; return the number of elements compared."""
    elements = 0
    for work in merge_runs(plan, directory, workers, None):
        elements += work.elements
        advance(work.run.bytes if work.run else 0)
    return elements


def merge_runs(plan: MergePlan, directory: Path, workers: int | None, outcome: Outcome | None) -> Iterator[Work]:
    """Yield each run of each shard, after all stages, in the order of the files.

    outcome: receives the digests; None where the shards exist and are only compared.
    """
    # A sum is made of short operations, each of which takes Python's lock: two threads with sums hold up each other.
    workers = workers or (1 if plan.summed else available_cores())
    spare: list[torch.Tensor] = []
    with (
        one_thread_each(),
        ExitStack() as files,
        thread_pool(1) as disk,
        thread_pool(1) as writing,
        thread_pool(workers) as merging,
        thread_pool(1) as reading,
    ):
        source, target = SourceReader(plan, spare, outcome), TargetWriter(plan, directory, spare, outcome, disk)
        paths = [adapter.weights for adapter, _ in plan.adapters]
        updates = Updates({path: files.enter_context(safe_open(path, framework="pt")) for path in paths})
        works = (Work(shard, run) for shard in plan.shards for run in (*runs_of(shard), None))
        read = in_order(reading, source.read, works, 2)
        merged = in_order(merging, lambda work: merge_run(work, updates, spare), read, workers + 1)
        yield from in_order(writing, target.write, merged, 2)
        for future in target.waiting:
            future.result()


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """Yield the results of the work in order. At most `ahead` items are in the pool, or done and not taken."""
    begun: deque[Future[Result]] = deque()
    for item in items:
        begun.append(pool.submit(work, item))
        if len(begun) == ahead:
            yield begun.popleft().result()
    for future in begun:
        yield future.result()


def take_memory(work: Work, spare: list[torch.Tensor], size: int) -> torch.Tensor:
    """Return a uint8 tensor of `size` bytes, from spare memory where possible: new memory costs more than its use."""
    try:
        buffer = spare.pop()
    except IndexError:
        buffer = torch.empty(0, dtype=torch.uint8)
    work.memory.append(buffer if len(buffer) >= size else torch.empty(size, dtype=torch.uint8))
    return work.memory[-1][:size]


class SourceReader:
    """Reads runs of the base, and hashes its files from them."""

    def __init__(self, plan: MergePlan, spare: list[torch.Tensor], outcome: Outcome | None) -> None:
        self.plan, self.spare, self.outcome = plan, spare, outcome
        self.digest: FileDigest | None = None

    def read(self, work: Work) -> Work:
        if self.outcome is not None and self.digest is None:
            self.digest = FileDigest(self.plan.base.path / work.shard.name)
        run = work.run
        if run is not None:
            memory = take_memory(work, self.spare, run.source_bytes)
            with run.tensor.source.path.open("rb", buffering=0) as file:
                work.stored = read_stored_rows(run.tensor.source, run.first, run.last, file, memory)
            if self.digest is not None and run.tensor.source.path == self.digest.path:
                self.digest.add(run.source_start, work.stored.bytes)
        elif self.outcome is not None and self.digest is not None:
            self.outcome.inputs[work.shard.name], self.digest = self.digest.finish(), None
        return work


def merge_run(work: Work, updates: Updates, spare: list[torch.Tensor]) -> Work:
    """Compute a run's output."""
    run, stored = work.run, work.stored
    if run is None or stored is None:
        return work
    if run.copied:
        work.out = stored.bytes
        return work
    with torch.inference_mode():
        work.update = updates.load(run.piece, run.tensor)
        work.out = take_memory(work, spare, run.bytes)
        out = work.out.view(FLOAT_DTYPES[run.tensor.target.dtype]).view(-1, stored.columns)
        work.stats = merge_rows(run, stored, work.update, out)
        work.elements = out.numel()
    return work


@dataclass
class TargetWriter:
    """Writes runs, unless they exist and are only compared. Reads them back, compares and hashes them."""

    plan: MergePlan
    directory: Path
    spare: list[torch.Tensor]
    outcome: Outcome | None
    disk: ThreadPoolExecutor
    digest: "FileDigest | None" = None
    settled: int = 0
    waiting: list[Future[None]] = field(default_factory=list)

    def write(self, work: Work) -> Work:
        if self.outcome is not None and self.digest is None:
            self.digest, self.settled = FileDigest(self.directory / work.shard.name), 0
        if work.run is None or work.out is None:
            verify_header(work.shard, self.directory)
            if self.outcome is not None and self.digest is not None:
                self.outcome.digests[work.shard.name] = self.digest.finish()
                self.settle(work.shard, 0)
                self.digest = None
            return work
        written = take_memory(work, self.spare, work.run.bytes)
        if self.digest is not None:
            write_run(work.run, self.directory, work.out)
        verify_run(work, self.directory, written, self.digest is not None)
        if self.digest is not None:
            self.digest.add(work.run.start, written)
            if self.digest.position - self.settled >= SYNC_BYTES:
                self.settled = self.digest.position
                self.settle(work.shard, self.settled)
        self.spare += work.memory
        work.stored, work.out, work.memory = None, None, []
        return work

    def settle(self, shard: ShardPlan, length: int) -> None:
        """Sync the first `length` bytes of a shard in the background and drop them and its source's (0: all) from memory."""
        source = self.plan.base.path / shard.name
        self.waiting.append(self.disk.submit(sync_and_drop, self.directory / shard.name, length, source, length))


class FileDigest:
    """BLAKE3 digest of the first `position` bytes of a file. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.digest = blake3()

    def add(self, start: int, data: torch.Tensor) -> None:
        """Continue with bytes that begin at `start`. Bytes before them are read from the file, hashed ones skipped."""
        self.extend(start)
        fresh = as_bytes(data)[self.position - start :]
        self.digest.update(fresh)
        self.position += len(fresh)

    def extend(self, end: int) -> None:
        """Continue to byte `end` with the bytes of the file."""
        if self.position >= end:
            return
        buffer = torch.empty(min(HASH_BYTES, end - self.position), dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            while self.position < end:
                piece = buffer[: end - self.position]
                self.digest.update(as_bytes(read_into(file, self.position, piece)))
                self.position += len(piece)

    def finish(self) -> str:
        """Return the digest of the whole file, as `b3sum` prints it."""
        self.extend(self.path.stat().st_size)
        return self.digest.hexdigest()


def sync_and_drop(path: Path, length: int, source: Path, used: int) -> None:
    """Sync a shard, then drop its first `length` and its source's `used` bytes from the page cache (0: all), to free pages."""
    sync_path(path)
    drop_from_memory(path, length)
    drop_from_memory(source, used)


def runs_of(plan: ShardPlan) -> Iterator[RowRange]:
    """Yield a shard's runs in file order, cut at places that depend on the shapes alone."""
    for tensor in plan.tensors:
        columns = matrix_shape(tensor.source.shape)[1]
        step = block_rows(columns) * (RUN_ELEMENTS // BLOCK_ELEMENTS)
        for piece in tensor.pieces:
            for first in range(piece.place.first, piece.place.last, step):
                yield RowRange(tensor, piece, first, min(first + step, piece.place.last))


def verify_header(plan: ShardPlan, directory: Path) -> None:
    """Raise MergeError unless the written shard has the planned size and header."""
    path = directory / plan.name
    size = path.stat().st_size
    if size != plan.bytes:
        raise MergeError(f"{path} has {size} bytes on disk where {plan.bytes} were written")
    with path.open("rb") as file:
        if file.read(len(plan.header)) != plan.header:
            raise MergeError(f"{path}: the header on disk is not the one written")


def write_run(run: RowRange, directory: Path, out: torch.Tensor) -> None:
    """Write one run's rows into the shard, which exists in its full size."""
    with (directory / run.tensor.target.path).open("r+b", buffering=0) as target:
        write_at(target, run.start, out)


def verify_run(work: Work, directory: Path, written: torch.Tensor, as_written: bool) -> None:
    """Read a run's rows back into `written` and compare every byte with those computed.

    as_written: False where another process wrote them, whose products may have been added up in another order. Raises
    MergeError naming the first wrong element.
    """
    run, stored, out = work.run, work.stored, work.out
    assert run is not None
    assert stored is not None
    assert out is not None
    with (directory / run.tensor.target.path).open("rb", buffering=0) as file:
        read_into(file, run.start, written)
    width = "u1" if len(out) % 8 else "u8"  # eight bytes at a time where possible
    if np.array_equal(written.numpy().view(width), out.numpy().view(width)):
        return
    name = run.tensor.target.name
    if work.update is None:
        raise MergeError(f"{name} should be the base's bytes and is not")
    with torch.inference_mode():
        refuse_wrong_elements(run, stored, work.update, written)
    if as_written:
        raise MergeError(f"{name} has other bytes on the disk than were written")


def refuse_wrong_elements(run: RowRange, stored: Stored, update: Update, written: torch.Tensor) -> None:
    """Raise MergeError naming the first element that is farther from W + delta than the nearest value.

    2**-40 of an element is allowed: more than float64's error, and far less than an output dtype's.
    """
    expected = stored.rows(run.first, run.last).double()
    if run.piece.change is not None:
        expected = apply_update(expected, update, run.piece, run.first, torch.empty_like(expected))
    out = written.view(FLOAT_DTYPES[run.tensor.target.dtype]).view(-1, stored.columns)
    nearest = torch.empty_like(out)
    round_once(expected, nearest)
    error, least = ((values.double() - expected).abs() for values in (out, nearest))
    wrong = ~((error <= least + 2.0**-40 * expected.abs()) | (out == nearest))  # no comparison holds for NaN
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        element = f"{run.tensor.target.name}: element {(run.first + row, column)} is {out[row, column].item():.9g}"
        message = f"{element} where W + delta is {expected[row, column].item():.9g}"
        raise MergeError(f"{message}; {int(wrong.sum())} elements near it are off")
