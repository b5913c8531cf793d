"""Runs that ended before their end, started again with the same words."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import yaml
from builders import as_gspo
from disk_mounts import mounting
from safetensors.torch import load_file
from typer.testing import CliRunner

import cogumi
from cogumi.checkpoints.manifest import read_run_name
from cogumi.cli.app import app
from cogumi.core.disk_space import space_of
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json, read_jsonl
from cogumi.health.verdict import judge_training
from cogumi.rl import memory_plan
from cogumi.telemetry import heartbeat
from cogumi.telemetry.recorder import Telemetry

Config = dict[str, Any]


@pytest.fixture
def sft(sft: Config) -> Config:
    sft["train"] |= {"save_strategy": "steps", "save_steps": 2}
    return sft


@pytest.fixture
def gspo(sft: Config) -> Config:
    return as_gspo(sft, save_steps=4)


@pytest.fixture
def whole_sft(sft: Config, train_once: Any, tiny_model: Path) -> Any:
    """What the run of `sft` came to without a stop; no test changes it."""
    return train_once("never-stopped-sft", tiny_model, sft).result


@pytest.fixture
def whole_gspo(gspo: Config, train_once: Any, tiny_model: Path) -> Any:
    """What the run of `gspo` came to without a stop, a checkpoint inside a rollout; no test changes it."""
    gspo = {**gspo, "train": gspo["train"] | {"save_steps": 3}}  # a rollout lasts four
    return train_once("never-stopped-gspo", tiny_model, gspo).result


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes a run fail after a step. 0: not any more."""
    on_step_end = Telemetry.on_step_end

    def stop(step: int) -> None:
        def failing(self: Telemetry, args: Any, state: Any, control: Any, **more: Any) -> None:
            on_step_end(self, args, state, control, **more)
            if state.global_step == step:
                raise RuntimeError("the card fell off the bus")

        monkeypatch.setattr(Telemetry, "on_step_end", failing)

    return stop


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """What was logged, without times, speeds, the machine's figures, and TRL's count of tokens, which begins anew in SFT."""
    timed = re.compile(r".*num_tokens|time|.*_time|.*runtime|.*_per_second|train_.*|disk/.*|perf/.*|total_flos")
    return [
        {key: value for key, value in row.items() if not timed.fullmatch(key)}
        for row in read_jsonl(run_dir / "metrics.jsonl")
    ]


def the_same(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    return all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize(("method", "fails_at"), [("sft", 4), ("sft", 1), ("gspo", 5)])
def test_a_failed_run_goes_on(
    method: str,
    fails_at: int,
    request: pytest.FixtureRequest,
    stop_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, whole = request.getfixturevalue(method), request.getfixturevalue(f"whole_{method}")
    stop_after(fails_at)
    with pytest.raises(RuntimeError, match="fell off"):
        cogumi.train(config)
    run_dir = Path(config["cogumi"]["run_dir"])
    assert read_json(run_dir / "status.json")["state"] == "failed"
    stop_after(0)
    monkeypatch.setattr(memory_plan, "free_memory_bytes", lambda: 1)  # a batch planned now would be another one
    result = cogumi.train(config)
    assert result.passed, str(result.verdict)
    assert logged(run_dir) == logged(whole.run_dir)
    assert the_same(run_dir, whole.run_dir)
    log_text = (run_dir / "run.log").read_text()
    assert ("resuming from" in log_text) == (fails_at > 1)
    assert "resumes where it stopped" in log_text


def test_a_checkpoint_inside_a_rollout_is_taken_and_resumed_from(
    gspo: Config, whole_gspo: Any, stop_after: Callable[[int], None]
) -> None:
    gspo["train"]["save_steps"] = 3  # a rollout lasts four
    assert "rollout" not in " ".join(
        line for line in (whole_gspo.run_dir / "run.log").read_text().splitlines() if "WARNING" in line
    )
    stop_after(5)
    with pytest.raises(RuntimeError, match="fell off"):
        cogumi.train(gspo)
    stop_after(0)
    result = cogumi.train(gspo)
    assert "checkpoint-3" in (result.run_dir / "run.log").read_text()
    assert result.passed, str(result.verdict)
    assert the_same(result.run_dir, whole_gspo.run_dir)


def test_a_run_that_failed_after_its_training_trains_no_step(
    sft: Config, whole_sft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cogumi.training import finish

    with monkeypatch.context() as patched:
        patched.setattr(finish, "record_verdict", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cogumi.train(sft)
    run_dir = Path(sft["cogumi"]["run_dir"])
    assert (run_dir / "adapter").is_dir()
    result = cogumi.train(sft, cogumi__merge=True)
    assert result.passed, str(result.verdict)
    assert "nothing is left to train" in (run_dir / "run.log").read_text()
    assert logged(run_dir) == logged(whole_sft.run_dir)
    assert the_same(run_dir, whole_sft.run_dir)
    assert result.merged is not None


def test_a_killed_run_goes_on(sft: Config, whole_sft: Any, tmp_path: Path, for_commands: dict[str, str]) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sft))
    waits = "import os, time, cogumi.telemetry.recorder as t\n" \
            "def wait(self, args, state, control, **more):\n" \
            "    if state.global_step == 5: print(os.getpid(), flush=True), time.sleep(600)\n" \
            "t.Telemetry.on_step_end = wait\n" \
            "import cogumi; cogumi.train('tiny.yaml')"  # fmt: skip
    words = [*prepared_process.python(for_commands), "-c", waits]
    process = subprocess.Popen(words, cwd=tmp_path, env=for_commands, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = next(int(line) for line in process.stdout if line.strip().isdigit())
    with pytest.raises(UsageError, match="under way in another process"):
        cogumi.train(sft)
    run_dir = Path(sft["cogumi"]["run_dir"])
    os.kill(pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert read_json(run_dir / "status.json")["state"] == "running"
    result = cogumi.train(sft)
    assert result.passed, str(result.verdict)
    assert logged(run_dir) == logged(whole_sft.run_dir)
    assert the_same(run_dir, whole_sft.run_dir)


def test_what_differs_is_named_and_nothing_changes(sft: Config, stop_after: Callable[[int], None]) -> None:
    stop_after(3)
    with pytest.raises(RuntimeError):
        cogumi.train(sft)
    run_dir = Path(sft["cogumi"]["run_dir"])
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    with pytest.raises(UsageError, match=r"another configuration \(train.learning_rate: 0.01 there, 0.02 here\)"):
        cogumi.train(sft, train__learning_rate=2e-2)
    with pytest.raises(UsageError, match=r"already holds a run \(failed\)"):
        cogumi.train(sft, cogumi__resume="never")
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    stop_after(0)
    assert cogumi.train(sft, train__save_steps=3, cogumi__merge=True).passed


def test_other_weights_in_the_directory_of_the_base_are_another_configuration(
    sft: Config, tiny_model: Path, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    stop_after(3)
    with pytest.raises(RuntimeError):
        cogumi.train(sft, model__name=str(base))
    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-4096] + bytes(4096))
    with pytest.raises(UsageError, match=rf"of another configuration \(other weights in {base}\)"):
        cogumi.train(sft, model__name=str(base))
    (base / "model.safetensors").write_bytes(weights)
    stop_after(0)
    assert cogumi.train(sft, model__name=str(base)).passed


def test_a_run_that_is_older_than_a_key_goes_on_with_its_default(
    sft: Config, whole_sft: Any, stop_after: Callable[[int], None]
) -> None:
    """Of the keys of cogumi only those that the user set are in its config.yaml."""
    stop_after(3)
    with pytest.raises(RuntimeError):
        cogumi.train(sft)
    run_dir = Path(sft["cogumi"]["run_dir"])
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    stored["cogumi"] = {key: stored["cogumi"][key] for key in (*sft["cogumi"], "flags")}
    del stored["data"]["options"]
    (run_dir / "config.yaml").write_text(yaml.safe_dump(stored))
    stop_after(0)
    with pytest.raises(UsageError, match=r"another configuration \(cogumi.tuning: lora there, full here"):
        cogumi.train({**sft, "lora": {}}, cogumi__tuning="full", lora__r=None)
    result = cogumi.train(sft, cogumi__merge_dtype="base")
    assert the_same(result.run_dir, whole_sft.run_dir)


def test_a_setting_refused_when_a_run_goes_on_loses_nothing(
    sft: Config, stop_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cogumi.methods import building as module

    stop_after(3)
    with pytest.raises(RuntimeError):
        cogumi.train(sft)
    run_dir = Path(sft["cogumi"]["run_dir"])
    assert "fell off the bus" in (run_dir / "report.html").read_text()

    def refused(*_: Any) -> None:
        raise UsageError("no memory")

    monkeypatch.setattr(module, "build_trainer", refused)
    with pytest.raises(UsageError, match="no memory"):
        cogumi.train(sft)
    assert (run_dir / "checkpoints" / "checkpoint-2").is_dir()


def fill_last_page(path: Path) -> None:
    """A row that makes a file end where its next byte needs another page."""
    missing, row = -path.stat().st_size % 4096 + 4096, '{"step": 2, "note": "%s"}\n'
    with path.open("a") as file:
        file.write(row % ("x" * (missing - len(row % ""))))


def test_a_full_disk_does_not_end_a_run(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the second step on no line about the run fits, nor a checkpoint; before the last there is space again."""
    on_step_end = Telemetry.on_step_end
    with mounting(tmp_path) as mount:
        disk = mount(options="size=8m")
        filler = disk / "somebody's"

        def filling(self: Telemetry, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 2:
                fill_last_page(disk / "run" / "metrics.jsonl")
                filler.write_bytes(bytes(space_of(disk).free))
            if state.global_step == 5:
                filler.unlink()
            on_step_end(self, args, state, control, **more)

        monkeypatch.setattr(Telemetry, "on_step_end", filling)
        monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.01)
        result = cogumi.train(sft, cogumi__run_dir=str(disk / "run"), train__save_steps=3)
        assert result.passed, str(result.verdict)
        assert [row["step"] for row in result.metrics if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("metrics wait in memory") == 1


def test_a_report_that_finds_no_room_takes_nothing_from_the_run(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cogumi.training import run as module

    leave = module.write_report
    with mounting(tmp_path) as mount:
        disk = mount(options="size=8m")

        def filled(run_dir: Path) -> None:
            (disk / "somebody's").write_bytes(bytes(space_of(disk).free))
            leave(run_dir)

        monkeypatch.setattr(module, "write_report", filled)
        result = cogumi.train(sft, cogumi__run_dir=str(disk / "run"))
        assert result.passed, str(result.verdict)
        assert "report.html: cannot be written: No space left on device; name another file (--out)" in caplog.text
        elsewhere = tmp_path / "home.html"
        output = CliRunner().invoke(app, ["report", str(disk / "run"), "--out", str(elsewhere)])
        assert output.exit_code == 0, output.output
        assert elsewhere.read_text().startswith("<!doctype html>")


def test_a_line_that_was_cut_off_is_logged_again(sft: Config, stop_after: Callable[[int], None]) -> None:
    stop_after(3)
    with pytest.raises(RuntimeError):
        cogumi.train(sft)
    path = Path(sft["cogumi"]["run_dir"]) / "metrics.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step": 3, "loss": 1.0})[:-4])
    stop_after(0)
    result = cogumi.train(sft)
    assert [row["step"] for row in result.metrics if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_fresh_machine_takes_up_a_finished_training_from_its_mirror(sft: Config, tmp_path: Path) -> None:
    first = cogumi.train(sft, cogumi__mirror=str(tmp_path / "mirror"))
    shutil.rmtree(tmp_path / "mirror" / "run")  # it was destroyed before its end was sent
    there = cogumi.train(sft, cogumi__mirror=str(tmp_path / "mirror"), cogumi__run_dir=str(tmp_path / "there"))
    assert there.passed, str(there.verdict)
    assert there.series("loss") == first.series("loss")
    assert the_same(there.run_dir, first.run_dir)
    assert read_run_name(there.run_dir / "checkpoints") == read_run_name(first.run_dir / "checkpoints")
    with pytest.raises(UsageError, match=r"another configuration \(train.learning_rate: 0.01 there, 0.02 here\)"):
        cogumi.train(
            sft,
            cogumi__mirror=str(tmp_path / "mirror"),
            cogumi__run_dir=str(tmp_path / "other"),
            train__learning_rate=2e-2,
        )


def test_a_verdict_needs_a_training_loss() -> None:
    evaluated = [{"step": 0, "eval_loss": 2.0}, {"step": 6, "eval_loss": 1.0}]
    assert not all(check.passed for check in judge_training(evaluated, 6, 6))
    assert all(check.passed for check in judge_training([*evaluated, {"step": 6, "loss": 1.5}], 6, 6))


def test_gspo_that_goes_on_inside_a_rollout_raises_no_false_alarm(
    gspo: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gspo["train"]["learning_rate"] = 1e-1
    whole = cogumi.train(gspo, cogumi__run_dir=str(tmp_path / "whole"))
    on_step_end = Telemetry.on_step_end

    def interrupting(self: Telemetry, args: Any, state: Any, control: Any, **more: Any) -> None:
        on_step_end(self, args, state, control, **more)
        if state.global_step == 5:  # the second rollout began with the fifth step
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Telemetry, "on_step_end", interrupting)
        with pytest.raises(KeyboardInterrupt):
            cogumi.train(gspo)
    result = cogumi.train(gspo)
    log_text = (result.run_dir / "run.log").read_text()
    assert "resuming from" in log_text
    assert "before anything was learned" not in log_text
    assert result.series("policy/staleness") == whole.series("policy/staleness")
    assert the_same(result.run_dir, whole.run_dir)


def test_where_a_disk_becomes_read_only_the_cause_is_what_is_said_last(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_step_end = Telemetry.on_step_end

    def failing(self: Telemetry, args: Any, state: Any, control: Any, **more: Any) -> None:
        on_step_end(self, args, state, control, **more)
        if state.global_step == 3:
            subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
            raise RuntimeError("the card fell off the bus")

    with mounting(tmp_path) as mount:
        disk = mount(name="disk", options="size=64m")
        sft["cogumi"]["run_dir"] = str(disk / "run")
        try:
            with monkeypatch.context() as patched:
                patched.setattr(Telemetry, "on_step_end", failing)
                with pytest.raises(RuntimeError, match="fell off the bus"):
                    cogumi.train(sft)
            with pytest.raises(UsageError, match=r"disk/run: cannot write .*Read-only file system; make it writable"):
                cogumi.train(sft)
            monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
            with pytest.raises(UsageError, match=r"prepared data cannot be written.*Read-only.*XDG_CACHE_HOME"):
                cogumi.preview(sft)
        finally:
            subprocess.run(["umount", str(disk)], check=True)
