"""`cogumi.start` and what it leaves: real detached processes, really killed, on a tiny model."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import until
from safetensors.torch import load_file

import cogumi
from cogumi.config.schema import load_config
from cogumi.core.durability import lock_directory
from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.run_directory import CONSOLE, START, is_running, read_json, this_process, write_json
from cogumi.runs.handle import Run
from cogumi.runs.launch import await_first_step
from cogumi.runs.supervisor import describe_existing
from cogumi.telemetry.status import format_screen, status_of

Config = dict[str, Any]
pytestmark = pytest.mark.usefixtures("none_left_behind")
SECRET = "hf_" + "s3cret" * 6


@pytest.fixture
def sft(sft: Config) -> Config:
    sft["train"] |= {"save_strategy": "steps", "save_steps": 2}
    sft["cogumi"]["compile"] = "off"
    return sft


def test_two_starts_are_one_run_that_outlives_who_started_it_and_is_what_train_does(
    sft: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, prepared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sft["train"]["hub_token"] = SECRET
    run_dir = tmp_path / "run"
    asks = "import cogumi, json, sys\ncogumi.start(json.load(sys.stdin))"
    starters = [
        subprocess.Popen([sys.executable, "-c", asks], stdin=subprocess.PIPE, text=True, process_group=0)
        for _ in range(2)
    ]
    for each in starters:
        assert each.stdin is not None
        each.stdin.write(json.dumps(sft))
        each.stdin.close()
    until((run_dir / START).exists)
    started = until(lambda: read_json(run_dir / START))
    for each in starters:  # as a notebook server does with a kernel, and all that is in its group
        for process in psutil.Process(each.pid).children(recursive=True):
            process.kill()
        os.killpg(each.pid, signal.SIGKILL)
        each.wait()
    assert os.getsid(started["pid"]) != os.getsid(0)
    os.kill(started["pid"], signal.SIGHUP)
    run = cogumi.attach(run_dir)
    assert run.status().alive
    assert SECRET not in " ".join(psutil.Process(started["pid"]).cmdline())
    ended = run.wait(timeout=120)
    assert (ended.state, ended.passed, ended.step, ended.checkpoint) == ("finished", True, 6, "checkpoint-6"), ended
    console = (run_dir / CONSOLE).read_text()
    assert console.count("INFO process ") == 1, console
    assert "\r" not in console  # a bar would be a line for each of its refreshes
    assert not any(SECRET in path.read_text() for path in run_dir.iterdir() if path.is_file())

    caplog.set_level("INFO")
    monkeypatch.setattr(sys, "executable", prepared)
    until(lambda: not is_running(started))  # it takes its interpreter down
    assert cogumi.start(sft).run_dir == run_dir
    assert "finished already; there is nothing to start" in caplog.text
    assert (run_dir / CONSOLE).read_text() == console
    with pytest.raises(
        UsageError, match=r"finished\) of another configuration \(train.learning_rate: 0.01 there, 0.02"
    ):
        describe_existing(load_config(sft, train__learning_rate=2e-2))

    here = cogumi.train(sft, cogumi__run_dir=str(tmp_path / "here"))
    ours, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (here.run_dir, run_dir))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_a_killed_run_is_seen_to_have_died_and_started_again_goes_on_until_it_is_stopped(
    sft: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    prepared: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(sys, "executable", prepared)
    run_dir = tmp_path / "run"
    run = cogumi.start(sft, train__max_steps=100_000)
    status = run.status()
    assert (status.state, status.stage, status.alive, status.steps) == ("running", "train", True, 100_000)
    assert status.pid is not None
    with pytest.raises(TimeoutError, match="it is still at work"):
        run.wait(timeout=0.1)

    already = describe_existing(load_config(sft, train__max_steps=100_000, train__learning_rate=2e-2))
    assert "under way already, with another configuration (train.learning_rate: 0.01 there" in already

    until(lambda: run.status().checkpoint)
    died = run.stop(kill_after=0)
    assert read_json(run_dir / "status.json")["state"] == "running"
    assert (died.state, died.alive, died.ended, died.passed) == ("died", False, True, False)
    assert died.reason is not None
    assert "SIGKILL" in died.reason
    assert died.reason.endswith(", as the kernel does when memory runs out, or as kill -9 does")
    run.dashboard()
    screen = capsys.readouterr().out
    assert "was ended by SIGKILL" in screen
    assert "last sign of life" in screen
    assert "tokens/s" not in screen.partition("\n--- ")[0]
    goes_on = f"the newest checkpoint is {died.checkpoint}; the same command resumes from it"
    assert f"\n{goes_on}\n" in screen
    with pytest.raises(UsageError, match=f"died, step .*; this run is not training; {goes_on}$"):
        run.unpause()
    json.dumps(died.as_dict())
    with pytest.raises(ProcessLookupError):  # nobody's number is signalled
        os.kill(status.pid, 0)
    assert run.stop() == died

    again = cogumi.start(sft, train__max_steps=100_000)
    until(lambda: "resuming from" in again.logs(100))
    stopped = again.stop()
    assert (stopped.state, stopped.alive) == ("stopped", False), stopped
    assert stopped.checkpoint == f"checkpoint-{stopped.step}"
    assert "asked to by SIGTERM" in (run_dir / "report.html").read_text()
    assert stopped.step is not None
    assert stopped.step > 2
    assert f"the newest checkpoint is {stopped.checkpoint}" in caplog.text
    assert [row["step"] for row in again.metrics() if "loss" in row] == list(range(1, stopped.step + 1))
    assert len("".join(again.follow()).splitlines()) == 20  # and it returns: the run has ended


def test_a_number_that_is_somebody_elses_by_now_is_not_signalled(tmp_path: Path) -> None:
    """A run's record names a process that began long before the one that has its number."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        record = {**this_process(), "pid": child.pid, "began": psutil.Process(child.pid).create_time()}
        assert is_running(record)
        write_json(tmp_path / "status.json", {"state": "running", "time": 1.0, **record, "began": 1.0})
        assert status_of(tmp_path).state == "died"
        with lock_directory(tmp_path):
            run = cogumi.attach(tmp_path)
            assert run.status().alive
            with pytest.raises(UsageError, match=f"not by number {child.pid}"):
                run.stop()
        run.stop(kill_after=0)
        assert child.poll() is None
        write_json(tmp_path / "status.json", {"state": "running", "time": time.time(), **record, "host": "elsewhere"})
        with pytest.raises(UsageError, match="is on elsewhere; stop it there"):
            run.stop()
    finally:
        child.kill()
    until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    assert is_running(record) is False
    child.wait()


def test_a_run_that_starts_again_after_a_kill_shows_no_step_of_the_process_before(tmp_path: Path) -> None:
    gone = {"pid": 2**22 - 1, "host": socket.gethostname(), "began": 1.0}
    write_json(tmp_path / "status.json", {"state": "running", "stage": "train", "time": 2.0, **gone})
    write_json(
        tmp_path / "heartbeat.json", {"time": 2.0, "step": 9, "steps": 20, "eta_seconds": 60.0, "stage": "train"}
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    died = status_of(tmp_path)
    assert (died.state, died.stage, died.step, died.eta_seconds) == ("died", None, 9, None)
    write_json(tmp_path / START, {**this_process(), "time": 3.0})
    starting = status_of(tmp_path)
    assert (starting.state, starting.step, starting.steps, starting.eta_seconds) == ("starting", None, None, None)
    write_json(tmp_path / "status.json", {"state": "running", "stage": "load", "time": 4.0, **this_process()})
    write_json(tmp_path / "heartbeat.json", {"time": 4.0, "step": 0, "steps": None, "eta_seconds": None})
    assert status_of(tmp_path).step is None


@pytest.mark.parametrize("written_by", ["a process that trains", "its parent"])
def test_a_failure_after_which_the_run_starts_again_is_not_its_end(tmp_path: Path, written_by: str) -> None:
    parent = this_process()
    trainer = psutil.Process().parent()
    assert trainer is not None
    other = {"pid": trainer.pid, "host": socket.gethostname(), "began": trainer.create_time()}
    failed = {"state": "failed", "time": 2.0, "retriable": True, **(parent if written_by == "its parent" else other)}
    write_json(tmp_path / "status.json", failed)
    write_json(tmp_path / START, {**parent, "time": 1.0, "restarts": 1})
    status = status_of(tmp_path)
    assert (status.state, status.ended, status.pid) == ("starting", False, parent["pid"])
    write_json(tmp_path / START, {**parent, "time": 1.0, "restarts": 0})
    assert status_of(tmp_path).state == "failed"


def test_a_resumed_run_that_ends_before_it_has_a_status_has_failed(tmp_path: Path) -> None:
    write_json(tmp_path / "status.json", {"state": "stopped", "time": 1.0, "pid": 1, "host": "gone", "began": 0.0})
    process = {"pid": 2**22 + 1, "host": socket.gethostname(), "began": 1.0}
    write_json(tmp_path / START, {**process, "time": time.time(), "exit": 1})
    (tmp_path / CONSOLE).write_text("ValueError: of another kind\n")
    reader, writer = os.pipe()
    os.close(writer)
    with (
        open(reader, "rb", 0) as words,
        pytest.raises(RunFailed, match=r"exit status 1 .*ends in: ValueError: of another"),
    ):
        await_first_step(Run(tmp_path), words)


@pytest.mark.parametrize("name", ["status.json", "flags.json"])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / "status.json", {"state": "finished", "time": 1.0})
    (tmp_path / name).write_text("{bad")
    with pytest.raises(UsageError, match=f"{name}: it holds no JSON") as caught:
        format_screen(status_of(tmp_path))
    assert "\n" not in str(caught.value)
