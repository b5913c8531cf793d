"""A checkpoint appears whole or not at all: written aside, synced, described by a manifest, renamed.

Trainer writes into `checkpoint-N` itself, file by file; a kill leaves a directory that its resume takes for the newest.
"""

import logging
import os
import secrets
import shutil
from pathlib import Path

from cogumi.checkpoints.manifest import CHECKPOINT_NAME, files_of, write_manifest
from cogumi.checkpoints.verify import Finding, inspect
from cogumi.core.durability import drop_from_memory, sync_path

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


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name."""
    found = CHECKPOINT_NAME.fullmatch(directory.name)
    assert found is not None, directory
    return int(found.group(1))


def commit(staged: Path, final: Path) -> Finding:
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
    forget(final)
    finding = inspect(final)
    forget(final)
    return finding


def forget(directory: Path) -> None:
    for path in files_of(directory).values():
        drop_from_memory(path)


def set_aside(directory: Path) -> Path:
    """Give a checkpoint that is in the way another name, which nothing takes for a checkpoint's: it may be somebody's last."""
    aside = directory.with_name(f"{ASIDE_PREFIX}{directory.name}-{secrets.token_hex(2)}")
    directory.rename(aside)
    return aside


def blocks_of(directory: Path) -> int:
    """What the files below a directory take on the disk, in bytes."""
    found = (os.lstat(path) for path in [directory, *directory.rglob("*")])
    return sum(status.st_blocks * 512 for status in found)
