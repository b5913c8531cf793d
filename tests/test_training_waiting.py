"""What is asked of a training under way by files: checkpoints and pauses in real runs; and what GSPO's rollouts leave."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import as_gspo
from finished_runs import FinishedRun
from processes import until
from safetensors.torch import load_file
from torch import equal
from transformers import TrainerCallback

import cogumi
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json, read_jsonl, this_process
from cogumi.training import loop

Config = dict[str, Any]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(loop, "PAUSE_SECONDS", 0.01)


@pytest.fixture
def sft(sft: Config) -> Config:
    sft["train"] |= {"max_steps": 8, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 100}
    sft["cogumi"]["compile"] = "off"
    return sft


def at_step(step: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something done before the waiting looks, at the end of a step."""
    look = loop.ControlCallback.on_step_end

    def first(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            act()
        look(self, args, state, control, **kwargs)

    monkeypatch.setattr(loop.ControlCallback, "on_step_end", first)


def wait_until_paused(home: Path) -> None:
    until(lambda: (home / "PAUSED").exists() and read_json(home / "status.json")["state"] == "paused")


def test_a_pause_saves_waits_goes_on_and_changes_nothing(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cogumi.train(sft, cogumi__run_dir=str(tmp_path / "whole"))
    home, seen = tmp_path / "run", {}

    def user() -> None:
        wait_until_paused(home)
        seen["reason"] = read_json(home / "status.json")["reason"]
        seen["how"] = (home / "PAUSED").read_text()
        seen["whole"] = cogumi.last_good_checkpoint(home / "checkpoints")
        seen["paused"] = str(cogumi.attach(home))
        time.sleep(1.5)  # that counts as no time of a step
        seen["asked"] = (home / "PAUSE").exists()
        cogumi.attach(home).unpause()

    at_step(3, lambda: cogumi.attach(home).pause(), monkeypatch)
    threading.Thread(target=user, daemon=True).start()
    paused = cogumi.train(sft)
    assert seen["reason"] == "step 3: asked to wait"
    assert "`cogumi unpause`" in seen["how"]
    assert f"`cogumi unpause {home}`" in (home / "run.log").read_text()
    assert seen["whole"] is not None
    assert seen["whole"].name == "checkpoint-3"
    assert "paused" in seen["paused"]
    assert not seen["asked"]
    assert not (home / "PAUSED").exists()
    one, other = (load_file(each.adapter / "adapter_model.safetensors") for each in (whole, paused) if each.adapter)
    assert all(equal(one[name], other[name]) for name in one)
    spent = read_json(home / "metrics.json")
    assert spent["seconds"]["paused"] >= 1.5
    assert spent["step_seconds"] < spent["elapsed_seconds"] - 1.5


def test_a_signal_ends_a_pause_without_another_step(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "run"

    def provider() -> None:
        wait_until_paused(home)
        os.kill(os.getpid(), signal.SIGTERM)

    at_step(3, lambda: cogumi.attach(home).pause(), monkeypatch)
    threading.Thread(target=provider, daemon=True).start()
    with pytest.raises(SystemExit):
        cogumi.train(sft)
    assert [path.name for path in (home / "checkpoints").glob("checkpoint-*")] == ["checkpoint-3"]
    assert not (home / "PAUSED").exists()
    status = read_json(home / "status.json")
    assert status["state"] == "stopped"
    assert status["reason"].startswith("asked to by SIGTERM: ended after its last finished step")


def test_a_checkpoint_now_is_one_and_training_goes_on(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "run"
    at_step(5, lambda: cogumi.attach(home).checkpoint(), monkeypatch)
    result = cogumi.train(sft)
    assert len(result.series("loss")) == 8
    assert sorted(path.name for path in (home / "checkpoints").glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-8"]
    assert not (home / "CHECKPOINT").exists()


def test_what_is_asked_too_late_or_of_another_part_is_forgotten(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "run"
    at_step(8, lambda: cogumi.attach(home).pause(), monkeypatch)
    cogumi.train(sft)  # the last step: there is nothing to wait for
    assert not (home / "PAUSE").exists()
    assert not (home / "PAUSED").exists()
    for ask in ("checkpoint", "pause", "unpause"):
        with pytest.raises(UsageError, match=r"finished, step 8/8; this run is not training"):
            getattr(cogumi.attach(home), ask)()
    assert not any((home / name).exists() for name in ("CHECKPOINT", "PAUSE"))
    (home / "status.json").write_text(json.dumps({"state": "running", "stage": "train", "time": 0.0, **this_process()}))
    with pytest.raises(UsageError, match="it is not paused"):
        cogumi.attach(home).unpause()
    (home / "PAUSED").touch()
    for ask in ("checkpoint", "pause"):
        with pytest.raises(UsageError, match="it waits already: `cogumi unpause` ends the pause"):
            getattr(cogumi.attach(home), ask)()


def test_saving_in_a_run_does_not_wait_for_the_disk(sft: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """No callback of cogumi's looks at a checkpoint right after the save; one of the user's might."""
    from cogumi.checkpoints.saving import Saver

    found = []
    at_once = Saver.is_read_on_save

    class Theirs(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None: ...

    def noted(self: Saver) -> bool:
        found.append(at_once(self))
        self.trainer.add_callback(Theirs())
        found.append(at_once(self))
        return found[-1]

    monkeypatch.setattr(Saver, "is_read_on_save", noted)
    cogumi.train(sft, train__max_steps=2)
    assert found[:2] == [False, True]


def test_rollouts_are_what_the_trainer_was_rewarded_for(sft: Config, tmp_path: Path) -> None:
    result = cogumi.train(as_gspo(sft, max_steps=8, save_strategy="no", reward_weights=[1.0, 0.5]))
    rows = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert [row["step"] for row in rows] == [1, 5]  # a rollout is four optimizer steps
    logged = {row["step"]: row for row in result.metrics if row.get("reward") is not None}
    for row in rows:
        assert set(row["rewards"]) == {"edit_similarity", "parses"}
        assert len(row["reward"]) == 32
        one, other = row["rewards"]["edit_similarity"], row["rewards"]["parses"]
        expected = [a + 0.5 * b for a, b in zip(one, other, strict=True)]
        assert row["reward"] == pytest.approx(expected, abs=2e-6)
        mean = sum(row["reward"]) / 32
        assert mean == pytest.approx(logged[row["step"]]["reward"], abs=1e-5)
        shown = [each["reward"] for each in row["shown"]]
        assert shown == sorted(shown)
        assert (shown[0], shown[-1]) == (min(row["reward"]), max(row["reward"]))
        assert len(shown) == 4
        assert all(each["prompt"] and isinstance(each["completion"], str) for each in row["shown"])


def test_a_completion_that_nobody_scored_has_no_reward() -> None:
    from cogumi.data.chat import transcript_of
    from cogumi.telemetry.recorder import spread_by_reward, weighted_sum

    nan = float("nan")
    assert weighted_sum((0.5, nan), [2.0, 1.0]) == 1.0
    assert str(weighted_sum((nan, nan), [1.0, 1.0])) == "nan"
    assert spread_by_reward([0.3, nan, 0.1]) == [2, 0]
    assert spread_by_reward([5.0, 1.0, 4.0, 2.0, 3.0, 0.0]) == [5, 3, 4, 0]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so", "tool_calls": [call]}]
    assert transcript_of(said) == 'user: hi\nassistant: so add({"a": 1})'
    assert transcript_of([*said[1:], {"role": "tool", "content": None}]) == 'assistant: so add({"a": 1})\ntool: '


def test_rewards_of_steps_that_are_made_again_are_dropped(tmp_path: Path) -> None:
    from cogumi.core.run_directory import ROLLOUTS
    from cogumi.telemetry.recorder import drop_later_rows

    path = tmp_path / ROLLOUTS
    path.write_text("".join(json.dumps({"step": step, "reward": []}) + "\n" for step in (1, 5, 9)))
    drop_later_rows(path, 5)
    assert [row["step"] for row in read_jsonl(path)] == [1, 5]


def test_what_the_disks_are_wanted_for_is_kept(finished_sft: FinishedRun) -> None:
    said = read_json(finished_sft.home / "forecast.json")["disks"]
    assert said["fits"] is True
    assert said["lines"][0].startswith("one checkpoint is ")
