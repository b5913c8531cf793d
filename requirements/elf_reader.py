"""The libraries that an ELF file asks for, read from the file itself: nothing is loaded or run."""

import re
import struct
from itertools import takewhile
from mmap import ACCESS_READ, mmap
from pathlib import Path

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB = 0, 1, 5
LONGEST_NAME = 4096
# Libraries whose soname carries CUDA's own major version. cufft, curand, cusolver and cusparse count on their own.
CUDA_LIBRARY = re.compile(
    r"lib(?:cudart|cublas|cublasLt|nvrtc|nvJitLink|cupti|nvblas|nvjpeg)(?:[.-][0-9a-f]{8})?\.so\.(\d+)"
)


def cuda_major(soname: str) -> int | None:
    """13 for libcudart.so.13, 11 for libcublas.so.11.0; None for a library that says nothing of CUDA's version."""
    found = CUDA_LIBRARY.match(soname)
    return int(found[1]) if found else None


def needed_libraries(source: bytes | Path) -> tuple[str, ...]:
    """The DT_NEEDED sonames of an ELF file, in its order; of a file, only the few pages that say so are read.

    Read from the file itself: nothing is loaded or run. `pip check` and package metadata do not see that one extension
    wants libcudart.so.12 and the next libcudart.so.13. Layout: the System V ABI, "Object Files" and "Dynamic Linking".
    Raises ValueError for what is not a whole 64-bit little-endian ELF file, saying what is wrong; OSError as open() does.
    """
    if isinstance(source, bytes):
        return read_needed(source)
    with source.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        try:
            return read_needed(mapped)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


def read_needed(data: bytes | mmap) -> tuple[str, ...]:
    def part(offset: int, size: int) -> bytes:
        if offset + size > len(data):
            raise ValueError(f"truncated ELF file: it ends at byte {len(data)}, and byte {offset + size} is needed")
        return data[offset : offset + size]

    header = part(0, 64)
    if header[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    if header[4:6] != b"\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (start,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
    if count and size != 56:
        raise ValueError(f"not an ELF file: program headers of {size} bytes instead of 56")
    # (type, flags, offset in the file, address in memory, physical address, size in the file, size in memory, alignment)
    segments = list(struct.iter_unpack("<IIQQQQQQ", part(start, 56 * count)))
    dynamic = next((each for each in segments if each[0] == PT_DYNAMIC), None)
    if dynamic is None:
        return ()  # linked statically
    section = part(dynamic[2], dynamic[5])
    pairs = struct.iter_unpack("<QQ", section[: len(section) // 16 * 16])
    entries = list(takewhile(lambda pair: pair[0] != DT_NULL, pairs))
    table = next((value for tag, value in entries if tag == DT_STRTAB), -1)
    names = []
    for address in (table + value for tag, value in entries if tag == DT_NEEDED):
        inside = (each for each in segments if each[0] == PT_LOAD and each[3] <= address < each[3] + each[5])
        segment = next(inside, None)
        if table < 0 or segment is None:
            raise ValueError("not a loadable ELF file: its string table is in no loadable segment")
        begin = segment[2] + address - segment[3]
        end = data.find(b"\0", begin, begin + LONGEST_NAME)
        if end < 0:
            raise ValueError("not a loadable ELF file: a name in its string table does not end")
        names.append(data[begin:end].decode("utf-8", "replace"))
    return tuple(names)
