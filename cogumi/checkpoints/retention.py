"""Which checkpoints stay: the newest that verify, the best, the one resumed from, and those that are pinned.

Only what a commit of ours wrote is ever removed, after a newer one was read back, by a rename first and then file by file.
"""

import logging
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from cogumi.checkpoints.commit import blocks_of
from cogumi.checkpoints.manifest import MANIFEST_NAME
from cogumi.checkpoints.resume import checkpoints_in
from cogumi.checkpoints.verify import Finding, inspect
from cogumi.disk.usage import space_of

log = logging.getLogger(__name__)

TRASH_PREFIX = ".cogumi-trash-"
# A file of this name in a checkpoint keeps it for good.
PIN_NAME = "KEEP"
# Below this, what others write meanwhile hides what came back.
NOTICED_BYTES = 1 << 28


def plan_pruning(
    output_dir: Path,
    keep: int,
    best: Path | None = None,
    pinned: frozenset[Path] = frozenset(),
    look: Callable[[Path], Finding] = inspect,
) -> tuple[list[Path], list[str]]:
    """(what goes, oldest first; what stays, with the reason). The newest `keep` that verify stay, and all newer ones.

    A damaged checkpoint does not count. Where fewer than `keep` verify, nothing goes. look: how one is verified; it is
    called for the newest until `keep` are good. Raises ValueError for keep below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove every checkpoint")
    kept, damaged, foreign, going, good = [], [], [], [], 0
    for path in checkpoints_in(output_dir):  # the newest first
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
    """Remove a checkpoint, and return the bytes that came back. What is half removed has a name nobody takes for one.

    Raises OSError naming what could not be removed: Trainer's rotation ignores that, and the disk fills up.
    """
    taken, free = blocks_of(path), space_of(path.parent).free
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(2)}")
    path.rename(trash)
    shutil.rmtree(trash)
    back = space_of(path.parent).free - free
    if taken > NOTICED_BYTES and back < taken // 2:
        log.warning(
            "%s was removed (%.2f GB) and only %.2f GB came back: something holds its files open, or something else is writing",
            path.name,
            taken / 1e9,
            max(0, back) / 1e9,
        )
    return back


def clean(output_dir: Path) -> list[Path]:
    """Remove what interrupted removals left behind."""
    found = [path for path in output_dir.glob(f"{TRASH_PREFIX}*") if path.is_dir() and not path.is_symlink()]
    for path in found:
        shutil.rmtree(path)
    return found
