"""Checkpoints that real trainers wrote, damaged in every way we know: what is rejected, why, and what cannot be seen."""

import io
import logging
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_checkpoints_protect import make
from test_checkpoints_resume import lora_trainer

from cogumi.checkpoints.manifest import MANIFEST_NAME, CheckpointDamaged, Manifest, read_manifest, seal, write_manifest
from cogumi.checkpoints.verify import CheckpointState, inspect, inspect_all, last_good_checkpoint
from cogumi.core.durability import sha256_file
from cogumi.core.errors import UsageError

KINDS = ("full", "lora", "sharded")
PARTS = ["trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"]  # that every trainer writes


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], object]:
    return lambda path, other: path.write_bytes(change(path.read_bytes()))


def flip(data: bytes, at: int, bits: int = 0xFF) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


def middle(data: bytes) -> int:
    """The middle of a file; in a zip file, the middle of the largest record: the bytes between records are nobody's."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return len(data) // 2
    record = max(zipfile.ZipFile(io.BytesIO(data)).infolist(), key=lambda record: record.file_size)
    name, extra = struct.unpack_from("<HH", data, record.header_offset + 26)
    return record.header_offset + 30 + name + extra + record.file_size // 2


# What is done to one file; `other` is the file of the same name in another step's checkpoint.
DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "deleted": lambda path, other: path.unlink(), "emptied": rewrite(lambda data: b""),
    "one byte short": rewrite(lambda data: data[:-1]), "half": rewrite(lambda data: data[: len(data) // 2]),
    "first byte flipped": rewrite(lambda data: flip(data, 0)),
    "middle byte flipped": rewrite(lambda data: flip(data, middle(data))),
    "last byte flipped": rewrite(lambda data: flip(data, -1)),
    "zeros at the end": rewrite(lambda data: data + bytes(4096)),
    "nothing but zeros": rewrite(lambda data: bytes(len(data))),
    "of another step": lambda path, other: path.write_bytes(other.read_bytes()),
}  # fmt: skip


def train_full(path: Path, **save: Any) -> None:
    trainer, _ = make(path, max_steps=4, save_total_limit=None)
    trainer.model.save_pretrained = partial(trainer.model.save_pretrained, **save)
    trainer.train()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, sources: list[str]) -> dict[str, Path]:
    """One run a kind, each with checkpoint-2 and checkpoint-4 as the trainer wrote them."""
    home = tmp_path_factory.mktemp("runs")
    train_full(home / "full")
    train_full(home / "sharded", max_shard_size="12KB")
    steps = {"max_steps": 4, "save_steps": 2, "max_length": 32}
    lora_trainer("SFTTrainer", "SFTConfig", tiny_model, home / "lora", {"text": sources[:16]}, **steps).train()
    return {kind: home / kind for kind in KINDS}


@pytest.fixture(scope="module")
def runs_of_cogumi(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same with manifests."""
    home = tmp_path_factory.mktemp("runs-of-cogumi")
    for kind, path in runs.items():
        shutil.copytree(path, home / kind)
        for step in (2, 4):
            write_manifest(home / kind / f"checkpoint-{step}", step)
    return {kind: home / kind for kind in KINDS}


Copy = Callable[..., Path]


@pytest.fixture
def copy(runs: dict[str, Path], runs_of_cogumi: dict[str, Path], tmp_path: Path) -> Iterator[Copy]:
    """A copy of a run's directory, with manifests or without, in the place of the one before; removed at the end."""

    def copy_run(kind: str, manifest: bool) -> Path:
        shutil.rmtree(tmp_path / kind, ignore_errors=True)
        return shutil.copytree((runs_of_cogumi if manifest else runs)[kind], tmp_path / kind)

    yield copy_run
    shutil.rmtree(tmp_path)


def rejected(finding: CheckpointState, *words: str) -> None:
    assert finding.state == "rejected", finding
    assert finding.reason
    assert "\n" not in finding.reason
    for word in words:
        assert word in finding.reason, finding.reason


def files_below(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


# ---- what the trainers wrote ----


@pytest.mark.parametrize("kind", KINDS)
def test_an_intact_checkpoint_is_verified_with_a_manifest_and_unverified_without(copy: Copy, kind: str) -> None:
    home = copy(kind, manifest=False)
    newest = home / "checkpoint-4"
    finding = inspect(newest)
    assert (finding.path, finding.step, finding.state) == (newest, 4, "unverified")
    assert finding.reason == "written without cogumi: not verified"
    assert finding.bytes == sum(path.stat().st_size for path in newest.iterdir())
    write_manifest(newest, 4)
    weight = finding.bytes + (newest / MANIFEST_NAME).stat().st_size
    assert inspect(newest) == CheckpointState(newest, 4, "verified", "", weight)


# ---- the corruptions ----


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_manifest_every_corruption_is_rejected(copy: Copy, runs_of_cogumi: dict[str, Path], kind: str) -> None:
    old, new = runs_of_cogumi[kind] / "checkpoint-2", runs_of_cogumi[kind] / "checkpoint-4"
    names = files_below(new)
    assert {"training_args.bin", MANIFEST_NAME, *PARTS} < names == files_below(old)
    for name in sorted(names):
        is_same = (old / name).read_bytes() == (new / name).read_bytes()
        for damage in DAMAGE:
            if (damage == "of another step" and is_same) or (damage, name) == ("deleted", MANIFEST_NAME):
                continue
            home = copy(kind, manifest=True)
            DAMAGE[damage](home / "checkpoint-4" / name, home / "checkpoint-2" / name)
            rejected(inspect(home / "checkpoint-4"), name)
            assert last_good_checkpoint(home) == home / "checkpoint-2", (damage, name)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_manifest_missing_parts_or_cut_off_weights_are_rejected(copy: Copy, kind: str) -> None:
    weights = [path.name for path in (copy(kind, manifest=False) / "checkpoint-4").glob("*.safetensors")]
    changes = [("deleted", name) for name in PARTS] + [("of another step", PARTS[0]), ("emptied", PARTS[0])]
    for damage in ("emptied", "one byte short", "half", "nothing but zeros", "zeros at the end"):
        changes += [(damage, name) for name in weights]
    for damage, name in changes:
        home = copy(kind, manifest=False)
        DAMAGE[damage](home / "checkpoint-4" / name, home / "checkpoint-2" / name)
        rejected(inspect(home / "checkpoint-4"), name)
        assert last_good_checkpoint(home) == home / "checkpoint-2", (damage, name)
    for name in weights:
        (home / "checkpoint-4" / name).unlink()
    rejected(inspect(home / "checkpoint-4"), "no weights")


# ---- the manifest itself ----


def test_no_byte_of_a_manifest_can_change_unseen(copy: Copy) -> None:
    newest = copy("full", manifest=True) / "checkpoint-4"
    data = (newest / MANIFEST_NAME).read_bytes()
    for at in range(len(data)):
        (newest / MANIFEST_NAME).write_bytes(flip(data, at, bits=0x01))
        with pytest.raises(CheckpointDamaged):
            read_manifest(newest)


NO_FILES = {"format": 1, "step": 2, "files": {}}


@pytest.mark.parametrize(
    "content",
    [
        "[]", "null", "3", '{"format": 2}', '{"format": 1}', '{"format": 1, "files": []}', "[" * 200_000,
        {"format": 1, "step": 2},
        *(NO_FILES | {"files": files} for files in (
            ["optimizer.pt"], {"optimizer.pt": 7}, {"optimizer.pt": {"size": 7}}, {"optimizer.pt": {"size": "7", "sha256": "0"}},
        )),
        {"format": 1, "files": {}}, NO_FILES | {"step": "2"},
    ],
    ids=lambda content: str(content)[:60],
)  # fmt: skip
def test_what_is_no_manifest_is_rejected_in_one_line(tmp_path: Path, content: Any) -> None:
    """Those that are no text are sealed."""
    directory = tmp_path / "checkpoint-2"
    directory.mkdir()
    (directory / MANIFEST_NAME).write_text(content if isinstance(content, str) else seal(content))
    rejected(inspect(directory), "format 2" if content == '{"format": 2}' else "")


def test_a_manifest_lists_every_file_with_its_size_and_hash(copy: Copy) -> None:
    newest = copy("lora", manifest=False) / "checkpoint-4"
    (newest / "reference").mkdir()
    (newest / "reference" / "notes.txt").write_text("kept")
    write_manifest(newest, 4)
    manifest = read_manifest(newest)
    assert isinstance(manifest, Manifest)
    assert manifest.step == 4
    assert set(manifest.files) == files_below(newest) - {MANIFEST_NAME}
    assert "reference/notes.txt" in manifest.files
    for name, entry in manifest.files.items():
        assert (entry.size, entry.sha256) == ((newest / name).stat().st_size, sha256_file(newest / name))
    assert manifest.bytes == sum(entry.size for entry in manifest.files.values())
    (newest / "reference" / "notes.txt").write_text("lost")
    rejected(inspect(newest), "reference/notes.txt")


def test_a_manifest_written_again_replaces_the_first_and_leaves_nothing_else(copy: Copy) -> None:
    newest = copy("full", manifest=True) / "checkpoint-4"
    (newest / f".{MANIFEST_NAME}.4711").write_text("what a killed process left")
    write_manifest(newest, 4)
    assert inspect(newest).state == "verified"
    manifest = read_manifest(newest)
    assert manifest is not None
    assert {path.name for path in newest.iterdir() if path.name.startswith(".")} == {f".{MANIFEST_NAME}.4711"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "scaler.pt", "second/adapter_model.safetensors"])
def test_a_file_that_a_resume_would_load_and_the_manifest_does_not_list_is_rejected(copy: Copy, name: str) -> None:
    newest = copy("full", manifest=True) / "checkpoint-4"
    (newest / name).parent.mkdir(exist_ok=True)
    shutil.copy(newest / "optimizer.pt", newest / name)
    rejected(inspect(newest), name, "added")


def test_a_note_beside_the_files_is_nobodys_business(copy: Copy) -> None:
    newest = copy("full", manifest=True) / "checkpoint-4"
    (newest / "KEEP").touch()
    (newest / "notes.md").write_text("the good one\n")
    assert inspect(newest).state == "verified"


@pytest.mark.parametrize("manifest", [True, False])
def test_a_directory_or_a_dangling_link_in_place_of_a_file_is_rejected(copy: Copy, manifest: bool) -> None:
    home = copy("full", manifest)
    for step, replace in ((2, Path.mkdir), (4, lambda path: path.symlink_to("nowhere"))):
        optimizer = home / f"checkpoint-{step}" / "optimizer.pt"
        optimizer.unlink()
        replace(optimizer)
        rejected(inspect(home / f"checkpoint-{step}"), "optimizer.pt is missing")


# ---- incomplete checkpoints ----


@pytest.mark.parametrize("manifest", [True, False])
def test_a_checkpoint_of_weights_alone_is_rejected_and_the_reason_says_so(tmp_path: Path, manifest: bool) -> None:
    make(tmp_path, max_steps=1, save_steps=1, save_only_model=True)[0].train()
    if manifest:
        write_manifest(tmp_path / "checkpoint-1", 1)
    rejected(inspect(tmp_path / "checkpoint-1"), "save_only_model", "cannot resume")
    assert last_good_checkpoint(tmp_path) is None


def test_a_save_that_was_killed_is_rejected_at_each_file_and_said_to_be_unfinished(copy: Copy) -> None:
    home = copy("full", manifest=False)
    for name in ("trainer_state.json", "rng_state.pth", "scheduler.pt", "optimizer.pt", "model.safetensors"):
        (home / "checkpoint-4" / name).unlink()
        rejected(inspect(home / "checkpoint-4"), "trainer_state.json", "did not finish")
    (home / "checkpoint-3").mkdir()
    rejected(inspect(home / "checkpoint-3"), "did not finish")


# ---- which one a run resumes from ----


def test_the_newest_good_one_is_taken_and_each_rejected_one_named(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    home = copy("full", manifest=True)
    shutil.copytree(home / "checkpoint-4", home / "checkpoint-10")
    shutil.copytree(home / "checkpoint-4", home / "checkpoint-9")
    (home / "checkpoint-4" / "optimizer.pt").unlink()
    with caplog.at_level(logging.INFO, logger="cogumi"):
        assert last_good_checkpoint(home) == home / "checkpoint-2"
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.partition(" is ")[0] for line in lines] == [str(home / f"checkpoint-{step}") for step in (10, 9, 4)]
    assert "step 4, not 10" in lines[0]
    assert "step 4, not 9" in lines[1]
    assert "optimizer.pt is missing" in lines[2]


def test_a_checkpoint_that_is_accepted_unverified_is_said_to_be(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    home = copy("lora", manifest=False)
    assert last_good_checkpoint(str(home)) == home / "checkpoint-4"
    assert [record.getMessage() for record in caplog.records] == [
        f"{home}/checkpoint-4 is accepted unverified: written without cogumi: not verified"
    ]


def test_a_verified_newest_one_needs_no_word_but_none_at_all_is_said(
    copy: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    home = copy("full", manifest=True)
    assert last_good_checkpoint(home) == home / "checkpoint-4"
    assert not caplog.records
    for step in (2, 4):
        (home / f"checkpoint-{step}" / "scheduler.pt").write_bytes(b"")
    assert last_good_checkpoint(home) is None
    assert caplog.records[-1].getMessage() == f"{home}: none of 2 checkpoints can be resumed from"


def test_the_order_is_that_of_the_steps_and_older_ones_are_not_read_before_they_are_asked_for(copy: Copy) -> None:
    home = copy("full", manifest=True)
    shutil.copytree(home / "checkpoint-4", home / "checkpoint-10")
    actual = inspect_all(home)
    assert next(actual).step == 10
    shutil.rmtree(home / "checkpoint-4")  # pruned meanwhile
    # The one that is gone is left out: it was not read before it was asked for.
    assert [(finding.step, finding.state) for finding in actual] == [(2, "verified")]


def test_odd_names_links_and_files_are_left_alone(copy: Copy) -> None:
    home = copy("full", manifest=True)
    newest = home / "checkpoint-4"
    odd = ("keep-this", "5.bak", "", "-8")
    for name in (*(f"checkpoint-{end}" for end in odd), ".cogumi-saving", "xcheckpoint-7"):
        shutil.copytree(newest, home / name)
    (home / ".cogumi-saving" / "checkpoint-8").mkdir()
    (home / "checkpoint-9").write_text("a file")
    (home / "checkpoint-11").symlink_to(newest, target_is_directory=True)
    (home / "checkpoint-١٢").mkdir()  # digits, but not Trainer's
    before = {path: path.lstat().st_mtime_ns for path in home.rglob("*")}
    assert [finding.path.name for finding in inspect_all(home)] == ["checkpoint-4", "checkpoint-2"]
    assert last_good_checkpoint(home) == newest
    assert before == {path: path.lstat().st_mtime_ns for path in home.rglob("*")}


def test_an_empty_directory_or_none_at_all_gives_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert last_good_checkpoint(tmp_path) is None
    assert last_good_checkpoint(tmp_path / "not-there-yet") is None
    assert list(inspect_all(tmp_path / "not-there-yet")) == []
    assert not caplog.records


def test_directories_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be listed"):
        last_good_checkpoint(tmp_path / "file")
    with pytest.raises(UsageError, match="checkpoint-STEP"):
        inspect(tmp_path)
    (tmp_path / "checkpoint-1").touch()
    rejected(inspect(tmp_path / "checkpoint-1"), "Not a directory")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here whose reading fails")
def test_a_file_that_cannot_be_read_is_a_reason(copy: Copy) -> None:
    """Nothing is mapped at address 0, so the first read gives EIO, as a bad sector does."""
    newest = copy("full", manifest=False) / "checkpoint-4"
    (newest / "trainer_state.json").unlink()
    (newest / "trainer_state.json").symlink_to("/proc/self/mem")
    rejected(inspect(newest), "checkpoint-4 cannot be read (Input/output error)")
