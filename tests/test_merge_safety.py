"""A merge that is killed, stopped, raced, or short of space: OUT is absent or complete, and the rest as it was."""

import errno
import fcntl
import hashlib
import importlib
import logging
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import EXPERTS, FUSED, save_base, train_adapter
from disk_mounts import ext_image
from golden import Golden
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from cogumi.core.errors import DiskFull, UsageError
from cogumi.merge import MergeError, merge_adapter, merging, stream

commit: Any = importlib.import_module("cogumi.merge.output_directory")
LINEARS = ["q_proj", "v_proj", "down_proj"]
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL = SIZES | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 256}
BASES: dict[str, PreTrainedConfig] = {
    "small": LlamaConfig(**SMALL, tie_word_embeddings=False),
    # Embedding and head are cut into two runs each.
    "large": LlamaConfig(**SIZES, hidden_size=256, intermediate_size=512, vocab_size=36000, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**SMALL, **EXPERTS),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("large", {"target_modules": [*LINEARS, "lm_head"]}),
    "dora": ("large", {"target_modules": [*LINEARS, "lm_head"], "use_dora": True}),
    "embedding-dora": ("large", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "experts": ("experts", {"target_modules": ["q_proj"], "target_parameters": FUSED}),
    "plain": ("small", {"target_modules": LINEARS}),
}
# What a merge would import, so that a forked child starts at the merge itself.
IMPORTED = ["cogumi.cli.app", "cogumi.merge", "peft.tuners.lora.model", "transformers.models.llama.modeling_llama"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """(base, adapter) of a kind, made when first asked for."""
    root = tmp_path_factory.mktemp("inputs")

    def make(kind: str) -> tuple[Path, Path]:
        family, lora = KINDS[kind]
        base, adapter = root / family, root / f"adapter-{kind}"
        if not base.exists():
            save_base(base, BASES[family], max_shard_size="60KB" if family == "small" else "16MB")
            (base / "tokenizer.json").write_text("{}")
        if not adapter.exists():
            train_adapter(base, adapter, **lora)
        return base, adapter

    return make


@pytest.fixture
def plain(inputs: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    return inputs("plain")


Merge = Callable[[Path | str], Any]


@pytest.fixture
def merge(plain: tuple[Path, Path]) -> Merge:
    return lambda out: merge_adapter(plain[1], out, base=plain[0], progress=False)


def contents(directory: Path) -> dict[str, str]:
    """sha256 of every file, by name; of the manifest, without its time of day."""
    collected = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == "cogumi-merge.json":
            data = re.sub(rb'"created": "[^"]*"', b"", data)
        collected[path.relative_to(directory).as_posix()] = hashlib.sha256(data).hexdigest()
    return collected


def nothing_left(out: Path) -> bool:
    return not [path for path in out.parent.iterdir() if path.name.startswith(out.name)]


# ---------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("lora", "keep"), ("dora", "keep"), ("embedding-dora", "keep"), ("experts", "keep"), ("lora", "float16")],
)
def test_bits_do_not_depend_on_threads(
    kind: str, dtype: str, inputs: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """Statistics, checks and model card too: they are added up in one order."""
    base, adapter = inputs(kind)
    before = torch.get_num_threads()
    collected = []
    try:
        for workers, torch_threads in [(1, 1), (2, 4), (8, 3)]:
            torch.set_num_threads(torch_threads)
            out = tmp_path / f"out{workers}"
            merge_adapter(adapter, out, base=base, dtype=dtype, workers=workers, progress=False)
            assert torch.get_num_threads() == torch_threads
            collected.append(contents(out))
    finally:
        torch.set_num_threads(before)
    assert collected[0] == collected[1] == collected[2]
    assert sum(name.endswith(".safetensors") for name in collected[0]) >= 1


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize("function", ["write_run", "verify_run"])
@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (MergeError("stop"), MergeError, "stop"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
        (OSError("stop"), OSError, "stop"),
        (OSError(errno.ENOSPC, FULL), DiskFull, FULL),
    ],
)
def test_a_failure_in_a_thread_leaves_nothing_and_torch_as_it_was(
    failure: BaseException,
    kind: type[BaseException],
    message: str,
    function: str,
    merge: Merge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, original, calls = torch.get_num_threads(), getattr(stream, function), []

    def fail(*arguments: Any) -> None:
        calls.append(torch.get_num_threads())
        if len(calls) == 3:
            raise failure
        original(*arguments)

    monkeypatch.setattr(stream, function, fail)
    try:
        torch.set_num_threads(3)
        with pytest.raises(kind, match=message) as caught:
            merge(tmp_path / "merged")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(calls) == {1}
    assert kind is not DiskFull or str(tmp_path) in str(caught.value)
    assert nothing_left(tmp_path / "merged")


COUNT_THREADS = """
import os, sys, torch
from cogumi.merge.arithmetic import one_thread_each
from cogumi.merge.stream import thread_pool
def product(matrix):
    before = len(os.listdir("/proc/self/task"))
    matrix @ matrix
    return len(os.listdir("/proc/self/task")) - before
matrix = torch.ones(1500, 1500)
with one_thread_each(), thread_pool(1) as pool:
    above = ("cogumi.training", "cogumi.methods", "cogumi.health")
    print(pool.submit(product, matrix).result(), [each for each in sys.modules if each.startswith(above)])
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_a_worker_brings_in_no_threads_of_its_own_and_a_merge_no_training() -> None:
    """torch.set_num_threads does not reach a thread that nothing has asked for its number of threads."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS],
        env=environment | {"OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0 []\n"


# ------------------------------------------------------------------------------------------------------- killed, stopped


def run_cli(words: list[str], stderr: Path, limit: int | None, pipe: Connection, slow: str | None) -> None:
    """The command line in a child, its standard error in a file, and no file larger than `limit` bytes."""
    from cogumi.cli.app import main

    slow_down(slow, pipe)
    descriptor = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    sys.argv = ["cogumi", *words]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    pipe.send("started")
    main()


def slow_down(name: str | None, pipe: Connection) -> None:
    if name is None:
        return
    place, _, function = name.rpartition(".")
    module = sys.modules[f"cogumi.merge.{place or 'merging'}"]
    original = getattr(module, function)

    def slower(*arguments: Any) -> Any:
        pipe.send(function)
        time.sleep(0.4)
        return original(*arguments)

    setattr(module, function, slower)


def start(
    words: list[str], said: Path, limit: int | None = None, slow: str | None = None
) -> tuple[BaseProcess, Connection]:
    """A forked child that has everything imported, at the moment at which it begins; or at its first slow call.

    slow: a function of the merge, such as "stream.write_run"; each call is announced and then held up.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ours, theirs = context.Pipe()
    child = context.Process(target=run_cli, args=(words, said, limit, theirs, slow))
    child.start()
    theirs.close()
    assert ours.recv() == "started"
    if slow is not None:
        assert ours.recv() == slow.rpartition(".")[2]
    return child, ours


def survive_kills(base: Path, adapter: Path, folder: Path, kills: int, caplog: pytest.LogCaptureFixture) -> None:
    """SIGKILL at uniform moments of a merge: OUT absent or complete, nothing else touched, and the next merge cleans."""
    out, before, moment = folder / "merged", [contents(base), contents(adapter)], random.Random(0)
    merge_adapter(adapter, out, base=base, progress=False)
    expected = contents(out)
    shutil.rmtree(out)
    words, said = ["merge", str(adapter), str(out), "--base", str(base)], folder.with_suffix(".stderr")
    child, _ = start(words, said)
    begun = time.perf_counter()
    child.join()
    duration = time.perf_counter() - begun
    assert child.exitcode == 0
    shutil.rmtree(out)
    killed = attempts = partials = 0
    while killed < kills and attempts < 3 * kills:
        attempts += 1
        child, _ = start(words, said)
        time.sleep(moment.uniform(0, duration))
        child.kill()
        child.join()
        killed += child.exitcode == -9
        if child.exitcode == 0:  # it was faster than the one that was timed
            duration *= 0.8
        left = [path for path in folder.iterdir() if path != out]
        assert len(left) <= 1  # each merge removes what the one before it left
        partials += len(left)
        assert not any((path / "cogumi-merge.json").exists() and out.exists() for path in left)
        if out.exists():
            assert contents(out) == expected
            shutil.rmtree(out)
        assert [contents(base), contents(adapter)] == before
    assert killed == kills
    assert partials > 0
    with caplog.at_level(logging.INFO):
        merge_adapter(adapter, out, base=base, progress=False)
    assert contents(out) == expected
    assert list(folder.iterdir()) == [out]
    assert ("which a killed merge had left" in caplog.text) == bool(left)


@pytest.mark.parametrize("kills", [8, pytest.param(60, marks=pytest.mark.sweep)])
def test_killed_at_random_moments(
    kills: int, inputs: Callable[[str], tuple[Path, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    survive_kills(*inputs("lora"), tmp_path, kills, caplog)


def test_a_running_merge_is_left_alone_and_a_killed_one_removed(
    plain: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, adapter = plain
    out = tmp_path / "merged"
    words = ["merge", str(adapter), str(out), "--base", str(base)]
    child, _ = start(words, tmp_path.with_suffix(".stderr"), slow="write_side_files")
    (partial,) = tmp_path.glob("merged.partial-*")
    with pytest.raises(UsageError, match=f"^out {out}: another merge is writing {partial.name}; wait") as caught:
        merge_adapter(adapter, out, base=base, progress=False)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [partial]
    child.kill()
    child.join()
    assert child.exitcode == -9
    assert list(tmp_path.iterdir()) == [partial]
    assert len(list(partial.glob("*.safetensors"))) > 1  # its shards are there, in their full size
    with caplog.at_level(logging.INFO):
        merge_adapter(adapter, out, base=base, progress=False)
    assert f"removed {partial}, which a killed merge had left" in caplog.text
    assert list(tmp_path.iterdir()) == [out]


def test_what_only_looks_like_a_partial_is_left_alone(merge: Merge, tmp_path: Path) -> None:
    """Nothing but a directory with a name of ours is removed, and no link is followed to somebody's data."""
    out = tmp_path / "merged[1]*"  # which means something else to a glob
    data = tmp_path / "data"
    data.mkdir()
    (data / "precious").write_text("keep me")
    (tmp_path / "merged[1]*.partial-x").write_text("a file")
    (tmp_path / "merged[1]*.partial-12345678").write_text("a file")
    (tmp_path / "merged[1]*.partial-0123abcd").symlink_to(data)
    (tmp_path / "merged[1]*.partial-0123abce").symlink_to(tmp_path / "nowhere")
    for name in ("merged[1]*.partial-of-mine", "merged1x.partial-0123abcd", "merged[1]*.partial-0123abcd.old"):
        shutil.copytree(data, tmp_path / name)
    stale = tmp_path / "merged[1]*.partial-00000000"
    shutil.copytree(data, stale)
    (stale / "link").symlink_to(data)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and stale not in path.parents}
    merge(out)
    assert not stale.exists()
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "merged[1]*.partial-0123abce").is_symlink()
    assert (out / "cogumi-merge.json").is_file()


def test_a_partial_that_another_merge_took_is_refused(
    merge: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock, a partial looks like a killed merge's."""
    original = commit.lock_directory
    held: list[int] = []

    def beaten(directory: Path) -> Any:
        held.append(os.open(directory, os.O_RDONLY))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
        return original(directory)

    monkeypatch.setattr(commit, "lock_directory", beaten)
    with pytest.raises(UsageError, match="another merge is writing"):
        merge(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    os.close(held[0])


@pytest.mark.parametrize(
    ("number", "during"),
    [
        (signal.SIGINT, "stream.write_run"),
        (signal.SIGINT, "stream.verify_run"),
        (signal.SIGINT, "write_side_files"),
        (signal.SIGINT, "write_manifest"),
        (signal.SIGTERM, "stream.write_run"),
        (signal.SIGTERM, "write_manifest"),
        (signal.SIGHUP, "stream.write_run"),
        (signal.SIGHUP, "write_side_files"),
    ],
)
def test_a_signal_stops_the_workers_and_leaves_nothing(
    number: signal.Signals, during: str, inputs: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """Ctrl-C, a provider that takes the machine back, a terminal that closes."""
    base, adapter = inputs("lora")
    out, said = tmp_path / "out" / "merged", tmp_path / "stderr"
    out.parent.mkdir()
    words = ["merge", str(adapter), str(out), "--base", str(base), "--workers", "1"]
    child, pipe = start(words, said, slow=during)
    time.sleep(0.1)
    assert child.pid is not None
    os.kill(child.pid, number)
    child.join(30)
    assert child.exitcode == 128 + number, said.read_text()
    with pytest.raises(EOFError):  # no other run has begun
        pipe.recv()
    assert nothing_left(out)
    assert said.read_text().splitlines()[-1] == "cogumi: interrupted; nothing is left of the merge"
    assert "Traceback" not in said.read_text()


def test_a_check_that_is_interrupted_leaves_the_directory_as_it_was(plain: tuple[Path, Path], tmp_path: Path) -> None:
    out, said = tmp_path / "merged", tmp_path / "stderr"
    merge_adapter(plain[1], out, base=plain[0], progress=False)
    before = contents(out)
    child, _ = start(["merge", "--check", str(out)], said, slow="merge_manifest.read_back")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGTERM)
    child.join(30)
    assert child.exitcode == 128 + signal.SIGTERM, said.read_text()
    assert said.read_text() == f"checking {out} ...\ncogumi: interrupted; the directory is as it was\n"
    assert contents(out) == before


# -------------------------------------------------------------------------------------------------------- full and odd disks


def kilobytes(message: str) -> tuple[int, int, int]:
    """(needed, free, to be freed) in bytes, as a refusal says them."""
    match = re.search(r"needs ([\d.]+ \w+) and .* has ([\d.]+ \w+) free .*; free ([\d.]+ \w+) or", message)
    assert match, message
    needed, free, more = (float(n) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit] for n, unit in map(str.split, match.groups()))
    return int(needed), int(free), int(more)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_too_small_a_disk_is_refused_before_a_byte_is_written(
    share: float,
    plain: tuple[Path, Path],
    tmp_path: Path,
    mount: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """share: of the shards' bytes, of which the small files need some more."""
    base, adapter = plain
    shards = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    disk = mount("tmpfs", f"size={int(share * shards)}")
    room = os.statvfs(disk).f_bavail * 4096
    monkeypatch.setattr(stream, "write_header", lambda *_: pytest.fail("wrote"))
    with pytest.raises(UsageError, match="nothing was written") as caught:
        merge_adapter(adapter, disk / "merged", base=base, progress=False)
    assert "\n" not in str(caught.value)
    needed, free, more = kilobytes(str(caught.value))
    assert needed >= shards
    assert free == pytest.approx(room, abs=8192)
    assert more == pytest.approx(needed - free, abs=2000)
    assert list(disk.iterdir()) == []


def test_the_numbers_of_a_disk_that_gave_a_part(
    inputs: Callable[[str], tuple[Path, Path]], tmp_path: Path, mount: Callable[..., Path]
) -> None:
    """ext4 keeps the blocks it found for a file that then does not fit: they are free, too, once that is removed."""
    base, adapter = inputs("lora")
    disk = mount("ext4", "loop", str(ext_image(tmp_path / "image", "ext4", 0, 32 << 20)))
    room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with pytest.raises(UsageError, match="nothing was written") as caught:
        merge_adapter(adapter, disk / "merged", base=base, progress=False)
    _, free, _ = kilobytes(str(caught.value))
    assert free == pytest.approx(room, rel=0.02)
    assert [path.name for path in disk.iterdir()] == ["lost+found"]


def test_a_limit_on_file_size_is_refused(inputs: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """Not a full disk: the message must not ask to free 0 kB."""
    base, adapter = inputs("lora")
    out, said = tmp_path / "out" / "merged", tmp_path / "stderr"
    out.parent.mkdir()
    child, _ = start(["merge", str(adapter), str(out), "--base", str(base)], said, limit=1 << 20)
    child.join(60)
    assert child.exitcode == 2, said.read_text()
    assert re.fullmatch(
        rf"merging {adapter} into its base, as {out} \.\.\.\n"
        rf"cogumi: out {out} needs \S+ MB and {out.parent} has \S+ [GT]B free \(File too large\); raise that limit "
        r"or choose another disk; nothing was written\n",
        said.read_text(),
    )
    assert nothing_left(out)


def test_a_disk_that_others_fill_up_later(
    merge: Merge, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards have their blocks; the small files find none."""
    disk = mount("tmpfs", "size=4m")
    original = merging.write_side_files

    def fill(*arguments: Any) -> None:
        with (disk / "filler").open("xb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize)
        original(*arguments)

    monkeypatch.setattr(merging, "write_side_files", fill)
    with pytest.raises(DiskFull, match="nothing was written") as caught:
        merge(disk / "merged")
    needed, free, more = kilobytes(str(caught.value))
    assert needed == pytest.approx(caught.value.needed, abs=1000)
    assert free == pytest.approx(needed - more, abs=2000)
    assert caught.value.place == str(disk)
    assert [path.name for path in disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "ext2"])
def test_out_on_another_filesystem(kind: str, merge: Merge, tmp_path: Path, mount: Callable[..., Path]) -> None:
    """The kernel does not copy between two of them, and ramfs and ext2 cannot allocate blocks beforehand."""
    source = str(ext_image(tmp_path / "image", "ext2", 0, 8 << 20)) if kind == "ext2" else "none"
    disk = mount(kind, "loop" if kind == "ext2" else "", source)
    merge(tmp_path / "here")
    merge(disk / "there")
    assert contents(tmp_path / "here") == contents(disk / "there")
    assert not list(disk.glob("there.*"))


def test_without_locks_a_partial_is_said_and_left(
    merge: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    partial = tmp_path / "merged.partial-0123abcd"
    partial.mkdir()

    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    merge(tmp_path / "merged")
    assert f"{partial} is a killed merge's, or a running one's" in caplog.text
    assert partial.exists()


def test_read_only_place(merge: Merge, mount: Callable[..., Path], golden: Golden) -> None:
    disk = mount("tmpfs", "size=10m,ro")
    with golden.raises("merge", message=str(disk)):
        merge(disk / "merged")


def test_a_quota_is_refused(merge: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = os.posix_fallocate, []

    def limited(*arguments: int) -> None:
        calls.append(arguments)
        if len(calls) > 2:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        original(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    with pytest.raises(UsageError, match=r"^out .* needs .* free \(Disk quota exceeded\); raise that limit or"):
        merge(tmp_path / "merged")
    assert nothing_left(tmp_path / "merged")


# ------------------------------------------------------------------------------------------------------------ where OUT is


def test_out_however_it_is_written(
    plain: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    base, adapter = plain
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    for out, lies in {"slash/": "there/slash", "plain": "there/plain", "../up": "up", "./a/../b": "there/b"}.items():
        if "a/" in out:
            (tmp_path / "there" / "a").mkdir()
        merge_adapter(adapter, out, base=base, progress=False)
        assert (tmp_path / lies / "cogumi-merge.json").is_file()
        assert nothing_left(tmp_path / f"{lies}.partial-")
    with golden.raises("merge", message="there/~"):
        merge_adapter(adapter, "~/merged", base=base, progress=False)
    with golden.raises("merge", message="config.json is not a directory"):
        merge_adapter(adapter, base / "config.json" / "merged", base=base, progress=False)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for taken in (base, adapter, tmp_path / "dangling", ".", "..", "/", ""):
        with golden.raises("merge", message="exists"):
            merge_adapter(adapter, taken, base=base, progress=False)
    with pytest.raises(UsageError, match=r"cannot write .*File name too long"):
        merge_adapter(adapter, "x" * 250, base=base, progress=False)


def test_out_inside_base_or_adapter_changes_neither(plain: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = (Path(shutil.copytree(path, tmp_path / path.name)) for path in plain)
    before = contents(base), contents(adapter)
    merge_adapter(adapter, tmp_path / "usual", base=base, progress=False)
    for inside in (base / "merged", adapter / "merged"):
        for _ in range(2):  # the second one has an output inside its inputs
            merge_adapter(adapter, inside, base=base, progress=False)
            assert contents(inside) == contents(tmp_path / "usual")
            inside = inside.with_name("again")
    for directory in (base, adapter):
        for name in ("merged", "again"):
            shutil.rmtree(directory / name)
    assert (contents(base), contents(adapter)) == before


@pytest.mark.parametrize("appears", ["directory", "full directory", "file", "link"])
def test_out_that_appears_during_the_merge_is_not_touched(
    appears: str, merge: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    out = tmp_path / "merged"
    original = merging.write_manifest

    def appear(*arguments: Any) -> None:
        original(*arguments)
        make_something(out, appears)

    monkeypatch.setattr(merging, "write_manifest", appear)
    with golden.raises("merge", message=f"out {out} exists"):
        merge(out)
    assert is_still(out, appears)
    assert [path.name for path in tmp_path.glob("merged*")] == ["merged"]


@pytest.mark.parametrize("appears", ["full directory", "file", "link"])
def test_out_that_appears_at_the_last_instant(
    appears: str, merge: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last look. Of an empty directory the kernel makes no fuss, and nothing is lost."""
    out = tmp_path / "merged"
    monkeypatch.setattr(commit, "check_target", lambda target: make_something(target, appears))
    with pytest.raises(OSError, match=str(out)):
        merge(out)
    assert is_still(out, appears)
    assert [path.name for path in tmp_path.glob("merged*")] == ["merged"]


def make_something(out: Path, what: str) -> None:
    if what == "link":
        out.symlink_to(out.parent / "nowhere")
    elif what == "file":
        out.write_text("keep me")
    else:
        out.mkdir()
        if what == "full directory":
            (out / "precious").write_text("keep me")


def is_still(out: Path, what: str) -> bool:
    if what == "link":
        return out.is_symlink() and not out.exists()
    if what == "file":
        return out.read_text() == "keep me"
    return [path.name for path in out.iterdir()] == (["precious"] if what == "full directory" else [])
