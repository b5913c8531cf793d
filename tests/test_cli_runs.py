"""The commands around a run in another process, as a user meets them: processes, their output and exit status."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import prepared_process
import psutil
import pytest
import typer
import yaml
from builders import run_config

from cogumi.cli import run_commands
from cogumi.core.run_directory import append_jsonl, this_process, write_json

DATA = {"eval_rows": 8, "fim": {"max_length": 160, "middle_chars": [8, 32]}}
# The command, whose number a test asks for.
NUMBERED = """
import os, runpy
open("pid", "w").write(str(os.getpid()))
runpy.run_module("cogumi", run_name="__main__")
"""


def here(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def cogumi(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return prepared_process.run(words, cwd, here(**environment))


@pytest.fixture
def in_process(
    command_line: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`cogumi` in this process, for commands that only look."""

    def cogumi(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patched:
            patched.chdir(cwd)
            for name, value in environment.items():
                patched.setenv(name, value)
            return subprocess.CompletedProcess(words, *command_line(*words))

    return cogumi


@pytest.fixture
def home(tiny_model: Path, code_parquet: Path, tmp_path: Path, none_left_behind: None) -> Path:
    """A directory with tiny.yaml, in which no process is left behind."""
    values = run_config("sft", tiny_model, code_parquet, "", data_section=DATA, cogumi={"compile": "off"})
    del values["cogumi"]["run_dir"]  # runs/tiny
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def test_start_wait_and_attach_to_what_has_finished(home: Path) -> None:
    python = prepared_process.as_program(home / "python", here())
    command = [python, "-m", "cogumi", "start", "tiny.yaml", "train.learning_rate=1e-2"]
    variables = here(COGUMI_TRAIN__MAX_STEPS="7")
    begun = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=300)
    assert begun.returncode == 0, begun.stderr
    assert re.search(r"runs/tiny: (running|finished)", begun.stderr), begun.stderr
    waited = cogumi("wait", "runs/tiny", cwd=home)
    assert waited.returncode == 0, waited.stderr
    assert re.fullmatch(r"runs/tiny: finished, step 7/7; 3 of 3 checks passed; flags: .*\d green\n", waited.stdout), (
        waited.stdout
    )
    assert yaml.safe_load((home / "runs/tiny/config.yaml").read_text())["train"]["learning_rate"] == 1e-2
    followed = cogumi("attach", "runs/tiny", cwd=home)
    assert followed.returncode == 0
    assert "pass  steps: 7 (required: 7)" in followed.stdout
    assert cogumi("logs", "runs/tiny", "-n", "3", cwd=home).stdout.count("\n") == 3


def test_a_run_that_was_killed_is_worth_another_try(
    home: Path, in_process: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Of `cogumi train`, which has no supervisor that knows how it ended: nobody wrote its end."""
    training = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = this_process() | {"pid": training.pid, "began": psutil.Process(training.pid).create_time()}
    training.kill()
    training.wait()
    (home / "runs/dead").mkdir(parents=True)
    (home / "runs/dead/run.log").touch()
    write_json(home / "runs/dead/status.json", {"state": "running", "stage": "train", "time": time.time(), **record})
    for command in ("wait", "attach"):
        done = in_process(command, "runs/dead", cwd=home)
        assert (done.returncode, "runs/dead: died" in done.stdout) == (75, True), done


def test_a_run_of_train_is_looked_at_left_and_stopped_from_another_terminal(home: Path) -> None:
    long = [*prepared_process.python(here()), "-c", NUMBERED, "train", "tiny.yaml", "train.max_steps=100000"]
    training = subprocess.Popen(long, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=here())
    try:
        deadline = time.monotonic() + 120
        beat = home / "runs/tiny/heartbeat.json"
        while not (beat.exists() and json.loads(beat.read_text())["step"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        shown = cogumi("status", "runs/tiny", cwd=home)
        assert shown.returncode == 0, shown.stderr
        assert "runs/tiny: running (train), step " in shown.stdout
        assert "last sign of life" in shown.stdout
        (status,) = json.loads(cogumi("status", "--json", cwd=home).stdout)
        assert (status["state"], status["alive"], status["pid"]) == ("running", True, int((home / "pid").read_text()))
        assert status["ended"] is False

        attach, pipe = [*prepared_process.client(here()), "attach", "runs/tiny"], subprocess.PIPE
        looking = subprocess.Popen(attach, cwd=home, env=here(), stdout=pipe, stderr=pipe, text=True)
        assert looking.stdout is not None
        assert looking.stdout.readline()
        looking.send_signal(signal.SIGINT)
        _, said = looking.communicate(timeout=60)
        assert looking.returncode == 0
        assert said == "\ncogumi: the run continues; come back with `cogumi attach runs/tiny`\n"
        assert training.poll() is None

        stopped = cogumi("stop", "runs/tiny", cwd=home)
        assert stopped.returncode == 0, stopped.stderr
        assert re.search(
            r"runs/tiny: stopped, step (\d+)/100000; .*newest checkpoint is checkpoint-\1\b", stopped.stderr
        )
        assert training.wait(timeout=60) == 143
        ended = cogumi("wait", "runs/tiny", cwd=home)
        assert ended.returncode == 1
        assert "stopped" in ended.stdout
    finally:
        training.kill()
        training.wait()


def test_several_runs_are_a_line_each_and_a_wrong_name_is_status_2(
    tmp_path: Path, in_process: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    cogumi = in_process
    beat = {"step": 3, "steps": 9, "time": 2.0, "eta_seconds": 7200.0, "cost_so_far": 1.5, "gpu": None, "anything": {}}
    for name, state in (("a", "finished"), ("b", "failed")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_json(tmp_path / "runs" / name / "status.json", {"state": state, "time": 1.0, "reason": "it broke"})
        write_json(tmp_path / "runs" / name / "heartbeat.json", beat)
    shown = cogumi("status", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    one, other = shown.stdout.splitlines()
    assert one == "runs/a: finished, step 3/9; it broke; $1.50"
    assert other.startswith("runs/b: failed, step 3/9; it broke; there is no checkpoint yet; the same command starts")
    stage = tmp_path / "notebooks" / "runs" / "project" / "sft"
    stage.mkdir(parents=True)
    write_json(stage / "status.json", {"state": "finished", "time": 1.0})
    assert "notebooks/runs/project/sft" in cogumi("status", cwd=tmp_path).stdout
    missing = cogumi("status", "runs/c", cwd=tmp_path)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "runs/c: no run there; there is runs/a, runs/b" in missing.stderr
    green = {"name": "memory", "level": "green", "evidence": "half is free", "knob": ""}
    red = {"name": "loss", "level": "red", "evidence": "it is NaN", "knob": "train.bf16"}
    write_json(tmp_path / "runs/a/flags.json", {"flags": [red, green]})
    assert "RED loss, 1 green" in cogumi("status", cwd=tmp_path).stdout
    older = [{"step": 0, "eval_loss": 5.3}, {"step": 2, "loss": 4.5, "grad_norm": 0.5}]
    for row in (*older, {"step": 3, "loss": 4.313, "grad_norm": None}):
        append_jsonl(tmp_path / "runs/a/metrics.jsonl", row)
    screen = cogumi("status", "runs/a", cwd=tmp_path).stdout
    assert "\nloss 4.313  eval_loss 5.3 (step 0)  grad_norm 0.5 (step 2)\n" in screen
    anew = "there is no checkpoint yet; the same command starts the run again\n"
    assert f"\n{anew}" in cogumi("status", "runs/b", cwd=tmp_path).stdout
    unpaused = cogumi("unpause", "runs/b", cwd=tmp_path)
    assert (unpaused.returncode, unpaused.stdout) == (2, "")
    assert unpaused.stderr == f"cogumi: runs/b: failed, step 3/9; this run is not training; {anew}"
    watched = cogumi("status", "--watch", "runs/a", cwd=tmp_path, COLUMNS="120").stdout
    assert "loss 4.313  eval_loss 5.3 (step 0)  grad_norm 0.5 (step 2)" in watched
    assert "$1.50 so far" in screen
    assert "it is NaN; change train.bf16" in screen


def test_a_directory_of_runs_is_looked_at_whole_and_where_one_run_is_wanted_they_are_named(
    tmp_path: Path, in_process: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    cogumi = in_process
    names = ("cli/one", "cli/two", "cli/project/dpo", "cli/project/sft", "other/run")
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        write_json(tmp_path / name / "status.json", {"state": "finished", "time": 1.0})
    (tmp_path / "empty").mkdir()
    below = sorted(name for name in names if name.startswith("cli/"))

    lines = cogumi("status", "cli", cwd=tmp_path).stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == below
    assert [load["run_dir"] for load in json.loads(cogumi("status", "cli", "--json", cwd=tmp_path).stdout)] == below
    assert cogumi("status", "other", cwd=tmp_path).stdout == "other/run: finished\n"
    assert cogumi("status", "other", "--watch", cwd=tmp_path).stdout.endswith("other/run: finished\n")

    refused = {
        ("status", "cli", "--watch"): "--watch follows one run, and there are 4: name its directory",
        ("attach", "cli"): f"cli: no run there; below it there is {', '.join(below[:3])}",
        ("stop", "cli/project"): "cli/project: no run there; below it there is cli/project/dpo, cli/project/sft",
        ("status", "cli/tow"): "cli/tow: no run there; there is cli/two",
        ("status", "empty"): "empty: no run there",
        ("status", "nothing"): "nothing: no run there",
    }
    for words, said in refused.items():
        answer = cogumi(*words, cwd=tmp_path)
        assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", f"cogumi: {said}\n")


@pytest.mark.parametrize("command", ["checkpoint", "pause", "attach"])
def test_commands_with_the_name_of_a_directory_are_quoted_for_the_shell(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attached(run_dir: Path) -> Mock:
        return Mock(follow=Mock(side_effect=KeyboardInterrupt))

    monkeypatch.setattr(run_commands.handle, "attach", attached)
    with suppress(typer.Exit):
        getattr(run_commands, command)(Path("runs/my run"))
    printed = capsys.readouterr()
    commands = re.findall(r"`(cogumi \w+ .+?)`", printed.out + printed.err)
    assert commands
    assert all(shlex.split(words)[2:] == ["runs/my run"] for words in commands)
