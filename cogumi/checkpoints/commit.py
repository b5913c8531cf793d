"""Write checkpoints whole or not at all: staged, synced, described by a manifest, renamed; and detect a full disk.

Trainer writes into `checkpoint-N` itself, file by file; a kill leaves a directory that its resume takes for the newest.
"""

import logging
import re
import resource
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cogumi.checkpoints.manifest import list_manifest_files, step_of, write_manifest
from cogumi.checkpoints.verify import CheckpointState, inspect
from cogumi.core.disk_space import space_of, try_allocate
from cogumi.core.durability import NO_SPACE, drop_from_memory, sync_path
from cogumi.core.errors import DiskFull
from cogumi.core.formatting import one_line

log = logging.getLogger(__name__)

# Not `checkpoint-...`: Trainer's rotation and its search for the last one look at every name that begins so.
STAGING_NAME = ".cogumi-saving"
ASIDE_PREFIX = "aside-"


def open_staging(output_dir: Path) -> Path:
    """Make an empty directory for a checkpoint, without what an interrupted save left there."""
    remove_staging(output_dir)
    staging = output_dir / STAGING_NAME
    staging.mkdir(parents=True)
    return staging


def remove_staging(output_dir: Path) -> None:
    """Remove the directory of unfinished saves, if there is one. A link is removed, and not followed."""
    staging = output_dir / STAGING_NAME
    if staging.is_symlink() or staging.is_file():
        log.warning("%s is not a directory: it is removed, and what a link leads to is left alone", staging)
        staging.unlink()
    elif staging.exists():
        shutil.rmtree(staging)


def commit(staged: Path, final: Path) -> CheckpointState:
    """Make a staged checkpoint durable, rename it to `final`, and verify it. Raises OSError, with `final` as it was.

    A power cut may come anywhere in this order: contents, manifest, names, the new name. The files are dropped from the
    page cache, which would prove nothing about the disk and slows down removals.
    """
    for path in sorted(staged.rglob("*"), reverse=True):  # files before the directories they are in
        sync_path(path)
    write_manifest(staged, step_of(final))
    sync_path(staged)
    staged.rename(final)
    staged.parent.rmdir()
    sync_path(final.parent)
    for path in list_manifest_files(final).values():
        drop_from_memory(path)
    finding = inspect(final)
    for path in list_manifest_files(final).values():
        drop_from_memory(path)
    return finding


def set_aside(directory: Path) -> Path:
    """Rename a checkpoint that is in the way, so that nothing takes it for a checkpoint: it may be the last one."""
    aside = directory.with_name(f"{ASIDE_PREFIX}{directory.name}-{secrets.token_hex(2)}")
    directory.rename(aside)
    return aside


# Libraries report a full disk as OSError, SafetensorError, a bare Exception of tokenizers, or a RuntimeError of torch's
# writer without the cause. These are the texts of Rust and C for ENOSPC, EDQUOT and EFBIG.
FULL_DISK_MESSAGES = re.compile(
    r"no space left|os error (28|122|27)\b|disk quota exceeded|file too large", re.IGNORECASE
)
# Texts without the cause: the disk is probed.
AMBIGUOUS_MESSAGES = re.compile(
    r"unexpected pos|iostream error|PytorchStreamWriter|cannot be opened|failed finding central directory"
)
PROBE_BYTES = 1 << 20


def is_disk_full(error: BaseException, directory: Path) -> bool:
    """Tell whether a save into `directory` failed because no more could be written there."""
    chain: list[BaseException] = []  # the error, and those that it was raised from
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        if (isinstance(cause, OSError) and cause.errno in NO_SPACE) or FULL_DISK_MESSAGES.search(str(cause)):
            return True
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return bool(AMBIGUOUS_MESSAGES.search(str(error))) and not can_write(directory)


def can_write(directory: Path) -> bool:
    """Probe whether a little more can be written there, into files as large as the largest one."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max((path.stat().st_size for path in directory.rglob("*") if path.is_file()), default=0)
    if limit != resource.RLIM_INFINITY and largest + PROBE_BYTES > limit:
        return False
    denied = try_allocate(directory, PROBE_BYTES)
    if denied == 0 or denied in NO_SPACE:
        return denied == 0
    return space_of(directory).free >= PROBE_BYTES  # it can only tell by writing


@contextmanager
def write_aside(unfinished: Path) -> Iterator[None]:
    """Have the block write a new directory; nothing of it stays if that fails. A full disk raises DiskFull."""
    remove_if_there(unfinished)
    try:
        yield
    except BaseException as error:
        name = unfinished.name.lstrip(".")
        full = isinstance(error, Exception) and is_disk_full(error, unfinished.parent)
        remove_if_there(unfinished)
        if full:
            raise DiskFull(
                f"{name}: it does not fit on the disk of {unfinished.parent} ({one_line(error)}); free space there, and the "
                "same command continues from the last checkpoint",
                unfinished.parent,
            ) from error
        raise


def remove_if_there(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
