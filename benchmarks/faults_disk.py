"""Faults of disks: a tmpfs that is full, out of inodes or read-only; and a flipped byte."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def fill(filler: Path, leave: int) -> None:
    """Take space until `leave` bytes are free."""
    size = shutil.disk_usage(filler.parent).free - leave
    with filler.open("xb") as file:
        if size > 0:
            os.posix_fallocate(file.fileno(), 0, size)


def flip(path: Path, share: float) -> None:
    """Change some bits of the byte at that share of the file."""
    with path.open("r+b") as file:
        at = int((os.fstat(file.fileno()).st_size - 1) * share)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x55]))
