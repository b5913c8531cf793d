"""Whose machine this is, and its disks as a run needs them: room to write, and what stays when the box stops.

RunPod: the container's disk is cleared when a pod stops; a volume disk (/workspace) stays until the pod is terminated; a network
volume stays (docs.runpod.io/pods/storage). Vast: stopping keeps everything; destroying or recycling keeps volumes alone
(docs.vast.ai). Read there in November 2026; not tried on either.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cogumi.core.disk_space import Filesystem, filesystem_of, hub_cache, nearest_existing, place_of, spoken
from cogumi.core.errors import Finding

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


# -------------------------------------------------------------------------------------------------------------- volumes


BASE = 20_000_000_000  # bytes: an 8B model in bfloat16, and its tokenizer
WHEELS = 8_000_000_000  # bytes: the stable lane, downloaded and unpacked
SCRATCH = 200_000_000  # bytes: what compilers and temporary files take
SHARED = 1 << 30  # bytes: Docker's default is 64 MiB, which loaders and NCCL overrun
ENDS = {"RunPod": "terminated", "Vast": "destroyed or recycled", "container": "removed", "machine": "given back"}


def findings(box: Box, work: Path) -> Iterator[Finding]:
    yield machine(box)
    yield from temporary()
    yield from directory("work directory", work, box)
    yield from caches(box, work)
    yield from shared_memory()


def machine(box: Box) -> Finding:
    if box.kind == "machine":
        return Finding("box", "ok", "no sign of RunPod, Vast or a container")
    volume = f"; RUNPOD_VOLUME_ID={box.network_volume}" if box.network_volume else ""
    return Finding("box", "ok", f"{box.kind} ({box.sign}{volume})")


def temporary() -> Iterator[Finding]:
    """Whether temporary files can be made: compilers, Arrow and tokenizers write some."""
    told = os.environ.get("TMPDIR")
    try:
        place = Path(tempfile.gettempdir())  # which writes a file to find out
    except FileNotFoundError:
        cause = "no directory for temporary files can be written to: every disk is full, or read-only"
        yield Finding(
            "temporary files",
            "fatal",
            told or "/tmp",
            cause,
            "free space (cogumi disk status), or set TMPDIR to a disk with room",
        )
        return
    disk = filesystem_of(place)
    figure = f"{place}: {spoken(disk.space.free)} free"
    if told and Path(told).absolute() != place.absolute():
        cause = f"TMPDIR={told} cannot be written to, so {place} is taken: {why_not(Path(told))}"
        yield Finding(
            "temporary files", "warning", figure, cause, f"free space in {told}, or set TMPDIR to a disk with room"
        )
    elif disk.space.free < SCRATCH:
        cause = f"less than {spoken(SCRATCH)} is left there for temporary files"
        yield Finding("temporary files", "warning", figure, cause, "free space, or set TMPDIR to a disk with room")
    else:
        yield Finding("temporary files", "ok", figure)


def why_not(path: Path) -> str:
    if not path.is_dir():
        return "it is no directory"
    space = filesystem_of(path).space
    if space.read_only:
        return "it is read-only"
    if space.free < 1_000_000 or space.inodes_free == 0:
        return "its disk is full"
    return "it takes no file"


def directory(what: str, path: Path, box: Box) -> Iterator[Finding]:
    disk = filesystem_of(path)
    space = disk.space
    figure = f"{path}: {spoken(space.free)} free of {spoken(space.total)}"
    if space.read_only or not os.access(nearest_existing(path), os.W_OK):
        cause = "runs/ and checkpoints/ are written here, and it cannot be written to"
        yield Finding(what, "warning", figure, cause, "work in a directory that you may write to")
    elif space.inodes_free == 0:
        yield Finding(
            what, "warning", figure, "all its inodes are taken: no file can be made", "remove many small files"
        )
    else:
        yield staying(what, figure, kept(path, box), box)


def staying(what: str, figure: str, found: Kept, box: Box) -> Finding:
    """The finding on what becomes of a directory that holds runs."""
    end = ENDS[box.kind]
    if found.on_stop is False:
        cause = f"{found.where}: what is written here is lost when the box stops"
        elsewhere = "/workspace" if box.kind == "RunPod" else "a directory on a disk"
        return Finding(what, "warning", figure, cause, f"work in {elsewhere}; cogumi.mirror keeps a copy elsewhere")
    if found.on_end is False:
        said = "stays when the box stops, " if found.on_stop else ""
        return Finding(what, "note", f"{figure}; {found.where}: {said}is lost when it is {end}")
    if box.kind != "machine" and found.on_end is None:
        return Finding(
            what,
            "note",
            f"{figure}; {found.where}: whether it stays when the box is {end}, the provider's console says",
        )
    stays = f"; {found.where}: stays when the box is {end}" if found.on_end else ""
    return Finding(what, "ok", f"{figure}{stays}")


def caches(box: Box, work: Path) -> Iterator[Finding]:
    """Caches that grow by tens of gigabytes, on a disk that has no room for them or does not stay."""
    roomiest = max((filesystem_of(place) for place in (work, Path("/workspace")) if place.is_dir()), key=room)
    for what, variable, path, size in (
        ("Hugging Face cache", "HF_HOME", hub_cache(), BASE),
        ("pip's cache", "PIP_CACHE_DIR", pip_cache(), WHEELS),
        ("uv's cache", "UV_CACHE_DIR", place_of("UV_CACHE_DIR", cache_home() / "uv"), WHEELS),
        ("environment", "", Path(sys.prefix), 0),
    ):
        disk = filesystem_of(path)
        figure = f"{path}: {spoken(disk.space.free)} free of {spoken(disk.space.total)}"
        elsewhere = roomiest.mount != disk.mount and room(roomiest) > 2 * room(disk)
        move = f"export {variable}={Path(roomiest.mount) / '.cache' / variable.split('_')[0].lower()}"
        if size and disk.space.free < size and what == "Hugging Face cache":
            cause = f"less than {spoken(size)} is left, which is one 8B model" + (
                f"; {roomiest.mount} has {spoken(room(roomiest))}" if elsewhere else ""
            )
            yield Finding(
                what,
                "warning",
                figure,
                cause,
                move if elsewhere else "free space (cogumi disk status), or take a box with a larger disk",
            )
        elif size and disk.space.free < size and elsewhere:
            yield Finding(what, "note", f"{figure}; {roomiest.mount} has {spoken(room(roomiest))}: {move}")
        elif variable == "HF_HOME" and kept(path, box).on_stop is False:
            cause = f"{kept(path, box).where}: every start of the box downloads the models again"
            yield Finding(what, "warning", figure, cause, move if elsewhere else "set HF_HOME to a disk that stays")
        elif not size and box.kind == "RunPod" and kept(path, box).on_stop is False:
            yield Finding(
                what, "note", f"{figure}; on the container disk: to be installed again when the pod was stopped"
            )
        elif variable == "HF_HOME":
            yield Finding(what, "ok", figure)


def room(disk: Filesystem) -> int:
    return 0 if disk.space.read_only else disk.space.free


def cache_home() -> Path:
    return place_of("XDG_CACHE_HOME", Path.home() / ".cache")


def pip_cache() -> Path:
    own = Path.home() / "Library/Caches/pip" if sys.platform == "darwin" else cache_home() / "pip"
    return place_of("PIP_CACHE_DIR", own)


def shared_memory() -> Iterator[Finding]:
    place = Path("/dev/shm")
    if not place.is_dir():
        return
    space = filesystem_of(place).space
    figure = f"/dev/shm: {spoken(space.free)} free of {spoken(space.total)}"
    if space.total < SHARED:
        cause = "loaders with workers, NCCL and vLLM pass data through it, and end with a bus error when it is full"
        yield Finding(
            "shared memory",
            "warning",
            figure,
            cause,
            "start the container with --shm-size=8g, or set dataloader_num_workers: 0",
        )
    else:
        yield Finding("shared memory", "ok", figure)
