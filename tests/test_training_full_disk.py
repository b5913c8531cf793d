"""The end of a run on a disk that is full: the adapter, the merged model, and what `cogumi.on_full` does about them."""

import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_llama
from disk_mounts import Mount, fill
from typer.testing import CliRunner

import cogumi
from cogumi.checkpoints import mirror as mirror_module
from cogumi.cli.app import app
from cogumi.core.disk_space import space_of
from cogumi.core.errors import DiskFull, UsageError
from cogumi.core.run_directory import read_json
from cogumi.telemetry import mirrored_run, trackers
from cogumi.telemetry.recorder import record_run
from cogumi.telemetry.status import format_screen, status_of
from cogumi.training import finish
from cogumi.training import run as module

Config = dict[str, Any]
LEFT = 400_000  # for the files that say how the run went; the merged model is larger


@pytest.fixture
def disk(mount: Mount) -> Path:
    return mount(options="size=16m", name="disk")


@pytest.fixture
def filling(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Path]:
    """Has somebody fill the disk, but for so many bytes, when a function of a run has returned."""

    def fill_after(name: str, left: int) -> Path:
        original, filler = getattr(module, name), disk / "filler"

        def filled(*given: Any) -> Any:
            done = original(*given)
            if name == "fit" or given[4]:  # after the training, and not before it
                filler.write_bytes(bytes(max(0, space_of(disk).free - left)))
            return done

        monkeypatch.setattr(module, name, filled)
        return filler

    return fill_after


def test_a_merge_that_does_not_fit_is_said_with_the_command_that_merges_later(
    sft: Config, disk: Path, tmp_path: Path, filling: Callable[[str, int], Path]
) -> None:
    filling("write_samples", LEFT)
    result = cogumi.train(sft, cogumi__run_dir=str(disk / "run"), cogumi__merge=True)
    (failed,) = [check for check in result.verdict.checks if not check.passed]
    assert failed.name == "merge"
    assert "\n" not in failed.figure
    for word in (f"{disk / 'run' / 'merged'} needs ", f"{disk / 'run'} has ", "free (No space left on device); free "):
        assert word in failed.figure
    assert result.merged is None
    assert not list((disk / "run").glob("merged*"))
    assert read_json(disk / "run" / "status.json")["state"] == "finished, checks failed"
    command = shlex.split(failed.fix.partition("run: cogumi ")[2])
    assert command[:2] == ["merge", str(result.adapter)]
    later = CliRunner().invoke(app, [*command[:2], str(tmp_path / "merged")])
    assert later.exit_code == 0, later.output
    assert (tmp_path / "merged" / "cogumi-merge.json").is_file()
    again = CliRunner().invoke(app, [*command[:2], str(disk / "merged")])
    assert again.exit_code != 0
    assert isinstance(again.exception, UsageError), "which the command line prints as one line, with exit status 2"


def test_a_merge_waits_for_space_where_on_full_says_so(
    sft: Config, disk: Path, filling: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    filler = filling("write_samples", LEFT)
    states: list[Any] = []

    def sleep(seconds: float) -> None:
        states.append(read_json(disk / "run" / "status.json"))
        if len(states) == 3:
            filler.unlink()

    monkeypatch.setattr(finish.time, "sleep", sleep)
    result = cogumi.train(sft, cogumi__run_dir=str(disk / "run"), cogumi__merge=True, cogumi__on_full="pause")
    assert result.passed, str(result.verdict)
    assert result.merged is not None
    assert [(state["stage"], state["reason"].partition(": ")[0]) for state in states] == [
        ("merge", "merge waits for space")
    ] * 3
    assert caplog.text.count("merge waits: ") == 1


def test_a_mirror_that_takes_nothing_is_said_by_the_status(
    sft: Config, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (disk / "filler").write_bytes(bytes(space_of(disk).free - 16_384))
    monkeypatch.setattr(mirror_module, "TROUBLE_SECONDS", 0.5)
    monkeypatch.setattr(mirror_module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(mirrored_run, "ADAPTER_SECONDS", 0.5)
    monkeypatch.setattr(mirrored_run, "END_SECONDS", 0.5)
    train = sft["train"] | {"save_strategy": "steps", "save_steps": 2}
    result = cogumi.train({**sft, "train": train}, cogumi__mirror=str(disk / "mirror"))
    assert [check.name for check in result.verdict.checks if not check.passed] == ["mirrored adapter"]
    assert "mirroring checkpoint-" in caplog.text
    stalled = "resumability has stalled before the first checkpoint: "
    shown = format_screen(status_of(result.run_dir))
    assert stalled in shown
    assert "No space left on device" in shown.partition(stalled)[2].partition("\n")[0]


def test_an_adapter_that_does_not_fit_is_one_line_and_the_same_words_go_on(
    sft: Config, disk: Path, filling: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**sft, "train": sft["train"] | {"save_strategy": "steps", "save_steps": 3}}
    filler = filling("fit", 0)
    with pytest.raises(DiskFull, match=r"adapter: it does not fit on the disk of .*free space there") as caught:
        cogumi.train(config, cogumi__run_dir=str(disk / "run"))
    assert "\n" not in str(caught.value)
    assert not (disk / "run" / ".adapter").exists()
    filler.unlink()
    monkeypatch.undo()
    result = cogumi.train(config, cogumi__run_dir=str(disk / "run"))
    assert result.passed, str(result.verdict)
    assert "nothing is left to train" in (disk / "run" / "run.log").read_text()


def test_a_training_continues_where_tensorboards_file_does_not_fit(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import Trainer, TrainerCallback, TrainingArguments

    filler, run = disk / "filler", disk / "run"

    class Filling(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:  # what is left of the file's last block takes some rows more
                filler.write_bytes(bytes(space_of(disk).free))
            if state.global_step == 190:
                filler.unlink()

    model = tiny_llama(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=16)
    args = TrainingArguments(output_dir=str(run), max_steps=200, logging_steps=1, save_strategy="no", use_cpu=True,
                             report_to="tensorboard", disable_tqdm=True)  # fmt: skip
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[Filling()])
    trackers.set_tensorboard_directory(run, trainer)
    trainer.train()
    trackers.close_tensorboard(trainer)
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == list(range(1, 201))
    assert caplog.text.count("TensorBoard's file does not fit on the disk; training continues without it") == 1
    steps = set()
    for path in (run / "tensorboard").iterdir():
        found = EventAccumulator(str(path))
        found.Reload()
        steps |= {event.step for event in found.Scalars("train/loss")} if found.Tags()["scalars"] else set()
    assert {1, 2, 3, 191, 200} <= steps


def test_a_log_that_finds_no_room_is_told_once_and_goes_on_when_there_is_some(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, run_dir = logging.getLogger("cogumi"), disk / "run"
    run_dir.mkdir()
    with record_run(run_dir):
        filler = fill(disk, 1.0)
        for number in range(3):
            log.info("line %d: %s", number, "x" * 10_000)
        filler.unlink()
        log.info("there is room again")
    said = capsys.readouterr().err
    assert said.count("run.log cannot be written: No space left on device\n") == 1
    assert "Logging error" not in said
    assert "there is room again" in (run_dir / "run.log").read_text()


def test_a_run_that_ends_on_a_full_disk_ends_with_its_own_error(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not with that of a log whose last lines find no room."""
    log, run_dir = logging.getLogger("cogumi"), disk / "run"
    run_dir.mkdir()

    def fail() -> None:
        with record_run(run_dir):
            fill(disk, 1.0)
            log.info("x" * 10_000)
            raise UsageError("what went wrong")

    with pytest.raises(UsageError, match="what went wrong"):
        fail()
    assert capsys.readouterr().err.count("run.log cannot be written") == 1
