"""What is saved appears whole or not at all: written aside, synced, described by a manifest, renamed; or the disk is full.

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
    """An empty directory in which a checkpoint is written. What an interrupted save left there is removed."""
    remove_staging(output_dir)
    staging = output_dir / STAGING_NAME
    staging.mkdir(parents=True)
    return staging


def remove_staging(output_dir: Path) -> None:
    """Remove the directory of unfinished saves, if it is there. Of a link, or a file, the name alone: a link is not followed."""
    staging = output_dir / STAGING_NAME
    if staging.is_symlink() or staging.is_file():
        log.warning("%s is not a directory: it is removed, and what a link leads to is left alone", staging)
        staging.unlink()
    elif staging.exists():
        shutil.rmtree(staging)


def commit(staged: Path, final: Path) -> CheckpointState:
    """Make a staged checkpoint durable, name it `final`, and read it back from the disk. Raises OSError, with `final` as it was.

    The order is what a power cut may interrupt anywhere: contents, manifest, names, the new name. Nothing of it stays in
    the page cache: what is read back there proves nothing, and a file without it is removed in no time.
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
    """Give a checkpoint that is in the way another name, which nothing takes for a checkpoint's: it may be the last one."""
    aside = directory.with_name(f"{ASIDE_PREFIX}{directory.name}-{secrets.token_hex(2)}")
    directory.rename(aside)
    return aside


# Libraries report it in four disguises, measured over 46 free-space points: OSError with an errno (8), SafetensorError (14),
# a bare Exception of the tokenizers library (3), and a RuntimeError of torch's writer that does not say why (21).
# As Rust and C say ENOSPC, EDQUOT and EFBIG.
FULL_DISK_MESSAGES = re.compile(
    r"no space left|os error (28|122|27)\b|disk quota exceeded|file too large", re.IGNORECASE
)
# What says nothing of the cause; then the disk is asked.
AMBIGUOUS_MESSAGES = re.compile(
    r"unexpected pos|iostream error|PytorchStreamWriter|cannot be opened|failed finding central directory"
)
PROBE_BYTES = 1 << 20


def is_disk_full(error: BaseException, directory: Path) -> bool:
    """Whether a save into `directory` failed because no more could be written there."""
    causes: list[BaseException] = []  # the error, and those that it was raised from
    each: BaseException | None = error
    while each is not None and each not in causes:
        if (isinstance(each, OSError) and each.errno in NO_SPACE) or FULL_DISK_MESSAGES.search(str(each)):
            return True
        causes.append(each)
        each = each.__cause__ or each.__context__
    return bool(AMBIGUOUS_MESSAGES.search(str(error))) and not can_write(directory)


def can_write(directory: Path) -> bool:
    """Whether a little more can be written there, into files as large as those that are there."""
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
    """In the block a directory is written from nothing; nothing of it stays where that fails, as on a full disk."""
    remove_if_there(unfinished)
    try:
        yield
    except BaseException as error:
        what = unfinished.name.lstrip(".")
        full = isinstance(error, Exception) and is_disk_full(error, unfinished.parent)
        remove_if_there(unfinished)
        if full:
            raise DiskFull(
                f"{what}: it does not fit on the disk of {unfinished.parent} ({one_line(error)}); free space there, and the "
                "same command continues from the last checkpoint",
                unfinished.parent,
            ) from error
        raise


def remove_if_there(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
