"""What makes a file stay: waiting for the disk, hashes, and the words of a disk that takes no more."""

import errno
import hashlib
import os
from pathlib import Path

# What a filesystem says when it takes no more of a file: full, over a quota, over a limit on the size of one.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync_path(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk. Raises FileExistsError rather than replace one."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, as `sha256sum` prints it."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
