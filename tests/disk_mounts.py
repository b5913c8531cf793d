"""Real filesystems for the tests of the disk: mounted for one test, filled to a share."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Mount = Callable[..., Path]


@contextmanager
def mounting(tmp_path: Path) -> Iterator[Mount]:
    """Mounts filesystems below tmp_path. Skips where that takes rights, or parts of the kernel, that are not to be had."""
    mounted: list[Path] = []

    def mount_one(kind: str = "tmpfs", options: str = "", source: str = "none", name: str = "") -> Path:
        options = options or ("size=8m" if kind == "tmpfs" else "")
        point = tmp_path / (name or f"disk{len(mounted)}")
        point.mkdir()
        words = ["mount", "-t", kind, *(["-o", options] if options else []), source, str(point)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"mounting {kind} is not possible here: {done.stderr.strip()}")
        mounted.append(point)
        return point

    try:
        yield mount_one
    finally:
        for point in mounted:
            if os.path.ismount(point):
                subprocess.run(["umount", str(point)], check=True)


def ext_image(path: Path, kind: str, reserved_percent: int, size: int = 16 << 20) -> Path:
    """An image of `size` bytes with a filesystem in it, of which some is kept for root."""
    tool = shutil.which(f"mkfs.{kind}") or shutil.which(f"mkfs.{kind}", path="/usr/sbin:/sbin")
    if tool is None:
        pytest.skip(f"no mkfs.{kind}")
    with path.open("xb") as file:
        file.truncate(size)
    subprocess.run([tool, "-q", "-m", str(reserved_percent), str(path)], check=True)
    return path


def fill(disk: Path, share: float, name: str = "filler") -> Path:
    """Have a file of this name take so much that `share` of the disk is taken, to a block of 4 KiB."""
    status = os.statvfs(disk)
    path = disk / name
    have = path.stat().st_size if path.exists() else 0
    used = (status.f_blocks - status.f_bfree) * status.f_frsize - have
    size = round((min(share, 1.0) * status.f_blocks * status.f_frsize - used) / 4096) * 4096
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return path
