"""Telling a full disk from everything else that can go wrong in a save.

Libraries report it in four disguises, measured over 46 free-space points: OSError with an errno (8), SafetensorError (14), a
bare Exception of the tokenizers library (3), and a RuntimeError of torch's writer that does not say why (21).
"""

import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cogumi.core.disk_space import allocatable, space_of
from cogumi.core.durability import NO_SPACE
from cogumi.core.errors import DiskFull
from cogumi.core.formatting import one_line

# As Rust and C say ENOSPC, EDQUOT and EFBIG.
SAID = re.compile(r"no space left|os error (28|122|27)\b|disk quota exceeded|file too large", re.IGNORECASE)
# What says nothing of the cause; then the disk is asked.
UNTOLD = re.compile(
    r"unexpected pos|iostream error|PytorchStreamWriter|cannot be opened|failed finding central directory"
)
PROBE_BYTES = 1 << 20


def disk_is_full(error: BaseException, directory: Path) -> bool:
    """Whether a save into `directory` failed because no more could be written there."""
    for each in causes(error):
        if isinstance(each, OSError) and each.errno in NO_SPACE:
            return True
        if SAID.search(str(each)):
            return True
    return bool(UNTOLD.search(str(error))) and not can_write(directory)


def causes(error: BaseException) -> list[BaseException]:
    """An error, and those that it was raised from."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__ or each.__context__
    return found


def can_write(directory: Path) -> bool:
    """Whether a little more can be written there, into files as large as those that are there."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max((path.stat().st_size for path in directory.rglob("*") if path.is_file()), default=0)
    if limit != resource.RLIM_INFINITY and largest + PROBE_BYTES > limit:
        return False
    asked = allocatable(directory, PROBE_BYTES)
    return asked.fits if asked.fits is not None else space_of(directory).free >= PROBE_BYTES


@contextmanager
def written_aside(unfinished: Path) -> Iterator[None]:
    """In the block a directory is written from nothing; nothing of it stays where that fails, as on a full disk."""
    remove_if_there(unfinished)
    try:
        yield
    except BaseException as error:
        what = unfinished.name.lstrip(".")
        full = isinstance(error, Exception) and disk_is_full(error, unfinished.parent)
        remove_if_there(unfinished)
        if full:
            raise DiskFull(
                f"{what}: it does not fit on the disk of {unfinished.parent} ({one_line(error)}); free space there, and the "
                "same command continues from the last checkpoint",
                unfinished.parent,
            ) from error
        raise


def remove_if_there(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
