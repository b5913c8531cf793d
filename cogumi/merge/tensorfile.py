"""The safetensors layout: where each tensor's bytes lie in a shard.

The format is an 8-byte little-endian header length, a JSON header (tensor name -> dtype, shape, byte range) and the
tensors' bytes, back to back (https://github.com/huggingface/safetensors#format). Reading the ranges ourselves lets the
merge copy an untouched tensor byte for byte and write a changed one block by block, so memory never holds a shard.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from cogumi.errors import UsageError

# The dtypes that are merged and converted; every other one is only ever copied.
FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# The header's own limit in the reference implementation; a larger length means that this is not a safetensors file.
MAX_HEADER_BYTES = 100_000_000


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
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise UsageError(f"{path} is not a whole safetensors file ({size} bytes); download it again")
        body = file.read(length)
    try:
        entries = json.loads(body)
    except ValueError as error:
        raise UsageError(f"{path} has no readable safetensors header ({error}); download it again") from error
    metadata = entries.pop("__metadata__", {})
    begin = 8 + length
    spans = [
        Span(path, name, entry["dtype"], tuple(entry["shape"]), *(begin + offset for offset in entry["data_offsets"]))
        for name, entry in entries.items()
    ]
    spans.sort(key=lambda span: (span.start, span.end))
    position = begin
    for span in spans:
        if span.start != position:
            raise UsageError(f"{path}: tensor {span.name} does not follow the one before it; download the file again")
        position = span.end
    if position != size:
        raise UsageError(f"{path} holds {size} bytes where its header promises {position}; download it again")
    return Shard(path, prefix + body, metadata, tuple(spans))


def element_count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def header_for(metadata: dict[str, str], tensors: list[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Header bytes for tensors (name, dtype, shape, bytes) that will be written in this order."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, length in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)  # the reference writer aligns the first tensor to 8 bytes, with spaces
    return struct.pack("<Q", len(body)) + body


def read_bytes(file: BinaryIO, start: int, length: int) -> bytearray:
    """Exactly `length` bytes from `start`. Raises OSError when the file ends before them."""
    buffer = bytearray(length)
    file.seek(start)
    if file.readinto(buffer) != length:  # type: ignore[attr-defined]
        raise OSError(f"{file.name} ended before byte {start + length}: did something change it during the merge?")
    return buffer


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements as bytes, row-major."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
