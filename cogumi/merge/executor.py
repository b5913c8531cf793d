"""The merge's threads: rows are written and verified side by side, and each shard is hashed and synced behind them."""

import ctypes
import hashlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from cogumi.core.durability import drop_from_memory, sync_path
from cogumi.core.notices import in_a_kernel
from cogumi.core.safetensors_file import as_bytes, read_into, write_header
from cogumi.merge.arithmetic import ieee_matmul, one_thread_each, open_weights
from cogumi.merge.element_check import ElementCheck, verify_header, verify_run
from cogumi.merge.plan import MergePlan
from cogumi.merge.stream import DeltaStats, Run, run_bytes, run_end, runs_of, source_end, write_run

Advance = Callable[[int], None]


@contextmanager
def progress_bar(wanted: bool, name: str, total: int) -> Iterator[Advance]:
    """A bar over `total` bytes; yields a function that takes the bytes just done, from any thread.

    Nothing is shown where stderr is no terminal and this is no notebook.
    """
    if wanted and in_a_kernel():
        from tqdm.auto import tqdm

        with tqdm(desc=name, total=total, unit="B", unit_scale=True) as bar:
            yield bar.update
        return
    if not (wanted and sys.stderr.isatty()):
        yield lambda count: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(name, total=total)
        yield lambda count: shown.update(task, advance=count)


def spoken(count: int) -> str:
    """Bytes in the unit a person would use: 13.49 GB, 240 kB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{-(-count // 1000)} kB"


# -------------------------------------------------------------------------------------------------------------- hashing


# What was just read or written is hashed in pieces that stay in a core's cache.
HASH_BYTES = 1 << 18
# Larger ones while another thread imports modules: it holds the interpreter lock, for which each piece waits up to 2 x 5 ms.
HASH_BYTES_AHEAD = 1 << 25


class FileDigest:
    """The sha256 of a file, as far as it was worked out. position: how many bytes that is. One thread at a time.

    found_in_memory: whether the file was in the page cache before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found_in_memory = is_in_memory(path)
        self.position = 0
        self.digest = hashlib.sha256()

    def extend(self, end: int, at_once: int = HASH_BYTES) -> None:
        """Go on to byte `end`, if it is not there yet."""
        buffer = torch.empty(max(0, min(at_once, end - self.position)), dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            while self.position < end:
                piece = buffer[: end - self.position]
                self.digest.update(as_bytes(read_into(file, self.position, piece)))
                self.position += len(piece)

    def finish(self) -> str:
        """The digest of the whole file, as `sha256sum` prints it."""
        self.extend(self.path.stat().st_size)
        return self.digest.hexdigest()


@contextmanager
def hashing_ahead(digests: Iterable[FileDigest]) -> Iterator[None]:
    """Work on digests, one after the other, while the block does something else; as far as that takes."""
    enough = threading.Event()
    failed: list[OSError] = []

    def work() -> None:
        try:
            for digest in digests:
                size = digest.path.stat().st_size
                while digest.position < size and not enough.is_set():
                    digest.extend(min(digest.position + HASH_BYTES_AHEAD, size), HASH_BYTES_AHEAD)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="cogumi-merge-hashing")
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()
    if failed:
        raise failed[0]


def is_in_memory(path: Path) -> bool:
    """Whether more than half of a file is in the page cache. True where nobody says (another's file, another system)."""
    size = path.stat().st_size
    if not (size and sys.platform == "linux"):
        return True
    pages = np.empty(-(-size // mmap.PAGESIZE), dtype=np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as view:
        start = np.frombuffer(view, dtype=np.uint8).ctypes.data
        asked = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
    return bool(asked != 0 or (pages & 1).mean() > 0.5)


# ------------------------------------------------------------------------------------------------------------- executor


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
