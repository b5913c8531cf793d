"""What makes a file stay: waiting for the disk and reading from it, hashes, locks, and the words of a disk that is full."""

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

# What a filesystem says when it takes no more of a file: full, over a quota, over a limit on the size of one.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# How much of a file is hashed before its reader hears of it.
HASH_STEP = 1 << 20

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


def blake3_file(path: Path, advance: Callable[[int], object] | None = None) -> str:
    """The BLAKE3 digest of a file's bytes, as `b3sum` prints it: as strong as sha256, and three times as fast.
    advance: called with the bytes just hashed."""
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
    Bytes that are not on the disk yet stay cached, and those that a process has mapped, and all of a tmpfs.
    Without posix_fadvise, this does nothing."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, length, os.POSIX_FADV_DONTNEED)


def bytes_in_memory(path: Path) -> int | None:
    """How many bytes of a file are in memory, so that a read of them proves nothing of the disk.

    None where the kernel does not say: on other systems than Linux, and on filesystems that map no files. Of a file that
    this user neither owns nor may write, Linux calls every page cached (mincore(2)), so it is None as well.
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
