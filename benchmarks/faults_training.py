"""The training that benchmarks/faults.py disturbs: small, deterministic, in a forked process that has everything imported.

A Llama of some 100 kB with dropout, AdamW, shuffled data, eight steps and a save every second one, on one thread. Its journal
has every loss to the last bit, the good checkpoints, and a hash of the final weights.
"""

from __future__ import annotations

import filecmp
import gc
import hashlib
import importlib
import multiprocessing
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

import cogumi
from benchmarks.harness import OwnTime
from benchmarks.models import word_tokenizer
from cogumi.checkpoints import saving

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
STEPS, SAVE_EVERY, KEEP = 8, 2, 2
SAVES = tuple(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
# Deterministic files: in a good checkpoint they are those of the undisturbed training, bit for bit.
STATE = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
# Python's audit events (docs.python.org/3/library/audit_events.html) that change a directory or a file.
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")
# With what a training would otherwise import while it is timed.
IMPORTED = (
    "accelerate", "benchmarks.faults_training", "cogumi.checkpoints.protection", "peft.tuners.lora.model",
    "peft.utils.transformers_weight_conversion", "safetensors.torch", "torch._dynamo", "torch.utils.serialization",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
# Said now and then on a disk that others use too, whatever becomes of the training.
OF_THE_DISK = re.compile(r"came back: something holds|mtime may not be reliable")
# A training of a second that says nothing for so long hangs.
HUNG_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """One training, started or resumed.

    Attributes:
        how: "plain" or "cogumi".
        directory: Its output_dir.
        words: File with its standard error.
        reference: output_dir of the undisturbed training.
        on_full: cogumi's policy for a full disk.
        event: (step of a save, n, "kill" or "ask"): die or wait for an answer before the n-th change of a file after it.
        each_save_asks: Wait for an answer before every save.
        shape: Sizes of another Llama.
    """

    how: str
    lora: bool
    directory: Path
    journal: Path
    words: Path
    reference: Path | None = None
    keep: int | None = KEEP
    on_full: str = "continue"
    event: tuple[int, int, str] | None = None
    each_save_asks: bool = False
    shape: tuple[tuple[str, int], ...] = ()
    steps: int = STEPS
    save_every: int = SAVE_EVERY


def train(pipe: Connection, job: Job) -> None:
    """Train in the child; end as a user's script would: normally, or with a traceback and exit status 1."""
    os.environ.update(ENVIRONMENT)
    # A trainer collects garbage at its start, and going through all of torch's objects takes longer than this training.
    gc.freeze()
    descriptor = os.open(job.words, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    pipe.send(("started",))
    disable_progress_bar()
    changes = Changes(job, pipe)
    trainer = make_trainer(job, changes, pipe)
    if job.how == "cogumi":
        saving.RETRY_SECONDS = 0.05  # a paused training would look again after 15 s, which takes an hour here
        # The kernel makes no disk read-only on which a file is open for writing, as the log of hangs would be.
        hangs = job.journal.with_suffix(".hangs")
        cogumi.protect(trainer, keep=job.keep or 100, on_full=job.on_full, log_path=hangs)
        trainer.train()
    else:
        # As transformers' example scripts do it: nothing there is not an error.
        there = job.directory.is_dir() and get_last_checkpoint(str(job.directory)) is not None
        trainer.train(resume_from_checkpoint=there)
    changes.save_begins(0)
    trainer.note_good_ones()
    if trainer.state.global_step >= job.steps:
        append(job.journal, f"end {weights_hash(trainer.model)}")


def make_trainer(job: Job, changes: Changes, pipe: Connection) -> Any:
    known: set[int] = set()
    # Seconds in callbacks since the last save: a protected training prunes there what a plain one prunes in the save.
    between = OwnTime()

    class Recorded(Trainer):
        """Writes the journal and announces each save. No callback does it: cogumi commits at once when one has on_save."""

        def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            self.note_good_ones()
            loss = super().training_step(*arguments, **keywords)
            append(job.journal, f"loss {self.state.global_step + 1} {float(loss).hex()}")
            return loss

        def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
            step = self.state.global_step
            saves = self.control.should_save
            if saves:
                changes.save_begins(step)
                pipe.send(("saving", step, time.monotonic(), between.wall))
                between.wall = 0.0
                if job.each_save_asks:
                    pipe.recv()
            start = time.monotonic()
            super()._maybe_log_save_evaluate(*arguments, **keywords)
            if saves:
                pipe.send(("saved", step, time.monotonic(), time.monotonic() - start))

        def note_good_ones(self) -> None:
            """Journal each checkpoint that has appeared and is good."""
            for step in SAVES:
                if job.reference and step not in known and is_good(job.directory, job.reference, step):
                    known.add(step)
                    append(job.journal, f"good {step}")

    torch.set_num_threads(1)
    set_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes: dict[str, Any] = {**small, "vocab_size": 256, "max_position_embeddings": 64, **dict(job.shape)}
    # Eager attention has dropout, so that a wrong state of the generators shows in the losses.
    sizes |= {"attn_implementation": "eager", "attention_dropout": 0.1}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0))
    if job.lora:
        # Large enough that the adapter is more than its JSON files.
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.1))
    tokens = torch.randint(2, 256, (20, 16)).tolist()  # eight steps of four cross the end of an epoch
    args = TrainingArguments(
        output_dir=str(job.directory), max_steps=job.steps, per_device_train_batch_size=4, learning_rate=1e-2,
        warmup_steps=3, save_steps=job.save_every, save_total_limit=job.keep, logging_steps=1, use_cpu=True,
        disable_tqdm=True, report_to="none", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Recorded(
        model=model,
        args=args,
        data_collator=default_data_collator,
        train_dataset=[{"input_ids": token, "labels": token} for token in tokens],  # type: ignore[arg-type]
        # One in Rust, whose writer has words of its own for a full disk.
        processing_class=word_tokenizer(256),
    )
    between.wrap(trainer.callback_handler, "on_step_end")
    return trainer


class Changes:
    """Count the changes that a training makes to files in its output_dir, and stop it before the requested one.

    Only changes that Python sees: safetensors' and torch's writers are native, so torch.save counts before and after.
    """

    def __init__(self, job: Job, pipe: Connection) -> None:
        self.directory, self.pipe = str(job.directory), pipe
        self.event = job.event or (0, 0, "")
        self.step, self.count = 0, 0
        if job.event is not None:
            sys.addaudithook(self.audit)
            for module, name in (("os", "fsync"), ("os", "posix_fallocate"), ("torch", "save")):
                self.watch(importlib.import_module(module), name)

    def save_begins(self, step: int) -> None:
        if self.step:
            self.pipe.send(("changes", self.step, self.count))
        self.step, self.count = step, 0

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in CHANGES or (event == "open" and writes(arguments))
        if changes and isinstance(arguments[0], str | os.PathLike):
            # A bare name is one that shutil.rmtree removes relative to an open directory.
            name = os.fspath(arguments[0])
            if name.startswith(self.directory) or not name.startswith("/"):
                self.happens()

    def watch(self, module: Any, name: str) -> None:
        original = getattr(module, name)

        def watched(*arguments: Any, **keywords: Any) -> Any:
            self.happens()
            result = original(*arguments, **keywords)
            self.happens()
            return result

        setattr(module, name, watched)

    def happens(self) -> None:
        self.count += 1
        if (self.step, self.count) == self.event[:2]:
            if self.event[2] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            self.pipe.send(("asks", self.step))
            self.pipe.recv()


def writes(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    return bool((isinstance(mode, str) and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def append(path: Path, line: str) -> None:
    with path.open("a") as file:  # a line is one write
        file.write(f"{line}\n")


def weights_hash(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def is_good(directory: Path, reference: Path, step: int) -> bool:
    """Whether the checkpoint of a step is there with the state that the undisturbed training had at that step."""
    here, there = directory / f"checkpoint-{step}", reference / f"checkpoint-{step}"
    names = [*STATE, *(name for name in WEIGHTS if (there / name).exists())]
    try:
        state = (here / "trainer_state.json").read_bytes()
        return f'"global_step": {step},'.encode() in state and all(
            filecmp.cmp(here / name, there / name, shallow=False) for name in names
        )
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Journal:
    """Losses, good checkpoints and hash of the final weights of a training and its resumed ones."""

    losses: tuple[tuple[int, str], ...]
    good: frozenset[int]
    end: str | None

    def equals(self, other: Journal) -> bool:
        """Every loss of every run, repeated steps too, and the weights at the end, to the last bit."""
        return set(self.losses) == set(other.losses) and self.end == other.end


def read_journal(path: Path) -> Journal:
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return Journal(
        losses=tuple((int(words[1]), words[2]) for words in lines if words[0] == "loss"),
        good=frozenset(int(words[1]) for words in lines if words[0] == "good"),
        end=next((words[1] for words in reversed(lines) if words[0] == "end"), None),
    )


def words_of(path: Path) -> set[str]:
    """Return the lines of a training's standard error without numbers and paths."""
    lines = path.read_text().splitlines() if path.exists() else []
    said = (line.strip() for line in lines if not OF_THE_DISK.search(line))
    return {re.sub(r"/\S+|[0-9a-f]{8,}|\d+", "#", line) for line in said if line}


class Running:
    """A training in a fork of a process that has the libraries imported. Its first message is ("started",)."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=train, args=(theirs, job))
        self.process.start()
        theirs.close()
        self.messages: list[tuple[Any, ...]] = []
        self.exit_status: int | None = None
        self.hung = False
        if (started := self.next()) != ("started",):
            raise RuntimeError(f"it said {started} before it started")

    def next(self, seconds: float = HUNG_SECONDS) -> tuple[Any, ...] | None:
        """Return the next message, None after so many seconds without one. ("ended", exit status) is the last message."""
        if self.exit_status is not None or not self.pipe.poll(seconds):
            return None
        try:
            message: tuple[Any, ...] = self.pipe.recv()
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
        """Return the exit status, negative for a signal. Kill a process that hangs, and note it."""
        while self.exit_status is None:
            if self.next() is None:
                self.hung = True
                self.signal(signal.SIGKILL)
        return self.exit_status

    def moments(self, what: str) -> dict[int, float]:
        """When each save began ("saving") or gave the thread back ("saved"), by step, in seconds of the monotonic clock."""
        return {message[1]: message[2] for message in self.messages if message[0] == what}
