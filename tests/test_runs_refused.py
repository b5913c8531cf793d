"""Starts that come to nothing: what the user is told, and what is left."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cogumi
from cogumi import runs
from cogumi.detached import Starter
from cogumi.errors import RunFailed, UsageError
from cogumi.process import is_running
from cogumi.run_status import status_of
from cogumi.rundir import START, read_json

Config = dict[str, Any]


@pytest.fixture
def sft(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Config:
    return {
        "model": {"name": str(tiny_model)},
        "lora": {"r": 4},
        "data": {"source": str(code_parquet), "eval_rows": 8, "fim": {"max_length": 160, "middle_chars": [8, 32]}},
        "train": {
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "gradient_checkpointing": False,
            "save_steps": 2,
        },
        "cogumi": {"method": "sft", "run_dir": str(tmp_path / "run"), "merge": False, "compile": "off"},
    }


@pytest.fixture(autouse=True)
def _as_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Other processes compute on one thread as well, and none of them is left behind."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    for path in tmp_path.rglob(START):
        pid = read_json(path).get("pid")
        if is_running(read_json(path)):
            os.kill(pid, signal.SIGKILL)


def until(happened: Callable[[], Any], seconds: float = 120) -> Any:
    """What `happened` returns, once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_mistakes_are_told_and_leave_nothing(sft: Config, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tiny.yml: no such config file"):
        cogumi.start(tmp_path / "tiny.yml")
    mistakes: dict[str, dict[str, Any]] = {
        "did you mean train.learning_rate": {"train__learnin_rate": 1},
        "gone.parquet": {"data__source": "gone.parquet"},
        "nowhere": {"lora__target_modules": ["nowhere"]},  # which only peft knows, once there is a model
    }
    with ThreadPoolExecutor() as pool:
        asked = {
            says: pool.submit(cogumi.start, sft, cogumi__run_dir=str(tmp_path / f"run-{number}"), **words)
            for number, (says, words) in enumerate(mistakes.items())
        }
    for says, start in asked.items():
        error = start.exception()
        assert isinstance(error, UsageError), repr(error)
        assert says in str(error)
        assert "\n" not in str(error)
    assert not list(tmp_path.iterdir())


def test_a_refusal_that_nobody_waited_for_is_found_in_the_directory(sft: Config, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ours, theirs = socket.socketpair()
    ours.close()
    with (tmp_path / "output").open("wb") as output, theirs:
        runs.launch(theirs.fileno(), (sft, {"lora__target_modules": ["nowhere"]}), output)
    until(lambda: (run_dir / START).exists() and "exit" in read_json(run_dir / START))
    refused = cogumi.attach(run_dir).status()
    assert (refused.state, refused.alive, refused.passed) == ("refused", False, False)
    assert refused.reason is not None
    assert "nowhere" in refused.reason
    assert cogumi.train(sft).passed  # it is not in the way
    assert status_of(run_dir).state == "finished"


def test_a_start_that_breaks_before_its_first_step_says_how(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")  # its interpreter cannot even begin
    with pytest.raises(RunFailed, match=r"the process ended before it had a run: .+"):
        cogumi.start(sft)


def test_a_run_that_is_stopped_while_it_is_being_started_was_stopped(sft: Config, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(cogumi.start, sft, train__max_steps=100_000)
        until((run_dir / START).exists)
        stopped = cogumi.attach(run_dir).stop()
        assert (stopped.state, stopped.alive) == ("stopped", False), stopped
        assert starting.result().run_dir == run_dir  # it was wanted
    assert read_json(run_dir / START)["exit"] == 128 + signal.SIGTERM


def test_a_refusal_is_raised_when_nothing_of_it_is_left(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.touch()
    ours, theirs = socket.socketpair()

    def trainer() -> None:
        starter = Starter(theirs.detach())
        assert starter.told(refused="no such thing")
        time.sleep(0.3)
        left.unlink()
        starter.hang_up()

    with ours, ThreadPoolExecutor() as pool:
        refusing = pool.submit(trainer)
        word = runs.listen(ours, None)
        assert word is not None
        with pytest.raises(UsageError, match="no such thing"):
            runs.refuse(word, ours)
        assert not left.exists()
        refusing.result()
