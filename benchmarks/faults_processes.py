"""Trainings in forks of one prepared process, watched, signalled and answered; and the journals they leave."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.faults_training import Job, train

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
# With what a training would otherwise import while it is timed.
IMPORTED = (
    "accelerate",
    "cogumi.checkpoints.protection",
    "peft.tuners.lora.model",
    "peft.utils.transformers_weight_conversion",
    "safetensors.torch",
    "tokenizers",
    "torch._dynamo",
    "torch.utils.serialization",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)
# Said now and then on a disk that others use too, whatever becomes of the training.
OF_THE_DISK = re.compile(r"came back: something holds|mtime may not be reliable")
# A training of a second that says nothing for so long hangs.
HUNG_SECONDS = 60.0


@dataclass(frozen=True)
class Journal:
    """What trainings wrote, the resumed one after the one before it."""

    losses: tuple[tuple[int, str], ...]
    good: frozenset[int]
    end: str | None

    def equals(self, other: Journal) -> bool:
        """Every loss of every run, repeated steps too, and the weights at the end, to the last bit."""
        return set(self.losses) == set(other.losses) and self.end == other.end


def read_journal(path: Path) -> Journal:
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    ends = [words[1] for words in lines if words[0] == "end"]
    return Journal(
        losses=tuple((int(words[1]), words[2]) for words in lines if words[0] == "loss"),
        good=frozenset(int(words[1]) for words in lines if words[0] == "good"),
        end=ends[-1] if ends else None,
    )


def words_of(path: Path) -> set[str]:
    """The lines that a training said of itself, without the numbers and the places in them."""
    lines = path.read_text().splitlines() if path.exists() else []
    said = (line.strip() for line in lines if not OF_THE_DISK.search(line))
    return {re.sub(r"/\S+|[0-9a-f]{8,}|\d+", "#", line) for line in said if line}


Message = tuple[Any, ...]


class Running:
    """A training in its child."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.messages: list[Message] = []
        self.exit_status: int | None = None
        self.hung = False
        started = self.next()
        if started is None or started[0] != "started":
            raise RuntimeError(f"the training said {started} before it started")
        self.pid: int = started[1]

    def next(self, seconds: float = HUNG_SECONDS) -> Message | None:
        """The next message; None when there was none for so long. ("ended", exit status) is the last one."""
        if self.exit_status is not None or not self.pipe.poll(seconds):
            return None
        message: Message = self.pipe.recv()
        self.messages.append(message)
        if message[0] == "ended":
            self.exit_status = message[1]
        return message

    def until(self, what: str, step: int | None = None) -> bool:
        """Wait for a message; False when the training ends, or hangs, before it."""
        while (message := self.next()) is not None and message[0] != "ended":
            if message[0] == what and step in (None, message[1]):
                return True
        return False

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self.pid, number)

    def answer(self) -> None:
        self.pipe.send("go on")

    def finish(self) -> int:
        """The exit status, negative for a signal. A training that hangs is killed, and that is noted."""
        while self.exit_status is None:
            if self.next() is None:
                self.hung = True
                self.signal(signal.SIGKILL)
        return self.exit_status

    def moments(self, what: str) -> dict[int, float]:
        """When each save began ("saving") or gave the thread back ("saved"), by step, in seconds of the monotonic clock."""
        return {message[1]: message[2] for message in self.messages if message[0] == what}


@contextmanager
def trainings() -> Iterator[Callable[[Job], Running]]:
    """A function that starts a training in a fork of one prepared process. One at a time."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    server.start()
    theirs.close()
    try:
        ours.recv()
    except EOFError:
        raise RuntimeError("the process that starts trainings ended before it was ready") from None

    def start(job: Job) -> Running:
        ours.send(job)
        return Running(ours)

    try:
        yield start
    finally:
        ours.close()
        server.join()


def serve(pipe: Connection) -> None:
    """Forks a child for each job, until the other end of the pipe is closed."""
    os.environ.update(ENVIRONMENT)
    for name in IMPORTED:
        importlib.import_module(name)
    # A trainer collects garbage at its start, and looking at all of torch's objects takes longer than this training.
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        if not isinstance(job, Job):  # an answer that came when its training had ended
            continue
        child = context.Process(target=train, args=(job, pipe))
        child.start()
        child.join()
        pipe.send(("ended", child.exitcode))
