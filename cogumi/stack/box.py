"""Whose machine this is, as far as it tells, and what of its disks stays when it is stopped or given back.

RunPod: the container's disk is cleared when a pod stops; a volume disk (/workspace) stays until the pod is terminated; a network
volume stays (docs.runpod.io/pods/storage). Vast: stopping keeps everything; destroying or recycling keeps volumes alone
(docs.vast.ai). Read there in November 2026; not tried on either.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cogumi.disk.usage import Filesystem, filesystem_of

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
OWN_DISK = ("overlay", "fuse.fuse-overlayfs", "aufs")  # of a container


@dataclass(frozen=True)
class Box:
    """kind: "RunPod", "Vast", "container" or "machine". sign: by what it is known. network_volume: its id, where one is told."""

    kind: str
    sign: str = ""
    network_volume: str = ""


@dataclass(frozen=True)
class Kept:
    """Whether files at a path stay when the box is stopped, and when it is given back. None: cannot be told from here."""

    on_stop: bool | None
    on_end: bool | None
    where: str


def box_of(environment: Mapping[str, str], system: Path = Path("/")) -> Box:
    if pod := environment.get("RUNPOD_POD_ID"):
        return Box("RunPod", f"RUNPOD_POD_ID={pod}", environment.get("RUNPOD_VOLUME_ID", ""))
    if label := environment.get("VAST_CONTAINERLABEL"):
        return Box("Vast", f"VAST_CONTAINERLABEL={label}")
    # Vast's own images have these two; a login over SSH may not have the variable.
    if (system / "etc/vast_boot.d").is_dir():
        return Box("Vast", "/etc/vast_boot.d")
    for sign in (".dockerenv", "run/.containerenv"):
        if (system / sign).exists():
            return Box("container", f"/{sign}")
    return Box("machine")


def environment_of_the_box(first_process: Path = Path("/proc/1/environ")) -> dict[str, str]:
    """This process's variables, over those that the container was started with: a login over SSH does not inherit them."""
    try:
        entries = first_process.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        entries = []  # no /proc, or another user's
    told = dict(entry.split("=", 1) for entry in entries if entry.startswith(("RUNPOD_", "VAST_")) and "=" in entry)
    return {**told, **os.environ}


def kept(path: Path, box: Box) -> Kept:
    """What becomes of `path`. Raises OSError where its filesystem does not answer."""
    disk = filesystem_of(path)
    if disk.kind in IN_MEMORY:
        return Kept(False, False, f"{disk.mount} is in memory")
    if box.kind == "RunPod":
        return kept_by_runpod(disk, box)
    if is_own_disk(disk):
        if box.kind == "Vast":
            return Kept(True, False, "the container's own disk")
        if box.kind == "container":
            return Kept(None, False, "the container's own disk")
        return Kept(True, None, f"the disk of this machine ({disk.mount})")
    if box.kind == "Vast":
        return Kept(True, True, f"a volume ({disk.mount})")
    return Kept(True, None, f"{'a network disk' if disk.network else 'a disk'} mounted at {disk.mount}")


def kept_by_runpod(disk: Filesystem, box: Box) -> Kept:
    if is_own_disk(disk):
        return Kept(False, False, "the container disk")
    if disk.network:
        return Kept(True, True, f"a network volume ({disk.mount})")
    if box.network_volume:
        return Kept(True, None, f"a volume ({disk.mount}); RUNPOD_VOLUME_ID={box.network_volume}")
    return Kept(True, False, f"the pod's volume disk ({disk.mount})")


def is_own_disk(disk: Filesystem) -> bool:
    return disk.mount == "/" or disk.kind in OWN_DISK
