"""Trainings whose disk fills up or that are killed, then started again; and what a safe checkpoint costs: 1 GB saved by
cogumi and by plain Trainer in turn. Damage is in tests/test_checkpoints_verify.py.

The same small training runs with plain Trainer and under cogumi.protect. After the fault it is started again as a user would
start it, and its losses are compared bit for bit with those of an undisturbed training.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults_training import (
    HUNG_SECONDS,
    SAVES,
    STEPS,
    Job,
    Journal,
    Running,
    is_good,
    read_journal,
    words_of,
)
from benchmarks.harness import Row, attempt, missing, ratio_row, row, values_row
from cogumi.checkpoints.manifest import MANIFEST_NAME
from cogumi.core.durability import sync_path

HOWS = {"cogumi": "cogumi", "plain": "plain Trainer"}
POLICIES = ("continue", "stop", "pause")
DISK_BYTES = 64 << 20
# A pausing training has waited long enough: a step and a save take some 50 ms.
SILENT_SECONDS = 1.0
# Llamas for the cost of a save. 84 million parameters: 12 bytes each with AdamW's state.
LARGE = (("hidden_size", 1024), ("intermediate_size", 4096), ("num_hidden_layers", 5), ("num_attention_heads", 16))
SMALL = (("hidden_size", 128), ("intermediate_size", 512), ("num_hidden_layers", 5), ("num_attention_heads", 2))
COST_BYTES = 10 << 30
TOUCHED_BYTES = 3 << 29  # more than a save


@dataclass(frozen=True)
class Sizes:
    """Number of faults of each kind. kills: at random times; changes: before a change of a file."""

    full: int
    kills: int
    changes: int
    inodes: int
    read_only: int
    terms: int


FULL = Sizes(full=66, kills=60, changes=84, inodes=18, read_only=16, terms=24)
QUICK = Sizes(full=6, kills=3, changes=4, inodes=3, read_only=2, terms=2)


@dataclass(frozen=True)
class Outcome:
    """Result of one training. met: the fault had an effect. lost: good checkpoints gone with no newer good one."""

    met: bool
    finished: bool
    identical: bool
    silent: bool
    lost: int
    note: str


@dataclass(frozen=True)
class Usual:
    """An undisturbed training: its output lines, seconds from one save to the next, and file changes of each save."""

    journal: Journal
    words: set[str]
    gaps: dict[int, float]
    changes: dict[int, int]


def nothing(*_: object) -> None: ...


class Bench:
    """Starts trainings in `folder`, and knows the undisturbed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.references = {lora: folder / ("reference-lora" if lora else "reference") for lora in (False, True)}
        self.bases: dict[tuple[str, bool], Job] = {}
        for lora, directory in self.references.items():
            self.undisturbed(Job("plain", lora, directory, *self.papers(), keep=None))
        self.usual = {(how, lora): self.measure(how, lora) for how in HOWS for lora in self.references}

    def papers(self) -> tuple[Path, Path]:
        """Names for the next journal and the next standard error."""
        self.number += 1
        return self.folder / f"journal-{self.number}", self.folder / f"words-{self.number}"

    def job(self, how: str, lora: bool, parent: Path | None = None) -> Job:
        directory = (parent or self.folder) / f"training-{self.number + 1}"
        return Job(how, lora, directory, *self.papers(), reference=self.references[lora])

    def undisturbed(self, job: Job) -> Running:
        running = Running(job)
        if running.finish() != 0:
            raise RuntimeError(f"an undisturbed training failed: {last_line(job.words)}")
        return running

    def measure(self, how: str, lora: bool) -> Usual:
        """Also leaves a training that lacks its last save."""
        job = replace(self.job(how, lora), event=(0, 0, "kill"))
        running = self.undisturbed(job)
        changes = {message[1]: message[2] for message in running.messages if message[0] == "changes"}
        ends = [*running.moments("saving").values(), running.moments("saved")[STEPS] + 0.02]
        gaps = {step: ends[number + 1] - ends[number] for number, step in enumerate(SAVES)}
        base = self.bases[how, lora] = replace(self.job(how, lora), keep=None)
        self.undisturbed(base)
        shutil.rmtree(base.directory / f"checkpoint-{STEPS}")
        again = replace(self.job(how, lora), words=job.words)
        shutil.copytree(base.directory, again.directory)
        self.undisturbed(again)
        shutil.rmtree(again.directory)
        return Usual(read_journal(job.journal), words_of(job.words), gaps, changes)

    def endure(
        self,
        job: Job,
        disturb: Callable[[Running], object] = nothing,
        heal: Callable[[], object] = nothing,
    ) -> Outcome:
        """Disturb a training, heal what it ran on, and start it again if it has not come to its end."""
        usual = self.usual[job.how, job.lora]
        running = Running(job)
        disturb(running)
        status, hung = running.finish(), running.hung
        heal()
        met = status != 0 or not words_of(job.words) <= usual.words
        lost, why = self.lost(job), self.ending(job, status)
        if read_journal(job.journal).end is None:
            job = replace(job, event=None, words=self.papers()[1])
            running = Running(job)
            why = f"{why}; again: {self.ending(job, running.finish())}"
            hung, lost, met = hung or running.hung, max(lost, self.lost(job)), True
        journal = read_journal(job.journal)
        finished = journal.end is not None and not hung
        if finished and len(set(journal.losses)) > STEPS:
            why += f"; {len(set(journal.losses))} different losses in {STEPS} steps"
        identical = finished and journal.equals(usual.journal)
        silent = finished and not identical and words_of(job.words) <= usual.words
        shutil.rmtree(job.directory)
        note = "" if identical and not lost else f"hung; {why}" if hung else f"lost {lost}; {why}" if lost else why
        return Outcome(met, finished, identical, silent, lost, note)

    def ending(self, job: Job, status: int) -> str:
        """How a training ended, in a few words."""
        if status < 0:
            return signal.Signals(-status).name
        return last_line(job.words).replace(f"{self.folder}/", "") if status else "done"

    def lost(self, job: Job) -> int:
        """Checkpoints that were good, are not, and have no newer good one."""
        assert job.reference is not None
        newest = max((step for step in SAVES if is_good(job.directory, job.reference, step)), default=0)
        return sum(step > newest for step in read_journal(job.journal).good)


def last_line(words: Path) -> str:
    return harness.last_line(words.read_text() if words.exists() else "")[:110]


# ------------------------------------------------------------------------------------------------------------------ disks


@contextmanager
def mounted(point: Path, options: str) -> Iterator[Path | str]:
    """A tmpfs, or why there is none: mounting takes root, and Linux."""
    if shutil.which("mount") is None:
        yield "no mount command"
        return
    point.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], capture_output=True, text=True)
    if done.returncode != 0:
        yield f"mounting a tmpfs is not permitted: {done.stderr.strip()}"
        return
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def remount(point: Path, mode: str) -> bool:
    """Turn a tmpfs "ro" or "rw"; False where the kernel refuses, as it does "ro" while a file is open for writing."""
    return subprocess.run(["mount", "-o", f"remount,{mode}", str(point)], capture_output=True).returncode == 0


def take_inodes(disk: Path, leave: int) -> Path:
    """Create empty files until `leave` inodes are free; returns the directory that holds them."""
    takers = disk / "takers"
    takers.mkdir()
    for number in range(os.statvfs(disk).f_favail - leave):
        (takers / str(number)).touch()
    return takers


def fill(filler: Path, leave: int) -> None:
    """Take space until `leave` bytes are free."""
    size = shutil.disk_usage(filler.parent).free - leave
    with filler.open("xb") as file:
        if size > 0:
            os.posix_fallocate(file.fileno(), 0, size)


# ----------------------------------------------------------------------------------------------------------------- faults


def turns(bench: Bench, count: int) -> Iterator[tuple[int, float, bool, Path]]:
    """(number, its share of count, whether with LoRA, the last checkpoint of the undisturbed training)."""
    for number in range(count):
        lora = number % 2 == 1
        yield number, (number + 0.5) / count, lora, bench.references[lora] / f"checkpoint-{STEPS}"


def full_disk(bench: Bench, count: int, disk: Path, how: str) -> Iterator[Outcome]:
    """Free space from less than one checkpoint to more than the three that there are while one is written and two stay."""
    filler = disk / "filler"
    give_back = partial(filler.unlink, missing_ok=True)
    for number, share, lora, checkpoint in turns(bench, count):
        policy = POLICIES[number // 2 % 3]
        fill(filler, int(3.3 * share * sum(path.stat().st_blocks * 512 for path in checkpoint.rglob("*"))))
        pauses = (how, policy) == ("cogumi", "pause")
        job = replace(bench.job(how, lora, disk), on_full=policy)
        yield bench.endure(job, partial(give_back_when_silent, give_back) if pauses else nothing, give_back)


def give_back_when_silent(give_back: Callable[[], object], running: Running) -> None:
    """A paused training continues when there is space again."""
    while running.exit_status is None:
        if running.next(SILENT_SECONDS) is None:
            give_back()
            return


def no_inodes(bench: Bench, count: int, disk: Path, how: str) -> Iterator[Outcome]:
    """From 2 free inodes to more than three checkpoints take."""
    for number, _, lora, checkpoint in turns(bench, count):
        files = len(list(checkpoint.iterdir())) + 1
        takers = take_inodes(disk, leave=2 + int(number / count * 3.2 * files))
        job = replace(bench.job(how, lora, disk), on_full=POLICIES[number // 2 % 2])
        yield bench.endure(job, heal=partial(shutil.rmtree, takers))


def signals(bench: Bench, count: int, number: int, how: str) -> Iterator[Outcome]:
    """A signal at a uniform moment between the beginning of a save and that of the next."""

    def disturb(running: Running) -> None:
        if running.until("saving", step):
            time.sleep(seconds)
            running.signal(number)

    moment = random.Random(0)
    for turn in range(count):
        lora, step = turn % 2 == 1, moment.choice(SAVES)
        seconds = moment.uniform(0, bench.usual[how, lora].gaps[step])
        yield bench.endure(bench.job(how, lora), disturb)


def changes(bench: Bench, how: str, count: int) -> list[tuple[bool, int, int]]:
    """`count` of all changes of files in all saves, as (lora, step, n).

    Their number is another one each time, as cogumi commits beside the training: the last ones may not come.
    """
    numbers = {key: range(1, bench.usual[how, key[0]].changes[key[1]] + 1) for key in product(bench.references, SAVES)}
    every = [(*key, number) for key, of_save in numbers.items() for number in of_save]
    count = min(count, len(every))
    return [every[(2 * number + 1) * len(every) // (2 * count)] for number in range(count)]


def killed_before_changes(bench: Bench, count: int, how: str) -> Iterator[Outcome]:
    for lora, step, number in changes(bench, how, count):
        yield bench.endure(replace(bench.job(how, lora), event=(step, number, "kill")))


def read_only(bench: Bench, count: int, disk: Path, how: str) -> Iterator[Outcome]:
    """The disk turns read-only during a save. The kernel refuses while a file is open for writing; then another moment."""
    done: list[bool] = []

    def disturb(running: Running) -> None:
        if running.until("asks"):
            done.append(remount(disk, "ro"))
            running.answer()

    met = 0
    for lora, step, number in changes(bench, how, 4 * count):
        if met == count:
            return
        job = replace(bench.job(how, lora, disk), event=(step, number, "ask"))
        done.clear()
        outcome = bench.endure(job, disturb, partial(remount, disk, "rw"))
        if done == [True]:
            met += 1
            yield outcome


def kind_rows(kind: str, wanted: int, work: Callable[..., Iterator[Outcome]], *arguments: Any) -> Iterator[Row]:
    """Yield cogumi's figures beside plain Trainer's for one kind of fault. wanted: how many must have had an effect."""
    collected = {how: list(work(*arguments, how)) for how in HOWS}
    figures = {
        "disturbed": "met", "finished or resumed": "finished", "losses identical": "identical",
        "good checkpoints lost": "lost", "silent divergences": "silent",
    }  # fmt: skip
    for metric, name in figures.items():
        is_bad = name in ("lost", "silent")
        for how, outcomes in collected.items():
            bad = (outcome.note for outcome in outcomes if bool(getattr(outcome, name)) == is_bad and name != "met")
            target = "<= 0" if is_bad else f">= {wanted if name == 'met' else len(outcomes)}"
            target = target if how == "cogumi" else ""
            value, of = sum(getattr(outcome, name) for outcome in outcomes), f"of {len(outcomes)}"
            yield row("faults", kind, f"{metric}, {HOWS[how]}", value, of, target=target, note=next(bad, ""))


def undisturbed_rows(bench: Bench) -> Iterator[Row]:
    """Protection changes no bit of a training."""
    same = sum(bench.usual["cogumi", lora].journal.equals(bench.usual["plain", lora].journal) for lora in (False, True))
    yield row("faults", "no fault", "losses identical, cogumi and plain Trainer", same, "of 2", target=">= 2")


def run(quick: bool = False) -> Iterator[Row]:
    """Run some 800 trainings in a quarter of an hour, or a handful of each kind, and measure the cost of a save."""
    with tempfile.TemporaryDirectory(prefix="cogumi-faults-") as name:
        bench, sizes = Bench(Path(name)), QUICK if quick else FULL
        yield from undisturbed_rows(bench)
        full, kills, terms, inodes = sizes.full, sizes.kills, sizes.terms, sizes.inodes
        with mounted(bench.folder / "disk", f"size={DISK_BYTES},nr_inodes=1024") as disk:
            if isinstance(disk, str):
                yield missing("faults", "disk full, no inodes, read-only disk", disk)
            else:
                yield from kind_rows("disk full", full * 10 // 11, full_disk, bench, full, disk)
                yield from kind_rows("no inodes", inodes * 3 // 4, no_inodes, bench, inodes, disk)
                yield from kind_rows("read-only disk", sizes.read_only, read_only, bench, sizes.read_only, disk)
        case = "SIGKILL at random moments of a save"
        yield from kind_rows(case, kills * 4 // 5, signals, bench, kills, signal.SIGKILL)
        case = "SIGKILL before a change of a file"
        yield from kind_rows(case, sizes.changes * 5 // 7, killed_before_changes, bench, sizes.changes)
        yield from kind_rows("SIGTERM during a save", terms * 4 // 5, signals, bench, terms, signal.SIGTERM)
    yield from attempt("faults", "cost of a save", partial(save_rows, quick))


# -------------------------------------------------------------------------------------------------------- cost of a save


def save_rows(quick: bool) -> Iterator[Row]:
    """Run two trainings that save after every step, each when told to.

    The first saves, which prune nothing, and the last, which is followed by no step, are not counted.
    """
    shape, rounds, warmup = (SMALL, 2, 3) if quick else (LARGE, 8, 3)
    with tempfile.TemporaryDirectory(prefix="cogumi-saves-") as name:
        folder, steps = Path(name), warmup + rounds + 1
        if not quick and shutil.disk_usage(folder).free < COST_BYTES:
            yield row("faults", "cost of a save", "-", None, note=f"skipped: needs {COST_BYTES >> 30} GiB in TMPDIR")
            return
        running = {}
        for how in ("plain", "cogumi"):
            papers = folder / f"{how}-journal", folder / f"{how}-words"
            job = Job(how, False, folder / how, *papers, each_save_asks=True, shape=shape, steps=steps, save_every=1)
            running[how] = Running(job)
        saves: dict[str, list[tuple[float, float]]] = {how: [] for how in running}
        for turn in range(1, steps + 1):
            # Each comes first in half of the turns: what the other one leaves of the machine's memory counts.
            for how, training in list(running.items())[:: 1 if turn % 2 else -1]:
                saves[how].append(one_save(training, folder / how, turn, steps))
        size = sum(path.stat().st_size for path in (folder / "cogumi" / f"checkpoint-{steps}").iterdir())
    case, kept = f"save of {size / 1e9:.2f} GB", slice(warmup, -1)
    held = {how: [save[0] for save in each[kept]] for how, each in saves.items()}
    # A quick run's save is too small to judge: what does not grow with it is most of it.
    metric, target = "training held, cogumi / plain", "" if quick else "<= 1.15"
    yield ratio_row("faults", case, metric, held, "cogumi", "plain", unit="", target=target)
    for how, seconds in held.items():
        yield values_row("faults", case, f"training held, {how}", seconds, "s")
    durable = [save[1] for save in saves["cogumi"][kept]]
    yield values_row("faults", case, "until on the disk, cogumi", durable, "s")


def one_save(training: Running, directory: Path, step: int, last: int) -> tuple[float, float]:
    """Let one save and the next step happen; return the seconds that the training was held, and until all was on the disk."""

    def await_message(what: str, of_step: int) -> float:
        if not training.until(what, of_step):
            raise RuntimeError(f"the training in {directory} ended before {what} of step {of_step}")
        return float(training.messages[-1][3])

    if step == 1:
        await_message("saving", step)
    final, protected = directory / f"checkpoint-{step}", directory.name == "cogumi"
    touch_memory(directory)
    training.answer()
    began = time.monotonic()
    while protected and not (final / MANIFEST_NAME).exists():
        time.sleep(0.001)
        if time.monotonic() - began > HUNG_SECONDS:
            raise RuntimeError(f"no {final} after {HUNG_SECONDS:.0f} s")
    durable = time.monotonic() - began
    held = await_message("saved", step)
    for path in () if protected else (*final.iterdir(), final):
        sync_path(path)  # in its own turn
    if step == last:
        training.finish()
    else:
        held += await_message("saving", step + 1)
    return held, durable


def touch_memory(directory: Path) -> None:
    """Leave free pages that the machine has: a virtual machine's host takes unused ones back, and getting them takes long."""
    path, block = directory.with_name("touched"), bytes(1 << 24)
    with path.open("wb") as file:
        for _ in range(TOUCHED_BYTES // len(block)):
            file.write(block)
    path.unlink()
