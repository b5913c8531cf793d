"""Which shared libraries a library asks for (DT_NEEDED), read from the ELF file itself: nothing is loaded or run.

`pip check` and package metadata do not see that one extension wants libcudart.so.12 and the next libcudart.so.13.
Layout: the System V ABI, "Object Files" and "Dynamic Linking".
"""

import re
import struct
from collections.abc import Callable
from pathlib import Path

Read = Callable[[int, int], bytes]  # offset, size -> exactly that many bytes, or ValueError

HEADER_BYTES, SEGMENT_BYTES, ENTRY_BYTES = 64, 56, 16
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB = 0, 1, 5
LONGEST_NAME = 4096

# Libraries whose soname carries CUDA's own major version. cufft, curand, cusolver and cusparse count on their own.
CUDA_LIBRARY = re.compile(
    r"lib(?:cudart|cublas|cublasLt|nvrtc|nvJitLink|cupti|nvblas|nvjpeg)(?:[.-][0-9a-f]{8})?\.so\.(\d+)"
)


def needed(source: bytes | Path) -> tuple[str, ...]:
    """The DT_NEEDED sonames of an ELF file, in its order; of a file, only the few pages that say so are read.

    Raises ValueError for what is not a whole 64-bit little-endian ELF file, saying what is wrong; OSError as open() does.
    """
    if isinstance(source, bytes):
        return _needed(_reader(len(source), lambda offset, size: source[offset : offset + size]))
    with source.open("rb") as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        try:
            return _needed(_reader(source.stat().st_size, read))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


def cuda_major(soname: str) -> int | None:
    """13 for libcudart.so.13, 11 for libcublas.so.11.0; None for a library that says nothing of CUDA's version."""
    found = CUDA_LIBRARY.match(soname)
    return int(found[1]) if found else None


def _reader(total: int, read: Read) -> Read:
    def checked(offset: int, size: int) -> bytes:
        if offset + size > total:
            raise ValueError(f"truncated ELF file: it ends at byte {total}, and byte {offset + size} is needed")
        return read(offset, size)

    return checked


def _needed(read: Read) -> tuple[str, ...]:
    segments = _segments(read)
    dynamic = next(((offset, size) for kind, offset, _, size in segments if kind == PT_DYNAMIC), None)
    if dynamic is None:
        return ()  # linked statically
    entries = _entries(read(*dynamic))
    names = [value for tag, value in entries if tag == DT_NEEDED]
    tables = [value for tag, value in entries if tag == DT_STRTAB]
    if not names:
        return ()
    if not tables:
        raise ValueError("not a loadable ELF file: its dynamic section has no string table")
    return tuple(_string(read, segments, tables[0] + name) for name in names)


def _segments(read: Read) -> list[tuple[int, int, int, int]]:
    """(type, offset in the file, address in memory, size in the file) of every program header."""
    header = read(0, HEADER_BYTES)
    if header[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    if header[4:6] != b"\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    if count and size != SEGMENT_BYTES:
        raise ValueError(f"not an ELF file: program headers of {size} bytes instead of {SEGMENT_BYTES}")
    table = read(start, size * count)
    found = []
    for at in range(0, len(table), SEGMENT_BYTES):
        kind, _, offset, address, _, in_file = struct.unpack_from("<IIQQQQ", table, at)
        found.append((kind, offset, address, in_file))
    return found


def _entries(dynamic: bytes) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for at in range(0, len(dynamic) - ENTRY_BYTES + 1, ENTRY_BYTES):
        tag, value = struct.unpack_from("<QQ", dynamic, at)
        if tag == DT_NULL:
            break
        found.append((tag, value))
    return found


def _string(read: Read, segments: list[tuple[int, int, int, int]], address: int) -> str:
    """The string at an address in memory, which the loadable segments map to a place in the file."""
    for kind, offset, start, size in segments:
        if kind == PT_LOAD and start <= address < start + size:
            left = min(start + size - address, LONGEST_NAME)
            text, end, _ = read(offset + address - start, left).partition(b"\0")
            if not end:
                raise ValueError("not a loadable ELF file: a name in its string table does not end")
            return text.decode("utf-8", "replace")
    raise ValueError("not a loadable ELF file: its string table is in no loadable segment")
