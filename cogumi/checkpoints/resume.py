"""Where a run resumes: the newest checkpoint that holds, and a word about each newer one that does not."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from cogumi.checkpoints.manifest import CHECKPOINT_NAME
from cogumi.checkpoints.verify import Finding, inspect
from cogumi.errors import UsageError

log = logging.getLogger(__name__)


def last_good_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint of `output_dir` that a run can resume from, None where there is none (or no directory yet).

    Newer ones that are rejected are logged, each with its reason; so is a checkpoint without a manifest that is accepted
    after a look at its structure alone. Raises UsageError when `output_dir` cannot be listed.
    """
    rejected = 0
    for finding in findings(output_dir):
        if finding.state == "rejected":
            log.warning("%s is not resumed from: %s", finding.path, finding.reason)
            rejected += 1
            continue
        if finding.state == "unverified":
            log.warning("%s is accepted unverified: %s", finding.path, finding.reason)
        return finding.path
    if rejected:
        log.warning("%s: none of %d checkpoints can be resumed from", output_dir, rejected)
    return None


def findings(output_dir: str | os.PathLike[str]) -> Iterator[Finding]:
    """Verify each checkpoint of `output_dir`, newest first, when it is asked for: that reads the whole checkpoint.

    Only directories named checkpoint-STEP count, and no links. One that is removed meanwhile, as by a training beside, is
    left out. Nothing in a directory that does not exist. Raises UsageError when it cannot be listed.
    """
    for directory in checkpoints_in(Path(output_dir)):
        finding = inspect_beside(directory)
        if finding is not None:
            yield finding


def inspect_beside(directory: Path) -> Finding | None:
    """Verify a checkpoint while others may remove it, or put another one in its place; None where it is gone."""
    while (before := inode_of(directory)) is not None:
        finding = inspect(directory)
        if finding.state != "rejected" or inode_of(directory) == before:
            return finding
    return None


def inode_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def checkpoints_in(output_dir: Path) -> list[Path]:
    """The directories named checkpoint-STEP, the highest step first."""
    try:
        paths = list(output_dir.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"{output_dir} cannot be listed ({error.strerror})", fix="name the directory of the checkpoints"
        ) from error
    steps = {
        path: int(name[1])
        for path in paths
        if (name := CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    }
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)
