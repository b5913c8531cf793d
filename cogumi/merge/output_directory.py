"""The output directory appears whole or not at all: a partial beside it, locked, allocated in full, renamed at the end."""

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cogumi.core.disk_space import space_of
from cogumi.core.durability import NO_SPACE, lock_directory, sync_path
from cogumi.core.errors import DiskFull, UsageError
from cogumi.core.formatting import format_bytes
from cogumi.merge.plan import MergePlan

log = logging.getLogger(__name__)


def check_target(target: Path) -> None:
    """Raise UsageError unless `target` is free and its parent directory can be written."""
    if os.path.lexists(target):
        raise UsageError(f"out {target} exists", fix="choose another name or remove it (nothing is overwritten)")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"out {target}: {parent} is not a directory", fix="create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"out {target}: no permission to write in {parent}", fix="choose another out")


def remove_stale(target: Path) -> None:
    """Remove what killed merges into `target` left: a running merge holds a lock on its partial directory, which dies
    with the process. Raises UsageError when another merge into it is running."""
    name = re.compile(re.escape(f"{target.name}.partial-") + "[0-9a-f]{8}")
    for partial in sorted(target.absolute().parent.iterdir()):
        if not name.fullmatch(partial.name) or not partial.is_dir() or partial.is_symlink():
            continue
        try:
            with lock_directory(partial) as free:
                if free is None:
                    log.warning("%s is a killed merge's, or a running one's; remove it if none runs", partial)
                elif free:
                    shutil.rmtree(partial)
                    log.info("removed %s, which a killed merge had left", partial)
                else:
                    raise already_running(target, partial)
        except FileNotFoundError:
            continue  # its own merge, or another one that cleans up, was faster
        except PermissionError as error:
            what = f"out {target}: {partial} was left by a merge and cannot be removed ({error.strerror})"
            raise UsageError(what, fix="remove it or choose another out") from error


def already_running(target: Path, partial: Path) -> UsageError:
    return UsageError(f"out {target}: another merge is writing {partial.name}", fix="wait for it or choose another out")


@contextmanager
def partial_directory(plan: MergePlan, target: Path) -> Iterator[Path]:
    """A new, locked directory beside `target`, with every shard in its full size. The block renames it to `target`.
    When the block fails, also by KeyboardInterrupt, the directory is removed. A full disk raises DiskFull, which says
    how many bytes the output needs."""
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    needed = small_bytes(plan) + plan.shard_bytes
    try:
        partial.mkdir()
    except OSError as error:
        if error.errno in NO_SPACE:
            raise disk_full(target, needed, error) from error
        raise UsageError(f"cannot write {partial}: {error.strerror}", fix="choose another out") from error
    with lock_directory(partial) as ours:
        if ours is False:  # a merge that has begun at the same moment took it for a killed one's, and removes it
            raise already_running(target, partial)
        try:
            allocate(plan, partial)
            yield partial
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise disk_full(target, needed, error) from error
            raise


def allocate(plan: MergePlan, partial: Path) -> None:
    """Create every shard in its full size, with its blocks allocated on the disk, before the merge computes anything.
    `df` shows more than can be written (quotas, reserved blocks, thin volumes). Raises OSError where an allocation
    fails. A filesystem that cannot allocate gets files of full size without blocks."""
    reserve = partial / ".reserve"
    for path, size in [(reserve, small_bytes(plan)), *((partial / shard.name, shard.bytes) for shard in plan.shards)]:
        with path.open("xb") as file:
            try:
                if size:
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                file.truncate(size)
    reserve.unlink()


def small_bytes(plan: MergePlan) -> int:
    """The manifest and the index take some 600 bytes a tensor, and each small file up to a 4 KiB block more than its size."""
    return 64 * 1024 + 600 * len(plan.tensors) + sum(path.stat().st_size + 4096 for path in plan.side_files.values())


def disk_full(target: Path, needed: int, error: OSError) -> DiskFull:
    """Why `needed` bytes could not be had, in one line with the numbers. What a merge had taken is free again."""
    place = target.absolute().parent
    free = space_of(place).free
    remedy = f"free {format_bytes(needed - free)}"
    if (
        error.errno != errno.ENOSPC or free >= needed
    ):  # a quota, a limit on the size of one file, blocks reserved for root
        remedy = "raise that limit"
    has = f"{place} has {format_bytes(free)} free ({error.strerror})"
    text = f"out {target} needs {format_bytes(needed)} and {has}; {remedy} or choose another disk; nothing was written"
    return DiskFull(text, place, needed)


def commit_output(partial: Path, target: Path) -> None:
    """Make `partial` durable and rename it, so that `target` appears whole or not at all, also after a power cut.
    Raises UsageError when `target` has appeared meanwhile. The rename replaces an empty directory that appears after
    the check, and nothing is lost."""
    for directory in [path for path in partial.rglob("*") if path.is_dir()] + [partial]:
        sync_path(directory)
    check_target(target)
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise UsageError(f"out {target} has appeared during the merge", fix="choose another out") from error
    sync_path(target.absolute().parent)
