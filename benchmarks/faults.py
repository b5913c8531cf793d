"""Trainings whose disk fills up or that are killed, then started again. Damage is in tests/test_checkpoints_verify.py.

The same small training runs with plain Trainer and under cogumi.protect. After the fault it is started again as a user would
start it, and its losses are compared bit for bit with those of an undisturbed training.
"""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import faults_costs, harness
from benchmarks.faults_disk import fill, mounted, remount, take_inodes
from benchmarks.faults_training import (
    SAVES,
    STEPS,
    Job,
    Journal,
    Running,
    is_good,
    read_journal,
    start,
    words_of,
)  # fmt: skip
from benchmarks.harness import Row, attempt, missing, row

HOWS = {"cogumi": "cogumi", "plain": "plain Trainer"}
POLICIES = ("continue", "stop", "pause")
DISK_BYTES = 64 << 20
# A pausing training has waited long enough: a step and a save take some 50 ms.
SILENT_SECONDS = 1.0


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
        running = start(job)
        if running.finish() != 0:
            raise RuntimeError(f"an undisturbed training failed: {last_line(job.words)}")
        return running

    def measure(self, how: str, lora: bool) -> Usual:
        """Also leaves a training that lacks its last save, for `damaged`."""
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
        damaged: int | None = None,
    ) -> Outcome:
        """Disturb a training, heal what it ran on, and start it again if it has not come to its end. damaged: a step
        whose checkpoint was damaged on purpose, and is no loss."""
        usual = self.usual[job.how, job.lora]
        running = start(job)
        disturb(running)
        status, hung = running.finish(), running.hung
        heal()
        met = status != 0 or not words_of(job.words) <= usual.words
        lost, why = self.lost(job, damaged), self.ending(job, status)
        if read_journal(job.journal).end is None:
            job = replace(job, event=None, words=self.papers()[1])
            running = start(job)
            why = f"{why}; again: {self.ending(job, running.finish())}"
            hung, lost, met = hung or running.hung, max(lost, self.lost(job, damaged)), True
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

    def lost(self, job: Job, damaged: int | None) -> int:
        """Checkpoints that were good, are not, and have no newer good one."""
        assert job.reference is not None
        newest = max((step for step in SAVES if is_good(job.directory, job.reference, step)), default=0)
        return sum(step > newest for step in read_journal(job.journal).good - {damaged})


def last_line(words: Path) -> str:
    return harness.last_line(words.read_text() if words.exists() else "")[:110]


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


def evenly(every: list[Any], count: int) -> list[Any]:
    count = min(count, len(every))
    return [every[(2 * number + 1) * len(every) // (2 * count)] for number in range(count)]


def changes(bench: Bench, how: str, count: int) -> list[tuple[bool, int, int]]:
    """`count` of all changes of files in all saves, as (lora, step, n).

    Their number is another one each time, as cogumi commits beside the training: the last ones may not come.
    """
    numbers = {key: range(1, bench.usual[how, key[0]].changes[key[1]] + 1) for key in product(bench.references, SAVES)}
    return evenly([(*key, number) for key, every in numbers.items() for number in every], count)


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
        yield from fault_rows(Bench(Path(name)), QUICK if quick else FULL)
    yield from attempt("faults", "cost of a save", partial(faults_costs.save_rows, quick))


def fault_rows(bench: Bench, sizes: Sizes) -> Iterator[Row]:
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
