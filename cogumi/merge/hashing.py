"""sha256 of large files, while something else reads or writes them; and what of them stays in memory."""

import ctypes
import hashlib
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from cogumi.merge.tensorfile import as_bytes, read_into

# What was just read or written is hashed in pieces that stay in a core's cache.
HASH_BYTES = 1 << 18
# Larger ones while another thread imports modules: it holds the interpreter lock, for which each piece waits up to 2 x 5 ms.
HASH_BYTES_AHEAD = 1 << 25


class FileDigest:
    """The sha256 of a file, as far as it was worked out. position: how many bytes that is. One thread at a time.

    found_in_memory: whether the file was in the page cache before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found_in_memory = is_in_memory(path)
        self.position = 0
        self.digest = hashlib.sha256()

    def extend(self, end: int, at_once: int = HASH_BYTES) -> None:
        """Go on to byte `end`, if it is not there yet."""
        buffer = torch.empty(max(0, min(at_once, end - self.position)), dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            while self.position < end:
                piece = buffer[: end - self.position]
                self.digest.update(as_bytes(read_into(file, self.position, piece)))
                self.position += len(piece)

    def finish(self) -> str:
        """The digest of the whole file, as `sha256sum` prints it."""
        self.extend(self.path.stat().st_size)
        return self.digest.hexdigest()


@contextmanager
def hashing_ahead(digests: Iterable[FileDigest]) -> Iterator[None]:
    """Work on digests, one after the other, while the block does something else; as far as that takes."""
    enough = threading.Event()
    failed: list[OSError] = []

    def work() -> None:
        try:
            for digest in digests:
                size = digest.path.stat().st_size
                while digest.position < size and not enough.is_set():
                    digest.extend(min(digest.position + HASH_BYTES_AHEAD, size), HASH_BYTES_AHEAD)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="cogumi-merge-hashing")
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()
    if failed:
        raise failed[0]


def is_in_memory(path: Path) -> bool:
    """Whether more than half of a file is in the page cache. True where nobody says (another's file, another system)."""
    size = path.stat().st_size
    if not (size and sys.platform == "linux"):
        return True
    pages = np.empty(-(-size // mmap.PAGESIZE), dtype=np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as view:
        start = np.frombuffer(view, dtype=np.uint8).ctypes.data
        asked = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
    return bool(asked != 0 or (pages & 1).mean() > 0.5)
