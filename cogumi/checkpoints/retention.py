"""Which checkpoints there are, the newest that a run can resume from, and which of them stay.

Only a checkpoint that cogumi committed is removed, after one that stays was read back. It is renamed, then deleted.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cogumi.checkpoints.manifest import CHECKPOINT_NAME, MANIFEST_NAME
from cogumi.checkpoints.verify import CheckpointState, inspect
from cogumi.core.disk_space import space_of
from cogumi.core.errors import UsageError

log = logging.getLogger(__name__)

TRASH_PREFIX = ".cogumi-trash-"
# A file of this name in a checkpoint keeps it for good.
PIN_NAME = "KEEP"


def last_good_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint of `output_dir` that a run can resume from, None where there is none (or no directory yet).

    Newer ones that are rejected are logged, each with its reason. A checkpoint without a manifest is logged as unverified.
    Raises UsageError when `output_dir` cannot be listed.
    """
    rejected = 0
    for finding in inspect_all(output_dir):
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


def inspect_all(output_dir: str | os.PathLike[str]) -> Iterator[CheckpointState]:
    """Verify each checkpoint of `output_dir`, newest first, when it is asked for: that reads the whole checkpoint."""
    for directory in list_checkpoints(Path(output_dir)):
        finding = inspect(directory)
        if finding.state != "rejected" or directory.exists():  # others may remove it meanwhile
            yield finding


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The directories named checkpoint-STEP, the highest step first."""
    try:
        paths = list(output_dir.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        fix = "name the directory of the checkpoints"
        raise UsageError(f"{output_dir} cannot be listed ({error.strerror})", fix=fix) from error
    steps = {
        path: int(name[1])
        for path in paths
        if (name := CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    }
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


def plan_pruning(
    output_dir: Path,
    keep: int,
    best: Path | None = None,
    pinned: frozenset[Path] = frozenset(),
    look: Callable[[Path], CheckpointState] = inspect,
) -> tuple[list[Path], list[str]]:
    """(what goes, oldest first; what stays, with the reason). The newest `keep` that verify stay, and all newer ones.

    A damaged checkpoint does not count. Where fewer than `keep` verify, nothing goes. look: how one is verified; it is
    called for the newest until `keep` are good. Raises ValueError for keep below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove every checkpoint")
    kept, damaged, foreign, going, good = [], [], [], [], 0
    for path in list_checkpoints(output_dir):  # the newest first
        if not (path / MANIFEST_NAME).is_file():
            foreign.append(f"{path.name}: not written by cogumi")
            continue
        counts = good < keep
        finding = look(path) if counts else None
        good += finding is not None and finding.state == "verified"
        if finding is not None and finding.state != "verified":
            damaged.append(f"{path.name}: is {finding.state} and does not count: {finding.reason}")
        elif best is not None and path.name == best.name:
            kept.append(f"{path.name}: the best")
        elif path in pinned or (path / PIN_NAME).exists():
            kept.append(f"{path.name}: pinned")
        elif counts:
            kept.append(f"{path.name}: one of the newest")
        else:
            going.append(path)
    return going[::-1], [*damaged, *kept[::-1], *foreign[::-1]]


def remove(path: Path) -> int:
    """Remove a checkpoint and return the bytes freed. It is renamed first, so half of one is never taken for a checkpoint."""
    free = space_of(path.parent).free
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(2)}")
    path.rename(trash)
    shutil.rmtree(trash)
    return space_of(path.parent).free - free


def remove_trash(output_dir: Path) -> list[Path]:
    """Remove what interrupted removals left behind."""
    found = [path for path in output_dir.glob(f"{TRASH_PREFIX}*") if path.is_dir() and not path.is_symlink()]
    for path in found:
        shutil.rmtree(path)
    return found
