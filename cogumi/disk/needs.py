"""What goes to which filesystem, and whether it has the space: bytes, inodes, and what it says when it is asked for them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cogumi.disk.usage import Allocation, Filesystem, allocatable, filesystem_of, nearest_existing, spoken

# Its free space is that of memory, which asking would take.
IN_MEMORY = "tmpfs"


@dataclass(frozen=True)
class Need:
    """What goes to one place beyond what is there: bytes at the fullest moment of training, and at the end of the run.

    entries: files and directories.
    """

    what: str
    path: Path
    training: int
    end: int
    entries: int


@dataclass(frozen=True)
class Disk:
    """One filesystem and what goes there. allocation: what it said when asked for the bytes; None where it was not."""

    filesystem: Filesystem
    needs: tuple[Need, ...]
    allocation: Allocation | None

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
    def entries(self) -> int:
        return sum(need.entries for need in self.needs if need.training or need.end)

    @property
    def short(self) -> int:
        """Bytes that are missing, by the filesystem's own numbers; 0 where it tells none."""
        space = self.filesystem.space
        return max(0, self.wanted - space.free) if space.total else 0

    @property
    def lacks_inodes(self) -> bool:
        free = self.filesystem.space.inodes_free
        return free is not None and self.entries > free

    @property
    def refusal(self) -> str:
        """Why it does not fit, in one clause; "" where it fits."""
        space = self.filesystem.space
        if not self.wanted:
            return ""
        if space.read_only:
            return "it is read-only"
        if self.short:
            return f"{spoken(self.short)} are missing"
        if self.lacks_inodes:
            return f"it has inodes for {space.inodes_free:,} more files, and {self.entries:,} are wanted"
        if self.allocation is not None and self.allocation.fits is False:
            return f"the numbers are not true: {self.allocation.message}"
        return ""

    @property
    def parts(self) -> str:
        """What it is wanted for, at that moment."""
        sizes = {need.what: need.end if self.end > self.training else need.training for need in self.needs}
        return ", ".join(f"{what} {spoken(size)}" for what, size in sizes.items())

    @property
    def fits(self) -> bool:
        return not self.refusal

    def __str__(self) -> str:
        space = self.filesystem.space
        when = "at the end" if self.end > self.training else "while training"
        said = f"wants {spoken(self.wanted)} more {when}" if self.wanted else "wants nothing more"
        verdict = f"does not fit: {self.refusal}" if self.refusal else "fits"
        kind = f"{self.filesystem.kind}, network" if self.filesystem.network else self.filesystem.kind
        return f"{self.filesystem.mount} ({kind}) {said} ({self.parts}); {spoken(space.free)} free: {verdict}"


def disks_of(needs: Iterable[Need], ask: bool) -> Iterable[Disk]:
    """The filesystems that the needs are for, each once, in the order in which they come up."""
    grouped: dict[tuple[int, int], tuple[Filesystem, list[Need]]] = {}
    for need in needs:
        place = nearest_existing(need.path).resolve()
        one = filesystem_of(place)
        # With a quota for a directory two parts of one device have numbers of their own.
        grouped.setdefault((os.stat(place).st_dev, one.space.total), (one, []))[1].append(need)
    for one, those in grouped.values():
        disk = Disk(one, tuple(those), None)
        if ask and disk.wanted and disk.fits and one.kind != IN_MEMORY:
            answer = allocatable(nearest_existing(those[0].path).resolve(), disk.wanted)
            # One file of that size may be refused where many smaller ones are not.
            disk = Disk(one, tuple(those), None if answer.reason == "file size limit" else answer)
        yield disk
