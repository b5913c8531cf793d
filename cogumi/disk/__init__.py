"""The disks of a run: what they hold, who uses them, and a monitor that says when they fill up. Needs no torch."""

from cogumi.disk.monitor import DiskMonitor, Sample
from cogumi.disk.owners import Leftover, Use, leftovers, uses
from cogumi.disk.usage import (
    Allocation,
    DeletedFile,
    Filesystem,
    Space,
    allocatable,
    deleted_but_open,
    filesystem_of,
    filesystems,
    space_of,
    spoken,
)

__all__ = [
    "Allocation",
    "DeletedFile",
    "DiskMonitor",
    "Filesystem",
    "Leftover",
    "Sample",
    "Space",
    "Use",
    "allocatable",
    "deleted_but_open",
    "filesystem_of",
    "filesystems",
    "leftovers",
    "space_of",
    "spoken",
    "uses",
]
