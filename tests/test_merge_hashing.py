"""Hashing beside reading and writing, against hashlib; and the page cache after a merge, asked of the kernel."""

import hashlib
import os
import random
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig

from cogumi.core.durability import drop_from_memory, sha256_file
from cogumi.merge import merge_adapter
from cogumi.merge.executor import HASH_BYTES, FileDigest, hashing_ahead, is_in_memory
from tests.merge_models import SIZES, save_base, train_adapter


def random_file(path: Path, size: int) -> Path:
    path.write_bytes(random.Random(size).randbytes(size))
    return path


@pytest.mark.parametrize("size", [0, 1, HASH_BYTES, 3 * HASH_BYTES + 17])
def test_a_digest_in_any_steps_is_that_of_the_file(size: int, tmp_path: Path) -> None:
    path = random_file(tmp_path / "file", size)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert sha256_file(path) == expected
    digest = FileDigest(path)
    steps = random.Random(1)
    for _ in range(5):
        digest.extend(steps.randint(0, size))  # backwards too, which is nothing to do
    assert digest.finish() == expected
    assert digest.finish() == expected


def test_hashing_ahead_goes_as_far_as_there_is_time(tmp_path: Path) -> None:
    paths = [random_file(tmp_path / f"{number}", (5 << 20) + number) for number in range(2)]
    digests = [FileDigest(path) for path in paths]
    with hashing_ahead(digests):
        give_up = time.monotonic() + 30
        while digests[1].position == 0 and time.monotonic() < give_up:
            time.sleep(0.001)
    assert digests[0].position == (5 << 20)
    assert [digest.finish() for digest in digests] == [hashlib.sha256(each.read_bytes()).hexdigest() for each in paths]


def test_a_file_that_cannot_be_read_is_said_after_the_block(tmp_path: Path) -> None:
    digest = FileDigest(random_file(tmp_path / "file", 10))
    digest.path.unlink()
    with pytest.raises(FileNotFoundError, match="file"), hashing_ahead([digest]):
        time.sleep(0.05)


def forget(path: Path) -> None:
    """Take a file out of the page cache; skip where it stays there (tmpfs, a kernel that does not say)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    drop_from_memory(path)
    if is_in_memory(path):
        pytest.skip("this filesystem keeps its files in memory")


def test_a_merge_leaves_the_page_cache_as_it_was(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", LlamaConfig(**SIZES | {"vocab_size": 32768}))
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    shard = base / "model.safetensors"
    forget(shard)
    merge_adapter(adapter, tmp_path / "one", base=base, progress=False)
    assert not is_in_memory(shard)
    assert not is_in_memory(tmp_path / "one" / "model.safetensors")
    shard.read_bytes()
    assert is_in_memory(shard)
    merge_adapter(adapter, tmp_path / "two", base=base, progress=False)
    assert is_in_memory(shard)
