"""The merge's threads: runs are written and verified side by side, and each shard is hashed and sent to the disk behind them."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cogumi.durable import drop_from_memory, sync_path
from cogumi.merge.arithmetic import ieee_matmul, one_thread_each, open_weights
from cogumi.merge.hashing import FileDigest
from cogumi.merge.plan import MergePlan
from cogumi.merge.progress import Advance
from cogumi.merge.stream import DeltaStats, Run, run_bytes, run_end, runs_of, source_end, write_run
from cogumi.merge.tensorfile import write_header
from cogumi.merge.verify import ElementCheck, verify_header, verify_run

# How much of a shard is hashed before the disk is asked to take it.
SYNC_BYTES = 1 << 26


@dataclass
class Outcome:
    """What was done: statistics by updated tensor, checks by tensor with arithmetic, sha256 by shard."""

    stats: dict[str, DeltaStats] = field(default_factory=dict)
    checks: dict[str, ElementCheck] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, stats: DeltaStats | None, check: ElementCheck | None) -> None:
        """Count one run of the tensor `name`."""
        if stats is not None:
            self.stats.setdefault(name, DeltaStats()).add(stats)
        if check is not None and check.elements:
            self.checks.setdefault(name, ElementCheck()).add(check)


# What a run gives: statistics where it updates, a check where it was verified.
Merged = tuple[DeltaStats | None, ElementCheck | None]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that, when the block fails, drops what has not begun and waits for what has.

    A new thread does not know of torch.set_num_threads until something asks it: matrix products do not, and would bring
    in OpenMP threads for each worker.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="cogumi-merge", initializer=torch.get_num_threads)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def write_and_verify(
    plan: MergePlan,
    directory: Path,
    sources: Mapping[str, FileDigest],
    workers: int,
    verify: bool,
    advance: Advance,
) -> Outcome:
    """Write, check, hash and sync every shard into `directory`, where the files exist in full size.

    sources: the digest of each of the base's shards, by name, begun or not; finished afterwards. advance: called with
    the bytes just done, from any thread. The output's bits do not depend on `workers`: the blocks
    are fixed and each is computed on one thread.
    """
    outcome = Outcome()
    # The writers come last, as the first to stop when something fails: the others wait for them.
    with (
        ieee_matmul(),
        one_thread_each(),
        open_weights(plan) as weights,
        threads(1) as disk,
        threads(workers) as followers,
        threads(workers) as pool,
    ):

        def merge(run: Run) -> Merged:
            stats = write_run(run, directory, weights)
            check = verify_run(run, directory, weights) if verify else None
            advance(run_bytes(run))
            return stats, check

        merging, digests = [], []
        for shard in plan.shards:
            write_header(directory / shard.name, shard.header)
            runs = [(run, pool.submit(merge, run)) for run in runs_of(shard)]
            merging += runs
            digests.append((shard, followers.submit(follow, directory / shard.name, sources[shard.name], runs, disk)))
        for run, merged in merging:
            outcome.add(run.tensor.target.name, *merged.result())
        for shard, digest in digests:
            outcome.digests[shard.name] = digest.result()
            if verify:
                verify_header(shard, directory)
    return outcome


def follow(path: Path, source: FileDigest, runs: list[tuple[Run, Future[Merged]]], disk: ThreadPoolExecutor) -> str:
    """The sha256 of a shard and of its source, worked out behind the writers while both are in memory; see `settle`."""
    target, settled, used, waiting = FileDigest(path), 0, 0, []
    to_drop = None if source.found_in_memory else source.path
    for run, merged in runs:
        merged.result()
        target.extend(run_end(run))
        used = max(used, source_end(run, source.path))
        source.extend(used)
        if target.position - settled >= SYNC_BYTES:
            settled = target.position
            waiting.append(disk.submit(settle, path, settled, to_drop, used))
    digest = target.finish()
    source.finish()
    waiting.append(disk.submit(settle, path, 0, to_drop, 0))
    for each in waiting:
        each.result()
    return digest


def settle(path: Path, length: int, source: Path | None, used: int) -> None:
    """Wait until a shard is on the disk, and let its first `length` bytes, and `used` of its source, leave the page cache.

    A merge passes through two models that nobody has asked for yet, and leaves the page cache as it was: where the kernel
    has to find new pages for all of it, that takes longer than the arithmetic.
    """
    sync_path(path)
    drop_from_memory(path, length)
    if source is not None:
        drop_from_memory(source, used)


def verify_shards(plan: MergePlan, directory: Path, workers: int, checked: Advance) -> dict[str, ElementCheck]:
    """Check every shard of a finished directory again."""
    outcome = Outcome()
    with ieee_matmul(), one_thread_each(), open_weights(plan) as weights, threads(workers) as pool:

        def check(run: Run) -> ElementCheck:
            found = verify_run(run, directory, weights)
            checked(run_bytes(run))
            return found

        for shard in plan.shards:
            verify_header(shard, directory)
        for run, found in [(run, pool.submit(check, run)) for shard in plan.shards for run in runs_of(shard)]:
            outcome.add(run.tensor.target.name, None, found.result())
    return outcome.checks
