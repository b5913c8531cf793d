"""`cogumi.sanity`, `cogumi.on_red` and flags.json in real runs: what ends early goes on and ends as if it had not."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from builders import as_gspo
from test_training_unfinished import logged, the_same

import cogumi
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json
from cogumi.health import data_checks
from cogumi.health import sentinel as module

Config = dict[str, Any]


@pytest.fixture
def sft(sft: Config) -> Config:
    sft["train"] |= {"max_steps": 14, "learning_rate": 1e-3, "warmup_steps": 2}
    return sft


@pytest.fixture
def asked(sft: Config) -> Config:
    """With rows and steps enough to be asked whether prompts and answers belong together."""
    sft["data"]["max_rows"] = 32
    sft["train"]["per_device_train_batch_size"] = 16
    return sft


@pytest.fixture
def gspo(sft: Config) -> Config:
    return as_gspo(sft, save_strategy="no")


@pytest.fixture
def red(sft: Config, train_once: Any, tiny_model: Path) -> Any:
    """What a run came to whose adapter does not move; no test changes it."""
    return train_once("red", tiny_model, sft | {"lora": sft["lora"] | {"lora_alpha": 0}}).result


@pytest.fixture
def watched(asked: Config, train_once: Any, tiny_model: Path) -> Any:
    """What the run of `asked` came to; no test changes it."""
    return train_once("watched", tiny_model, asked).result


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        ("asked", 10),
        pytest.param("gspo", 15, marks=pytest.mark.slow("trainings of 18 steps; the fast tier has the SFT run")),
    ],
)
def test_a_sanity_check_answers_and_its_steps_are_not_lost(
    method: str, steps: int, request: pytest.FixtureRequest, train_once: Any, tiny_model: Path
) -> None:
    config = request.getfixturevalue(method)
    if method == "gspo":  # two steps to a rollout: the check ends in the middle of its eighth
        config["train"] |= {"max_steps": 18, "generation_batch_size": 16}
        config["cogumi"]["flags"] = {"truncated_red": 1}  # an untrained model ends nothing
    whole = train_once("watched" if method == "asked" else "eighteen-steps", tiny_model, config).result
    checked = cogumi.train(config, cogumi__sanity=steps)
    home = checked.run_dir
    assert not checked.passed  # a few steps of a tiny model show nothing
    assert checked.verdict.safe_to_scale == "not shown", str(checked.verdict)
    assert (home / "checkpoints" / f"checkpoint-{steps}").is_dir()
    assert checked.adapter == home / "adapter"
    assert checked.merged is None
    status, verdict = read_json(home / "status.json"), read_json(home / "verdict.json")
    assert status["state"] == "sanity checked"
    assert "safe to scale: not shown" in status["reason"]
    assert verdict["safe_to_scale"] == "not shown"
    assert not (home / "DONE").exists()
    with pytest.raises(UsageError, match=r"its first steps were checked.*leave cogumi.sanity out"):
        cogumi.train(config, cogumi__sanity=steps)
    if method == "asked":  # what was not shown may be checked for longer
        assert cogumi.train(config, cogumi__sanity=steps + 2).verdict.safe_to_scale == "not shown"
    result = cogumi.train(config)
    assert result.verdict.safe_to_scale is None
    assert "with other versions" not in (home / "run.log").read_text()
    assert logged(home) == logged(whole.run_dir)
    assert the_same(result.run_dir, whole.run_dir)
    assert (home / "DONE").exists()


def test_a_check_of_a_broken_run_says_no_and_why(sft: Config) -> None:
    result = cogumi.train(sft, cogumi__sanity=12, lora__lora_alpha=0)
    assert not result.passed
    assert result.verdict.safe_to_scale == "no"
    said = read_json(result.run_dir / "verdict.json")
    (check,) = (check for check in said["checks"] if check["name"] == "safe to scale")
    assert "adapter moves" in check["figure"]
    assert "lora.lora_alpha" in check["figure"]
    assert [flag["name"] for flag in said["was_red"]] == ["adapter moves"]
    assert "safe to scale: no" in read_json(result.run_dir / "status.json")["reason"]


def test_a_check_as_long_as_the_run_is_the_run(sft: Config) -> None:
    result = cogumi.train(sft, cogumi__sanity=14)
    assert result.verdict.safe_to_scale == "not shown"
    assert read_json(result.run_dir / "status.json")["state"] == "finished, checks failed"
    assert result.adapter == result.run_dir / "adapter"


def test_stop_ends_a_run_with_a_checkpoint(sft: Config) -> None:
    result = cogumi.train(sft, cogumi__on_red="stop", lora__lora_alpha=0)
    home = result.run_dir
    assert not result.passed
    assert read_json(home / "status.json")["state"] == "stopped by a red flag"
    assert "adapter moves" in read_json(home / "status.json")["reason"]
    (checkpoint,) = (home / "checkpoints").glob("checkpoint-*")
    stopped = int(checkpoint.name.removeprefix("checkpoint-"))
    assert 10 <= stopped < 14
    assert result.adapter.is_dir()
    assert [row["step"] for row in result.metrics if "loss" in row] == list(range(1, stopped + 1))
    flags = read_json(home / "flags.json")
    assert flags["flags"][0]["name"] == "adapter moves"
    assert flags["flags"][0]["level"] == "red"
    goes_on = cogumi.train(sft, cogumi__on_red="warn", lora__lora_alpha=0)
    assert len(goes_on.series("loss")) == 14
    log_text = (home / "run.log").read_text()
    assert f" step {stopped}: red: adapter moves: " in log_text
    assert log_text.count(" INFO red: adapter moves: ") == 2  # each part ends with what is red
    assert "was red at step" not in log_text  # it still is


def test_warn_says_it_once_and_trains_on(red: Any) -> None:
    assert len(red.series("loss")) == 14
    assert (red.run_dir / "run.log").read_text().count("ERROR step") == 1
    assert [flag.name for _, flag in red.verdict.was_red] == ["adapter moves"]


def test_what_was_red_stays_known_when_a_run_goes_on(sft: Config) -> None:
    early = cogumi.train(sft, lora__lora_alpha=0, cogumi__sanity=12)
    (at, flag), *_ = early.verdict.was_red
    assert flag.name == "adapter moves"
    whole = cogumi.train(sft, lora__lora_alpha=0)
    assert [(step, flag.name) for step, flag in whole.verdict.was_red] == [(at, "adapter moves")]


def test_a_red_flag_survives_a_signal_after_the_last_step(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    sft["train"] |= {"save_strategy": "steps", "save_steps": 14}
    with monkeypatch.context() as patched:
        patched.setattr("cogumi.training.finish.save_adapter", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit):
            cogumi.train(sft, lora__lora_alpha=0)
    result = cogumi.train(sft, lora__lora_alpha=0)
    assert [row["step"] for row in result.metrics if "loss" in row] == list(range(1, 15))
    assert (result.verdict.flags[0].name, result.verdict.flags[0].level) == ("adapter moves", "red")
    assert [flag.name for _, flag in result.verdict.was_red] == ["adapter moves"]


def test_pause_waits_until_the_file_is_gone(sft: Config, red: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cogumi.training.loop.PAUSE_SECONDS", 0.01)
    home, seen = Path(sft["cogumi"]["run_dir"]), {}

    def user() -> None:
        while not (home / "PAUSED").exists():
            time.sleep(0.05)
        while read_json(home / "status.json")["state"] != "paused":
            time.sleep(0.05)
        seen["status"] = read_json(home / "status.json")
        seen["text"] = (home / "PAUSED").read_text()
        seen["checkpoints"] = sorted(path.name for path in (home / "checkpoints").glob("checkpoint-*"))
        (home / "PAUSED").unlink()

    thread = threading.Thread(target=user, daemon=True)
    thread.start()
    result = cogumi.train(sft, cogumi__on_red="pause", lora__lora_alpha=0)
    thread.join()
    assert "adapter moves" in seen["status"]["reason"]
    assert "adapter moves" in seen["text"]
    assert len(seen["checkpoints"]) == 1  # saved before it waits
    assert len(result.series("loss")) == 14
    assert the_same(result.run_dir, red.run_dir)
    assert logged(home) == logged(red.run_dir)


def test_watching_changes_nothing_that_is_learned(asked: Config, watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_json(watched.run_dir / "flags.json")["step"] == 14
    for name in ("begin", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_train_end"):
        monkeypatch.setattr(module.Sentinel, name, lambda *_, **__: None)
    alone = cogumi.train(asked)
    assert the_same(watched.run_dir, alone.run_dir)
    assert logged(watched.run_dir) == logged(alone.run_dir)


@pytest.mark.parametrize(
    ("base", "examples", "fewest", "most"),
    [("cogumi:small-base", 32, 16, 30), ("", 32, 32, 64), ("", 8, 0, 0)],
    ids=["told apart at once", "not told apart", "too short a run"],
)
def test_prompts_are_compared_for_a_twentieth_of_the_training(
    base: str, examples: int, fewest: int, most: int, asked: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_checks, "CLEAR_T", 2.0)
    calls, measured, loss_of = [], [], data_checks.loss_of
    monkeypatch.setattr(data_checks, "loss_of", lambda *inputs: calls.append(inputs) or loss_of(*inputs))
    begin = module.Sentinel.begin
    monkeypatch.setattr(module.Sentinel, "begin", lambda self: begin(self) or measured.append(self.batches.pairs))
    source = {"data__source": "cogumi:stdlib", "model__name": base} if base else {}
    cogumi.train(asked, **source, train__per_device_train_batch_size=examples)
    assert fewest <= len(calls) <= most  # those not told apart are compared again at the end
    assert all(own[2:] == other[2:] for own, other in zip(calls[::2], calls[1::2], strict=True))  # the same completion
    assert all(own[1] != other[1] for own, other in zip(calls[::2], calls[1::2], strict=True))
    assert (measured[0] is not None) == bool(most)
    if most:
        assert (measured[0].t >= data_checks.CLEAR_T) == bool(base)
