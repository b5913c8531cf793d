"""Saves by time, where a configuration has no `train.save_steps`, and the snapshots of adapters that come with them."""

import errno
import itertools
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import torch
import yaml
from builders import as_gspo
from processes import until
from safetensors.torch import load_file

import cogumi
from cogumi.checkpoints.manifest import step_of
from cogumi.checkpoints.snapshots import list_snapshots, take_snapshot, thin_out
from cogumi.checkpoints.verify import list_checkpoints
from cogumi.config.schema import load_config
from cogumi.core.run_directory import read_json, read_jsonl, read_section
from cogumi.evaluation.saved_models import read_setup
from cogumi.forecast.disk_forecast import forecast_disks
from cogumi.merge import merge_adapter
from cogumi.telemetry.status import status_of
from cogumi.training import loop

Config = dict[str, Any]
REPOSITORY = Path(__file__).parents[1]
# A run that saves a few times in a second or two; its share of the time would be 2 % in a longer one.
FAST = {"MIN_SAVE_SECONDS": 0.3, "MAX_SAVE_SHARE": 0.9, "SAVES_PER_RUN": 4}
SCRIPT = f"""
import sys, cogumi
from cogumi.training import loop
vars(loop).update({FAST})
cogumi.train(sys.argv[1])
"""


@pytest.fixture
def silent(sft: Config) -> Config:
    """A run whose configuration does not say when it saves."""
    del sft["train"]["save_strategy"]
    sft["train"] |= {"max_steps": 40, "learning_rate": 1e-3, "save_total_limit": 10}
    return sft


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_jsonl(run_dir / "metrics.jsonl") if "loss" in row]


def same_adapter(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (one, other))
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def saved_steps(run_dir: Path) -> list[int]:
    text = (run_dir / "run.log").read_text()
    return [int(step) for step in re.findall(r"checkpoint-(\d+) is saved and verified", text)]


@pytest.mark.parametrize("method", ["sft", "gspo"])
def test_a_run_without_save_steps_saves_by_time_and_learns_the_same(
    method: str, silent: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = silent if method == "sft" else as_gspo(silent, max_steps=24)
    for name, value in FAST.items():
        monkeypatch.setattr(loop, name, value)
    result = cogumi.train(config)
    *between, last = saved_steps(result.run_dir)
    assert last == config["train"]["max_steps"]
    assert between
    kept = read_section(result.run_dir / "decisions.json", "saves")
    assert 0 < kept["save_seconds"] / kept["lost_seconds_at_most"] <= 0.9
    assert "saves by time (train.save_steps is not set): one takes" in (result.run_dir / "run.log").read_text()
    without = cogumi.train(config, train__save_strategy="no", cogumi__run_dir=str(result.run_dir.parent / "without"))
    assert saved_steps(without.run_dir) == []
    assert losses(without.run_dir) == losses(result.run_dir)
    assert same_adapter(without.run_dir / "adapter", result.run_dir / "adapter")


def test_a_run_that_is_killed_between_saves_goes_on_with_its_interval(silent: Config, tmp_path: Path) -> None:
    silent["train"]["max_steps"] = 120
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(silent))
    run_dir, environment = Path(silent["cogumi"]["run_dir"]), os.environ | {"PYTHONPATH": str(REPOSITORY)}
    environment |= {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums go by it, as in the run below
    command = [*prepared_process.python(environment), "-c", SCRIPT, str(tmp_path / "run.yaml")]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        until(lambda: len(list_checkpoints(run_dir / "checkpoints")) >= 2 or process.poll() is not None, 120)
        os.kill(status_of(run_dir).pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        before = read_section(run_dir / "decisions.json", "saves")["interval_seconds"]
        assert subprocess.run(command, env=environment, stdout=said, stderr=said).returncode == 0
    assert "resuming from" in (tmp_path / "said").read_text()
    assert read_section(run_dir / "decisions.json", "saves")["interval_seconds"] == before
    whole = cogumi.train(silent, train__save_strategy="no", cogumi__run_dir=str(tmp_path / "whole"))
    assert losses(whole.run_dir) == losses(run_dir)
    assert same_adapter(whole.run_dir / "adapter", run_dir / "adapter")
    assert read_json(run_dir / "verdict.json")["passed"]


def test_two_percent_are_kept_before_ten_minutes(silent: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    silent["train"]["max_steps"] = 8
    monkeypatch.setattr(loop, "SAVED_BYTES_PER_SECOND", 1e3)  # a checkpoint seems to take minutes
    monkeypatch.setattr(loop, "MIN_SAVE_SECONDS", 0.0)
    result = cogumi.train(silent)
    assert saved_steps(result.run_dir) == [8]
    text = (result.run_dir / "run.log").read_text()
    assert re.search(r"saves by time .* 2\.0 % of the time; at most .* h .* are lost; oftener would cost more", text)


def test_an_explicit_interval_is_respected(silent: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FAST.items():
        monkeypatch.setattr(loop, name, value)
    silent["train"] |= {"max_steps": 12, "save_steps": 5}
    result = cogumi.train(silent)
    assert saved_steps(result.run_dir) == [5, 10, 12]
    assert not read_section(result.run_dir / "decisions.json", "saves")


def test_the_disk_forecast_does_not_count_saves_by_time(silent: Config) -> None:
    silent["train"]["save_total_limit"] = 2
    forecast = forecast_disks(load_config(silent))
    assert (forecast.saves, forecast.held) == (None, 3)
    assert "saves are by time" in " ".join(forecast.lines)
    silent["train"]["save_steps"] = 40
    assert forecast_disks(load_config(silent)).saves == 1


def test_each_save_leaves_an_adapter_that_merges_and_begins_a_run(silent: Config) -> None:
    config = as_gspo(silent, max_steps=40, save_steps=10, save_total_limit=2)
    result = cogumi.train(config)
    checkpoints = result.run_dir / "checkpoints"
    snapshots = list_snapshots(checkpoints)
    assert list(snapshots) == cogumi.attach(result.run_dir).status().snapshots == [10, 20, 30, 40]
    assert [step_of(path) for path in list_checkpoints(checkpoints)] == [40, 30]
    one, other = (path / "adapter_model.safetensors" for path in (snapshots[30], checkpoints / "checkpoint-30"))
    assert one.samefile(other)
    assert same_adapter(snapshots[40], result.adapter)
    assert not same_adapter(snapshots[10], result.adapter)
    (rewards,) = (check.figure for check in result.verdict.checks if check.name == "rewards")
    assert re.search(r"; best around step \d+: .* at the end; nearest adapter .*/adapters/step-\d+$", rewards)
    (reward,) = (check for check in result.verdict.checks if check.name == "reward")
    assert "in 10 rollouts" in reward.figure
    merge_adapter(snapshots[10], result.run_dir / "merged-10")
    assert read_setup(snapshots[10]).files.adapter == snapshots[10]
    later = silent | {"model": {**silent["model"], "adapter": str(snapshots[10])}, "lora": {}}
    assert cogumi.train(later, train__max_steps=2, cogumi__run_dir=str(result.run_dir.parent / "later")).passed


def make_checkpoint(directory: Path, step: int) -> Path:
    checkpoint = directory / f"checkpoint-{step}"
    checkpoint.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "cogumi-manifest.json"):
        (checkpoint / name).write_text(name)
    return checkpoint


def test_twenty_snapshots_stay_evenly_spread_and_none_is_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def check_unfinished(step: int, place: Path) -> None:
        assert sorted(os.listdir(place)) == ["adapter_config.json", "adapter_model.safetensors"]
        assert step not in list_snapshots(tmp_path)

    monkeypatch.setattr(os, "link", no_links)
    for step in range(10, 1010, 10):
        take_snapshot(make_checkpoint(tmp_path, step), partial(check_unfinished, step))
    steps = list(list_snapshots(tmp_path))
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert (len(steps), steps[0], steps[-1]) == (20, 10, 1000)
    assert max(gaps) <= 4 * min(gaps)
    assert not (tmp_path / "adapters" / ".unfinished").exists()
    while thin_out(tmp_path, len(list_snapshots(tmp_path)) // 2):
        pass
    assert not list_snapshots(tmp_path)
