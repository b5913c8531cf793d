"""Writing the merged shards in one pass, through stages that work side by side.

One thread reads the base in runs of rows and hashes it. Others merge a run and check it. One writes it, reads it back,
compares and hashes it. Another waits for the disk. Every stage takes the runs in the order of the files, so a file is
hashed from the bytes that are in memory. The output's bits do not depend on the number of threads: the blocks are fixed,
and each is computed on one thread.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from blake3 import blake3
from tqdm.auto import tqdm

from cogumi.core.durability import drop_from_memory, sync_path
from cogumi.core.errors import MergeError
from cogumi.core.notices import is_notebook
from cogumi.core.safetensors_file import as_bytes, matrix_shape, read_into, write_at, write_header
from cogumi.merge.arithmetic import (
    BLOCK_ELEMENTS,
    Stored,
    Update,
    Updates,
    block_rows,
    ieee_matmul,
    one_thread_each,
    open_weights,
    read_stored_rows,
)
from cogumi.merge.draft import DeltaStats, Draft, draft_run
from cogumi.merge.element_check import ElementCheck, check_rows, verify_header
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
class Outcome:
    """Statistics by updated tensor, checks by tensor with arithmetic, BLAKE3 by shard: the output's and the base's."""

    stats: dict[str, DeltaStats] = field(default_factory=dict)
    checks: dict[str, ElementCheck] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass
class Work:
    """One run on its way through the stages, or the end of a shard, where it has no run. memory: what `stored` and `draft`
    are in, until the run has been written."""

    shard: ShardPlan
    run: RowRange | None
    stored: Stored | None = None
    update: Update | None = None
    draft: Draft | None = None
    check: ElementCheck = field(default_factory=ElementCheck)
    memory: list[torch.Tensor] = field(default_factory=list)


def write_and_verify(plan: MergePlan, directory: Path, workers: int | None, advance: Advance) -> Outcome:
    """Write, check, hash and sync every shard into `directory`, where the files exist in full size. workers: threads
    that compute. advance: called with the bytes just done."""
    outcome = Outcome()
    for shard in plan.shards:
        write_header(directory / shard.name, shard.header)
    for work in merge_runs(plan, directory, workers, outcome):
        if work.run is None or work.draft is None:
            continue
        name = work.run.tensor.target.name
        if work.draft.stats is not None:
            outcome.stats.setdefault(name, DeltaStats()).add(work.draft.stats)
        if work.check.elements:
            outcome.checks.setdefault(name, ElementCheck()).add(work.check)
        advance(work.run.bytes)
    return outcome


def verify_shards(plan: MergePlan, directory: Path, workers: int | None, advance: Advance) -> int:
    """Check every shard of a finished directory again; the number of elements compared."""
    elements = 0
    for work in merge_runs(plan, directory, workers, None):
        elements += work.check.elements
        advance(work.run.bytes if work.run else 0)
    return elements


def merge_runs(plan: MergePlan, directory: Path, workers: int | None, outcome: Outcome | None) -> Iterator[Work]:
    """Each run of each shard, through all stages, in the order of the files. outcome: gets the digests; None where the
    shards are there, and are only compared."""
    # A sum is made of short operations, each of which takes Python's lock: two threads with sums hold up each other.
    workers = workers or (1 if all(tensor.summed for tensor in plan.tensors) else available_cores())
    spare: list[torch.Tensor] = []
    with (
        ieee_matmul(),
        one_thread_each(),
        open_weights(plan) as weights,
        thread_pool(1) as disk,
        thread_pool(1) as writing,
        thread_pool(workers) as merging,
        thread_pool(1) as reading,
    ):
        source, target = SourceReader(plan, spare, outcome), TargetWriter(plan, directory, spare, outcome, disk)
        updates = Updates(weights)
        works = (Work(shard, run) for shard in plan.shards for run in (*runs_of(shard), None))
        read = in_order(reading, source.read, works, 2)
        merged = in_order(merging, lambda work: merge_run(work, updates, spare), read, workers + 1)
        yield from in_order(writing, target.write, merged, 2)
        target.wait()


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """What the work on each item gives, in order. At most `ahead` items are with the pool, or done and not taken."""
    begun: deque[Future[Result]] = deque()
    for item in items:
        begun.append(pool.submit(work, item))
        if len(begun) == ahead:
            yield begun.popleft().result()
    for future in begun:
        yield future.result()


def take_memory(work: Work, spare: list[torch.Tensor], size: int) -> torch.Tensor:
    """A uint8 tensor of `size` bytes, from memory that is spare: new memory costs more than its use."""
    try:
        kept = spare.pop()
    except IndexError:
        kept = torch.empty(0, dtype=torch.uint8)
    work.memory.append(kept if len(kept) >= size else torch.empty(size, dtype=torch.uint8))
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
    """Compute a run's output, and check it against W + delta."""
    run, stored = work.run, work.stored
    if run is None or stored is None:
        return work
    with torch.inference_mode():
        if run.copied:
            work.draft = Draft(stored.bytes)
        else:
            work.update = updates.load(run.piece, run.tensor)
            work.draft = draft_run(run, stored, work.update, take_memory(work, spare, run.bytes))
            if work.draft.nearest:
                work.check = ElementCheck((run.last - run.first) * stored.columns)
            else:
                work.check = check_rows(run, work.update, stored, work.draft.bytes)
    return work


class TargetWriter:
    """Writes runs, unless they are there and only to be compared. Reads them back, compares and hashes them."""

    def __init__(
        self,
        plan: MergePlan,
        directory: Path,
        spare: list[torch.Tensor],
        outcome: Outcome | None,
        disk: ThreadPoolExecutor,
    ) -> None:
        self.plan, self.directory, self.spare, self.outcome, self.disk = plan, directory, spare, outcome, disk
        self.digest: FileDigest | None = None
        self.settled = 0
        self.waiting: list[Future[None]] = []

    def write(self, work: Work) -> Work:
        if self.outcome is not None and self.digest is None:
            self.digest, self.settled = FileDigest(self.directory / work.shard.name), 0
        if work.run is None or work.stored is None or work.draft is None:
            verify_header(work.shard, self.directory)
            if self.outcome is not None and self.digest is not None:
                self.outcome.digests[work.shard.name] = self.digest.finish()
                self.settle(work.shard, 0)
                self.digest = None
            return work
        written = take_memory(work, self.spare, work.run.bytes)
        if self.digest is not None:
            write_run(work.run, self.directory, work.draft)
        verify_run(work, self.directory, written, self.digest is not None)
        if self.digest is not None:
            self.digest.add(work.run.start, written)
            if self.digest.position - self.settled >= SYNC_BYTES:
                self.settled = self.digest.position
                self.settle(work.shard, self.settled)
        self.spare += work.memory
        work.stored, work.memory = None, []
        return work

    def settle(self, shard: ShardPlan, length: int) -> None:
        """Have the first `length` bytes of a shard put on the disk, and forgotten with those of its source (0: all)."""
        source = self.plan.base.path / shard.name
        self.waiting.append(self.disk.submit(sync_and_drop, self.directory / shard.name, length, source, length))

    def wait(self) -> None:
        for each in self.waiting:
            each.result()


class FileDigest:
    """The BLAKE3 digest of a file, as far as it was worked out: `position` bytes. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.digest = blake3()

    def add(self, start: int, data: torch.Tensor) -> None:
        """Continue with bytes of the file that begin at `start`. What lies before them is read from the file; what was
        hashed already is skipped."""
        self.extend(start)
        fresh = as_bytes(data)[self.position - start :]
        self.digest.update(fresh)
        self.position += len(fresh)

    def extend(self, end: int) -> None:
        """Continue to byte `end` with what is in the file, if it is not there yet."""
        if self.position >= end:
            return
        buffer = torch.empty(min(HASH_BYTES, end - self.position), dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            while self.position < end:
                piece = buffer[: end - self.position]
                self.digest.update(as_bytes(read_into(file, self.position, piece)))
                self.position += len(piece)

    def finish(self) -> str:
        """The digest of the whole file, as `b3sum` prints it."""
        self.extend(self.path.stat().st_size)
        return self.digest.hexdigest()


def sync_and_drop(path: Path, length: int, source: Path, used: int) -> None:
    """Wait until a shard is on the disk. Then drop its first `length` bytes, and `used` bytes of its source, from the
    page cache (0: all). Otherwise the kernel must find new pages for two models, which takes longer than the arithmetic."""
    sync_path(path)
    drop_from_memory(path, length)
    drop_from_memory(source, used)


def runs_of(plan: ShardPlan) -> Iterator[RowRange]:
    """A shard's work, in file order, cut at places that depend on the shapes alone."""
    for tensor in plan.tensors:
        columns = matrix_shape(tensor.source.shape)[1]
        step = block_rows(columns) * (RUN_ELEMENTS // BLOCK_ELEMENTS)
        for piece in tensor.pieces:
            for first in range(piece.place.first, piece.place.last, step):
                yield RowRange(tensor, piece, first, min(first + step, piece.place.last))


def write_run(run: RowRange, directory: Path, draft: Draft) -> None:
    """Write one run's rows into the shard, which exists in its full size."""
    with (directory / run.tensor.target.path).open("r+b", buffering=0) as target:
        write_at(target, run.start, draft.bytes)


def verify_run(work: Work, directory: Path, written: torch.Tensor, as_written: bool) -> None:
    """Read a run's rows back into `written` and compare every byte with what was computed. Where they differ, name the
    first element that is not what base and adapter give. as_written: they must not differ, whatever rounding allows.
    Raises MergeError."""
    run, draft, stored = work.run, work.draft, work.stored
    assert run is not None
    assert draft is not None
    assert stored is not None
    with (directory / run.tensor.target.path).open("rb", buffering=0) as file:
        read_into(file, run.start, written)
    if same_bytes(written, draft.bytes):
        return
    name = run.tensor.target.name
    if work.update is None:
        raise MergeError(f"{name} should be the base's bytes and is not")
    with torch.inference_mode():
        check_rows(run, work.update, stored, written)
    if as_written or draft.nearest:
        raise MergeError(f"{name} has other bytes on the disk than were written")


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two uint8 tensors of one size are equal, eight bytes at a time where it can be."""
    width = "u1" if len(one) % 8 else "u8"
    return np.array_equal(one.numpy().view(width), other.numpy().view(width))
