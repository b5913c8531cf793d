"""Filesystems: what they hold, how much may be written, and whether what a run needs of each fits.

Nothing here is changed or removed, and nothing needs torch.
"""

import ctypes
import errno
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from cogumi.core.durability import NO_SPACE
from cogumi.core.formatting import format_bytes as format_bytes

log = logging.getLogger(__name__)

# Kinds of filesystem whose numbers may be a server's or a whole cluster's, and not what this user may write.
NETWORK_KINDS = re.compile(
    r"9p|afs|beegfs|ceph|cifs|coda|davfs|fuse|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|smb3|smbfs|"
    r"virtiofs|wekafs|fuse\.(?!fuse-overlayfs$|lxcfs$).*"
)


@dataclass(frozen=True)
class Space:
    """Size of a filesystem in bytes; `free` is what may still be written without being root.

    `inodes` and `inodes_free` are None where a filesystem has no fixed number of them (btrfs, most network ones).
    """

    total: int
    used: int
    free: int
    inodes: int | None
    inodes_free: int | None
    read_only: bool

    @property
    def used_share(self) -> float | None:
        """Used share of the bytes, as df prints it: blocks reserved for root count as used. None without a size."""
        return self.used / (self.used + self.free) if self.used + self.free else None

    @property
    def inodes_share(self) -> float | None:
        """Used share of the inodes: without a free one, no file can be made."""
        if self.inodes is None or self.inodes_free is None:
            return None
        return 1 - self.inodes_free / self.inodes


@dataclass(frozen=True)
class Filesystem:
    """A mounted filesystem and what uses it. `device` and `kind` are "" where the system does not tell (no /proc)."""

    used_for: tuple[str, ...]
    mount: str
    device: str
    kind: str
    network: bool
    space: Space


def space_of(path: Path) -> Space:
    """Return the sizes of the filesystem of `path`. Raises OSError if it does not respond."""
    status = os.statvfs(path)
    counted = status.f_files > 0  # otherwise it has no fixed number of inodes, and all are 0
    return Space(
        total=status.f_blocks * status.f_frsize,
        used=(status.f_blocks - status.f_bfree) * status.f_frsize,
        free=status.f_bavail * status.f_frsize,
        inodes=status.f_files if counted else None,
        inodes_free=status.f_favail if counted else None,
        read_only=bool(status.f_flag & os.ST_RDONLY),
    )


def filesystem_of(path: Path, *used_for: str) -> Filesystem:
    """Return the filesystem of `path`, which may not exist yet. Raises OSError if it does not respond."""
    place = nearest_existing(path).resolve()
    space = space_of(place)
    try:
        import psutil

        partitions = psutil.disk_partitions(all=True)
    except ImportError:  # the doctor runs where packages are missing
        partitions = []
    # Of mounts over each other the last one is seen.
    over = [row for row in reversed(partitions) if place.is_relative_to(row.mountpoint)]
    if not over:
        mount = next(filter(Path.is_mount, (place, *place.parents)))
        return Filesystem(used_for, str(mount), "", "", False, space)
    partition = max(over, key=lambda row: len(row.mountpoint))
    network = NETWORK_KINDS.fullmatch(partition.fstype) is not None
    return Filesystem(used_for, partition.mountpoint, partition.device, partition.fstype, network, space)


def filesystems(directory: Path) -> list[Filesystem]:
    """List the filesystems that a run writes to, the run's first. Those that do not respond are logged and skipped."""
    places = {"run directory": directory, "HF cache": hub_cache(), "datasets": datasets_cache()}
    places |= {"temp": Path(tempfile.gettempdir()), "shared memory": Path("/dev/shm")}
    by_device: dict[tuple[int, int], Filesystem] = {}
    for name, place in places.items():
        if name == "shared memory" and not place.is_dir():
            continue
        try:
            # With a quota for a directory two parts of one device have numbers of their own.
            device = os.stat(nearest_existing(place)).st_dev
            one = filesystem_of(place, name)
        except OSError as error:
            log.warning("%s %s: its filesystem does not answer: %s", name, place, error.strerror)
            continue
        key = (device, one.space.total)
        by_device[key] = replace(by_device[key], used_for=(*by_device[key].used_for, name)) if key in by_device else one
    return list(by_device.values())


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that is there. Raises OSError if one cannot be read."""
    absolute = path.absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def path_from_environment(variable: str, default: Path) -> Path:
    """Return the path in an environment variable, with ~ and $NAME expanded; `default` if it is not set."""
    value = os.environ.get(variable)
    return Path(os.path.expandvars(os.path.expanduser(value))) if value else default


def hf_home() -> Path:
    return path_from_environment(
        "HF_HOME", path_from_environment("XDG_CACHE_HOME", Path.home() / ".cache") / "huggingface"
    )


def hub_cache() -> Path:
    return path_from_environment("HF_HUB_CACHE", path_from_environment("HUGGINGFACE_HUB_CACHE", hf_home() / "hub"))


def datasets_cache() -> Path:
    return path_from_environment("HF_DATASETS_CACHE", hf_home() / "datasets")


def try_allocate(directory: Path, size: int) -> int:
    """Allocate `size` bytes (at least 1) in `directory`, and free them at once: 0, or the errno of the filesystem.

    Under a quota, or on a thin or network volume, free space may be reported that cannot be written. Only an allocation
    shows this. It uses a temporary file without a name, so a crash leaves nothing behind. EOPNOTSUPP and ENOSYS say that
    this filesystem can only tell by writing. Raises OSError where no file can be made in `directory` at all.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            fallocate(file.fileno(), size)
    except OSError as error:
        if error.errno not in (*NO_SPACE, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return error.errno
    return 0


def fallocate(file: int, size: int) -> None:
    """Allocate `size` bytes for an empty file. Raises OSError, with EOPNOTSUPP where the filesystem cannot allocate.

    This calls fallocate(2). Where the filesystem cannot allocate, glibc's posix_fallocate writes into every block. That
    takes minutes on a network volume, and the volume reports a full quota only when the file is closed.
    """
    if sys.platform != "linux":
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while function(file, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


# tmpfs is RAM; probing its free space would allocate it.
IN_MEMORY = "tmpfs"


@dataclass(frozen=True)
class Need:
    """Additional bytes in one place: at the fullest moment of training, and at the end of the run."""

    what: str
    path: Path
    training: int
    end: int


@dataclass(frozen=True)
class Disk:
    """One filesystem and what goes there. denied: what it said when it was asked for the bytes; "" if it has them."""

    filesystem: Filesystem
    needs: tuple[Need, ...]
    denied: str = ""

    @property
    def training(self) -> int:
        return sum(need.training for need in self.needs)

    @property
    def end(self) -> int:
        return sum(need.end for need in self.needs)

    @property
    def wanted(self) -> int:
        """Bytes beyond what is there, at the fullest moment."""
        return max(self.training, self.end)

    @property
    def short(self) -> int:
        """Bytes that are missing, by the filesystem's own numbers; 0 where it tells none."""
        space = self.filesystem.space
        return max(0, self.wanted - space.free) if space.total else 0

    @property
    def refusal(self) -> str:
        """Reason why it does not fit; "" if it fits."""
        if self.wanted and self.filesystem.space.read_only:
            return "it is read-only"
        if self.short:
            return f"{format_bytes(self.short)} are missing"
        return f"it has less than it says: {self.denied}" if self.denied else ""

    def __str__(self) -> str:
        space, parts = self.filesystem.space, []
        for need in self.needs:
            parts.append(f"{need.what} {format_bytes(need.end if self.end > self.training else need.training)}")
        when = "at the end" if self.end > self.training else "while training"
        demand = f"wants {format_bytes(self.wanted)} more {when}" if self.wanted else "wants nothing more"
        verdict = f"does not fit: {self.refusal}" if self.refusal else "fits"
        kind = f"{self.filesystem.kind}, network" if self.filesystem.network else self.filesystem.kind
        return f"{self.filesystem.mount} ({kind}) {demand} ({', '.join(parts)}); {format_bytes(space.free)} free: {verdict}"


def group_needs(needs: Iterable[Need]) -> Iterable[Disk]:
    """Group needs by filesystem, in the order in which they come up."""
    grouped: dict[tuple[int, int], tuple[Filesystem, list[Need]]] = {}
    for need in needs:
        place = nearest_existing(need.path).resolve()
        one = filesystem_of(place)
        # With a quota for a directory two parts of one device have numbers of their own.
        grouped.setdefault((os.stat(place).st_dev, one.space.total), (one, []))[1].append(need)
    for one, those in grouped.values():
        disk = Disk(one, tuple(those))
        if disk.wanted and not disk.refusal and one.kind != IN_MEMORY:
            answer = try_allocate(nearest_existing(those[0].path).resolve(), disk.wanted)
            # Not EFBIG: one file of that size may be refused where many smaller ones are not.
            if answer in (errno.ENOSPC, errno.EDQUOT):
                disk = replace(disk, denied=os.strerror(answer))
        yield disk
