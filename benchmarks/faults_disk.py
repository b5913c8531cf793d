"""Faults of disks and files: a tmpfs that is full, out of inodes or read-only; checkpoint files deleted, cut or swapped."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

# Takes the newest checkpoint and the one before it.
Damage = Callable[[Path, Path], None]
ENDS = {"first": 0.0, "last": 1.0}


@contextmanager
def mounted(point: Path, options: str) -> Iterator[Path | str]:
    """A tmpfs, or why there is none: mounting takes root, and Linux."""
    if shutil.which("mount") is None:
        yield "no mount command"
        return
    point.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], capture_output=True, text=True)
    if done.returncode != 0:
        yield f"mounting a tmpfs is not permitted: {done.stderr.strip()}"
        return
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def remount(point: Path, mode: str) -> bool:
    """Turn a tmpfs "ro" or "rw"; False where the kernel refuses, as it does "ro" while a file is open for writing."""
    return subprocess.run(["mount", "-o", f"remount,{mode}", str(point)], capture_output=True).returncode == 0


def take_inodes(disk: Path, leave: int) -> Path:
    """Create empty files until `leave` inodes are free; returns the directory that holds them."""
    takers = disk / "takers"
    takers.mkdir()
    for number in range(os.statvfs(disk).f_favail - leave):
        (takers / str(number)).touch()
    return takers


def allocated(directory: Path) -> int:
    """Bytes of the blocks that a directory's files take."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))


def fill(filler: Path, leave: int) -> None:
    """Take space until `leave` bytes are free."""
    size = shutil.disk_usage(filler.parent).free - leave
    with filler.open("xb") as file:
        if size > 0:
            os.posix_fallocate(file.fileno(), 0, size)


def damages(newest: Path, decisive: tuple[str, ...]) -> list[tuple[str, Damage]]:
    """Every (label, damage) for a checkpoint; all kinds for the files that decide how training goes on, else three."""
    older = newest.with_name("checkpoint-" + str(int(newest.name.partition("-")[2]) - 2))
    found: list[tuple[str, Damage]] = []
    for path in sorted(newest.iterdir()):
        name = path.name
        kinds: dict[str, Damage] = {
            "deleted": partial(delete, (name,)),
            "cut to a half": partial(cut, name, 0.5, 0),
            "with a byte flipped in the middle": partial(flip, name, 0.5),
        }
        if name in decisive or "manifest" in name:
            kinds |= {"emptied": partial(cut, name, 0.0, 0), "cut by a byte": partial(cut, name, 1.0, 1)}
            kinds |= {f"with its {place} byte flipped": partial(flip, name, at) for place, at in ENDS.items()}
            if not filecmp.cmp(path, older / name, shallow=False):
                kinds["of the step before"] = partial(swap, name)
        found += [(f"{name} {kind}", damage) for kind, damage in kinds.items()]
    found += [("optimizer.pt and scheduler.pt deleted", partial(delete, ("optimizer.pt", "scheduler.pt")))]
    found += [("all but the weights deleted", partial(delete, ("optimizer.pt", "scheduler.pt", "rng_state.pth")))]
    return found


def delete(names: tuple[str, ...], newest: Path, older: Path) -> None:
    for name in names:
        (newest / name).unlink()


def cut(name: str, share: float, less: int, newest: Path, older: Path) -> None:
    path = newest / name
    os.truncate(path, int(path.stat().st_size * share) - less)


def flip(name: str, share: float, newest: Path, older: Path) -> None:
    """Change some bits of the byte at that share of the file."""
    with (newest / name).open("r+b") as file:
        at = int((os.fstat(file.fileno()).st_size - 1) * share)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x55]))


def swap(name: str, newest: Path, older: Path) -> None:
    shutil.copyfile(older / name, newest / name)
