"""Trackers of a run: one run there for one here, and a broken one ends nothing.

W&B (0.31, offline) and trackio (0.43) are not in the lane: their tests run where both are installed, and were run by hand so.
"""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from qlora_runs import Config, short_sft
from test_entry import wandb  # noqa: F401  a stand-in of W&B

import cogumi
from cogumi.core.errors import RefusedAtSetup
from cogumi.core.run_directory import DECISIONS, read_json, read_section
from cogumi.notebook.panel import write_report
from cogumi.telemetry import trackers
from cogumi.telemetry.recorder import set_status
from cogumi.telemetry.status import format_screen, status_of

URL = "https://example.org/someone/runs/abc"


@pytest.fixture
def sft(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Config:
    return short_sft(tiny_model, code_parquet, tmp_path / "run", rows=15)


def test_a_tracker_that_raises_warns_once_and_the_training_continues(
    sft: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    add_scalar, rows = SummaryWriter.add_scalar, list[int]()

    def failing(self: Any, name: str, value: float, step: int, *more: Any) -> None:
        rows.append(step)
        if step >= 2:
            raise RuntimeError("the server said\nno")
        add_scalar(self, name, value, step, *more)

    monkeypatch.setattr(SummaryWriter, "add_scalar", failing)
    result = cogumi.train(sft, train__report_to="tensorboard", cogumi__merge=False)
    assert len(result.series("loss")) == 3
    assert rows.count(2) == 1
    log = (result.run_dir / "run.log").read_text()
    assert log.count("TensorBoard: the server said no; training continues without it") == 1


@pytest.mark.parametrize("outcome", ["passed", "checks failed", "raised"])
def test_the_trackers_end_as_the_run_does(outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(trackers, "UNFINISHED", [("W&B", lambda exit_code: codes.append(exit_code))] * 2)
    try:
        with trackers.finish_trackers(tmp_path):
            if outcome == "raised":
                raise KeyError(outcome)
            if outcome == "passed":
                (tmp_path / "DONE").touch()
    except KeyError:
        assert outcome == "raised"
    assert codes == [outcome != "passed"] * 2
    assert not trackers.UNFINISHED


def test_a_tracker_that_hangs_or_fails_at_the_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(exit_code: int) -> None:
        raise ConnectionError("gone")

    caplog.set_level(logging.INFO, logger="cogumi")
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "UNFINISHED", [("W&B", lambda exit_code: time.sleep(60)), ("trackio", fail)])
    began = time.monotonic()
    with trackers.finish_trackers(tmp_path):
        pass
    assert time.monotonic() - began < 30
    assert "cannot end the run of trackio: gone" in caplog.text
    assert "W&B has not taken everything within 0 s" in caplog.text


def test_its_url_is_in_status_and_report(sft: Config) -> None:
    run_dir = cogumi.train(sft, cogumi__sanity=1).run_dir
    assert "trackers" not in read_json(run_dir / "status.json")
    trackers.write_section(run_dir / DECISIONS, trackers.SECTION, {"urls": {"wandb": URL}})
    set_status(run_dir, "finished")
    status = status_of(run_dir)
    assert status.as_dict()["trackers"] == {"wandb": URL}
    assert f"wandb: {URL}" in format_screen(status)
    assert URL in write_report(run_dir).read_text()


def test_wandb_and_trackio_take_up_the_run_that_a_resumed_one_began(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="make test-ecosystem has it")  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    pytest.importorskip("trackio", reason="make test-ecosystem has it")
    sft["train"] |= {"report_to": ["wandb", "trackio", "tensorboard"]}
    cogumi.train(sft, cogumi__sanity=1)
    assert wandb.run is None
    section = read_section(tmp_path / "run" / DECISIONS, trackers.SECTION)
    assert (section["wandb_project"], section["name"][:4]) == ("mine", "run-")
    monkeypatch.setenv("WANDB_PROJECT", "another")
    cogumi.train(sft)
    assert read_section(tmp_path / "run" / DECISIONS, trackers.SECTION) == section
    begun = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(begun) == 2
    assert all(path.name.endswith(section["wandb_id"]) for path in begun)
    from trackio.sqlite_storage import SQLiteStorage

    assert section["name"] in SQLiteStorage.get_runs(section["project"])
    rows = SQLiteStorage.get_logs(section["project"], section["name"])
    assert [row["train/global_step"] for row in rows if "train/loss" in row] == [1, 2, 3]


@pytest.mark.usefixtures("wandb")
def test_wandb_that_makes_no_run_is_refused(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    with pytest.raises(RefusedAtSetup, match="returned error 403"):
        cogumi.train(sft, train__report_to=["wandb"])
    assert not trackers.UNFINISHED
