"""A few faults of every kind: what `make faults` does at length. And that it sees what plain Trainer loses."""

import math
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_checkpoints_protect import flip

from benchmarks import faults, harness
from benchmarks.faults import QUICK, Bench, Outcome, mounted
from benchmarks.faults_training import SAVES, is_good, read_journal, words_of

pytestmark = [
    pytest.mark.slow("of the benchmarks, not of the package"),
    pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch loaded"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", f"size={faults.DISK_BYTES},nr_inodes=1024") as point:
        if isinstance(point, str):
            pytest.skip(point)
        yield point


def all_good(outcomes: list[Outcome]) -> bool:
    return all(
        outcome.finished and outcome.identical and not outcome.silent and not outcome.lost for outcome in outcomes
    )


def write_journal(path: Path, whole: Path, until: int) -> None:
    """A training's journal up to a step, as if it had been killed then."""
    lines = [line for line in whole.read_text().splitlines() if not line.startswith("end")]
    path.write_text("".join(f"{line}\n" for line in lines if int(line.split()[1]) <= until))


# ---------------------------------------------------------------------------------------------------------- cogumi's


def test_a_protected_training_is_the_same_training(bench: Bench) -> None:
    assert harness.failed(faults.undisturbed_rows(bench)) == []
    (plain, lora) = (bench.usual["cogumi", lora].journal for lora in (False, True))
    assert len(plain.losses) == len(lora.losses) == faults.STEPS
    assert plain.good == lora.good == set(SAVES)
    assert plain.losses != lora.losses


@pytest.mark.parametrize("kind", ["full_disk", "no_inodes", "read_only"])
def test_disks_that_fail(kind: str, bench: Bench, disk: Path) -> None:
    count = {"full_disk": QUICK.full, "no_inodes": QUICK.inodes, "read_only": QUICK.read_only}[kind]
    outcomes = list(getattr(faults, kind)(bench, count, disk, "cogumi"))
    assert len(outcomes) == count
    assert sum(outcome.met for outcome in outcomes) >= count // 2
    assert all_good(outcomes), outcomes


def test_kills_and_signals(bench: Bench) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        outcomes = list(faults.signals(bench, QUICK.kills, number, "cogumi"))
        assert any(outcome.met for outcome in outcomes)
        assert all_good(outcomes), outcomes


def test_kills_before_changes_of_files(bench: Bench) -> None:
    outcomes = list(faults.killed_before_changes(bench, QUICK.changes, "cogumi"))
    assert any(outcome.met for outcome in outcomes)
    assert all_good(outcomes), outcomes


# ------------------------------------------------------------------------------------------- the harness sees losses


def test_plain_trainer_s_losses_are_seen(bench: Bench, disk: Path) -> None:
    """As measured before: a full disk leaves a checkpoint that cannot be resumed from."""
    full = list(faults.full_disk(bench, 4, disk, "plain"))
    assert not any(each.finished for each in full[:3])
    assert all(each.note for each in full[:3])
    kills = list(faults.killed_before_changes(bench, 4, "plain"))
    assert not all(kill.finished for kill in kills)


def test_a_silent_divergence_is_seen(bench: Bench) -> None:
    """Plain Trainer resumes without its optimizer, and says nothing; without the weights it does."""
    collected = {}
    for name in ("optimizer.pt", "model.safetensors"):
        job, base = bench.job("plain", False), bench.bases["plain", False]
        shutil.copytree(base.directory, job.directory)
        (job.directory / "checkpoint-6" / name).unlink()
        write_journal(job.journal, base.journal, 6)
        collected[name] = bench.endure(job)
    silent, loud = collected.values()
    assert (silent.finished, silent.identical, silent.silent) == (True, False, True)
    assert (loud.finished, loud.identical, loud.silent, loud.lost) == (False, False, False, 1)
    assert "Can't find a valid checkpoint" in loud.note


def test_a_lost_checkpoint_is_seen(bench: Bench) -> None:
    job = bench.job("cogumi", False)
    shutil.copytree(bench.bases["cogumi", False].directory, job.directory)
    write_journal(job.journal, bench.bases["cogumi", False].journal, 6)
    assert bench.lost(job) == 0
    for step, lost in {6: 1, 4: 2, 2: 3}.items():
        flip(job.directory / f"checkpoint-{step}" / "optimizer.pt")
        assert not is_good(job.directory, bench.references[False], step)
        assert bench.lost(job) == lost


def test_one_bit_of_one_loss_counts(tmp_path: Path) -> None:
    text = "".join(f"loss {step} {(0.1 * step).hex()}\n" for step in range(1, 4)) + "good 2\nend abc\n"
    bit = text.replace((0.1).hex(), math.nextafter(0.1, 1).hex())
    for name, other in {"same": text, "bit": bit}.items():
        (tmp_path / name).write_text(other)
    (tmp_path / "twice").write_text(f"loss 2 {(0.2).hex()}\n" + text)
    (tmp_path / "end").write_text(text.replace("abc", "abd"))
    (tmp_path / "short").write_text(text.replace(f"loss 3 {(0.1 * 3).hex()}\n", ""))
    (tmp_path / "differs once").write_text(f"loss 2 {(0.25).hex()}\n" + text)
    same = read_journal(tmp_path / "same")
    assert (same.good, same.end, len(same.losses)) == ({2}, "abc", 3)
    equal = {path.name: read_journal(path).equals(same) for path in tmp_path.iterdir()}
    assert equal == {"same": True, "bit": False, "twice": True, "end": False, "short": False, "differs once": False}


def test_words_are_compared_without_numbers_and_places(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("saved /tmp/a/checkpoint-6 in 0.5 s\n\n")
    (tmp_path / "b").write_text("saved /tmp/b/checkpoint-12 in 1.25 s\n")
    (tmp_path / "c").write_text("saved /tmp/b/checkpoint-12 in 1.25 s\nrejected it\n")
    assert words_of(tmp_path / "a") == words_of(tmp_path / "b") < words_of(tmp_path / "c")
    assert words_of(tmp_path / "none") == set()


def test_figures_stand_beside_each_other_and_only_cogumi_s_are_judged() -> None:
    good = Outcome(True, True, True, False, 0, "")
    silent = replace(good, identical=False, silent=True, lost=2, note="why")
    found = {"cogumi": [good, good], "plain": [good, silent]}
    rows = list(faults.kind_rows("kind", 2, lambda how: iter(found[how])))
    values = {row["metric"]: (row["value"], row["target"], row["ok"], row["note"]) for row in rows}
    assert len(rows) == 10
    assert harness.failed(rows) == []
    assert values["losses identical, cogumi"] == (2, ">= 2", True, "")
    assert values["losses identical, plain Trainer"] == (1, "", None, "why")
    assert values["good checkpoints lost, plain Trainer"] == (2, "", None, "why")
    found["cogumi"] = [silent, replace(good, met=False)]
    rows = list(faults.kind_rows("kind", 2, lambda how: iter(found[how])))
    assert len(harness.failed(rows)) == 4  # disturbed, identical, lost, silent


@pytest.mark.sweep  # two processes that import torch
def test_a_save_is_timed() -> None:
    rows = {row["metric"]: row for row in faults.save_rows(quick=True)}
    assert len(rows) == 4
    assert all(row["value"] > 0 and row["ok"] is None for row in rows.values())
