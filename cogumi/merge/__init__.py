"""Merging a LoRA adapter into its full-precision base, exactly and checked.

resolve -> plan -> write -> verify -> manifest -> commit. Everything that can be refused is refused before the first
byte is written; everything is written next to the output under another name, checked there, and renamed at the end, so
the output directory is either absent or complete.
"""

import json
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from cogumi.errors import UsageError
from cogumi.merge import stream
from cogumi.merge import verify as verification
from cogumi.merge.logits import LogitCheck, check_logits
from cogumi.merge.manifest import MANIFEST_NAME, build_manifest, sha256_file
from cogumi.merge.plan import INDEX_NAME, OUTPUT_DTYPES, MergePlan, build_plan
from cogumi.merge.resolve import resolve_adapter, resolve_base
from cogumi.merge.verify import MergeError

__all__ = ["LogitCheck", "MergeError", "MergeReport", "check_logits", "merge_adapter"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeReport:
    """What a finished merge did.

    bytes: of all output shards. max_delta: the largest change of an element before rounding; max_delta_ratio: the
    largest Frobenius |delta| / |W| of a tensor. largest_error: the
    largest |out - (W + delta)| of an element as a share of what one rounding allows it, measured on disk (more than 1
    raises MergeError); None when the merge was asked not to verify.
    """

    out: Path
    base: str
    tensors_merged: int
    tensors_copied: int
    bytes: int
    max_delta: float
    max_delta_ratio: float
    largest_error: float | None
    seconds: float

    def __str__(self) -> str:
        checked = "not verified" if self.largest_error is None else "every element checked on disk"
        return (
            f"{self.out}: {self.base} with {self.tensors_merged} tensors merged and {self.tensors_copied} copied "
            f"({self.bytes / 1e9:.2f} GB, {self.seconds:.1f} s)\n"
            f"{checked}; largest change of an element {self.max_delta:.3g}, of a tensor {self.max_delta_ratio:.2%}"
        )


def merge_adapter(
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    base_revision: str | None = None,
    dtype: str = "keep",
    verify: str = "elements",
    *,
    progress: bool = True,
) -> MergeReport:
    """Merge a PEFT LoRA adapter into its full-precision base and write the model to `out`.

    W + scaling * B @ A is computed in float32 and rounded once. Shards, names and (with dtype="keep") dtypes are the
    base's, and tensors without an update are its bytes. Memory stays at one layer's factors and a few megabytes of
    blocks. The formula is LoRA's (https://arxiv.org/abs/2106.09685, section 4.1), with scaling alpha / r, or
    alpha / sqrt(r) for rsLoRA (https://arxiv.org/abs/2312.03732).

    adapter: a directory written by PEFT's save_pretrained. base: a directory, or a hub id that is in the local cache;
    by default what the adapter records, at the revision it records. dtype: "keep", "bfloat16", "float16" or "float32".
    verify: "elements" re-reads every output tensor and compares it with W + delta in float64; "none" does not.
    progress: show a bar when stderr is a terminal.

    Raises UsageError, with nothing written, when the adapter or base is not one that merges exactly, they do not fit
    together, `out` exists or cannot be written, or the disk is too full; MergeError when the verification fails;
    OSError when the disk does. In every case, interruption included, `out` exists afterwards only if it is whole.
    """
    started = time.monotonic()
    if dtype != "keep" and dtype not in OUTPUT_DTYPES:
        raise UsageError(f"dtype={dtype!r} is not one of keep, {', '.join(OUTPUT_DTYPES)}")
    if verify not in ("elements", "none"):
        raise UsageError(f"verify={verify!r} is not one of elements, none")
    target = Path(out)
    check_target(target)
    found = resolve_adapter(Path(adapter))
    plan = build_plan(found, resolve_base(found, None if base is None else os.fspath(base), base_revision), dtype)
    check_space(plan, target)

    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    try:
        make_directory(partial)
        stats: dict[str, stream.DeltaStats] = {}
        checks: dict[str, verification.ElementCheck] = {}
        digests: dict[str, str] = {}
        with progress_bar("writing", plan.shard_bytes, progress) as advance:
            for shard in plan.shards:
                stats |= stream.write_shard(shard, partial, found.weights, advance)
        write_side_files(plan, partial)
        if verify == "elements":
            with progress_bar("verifying", plan.shard_bytes, progress) as advance:
                for shard in plan.shards:
                    digests[shard.name], shard_checks = verification.verify_shard(
                        shard, partial, found.weights, advance
                    )
                    checks |= shard_checks
        else:
            digests = {shard.name: sha256_file(partial / shard.name) for shard in plan.shards}
        manifest = build_manifest(plan, dtype, verify, digests, stats, checks)
        write_synced(partial / MANIFEST_NAME, (json.dumps(manifest, indent=2) + "\n").encode())
        commit(partial, target)
    except BaseException:  # KeyboardInterrupt too: a half-written model must not stay on a disk that is short of space
        if partial.exists():
            shutil.rmtree(partial)
        raise
    unchanged = [name for name, stat in stats.items() if stat.max_abs_delta == 0]
    if unchanged:
        log.warning(
            "%d of %d updates are zero (never trained?), the first is %s", len(unchanged), len(stats), unchanged[0]
        )
    return MergeReport(
        out=target,
        base=plan.base.name,
        tensors_merged=plan.updates,
        tensors_copied=plan.copies,
        bytes=plan.shard_bytes,
        max_delta=max(stat.max_abs_delta for stat in stats.values()),
        max_delta_ratio=max(stat.ratio or 0.0 for stat in stats.values()),
        largest_error=max(check.bound_used for check in checks.values()) if verify == "elements" else None,
        seconds=time.monotonic() - started,
    )


def check_target(target: Path) -> None:
    """Raise UsageError unless `target` is free and its parent directory can be written."""
    if os.path.lexists(target):
        raise UsageError(f"out {target} exists; choose another name or remove it (a merge never overwrites)")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"out {target}: {parent} is not a directory; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"out {target}: no permission to write in {parent}; choose another out")


def make_directory(path: Path) -> None:
    try:
        path.mkdir()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another out") from error


def check_space(plan: MergePlan, target: Path) -> None:
    """Raise UsageError, with the numbers, when the output does not fit on the disk."""
    parent = target.absolute().parent
    tensors = plan.updates + plan.copies
    # The manifest and the index take some 600 bytes a tensor, and each file up to one 4 KiB block more than its size.
    small = 64 * 1024 + 600 * tensors + 4096 * (len(plan.shards) + len(plan.side_files))
    needed = plan.shard_bytes + sum(path.stat().st_size for path in plan.side_files.values()) + small
    status = os.statvfs(parent)
    free = status.f_bavail * status.f_frsize
    if needed <= free:
        return
    leftovers = sorted(path.name for path in parent.glob(f"{target.name}.partial-*"))
    hint = f"; {', '.join(leftovers)} was left by a killed merge and can be removed" if leftovers else ""
    raise UsageError(
        f"out {target} needs {needed / 1e9:.3f} GB and {parent} has {free / 1e9:.3f} GB free; free "
        f"{(needed - free) / 1e9:.3f} GB or choose another disk{hint}"
    )


def write_side_files(plan: MergePlan, directory: Path) -> None:
    write_synced(directory / "config.json", plan.config)
    if plan.index is not None:
        write_synced(directory / INDEX_NAME, (json.dumps(plan.index, indent=2) + "\n").encode())
    for name, source in plan.side_files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        write_synced(directory / name, source.read_bytes())


def write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def commit(partial: Path, target: Path) -> None:
    """Make `partial` durable and rename it: the output appears whole or not at all, power cuts included."""
    for directory in [path for path in partial.rglob("*") if path.is_dir()] + [partial]:
        sync_directory(directory)
    partial.rename(target)
    sync_directory(target.absolute().parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def progress_bar(what: str, total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes just done. Silent when stderr is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = wanted and sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(count: int) -> None:
            bar.update(task, advance=count)

        yield advance
