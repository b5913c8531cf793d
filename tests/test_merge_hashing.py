"""Hashing beside reading and writing, against the whole file at once; and the page cache after a merge, asked of the kernel."""

import os
import random
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from builders import SIZES, save_base, train_adapter
from page_cache import is_in_memory
from transformers import LlamaConfig

from cogumi.core.durability import drop_from_memory
from cogumi.merge import merge_adapter
from cogumi.merge.stream import HASH_BYTES, FileDigest


def random_file(path: Path, size: int) -> Path:
    path.write_bytes(random.Random(size).randbytes(size))
    return path


@pytest.mark.parametrize("size", [0, 1, HASH_BYTES, 3 * HASH_BYTES + 17])
def test_a_digest_in_any_steps_is_that_of_the_file(size: int, tmp_path: Path) -> None:
    path = random_file(tmp_path / "file", size)
    data = path.read_bytes()
    digest, steps = FileDigest(path), random.Random(1)
    for _ in range(5):
        start, end = sorted(steps.choices(range(size + 1), k=2))
        # What was hashed before is skipped, and what lies between is read from the file.
        digest.add(start, torch.frombuffer(bytearray(data[start:end] or b"x"), dtype=torch.uint8)[: end - start])
        digest.extend(steps.randint(0, size))  # backwards too, which is nothing to do
    assert digest.finish() == blake3(data).hexdigest()
    assert digest.finish() == blake3(data).hexdigest()


def forget(path: Path) -> None:
    """Take a file out of the page cache; skip where it stays there (tmpfs, a kernel that does not say)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    drop_from_memory(path)
    if is_in_memory(path):
        pytest.skip("this filesystem keeps its files in memory")


def test_a_merge_leaves_neither_model_in_memory(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", LlamaConfig(**SIZES | {"vocab_size": 32768}))
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    shard = base / "model.safetensors"
    forget(shard)
    shard.read_bytes()
    assert is_in_memory(shard)
    merge_adapter(adapter, tmp_path / "merged", base=base, progress=False)
    assert not is_in_memory(shard)
    assert not is_in_memory(tmp_path / "merged" / "model.safetensors")
