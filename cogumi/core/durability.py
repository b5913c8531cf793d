"""What makes a file stay: waiting for the disk and reading from it, hashes, locks, and the words of a disk that is full."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

# What a filesystem says when it takes no more of a file: full, over a quota, over a limit on the size of one.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# What flock says on filesystems that cannot lock a directory (some network filesystems).
NO_LOCKS = (errno.EINVAL, errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def sync_path(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(directory: Path) -> OSError | None:
    """Why a directory takes no new file; None where it takes one, or is merely full."""
    try:
        with TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return None if error.errno in NO_SPACE else error


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk. Raises FileExistsError rather than replace one."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def lock_directory(directory: Path) -> Iterator[bool | None]:
    """Hold the lock of a directory while in the block: True, False if another process has it, None if none can be had."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held: bool | None = True
        except BlockingIOError:
            held = False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            held = None
        yield held
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, as `sha256sum` prints it."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def drop_from_memory(path: Path, length: int = 0) -> None:
    """Drop the first `length` bytes of a file (0: all) from the page cache, so that the next read comes from the disk.
    Bytes that are not on the disk yet stay cached. Without posix_fadvise, this does nothing."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, length, os.POSIX_FADV_DONTNEED)
