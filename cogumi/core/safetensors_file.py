"""Read and write the safetensors layout: where each tensor's bytes lie in a shard.

A file is an 8-byte little-endian header length, a JSON header and the tensors' bytes, back to back. The header maps
tensor names to dtype, shape and byte range (https://github.com/huggingface/safetensors#format). With these ranges, the
merge copies unchanged tensors byte for byte and writes changed ones in blocks. Memory never holds a whole shard.
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from cogumi.core.errors import UsageError

# The dtypes that are merged and converted; every other one is only ever copied.
FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

element_count = math.prod  # of a shape


@dataclass(frozen=True)
class Span:
    """One tensor in one file. `start` and `end` are byte offsets from the beginning of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file. `header` is everything before the first tensor's bytes; `spans` are in file order."""

    path: Path
    header: bytes
    metadata: dict[str, str]
    spans: tuple[Span, ...]


def read_shard(path: Path) -> Shard:
    """Read and check a shard's header. Raises UsageError when the file is not a whole safetensors file."""
    try:
        with safe_open(path, framework="numpy"):  # which checks that the tensors' ranges account for every byte
            pass
    except SafetensorError as error:
        raise UsageError(f"{path} is not a whole safetensors file ({error})", fix="download it again") from error
    with path.open("rb") as file:
        prefix = file.read(8)
        body = file.read(struct.unpack("<Q", prefix)[0])
    entries, begin = json.loads(body), len(prefix + body)
    metadata = entries.pop("__metadata__", {})
    spans = [
        Span(path, name, entry["dtype"], tuple(entry["shape"]), *(begin + offset for offset in entry["data_offsets"]))
        for name, entry in entries.items()
    ]
    spans.sort(key=lambda span: (span.start, span.end))
    return Shard(path, prefix + body, metadata, tuple(spans))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of a tensor seen as a matrix of its last dimension; a vector is one column."""
    if len(shape) < 2:
        return element_count(shape), 1
    return element_count(shape[:-1]), shape[-1]


def make_header(metadata: dict[str, str], tensors: list[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Header bytes for tensors (name, dtype, shape, bytes) that will be written in this order."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, length in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)  # the reference writer aligns the first tensor to 8 bytes, with spaces
    return struct.pack("<Q", len(body)) + body


def read_into(file: BinaryIO, start: int, values: torch.Tensor) -> torch.Tensor:
    """Fill a contiguous tensor from byte `start` on, and return it. Any number of threads may read one file at once.

    Raises OSError when the file ends before that.
    """
    buffer = as_bytes(values)
    done = 0
    while done < len(buffer):
        read = os.preadv(file.fileno(), [buffer[done:]], start + done)
        if read == 0:
            raise OSError(
                f"{file.name} ended before byte {start + len(buffer)}: did something change it during the merge?"
            )
        done += read
    return values


def read_elements(span: Span, first: int, count: int) -> torch.Tensor:
    """`count` elements of a float tensor, from element `first` on, flat."""
    kind = FLOAT_DTYPES[span.dtype]
    with span.path.open("rb", buffering=0) as file:
        return read_into(file, span.start + first * kind.itemsize, torch.empty(count, dtype=kind))


def leading_rows_equal(span: Span, stored: Span, block: int = 1 << 18) -> bool:
    """Tell whether the rows that both tensors have are equal, in the dtype of `span`."""
    rows, columns = matrix_shape(span.shape)
    if matrix_shape(stored.shape)[1] != columns:
        return False
    total = min(rows, matrix_shape(stored.shape)[0]) * columns
    for first in range(0, total, block):
        count = min(block, total - first)
        ours, theirs = read_elements(span, first, count), read_elements(stored, first, count)
        if not torch.equal(ours, theirs.to(ours.dtype)):
            return False
    return True


def write_at(file: BinaryIO, start: int, values: torch.Tensor) -> None:
    """Write a tensor's elements at byte `start`. Any number of threads may write one file at once."""
    buffer = as_bytes(values)
    done = 0
    while done < len(buffer):
        done += os.pwrite(file.fileno(), buffer[done:], start + done)


def write_header(path: Path, header: bytes) -> None:
    with path.open("r+b") as file:
        file.write(header)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """View a tensor's elements as bytes, row-major; writable if the tensor is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
