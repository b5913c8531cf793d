"""Starts that come to nothing: what the user is told, and what is left."""

import json
import os
import pickle
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import until

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.run_directory import CONSOLE, START, read_json, write_json
from cogumi.runs import launch
from cogumi.telemetry.status import status_of

Config = dict[str, Any]
pytestmark = pytest.mark.usefixtures("none_left_behind")


@pytest.fixture
def sft(sft: Config) -> Config:
    sft["train"] |= {"save_strategy": "steps", "save_steps": 2}
    sft["cogumi"]["compile"] = "off"
    return sft


@pytest.fixture
def fast(prepared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started is a fork of a process that has imported torch."""
    monkeypatch.setattr(sys, "executable", prepared)


@pytest.mark.usefixtures("fast")
def test_mistakes_are_told_and_leave_nothing(sft: Config, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tiny.yml: no such config file"):
        cogumi.start(tmp_path / "tiny.yml")
    mistakes: dict[str, dict[str, Any]] = {
        "did you mean train.learning_rate": {"train__learnin_rate": 1},
        "gone.parquet": {"data__source": "gone.parquet"},
        "Invalid epsilon": {"train__adam_epsilon": -1.0},  # which only torch knows, once there is a model
    }
    with ThreadPoolExecutor() as pool:
        requests = {
            says: pool.submit(cogumi.start, sft, cogumi__run_dir=str(tmp_path / f"run-{number}"), **words)
            for number, (says, words) in enumerate(mistakes.items())
        }
    for says, start in requests.items():
        error = start.exception()
        assert isinstance(error, UsageError), repr(error)
        assert says in str(error)
        assert "\n" not in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


@pytest.mark.usefixtures("fast")
def test_a_file_is_not_taken_for_a_directory_of_a_run(sft: Config, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    for begin in (cogumi.train, cogumi.start):
        with pytest.raises(UsageError) as refused:
            begin(sft, cogumi__run_dir=str(path))
        assert str(refused.value) == f"{path} is a file, not a directory; set cogumi.run_dir to a new directory"
    assert path.read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "python"]


@pytest.mark.usefixtures("fast")
def test_a_refusal_that_nobody_waited_for_is_found_in_the_directory(sft: Config, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    reader, writer = os.pipe()
    os.close(reader)
    with (tmp_path / "output").open("wb") as output:
        launch.launch(run_dir, pickle.dumps(load_config(sft, train__adam_epsilon=-1.0)), writer, output)
    until(lambda: (run_dir / START).exists() and "exit" in read_json(run_dir / START))
    refused = cogumi.attach(run_dir).status()
    assert (refused.state, refused.alive, refused.passed) == ("refused", False, False)
    assert refused.reason is not None
    assert "Invalid epsilon" in refused.reason
    assert cogumi.train(sft).passed  # it is not in the way
    assert status_of(run_dir).state == "finished"


def test_a_start_that_breaks_before_its_first_step_says_how(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")  # its interpreter cannot even begin
    with pytest.raises(RunFailed, match=r"the process ended before it had a run: .+"):
        cogumi.start(sft)


@pytest.mark.usefixtures("fast")
def test_a_run_that_is_stopped_while_it_is_being_started_was_stopped(sft: Config, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(cogumi.start, sft, train__max_steps=100_000)
        until((run_dir / START).exists)
        stopped = cogumi.attach(run_dir).stop()
        assert (stopped.state, stopped.alive) == ("stopped", False), stopped
        assert starting.result().run_dir == run_dir  # it was wanted
    assert read_json(run_dir / START)["exit"] == 128 + signal.SIGTERM


@pytest.mark.parametrize("new", [True, False])
def test_a_refusal_is_raised_when_its_processes_have_ended(tmp_path: Path, new: bool) -> None:
    """What a start made is removed then, and never that of an earlier run."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / CONSOLE).touch()
    reader, writer = os.pipe()

    def trainer() -> None:
        os.write(writer, json.dumps({"refused": "no such thing"}).encode() + b"\n")
        time.sleep(0.3)
        write_json(run_dir / START, {"new": new, "refused": "no such thing"})
        os.close(writer)

    with open(reader, "rb", 0) as words, ThreadPoolExecutor() as pool:
        refusing = pool.submit(trainer)
        with pytest.raises(UsageError, match="no such thing"):
            until(lambda: launch.poll_startup_message(words, run_dir))
        assert run_dir.exists() is not new
        refusing.result()
