"""The merge's threads: every shard is written, then verified and hashed while the next is written and the disk catches up."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from cogumi.merge.arithmetic import Weights, ieee_matmul, one_thread_each, open_weights
from cogumi.merge.commit import sync_path
from cogumi.merge.plan import MergePlan, ShardPlan
from cogumi.merge.progress import Advance
from cogumi.merge.stream import DeltaStats, Run, run_bytes, runs_of, write_run
from cogumi.merge.tensorfile import write_header
from cogumi.merge.verify import ElementCheck, sha256_file, verify_header, verify_run

T = TypeVar("T")
# How many bytes may wait for the disk before it is asked to take them: the kernel's own limit is a tenth of the memory.
SYNC_BYTES = 1 << 28


@dataclass
class Outcome:
    """What was done: statistics by updated tensor, checks by tensor with arithmetic, sha256 by shard."""

    stats: dict[str, DeltaStats] = field(default_factory=dict)
    checks: dict[str, ElementCheck] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


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
    plan: MergePlan, directory: Path, workers: int, verify: bool, wrote: Advance, checked: Advance
) -> Outcome:
    """Write, sync and check every shard into `directory`, where the files exist in full size.

    wrote, checked: called with the bytes just done, from any thread. The output's bits do not depend on `workers`: the
    blocks are fixed and each is computed on one thread.
    """
    outcome = Outcome()
    with ieee_matmul(), one_thread_each(), open_weights(plan) as weights, threads(workers) as pool, threads(1) as disk:
        backlog = Backlog(disk)

        def write(run: Run) -> DeltaStats | None:
            stats = write_run(run, directory, weights)
            wrote(run_bytes(run))
            backlog.add(directory / run.tensor.target.path, run_bytes(run))
            return stats

        writing = submit(pool, write, plan.shards[0])
        checking = []
        for number, shard in enumerate(plan.shards):
            write_header(directory / shard.name, shard.header)
            following = submit(pool, write, plan.shards[number + 1]) if number + 1 < len(plan.shards) else []
            for name, stats in results(writing):
                if stats is not None:
                    outcome.stats.setdefault(name, DeltaStats()).add(stats)
            backlog.finish(directory / shard.name)
            digest = pool.submit(sha256_file, directory / shard.name)
            checks = check_shard(shard, directory, weights, pool, checked) if verify else []
            checking.append((shard, digest, checks))
            writing = following
        for shard, digest, checks in checking:
            add_checks(outcome.checks, checks)
            outcome.digests[shard.name] = digest.result()
        backlog.wait()
    return outcome


def verify_shards(plan: MergePlan, directory: Path, workers: int, checked: Advance) -> dict[str, ElementCheck]:
    """Check every shard of a finished directory again."""
    found: dict[str, ElementCheck] = {}
    with ieee_matmul(), one_thread_each(), open_weights(plan) as weights, threads(workers) as pool:
        for checks in [check_shard(shard, directory, weights, pool, checked) for shard in plan.shards]:
            add_checks(found, checks)
    return found


def check_shard(
    shard: ShardPlan, directory: Path, weights: Weights, pool: ThreadPoolExecutor, checked: Advance
) -> list[tuple[str, Future[ElementCheck]]]:
    """Compare a written shard's header now, and its tensors in the pool."""
    verify_header(shard, directory)

    def verify(run: Run) -> ElementCheck:
        check = verify_run(run, directory, weights)
        checked(run_bytes(run))
        return check

    return submit(pool, verify, shard)


def submit(pool: ThreadPoolExecutor, work: Callable[[Run], T], shard: ShardPlan) -> list[tuple[str, Future[T]]]:
    return [(run.tensor.target.name, pool.submit(work, run)) for run in runs_of(shard)]


def add_checks(found: dict[str, ElementCheck], checks: list[tuple[str, Future[ElementCheck]]]) -> None:
    for name, check in results(checks):
        if check.elements:
            found.setdefault(name, ElementCheck()).add(check)


def results(futures: Iterable[tuple[str, Future[T]]]) -> Iterator[tuple[str, T]]:
    """Each name with its result, in order; the first error is raised at its turn."""
    for name, future in futures:
        yield name, future.result()


class Backlog:
    """Asks the disk, on a thread of its own, to take what was written, so that the end does not wait for all of it."""

    def __init__(self, disk: ThreadPoolExecutor) -> None:
        self.disk = disk
        self.lock = threading.Lock()
        self.unsynced = 0
        self.syncs: list[Future[None]] = []

    def add(self, path: Path, count: int) -> None:
        with self.lock:
            self.unsynced += count
            due = self.unsynced >= SYNC_BYTES
            if due:
                self.unsynced = 0
        if due:
            self.finish(path)

    def finish(self, path: Path) -> None:
        self.syncs.append(self.disk.submit(sync_path, path))

    def wait(self) -> None:
        for sync in self.syncs:
            sync.result()
