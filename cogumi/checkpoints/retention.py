"""Which checkpoints stay: the newest that verify, the best, the one resumed from, and those somebody wants kept.

Only what a commit of ours wrote is ever removed, after a newer one was read back, by a rename first and then file by file.
"""

import logging
import secrets
import shutil
from pathlib import Path

from cogumi.checkpoints.commit import blocks_of
from cogumi.checkpoints.manifest import MANIFEST_NAME
from cogumi.checkpoints.resume import checkpoints_in
from cogumi.disk import space_of

log = logging.getLogger(__name__)

TRASH_PREFIX = ".cogumi-trash-"
# A file of this name in a checkpoint keeps it for good.
PIN_NAME = "KEEP"
# Below this, what others write meanwhile hides what came back.
NOTICED_BYTES = 1 << 28


def plan_pruning(
    output_dir: Path, keep: int, best: Path | None = None, pinned: frozenset[Path] = frozenset()
) -> tuple[list[Path], list[str]]:
    """(what goes, oldest first; what stays, with the reason). The newest `keep` stay.

    Looks at names, not at contents: whoever removes has verified one that stays. Raises ValueError for keep below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove every checkpoint")
    ours, said = [], []
    for path in reversed(checkpoints_in(output_dir)):
        if (path / MANIFEST_NAME).is_file():
            ours.append(path)
        else:
            said.append(f"{path.name}: not written by cogumi")
    kept = dict.fromkeys(ours[-keep:], "one of the newest")
    kept |= {path: "pinned" for path in ours if path in pinned or (path / PIN_NAME).exists()}
    if best is not None:
        kept |= {path: "the best" for path in ours if path.name == best.name}
    going = [path for path in ours if path not in kept]
    return going, [*(f"{path.name}: {kept[path]}" for path in ours if path in kept), *said]


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
