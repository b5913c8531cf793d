"""`cogumi.restarts`: real runs in a child process that real kills and errors end, and that start again by themselves, or not."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finished_runs import small
from processes import until
from safetensors.torch import load_file

import cogumi
from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.run_directory import read_json
from cogumi.rewards.named_rewards import RewardError
from cogumi.runs import restarts as module

Config = dict[str, Any]
# happens.json has what happens in each part of the run, and after which step, once that one's checkpoint is there.
REWARD = """
import json, os, signal, time
from pathlib import Path
here = Path(__file__).parent

def letters(completions, trainer_state, **_):
    parts = (here / "parts").read_text().split() if (here / "parts").exists() else []
    if str(os.getpid()) not in parts:
        parts.append(str(os.getpid()))
        (here / "parts").write_text(" ".join(parts))
    happens = json.loads((here / "happens.json").read_text())
    what, step = happens[len(parts) - 1] if len(parts) <= len(happens) else ("", -1)
    if trainer_state.global_step == step and trainer_state.max_steps:  # not in the try before the training
        deadline = time.monotonic() + 60
        while step and not (here / f"run/checkpoints/checkpoint-{step}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.2)  # the heartbeat has the step by then
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if what == "asleep":
            (here / what).touch()
            while True:
                try:
                    time.sleep(1000)
                except BaseException:
                    pass
        if what == "hang":
            from cogumi.training import watch
            watch.STAGE_SECONDS.clear()
            watch.OTHER_SECONDS = watch.SAVE_SECONDS = 1.0
            time.sleep(1000)
        raise __import__("httpx").ConnectError(what) if what == "no network" else ValueError(what)
    return [sum(map(str.isalpha, text)) / 100 for text in completions]
"""


@pytest.fixture
def config(
    tiny_model: Path, code_parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: str
) -> Callable[..., Config]:
    """(what happens after which step, by part; keys of cogumi) -> a GSPO run of four steps, saved after each."""
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(sys, "executable", prepared)

    def make(*happens: tuple[str, int], **ours: Any) -> Config:
        (tmp_path / "own.py").write_text(REWARD)
        (tmp_path / "happens.json").write_text(json.dumps(happens))
        train = {
            "max_steps": 4, "num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 1,
            "max_completion_length": 8, "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 1,
        }  # fmt: skip
        values = {"method": "gspo", "rewards": [f"{tmp_path / 'own.py'}:letters"], "merge": False} | ours
        return small(tiny_model, code_parquet, train, run_dir=str(tmp_path / "run"), **values)

    return make


def parts(directory: Path) -> int:
    return len((directory / "parts").read_text().split())


def test_a_run_that_is_killed_twice_ends_as_one_that_was_not(
    config: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = cogumi.train(config(("kill", 2), ("kill", 3)), cogumi__restarts=3)
    assert result.passed, str(result.verdict)
    assert parts(tmp_path) == 3
    assert re.findall(r"restart \d of 3", caplog.text) == ["restart 1 of 3", "restart 2 of 3"]
    undisturbed = cogumi.train(config(), cogumi__run_dir=str(tmp_path / "undisturbed"))
    assert result.adapter is not None
    assert undisturbed.adapter is not None
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (result.adapter, undisturbed.adapter))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert result.series("loss") == undisturbed.series("loss")


@pytest.mark.slow("several runs")
@pytest.mark.parametrize(
    ("happens", "error", "tries"),
    [
        ([("kill", 2), ("kill", 2), ("", -1)], RunFailed, 2),  # the same end at the same step
        ([("out of range", 1)], RewardError, 1),  # the run's own
        ([("term", 1)], SystemExit, 1),  # a user's signal
    ],
    ids=["same-step", "own-error", "signal"],
)
def test_what_another_try_would_meet_again_is_final(
    config: Callable[..., Config],
    tmp_path: Path,
    happens: Any,
    error: type[BaseException],
    tries: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(error):
        cogumi.train(config(*happens), cogumi__restarts=3)
    assert parts(tmp_path) == tries
    said = capfd.readouterr().err  # of the child: the details of its own error are in run.log alone
    assert ("RewardError" in said) is (error is RewardError)
    assert "Traceback" not in said


@pytest.mark.slow("several runs")
def test_a_transient_error_and_a_hang_are_tried_again(config: Callable[..., Config], tmp_path: Path) -> None:
    result = cogumi.train(config(("no network", 1), ("hang", 2), on_hung="stop"), cogumi__restarts=2)
    assert result.passed
    assert parts(tmp_path) == 3


def test_a_refusal_is_final(config: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no_such_module"):
        cogumi.train(config(), lora__target_modules=["no_such_module"], cogumi__restarts=3)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow("several runs")
def test_a_red_flag_is_final(config: Callable[..., Config], tmp_path: Path) -> None:
    result = cogumi.train(config(), cogumi__flags__truncated_red=0.01, cogumi__on_red="stop", cogumi__restarts=3)
    assert not result.passed
    assert read_json(tmp_path / "run" / "status.json")["state"] == "stopped by a red flag"
    assert parts(tmp_path) == 1


@pytest.mark.slow("several runs")
def test_a_detached_run_that_is_killed_is_waited_for_until_its_end(
    config: Callable[..., Config], tmp_path: Path, none_left_behind: None
) -> None:
    run = cogumi.start(config(("kill", 2)), cogumi__restarts=1)
    assert run.wait(300).state == "finished"
    assert parts(tmp_path) == 2
    assert "restart 1 of 1" in (tmp_path / "run" / "console.log").read_text()


@pytest.mark.slow("a detached run")
def test_a_run_that_stop_has_killed_is_not_started_again(
    config: Callable[..., Config], tmp_path: Path, none_left_behind: None
) -> None:
    run = cogumi.start(config(("asleep", 1)), cogumi__restarts=3)
    until(lambda: (tmp_path / "asleep").exists())
    run.stop(kill_after=0.0)
    until(lambda: "exit" in read_json(tmp_path / "run" / "start.json"))
    assert parts(tmp_path) == 1
    assert "SIGKILL" in str(run.status())
    assert "restart 1" not in (tmp_path / "run" / "console.log").read_text()
