"""What a terminal shows of a merge, and a terminal that is closed meanwhile: real ones, whose session the merge leads."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import prepared_process
import pytest
from builders import SIZES, save_base, train_adapter
from processes import until
from transformers import LlamaConfig

# `cogumi WORDS`, held up before its last files until the terminal is closed. argv[1]: what SIGHUP does, as under nohup or not.
HELD = """
import runpy, signal, sys, time
from pathlib import Path
from cogumi.merge import merging
original = merging.write_side_files
def write_side_files(*given):
    Path("held").touch()
    until = time.monotonic() + 60
    while not Path("closed").exists() and time.monotonic() < until:
        time.sleep(0.01)
    original(*given)
merging.write_side_files = write_side_files
signal.signal(signal.SIGHUP, getattr(signal, sys.argv.pop(1)))
runpy.run_module("cogumi", run_name="__main__")
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    train_adapter(save_base(tmp_path / "base", LlamaConfig(**SIZES)), tmp_path / "adapter", target_modules=["q_proj"])
    return tmp_path


@contextmanager
def held_merge(home: Path, environment: dict[str, str], hangup: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A merge whose shards are written: its process, and the other end of its terminal."""
    master, slave = pty.openpty()
    words = [*prepared_process.python(environment), "-c", HELD, hangup, "merge", "adapter", "merged"]
    process = subprocess.Popen(words, cwd=home, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    try:
        until((home / "held").exists)
        assert list(home.glob("merged.partial-*"))
        yield process, master
    finally:
        with suppress(OSError):
            os.close(master)
        process.kill()
        process.wait()


def test_a_terminal_that_closes_leaves_nothing_of_the_merge(home: Path, for_commands: dict[str, str]) -> None:
    with held_merge(home, for_commands, "SIG_DFL") as (process, master):
        os.close(master)
        assert process.wait(60) == 128 + signal.SIGHUP
    assert sorted(path.name for path in home.iterdir()) == ["adapter", "base", "held"]


def test_under_nohup_the_merge_continues_without_its_terminal(home: Path, for_commands: dict[str, str]) -> None:
    with held_merge(home, for_commands, "SIG_IGN") as (process, master):
        os.close(master)
        (home / "closed").touch()
        assert process.wait(60) == 0
    assert (home / "merged" / "cogumi-merge.json").is_file()
    assert not list(home.glob("merged.partial-*"))


def test_a_check_shows_its_stages(home: Path, for_commands: dict[str, str]) -> None:
    assert prepared_process.run(["merge", "adapter", "merged"], home, for_commands).returncode == 0
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    words = [*prepared_process.client(for_commands), "merge", "--check", "merged"]
    process = subprocess.Popen(words, cwd=home, env=for_commands, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    with suppress(OSError):  # EIO is how Linux says that the other end has closed
        while chunk := os.read(master, 1 << 16):
            shown += chunk
    os.close(master)
    assert process.wait(60) == 0, shown
    stages = (
        b"checking merged ...\r\n",
        b"loading the libraries ...\r\n",
        b"hashing:   0%|",
        b"hashing base and adapter:   0%|",
        b"reading the adapter and its base ...\r\n",
        b"verifying:   0%|",
        b"merged: ",
    )
    assert sorted(stages, key=shown.index) == list(stages)
