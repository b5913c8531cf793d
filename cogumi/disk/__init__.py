"""The disks of a run: what they hold, who uses them, and a monitor that says when they fill up. Needs no torch.

What takes packages beyond Python's own is imported when it is first used: the doctor looks at disks where those are missing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from cogumi.core.disk_space import (
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

if TYPE_CHECKING:
    from cogumi.disk.monitor import DiskMonitor, Sample
    from cogumi.disk.usage_by_owner import Leftover, Use, leftovers, uses

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
_HOME = dict.fromkeys(("DiskMonitor", "Sample"), "cogumi.disk.monitor")
_HOME |= dict.fromkeys(("Leftover", "Use", "leftovers", "uses"), "cogumi.disk.usage_by_owner")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cogumi.disk' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
