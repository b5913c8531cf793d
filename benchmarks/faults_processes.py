"""Trainings of benchmarks/faults_training.py in forks of one prepared process, watched, signalled and answered.

And the journals that they leave.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults_training import Job, train
from benchmarks.harness import prepared_forks

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

    def __init__(self, job: Job) -> None:
        context = prepared_forks(IMPORTED)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=train, args=(job, theirs))
        self.process.start()
        theirs.close()
        self.messages: list[Message] = []
        self.exit_status: int | None = None
        self.hung = False
        if (started := self.next()) != ("started",):
            raise RuntimeError(f"the training said {started} before it started")

    def next(self, seconds: float = HUNG_SECONDS) -> Message | None:
        """The next message; None when there was none for so long. ("ended", exit status) is the last one."""
        if self.exit_status is not None or not self.pipe.poll(seconds):
            return None
        try:
            message: Message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.exit_status = self.process.exitcode
            message = ("ended", self.exit_status)
        self.messages.append(message)
        return message

    def until(self, what: str, step: int | None = None) -> bool:
        """Wait for a message; False when the training ends, or hangs, before it."""
        while (message := self.next()) is not None and message[0] != "ended":
            if message[0] == what and step in (None, message[1]):
                return True
        return False

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self.process.pid, number)

    def answer(self) -> None:
        with suppress(BrokenPipeError):  # its training has ended
            self.pipe.send("continue")

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
