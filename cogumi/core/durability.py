"""Durable writes: fsync, hashing, locks and disk-full errors."""

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

# Full, over a quota, over a limit on the size of a file.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HASH_STEP = 1 << 20  # bytes between two reports of progress
# errno values flock returns when a filesystem does not support locks.
NO_LOCKS = (errno.EINVAL, errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def sync_path(path: Path) -> None:
    """Flush a file, or a directory's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(directory: Path) -> OSError | None:
    """Return why no file can be created in a directory; None if it can, or the disk is merely full."""
    try:
        with TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return None if error.errno in NO_SPACE else error


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk. Raises FileExistsError rather than replace one."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def lock_directory(directory: Path) -> Iterator[bool | None]:
    """Hold the lock of a directory in the block. Yields False if another process has it, None without lock support."""
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
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def blake3_file(path: Path, advance: Callable[[int], object] | None = None) -> str:
    """Return the BLAKE3 digest of a file, as `b3sum` prints it: as strong as sha256, and three times as fast.

    advance: called with the number of bytes just hashed.
    """
    from blake3 import blake3  # this module is imported where an environment is examined that lacks packages

    digest, buffer = blake3(), memoryview(bytearray(HASH_STEP))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()


def drop_from_memory(path: Path, length: int = 0) -> None:
    """Drop the first `length` bytes of a file (0: all) from the page cache, so that the next read comes from the disk.

    Bytes that are not flushed yet, or mapped, or on a tmpfs stay cached. Does nothing without posix_fadvise.
    """
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, length, os.POSIX_FADV_DONTNEED)


def bytes_in_memory(path: Path) -> int | None:
    """Return how many bytes of a file are in the page cache, so that reading them proves nothing about the disk.

    None if unknown: not on Linux, on filesystems that map no files, and for a file that this user neither owns nor may
    write, for which Linux reports every page as cached (mincore(2)).
    """
    import numpy as np

    status = path.stat()
    if status.st_size == 0:
        return 0
    if sys.platform != "linux" or not (status.st_uid == os.geteuid() or os.access(path, os.W_OK)):
        return None
    pages = np.empty(-(-status.st_size // mmap.PAGESIZE), dtype=np.uint8)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), status.st_size, prot=mmap.PROT_READ) as view:
            start = np.frombuffer(view, dtype=np.uint8).ctypes.data
            where = [ctypes.c_void_p(start), ctypes.c_size_t(status.st_size), ctypes.c_void_p(pages.ctypes.data)]
            failed = ctypes.CDLL(None).mincore(*where)
    except OSError:  # such a filesystem
        return None
    return None if failed else min(status.st_size, mmap.PAGESIZE * int(np.count_nonzero(pages & 1)))
