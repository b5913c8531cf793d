"""Users of the disks of a run: the caches of the libraries, the checkpoints, and what cogumi itself left over. Needs no torch.

Sizes are what files take on the disk (allocated blocks, a file with two names counted once), not the lengths that they
say they have. Nothing here is changed or removed.
"""

import logging
import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from cogumi.core.disk_space import datasets_cache, hf_home, hub_cache, path_from_environment
from cogumi.core.disk_space import filesystem_of as filesystem_of
from cogumi.core.durability import lock_directory
from cogumi.core.formatting import format_bytes as format_bytes

log = logging.getLogger(__name__)

# What cogumi leaves in a directory of checkpoints; cogumi.checkpoints and cogumi.merge give these names.
STAGING = "unfinished save"
TRASH = "unfinished removal"
ASIDE = "checkpoints set aside"
MERGE = "unfinished merge"
LEFTOVERS = {
    STAGING: re.compile(r"\.cogumi-saving"), TRASH: re.compile(r"\.cogumi-trash-.+"),
    ASIDE: re.compile(r"aside-checkpoint-\d+-[0-9a-f]+"), MERGE: re.compile(r".+\.partial-[0-9a-f]{8}"),
}  # fmt: skip
KNOWN_NAMES = LEFTOVERS | {"checkpoints": re.compile(r"checkpoint-\d+"), "wandb": re.compile("wandb")}
# A directory in which something changed so lately may be in use by a process that cannot be seen from here.
SETTLED_SECONDS = 60.0


@dataclass(frozen=True)
class Use:
    """Allocated bytes of one kind of content below `path`."""

    what: str
    path: str
    bytes: int


def list_uses(directory: Path) -> list[Use]:
    """List the users of the space: the caches, and below `directory` what is known by name. Largest first.

    Reads every directory's entries, as du does. Does not follow links, nor leave a place's filesystem.
    """
    seen: set[tuple[int, int]] = set()
    uses: list[Use] = []
    for name, place in [*caches(), ("everything else", directory)]:
        try:
            root = place.resolve()
            sizes = sizes_below(root, name, KNOWN_NAMES if place is directory else {}, seen) if root.is_dir() else {}
            uses += [Use(kind, str(root), size) for kind, size in sizes.items() if size]
        except OSError as error:  # a network volume that is gone must not hide the rest
            log.warning("%s %s cannot be read: %s", name, place, error.strerror)
    return sorted(uses, key=lambda use: -use.bytes)


def caches() -> list[tuple[str, Path]]:
    """List (name, directory) of the caches that a run's libraries fill, at the defaults of November 2026."""
    return [
        ("HF hub cache", hub_cache()),
        ("HF datasets cache", datasets_cache()),
        ("HF xet cache", path_from_environment("HF_XET_CACHE", hf_home() / "xet")),
        ("cogumi cache", Path(platformdirs.user_cache_dir("cogumi"))),  # prepared data, random models, compiled kernels
        ("wandb", path_from_environment("WANDB_DIR", Path.cwd()) / "wandb"),
    ]


def sizes_below(
    root: Path, otherwise: str, names: dict[str, re.Pattern[str]], seen: set[tuple[int, int]]
) -> dict[str, int]:
    """Allocated bytes from `root` down, by the kind of the outermost name that is known; `seen`: what was counted already."""
    sizes: dict[str, int] = {}
    device = os.lstat(root).st_dev
    waiting = [(str(root), kind_of(root.name, names) or otherwise)]
    while waiting:
        path, kind = waiting.pop()
        with suppress(FileNotFoundError, PermissionError):  # a run continues meanwhile; another user's
            status = os.lstat(path)
            if status.st_dev != device or (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            sizes[kind] = sizes.get(kind, 0) + status.st_blocks * 512
            for entry in os.scandir(path) if stat.S_ISDIR(status.st_mode) else ():
                waiting.append((entry.path, kind if kind != otherwise else kind_of(entry.name, names) or kind))
    return sizes


def kind_of(name: str, names: dict[str, re.Pattern[str]]) -> str | None:
    return next((kind for kind, pattern in names.items() if pattern.fullmatch(name)), None)


@dataclass(frozen=True)
class Leftover:
    """Something of cogumi's that is not a result. `in_use` says why it may still be wanted; "" if no process holds it."""

    what: str
    path: str
    bytes: int
    in_use: str


def list_leftovers(directory: Path) -> list[Leftover]:
    """List what saves, removals and merges left in `directory` and its checkpoints/. Links are never cogumi's."""
    leftovers = []
    for place in (directory, directory / "checkpoints"):
        for path in sorted(place.iterdir()) if place.is_dir() else []:
            kind = kind_of(path.name, LEFTOVERS)
            if kind is not None and not path.is_symlink() and path.is_dir():
                try:
                    leftovers.append(Leftover(kind, str(path), disk_bytes(path), describe_use(path)))
                except FileNotFoundError:
                    continue  # removed meanwhile, by whoever it was of
    return leftovers


def disk_bytes(path: Path) -> int:
    """Allocated bytes of a file, or of a directory and all in it."""
    return sum(sizes_below(path, "", {}, set()).values())


def describe_use(path: Path) -> str:
    """Say why something may be in use: it is locked, or changed just now; else ""."""
    if is_locked(path.parent) or (path.is_dir() and is_locked(path)):
        return "a training or a merge has it locked"
    age = time.time() - last_change(path)
    return f"changed {max(0.0, age):.0f} s ago" if age < SETTLED_SECONDS else ""


def last_change(path: Path) -> float:
    """When a file, or something in a directory, changed last, a new name included. Seconds since 1970."""
    try:
        return max(os.lstat(entry).st_ctime for entry in (path, *path.rglob("*")))
    except FileNotFoundError:
        return time.time()  # just removed, by its user


def is_locked(directory: Path) -> bool:
    with lock_directory(directory) as free:
        return free is False
