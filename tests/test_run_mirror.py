"""Runs whose machine is destroyed: the process group killed, the run directory removed, the same command typed again.

The machine is a process of its own; what it writes to moto's S3 server goes through a proxy, which also says when it is killed.
"""

import json
import logging
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import yaml
from builders import as_gspo
from hub_server import HubServer
from mirror_server import Bucket
from test_checkpoints_mirror import REPOSITORY, bucket, hub, make, server
from test_flags import SFT
from test_training_unfinished import logged, stop_after, the_same

import cogumi
from cogumi.checkpoints.manifest import MANIFEST_NAME
from cogumi.checkpoints.mirror import Mirror, Store
from cogumi.core.errors import UsageError
from cogumi.core.run_directory import read_json, write_json
from cogumi.health import rules
from cogumi.health.flags import RunHistory
from cogumi.telemetry import mirrored_run
from cogumi.telemetry.mirrored_run import RunMirror, fetch_files
from cogumi.telemetry.status import read_json_or_empty
from cogumi.training import run as run_module

__all__ = ["bucket", "hub", "server", "stop_after"]  # fixtures
Config = dict[str, Any]
# A machine: the command line in a process group of its own, in a hurry.
MACHINE = """
import os, sys
os.setpgrp()
import cogumi.telemetry.mirrored_run as mirrored_run, cogumi.checkpoints.mirror as mirror
mirrored_run.LOOK_SECONDS = mirrored_run.SEND_SECONDS = mirrored_run.RETRY_SECONDS = mirror.RETRY_SECONDS = 0.05
{more}
print("machine", os.getpid(), flush=True)
from cogumi.cli.app import main
sys.argv = ["cogumi", *sys.argv[1:]]
main()
"""


@pytest.fixture
def sft(sft: Config, bucket: Bucket) -> Config:
    sft["train"] |= {"save_strategy": "steps", "save_steps": 2}
    sft["cogumi"] |= {"mirror": bucket.url}
    return sft


@pytest.fixture
def machine(tmp_path: Path, bucket: Bucket, for_commands: dict[str, str]) -> Callable[..., tuple[int, str]]:
    """Types a command on a machine, which is destroyed at its `dies_at`th request to the mirror; status and output."""

    def run(*words: object, dies_at: int = 0, more: str = "") -> tuple[int, str]:
        command = [*prepared_process.python(for_commands | bucket.environment), "-c", MACHINE.format(more=more)]
        command += map(str, words)
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=for_commands | bucket.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("machine"))
        bucket.proxy.requests.clear()

        def kill(method: str, path: str) -> None:
            if dies_at and len(bucket.proxy.requests) == dies_at:
                os.killpg(pid, signal.SIGKILL)

        bucket.proxy.after = kill
        output = process.communicate(timeout=300)[0]
        bucket.proxy.after = lambda *_: None
        return process.returncode, output

    return run


def destroyed(config: Config, tmp_path: Path, machine: Any, moments: list[int]) -> None:
    """Train, on machines that are destroyed at these moments, and then on one that is not."""
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    run_dir = Path(config["cogumi"]["run_dir"])
    for moment in [*moments, 0]:
        shutil.rmtree(run_dir, ignore_errors=True)
        status, output = machine("train", "my.yaml", dies_at=moment)
        if status != -signal.SIGKILL:
            assert status == 0, f"{moments}: {output}"


def undisturbed(config: Config, tmp_path: Path, train_once: Any, tiny_model: Path, name: str) -> Path:
    alone = {**config, "cogumi": {key: value for key, value in config["cogumi"].items() if key != "mirror"}}
    return Path(train_once(f"never-destroyed-{name}", tiny_model, alone).result.run_dir)


def test_three_machines_destroyed_at_random_moments_cost_nothing(
    sft: Config, tmp_path: Path, machine: Any, bucket: Bucket, train_once: Any, tiny_model: Path
) -> None:
    whole = undisturbed(sft, tmp_path, train_once, tiny_model, "sft")
    moments = [random.randint(1, 120) for _ in range(3)]
    destroyed(sft, tmp_path, machine, moments)
    run_dir = Path(sft["cogumi"]["run_dir"])
    assert logged(run_dir) == logged(whole), moments
    assert the_same(run_dir, whole), moments
    assert read_json(run_dir / "verdict.json")["passed"]
    there = bucket.files()
    assert {"config.yaml", "metrics.jsonl", "report.html", "run.log", "verdict.json", "DONE", "status.json"} <= there[
        "run"
    ]
    assert "adapter_model.safetensors" in there["adapter"]


@pytest.mark.slow("dozens of runs")
@pytest.mark.parametrize("method", ["sft", "gspo"])
@pytest.mark.parametrize("chain", [0, *(pytest.param(chain, marks=pytest.mark.sweep) for chain in (1, 2, 3, 4))])
def test_machines_destroyed_behind_a_failing_server(
    sft: Config,
    method: str,
    chain: int,
    tmp_path: Path,
    machine: Any,
    bucket: Bucket,
    train_once: Any,
    tiny_model: Path,
) -> None:
    config = sft if method == "sft" else as_gspo(sft, save_steps=3)  # inside a rollout, which lasts four steps
    whole = undisturbed(config, tmp_path, train_once, tiny_model, method)
    chance = random.Random(chain)
    faults: list[Any] = [(500, "InternalError"), (503, "SlowDown"), "cut"]
    bucket.proxy.faults = lambda verb, path: chance.choice(faults) if chance.random() < 0.04 else None
    moments = [random.randint(1, 150) for _ in range(3)]
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    run_dir, statuses = Path(config["cogumi"]["run_dir"]), []
    for moment in [*moments, *(20 * [0])]:
        shutil.rmtree(run_dir, ignore_errors=True)
        status, output = machine("train", "my.yaml", dies_at=moment)
        statuses.append(status)
        assert status in (0, 2, -signal.SIGKILL), f"{moments}: {output}"  # 2: the server failed as the run began
        if status == 0:
            break
    assert statuses[-1] == 0
    assert logged(run_dir) == logged(whole), moments
    assert the_same(run_dir, whole), moments


def test_a_run_that_is_finished_in_its_mirror_is_fetched_and_not_made_again(
    sft: Config, tmp_path: Path, command_line: Any, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    config, run_dir = tmp_path / "my.yaml", Path(sft["cogumi"]["run_dir"])
    config.write_text(yaml.safe_dump(sft))
    first = cogumi.train(config)
    assert first.passed, str(first.verdict)
    shutil.move(run_dir, kept := tmp_path / "first")
    there = bucket.files()
    assert {"config.yaml", "metrics.jsonl", "report.html", "run.log", "verdict.json", "DONE"} <= there["run"]
    with pytest.raises(UsageError, match=r"another configuration \(train.learning_rate: 0.01 there, 0.02 here\)"):
        cogumi.train(config, train__learning_rate=2e-2)
    with pytest.raises(UsageError, match="holds this run already"):
        cogumi.train(config, cogumi__resume="never")
    assert not run_dir.exists()
    caplog.set_level(logging.INFO, logger="cogumi")
    result = cogumi.train(config)
    assert "it is finished already, and there is nothing to start" in caplog.text
    assert result.verdict.as_dict() == first.verdict.as_dict()
    assert result.metrics == first.metrics
    assert the_same(run_dir, kept)
    assert not (run_dir / "checkpoints").exists()
    assert bucket.files() == there
    shutil.rmtree(run_dir)
    status, output, _ = command_line("train", config)
    assert status == 0
    assert "finished, step 6/6" in output
    shutil.rmtree(run_dir)
    status, *_ = command_line("start", config)
    assert status == 0
    assert "is finished already in" in caplog.text
    assert cogumi.attach(run_dir).status().passed


@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_who_waits_for_a_run_may_destroy_its_machine(sft: Config, bucket: Bucket, restarts: int) -> None:
    """As in `cogumi wait RUN; stop the machine`: verdict, report and DONE go to the mirror after the run has its state."""

    def slow(method: str, path: str) -> None:
        if method == "PUT" and "/run/" in path:
            time.sleep(0.3)

    bucket.proxy.faults = slow
    status = cogumi.start(sft, cogumi__restarts=restarts).wait()
    assert status.passed
    assert {"verdict.json", "report.html", "DONE", "status.json"} <= bucket.files()["run"]
    mirrored = Store(bucket.url)
    assert json.loads(mirrored.text("run", "status.json"))["state"] == "finished"


def test_a_mirror_belongs_to_one_run_that_is_under_way(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also before its first checkpoint. Of another machine the heartbeat tells whether it lives."""
    place, other = tmp_path / "mirror" / "run", str(tmp_path / "other")
    sft["cogumi"] |= {"mirror": str(tmp_path / "mirror")}
    run = cogumi.start(sft, train__max_steps=100_000, train__save_steps=50_000)
    while (
        read_json_or_empty(place / "status.json").get("state") != "running" or not (place / "heartbeat.json").exists()
    ):
        time.sleep(0.2)
    with pytest.raises(UsageError, match=r"holds a run of another configuration \(train\.max_steps: 100000 there"):
        cogumi.train(sft, train__save_steps=50_000, cogumi__run_dir=other)
    same = {"train__max_steps": 100_000, "train__save_steps": 50_000, "cogumi__run_dir": other}
    with pytest.raises(UsageError, match=rf"holds a run that is under way \(process {run.status().pid} on "):
        cogumi.train(sft, **same)
    assert not Path(other).exists()
    run.stop()
    run.wait()

    status, beat = (read_json(place / name) for name in ("status.json", "heartbeat.json"))
    write_json(place / "status.json", status | {"state": "running", "host": "another-machine"})
    write_json(place / "heartbeat.json", beat | {"time": time.time()})
    monkeypatch.setattr(mirrored_run, "SEND_SECONDS", 5.0)
    monkeypatch.setattr(mirrored_run, "RETRY_SECONDS", 0.1)
    beating = threading.Timer(2, lambda: write_json(place / "heartbeat.json", beat | {"time": time.time()}))
    beating.start()
    with pytest.raises(UsageError, match=r"under way \(process \d+ on another-machine\); wait for it, end that one"):
        cogumi.train(sft, **same)
    write_json(place / "heartbeat.json", beat | {"time": time.time()})
    monkeypatch.setattr(mirrored_run, "SEND_SECONDS", 1.0)
    monkeypatch.setattr(run_module, "prepare_base", refuse)
    with pytest.raises(UsageError, match="a pretend refusal"):  # it was silent for long enough, and the run goes on
        cogumi.train(sft, **same)
    assert caplog.text.count("at work a moment ago") == 2


def refuse(*_: Any) -> None:
    raise UsageError("a pretend refusal")


@pytest.mark.parametrize(("run_dir", "mirror"), [("run", "run"), ("run", "run/mirror"), ("mirror/run", "mirror")])
def test_a_mirror_in_its_own_run_directory_is_refused(sft: Config, tmp_path: Path, run_dir: str, mirror: str) -> None:
    (tmp_path / "mirror").mkdir()
    with pytest.raises(UsageError, match=r"cogumi\.mirror: .* are lost together; name a place outside of it"):
        cogumi.train(sft, cogumi__run_dir=str(tmp_path / run_dir), cogumi__mirror=str(tmp_path / mirror))
    assert not (tmp_path / run_dir).exists()


def test_the_status_is_read_from_the_mirror(
    sft: Config, stop_after: Any, command_line: Any, bucket: Bucket, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        raise_from(command_line("status", bucket.url))
    stop_after(5)
    for place in (bucket.url, str(tmp_path / "mirror")):
        with pytest.raises(RuntimeError, match="fell off"):
            cogumi.train(sft, cogumi__mirror=place)
        shutil.rmtree(sft["cogumi"]["run_dir"])
        status, output, _ = command_line("status", place)
        assert status == 0
        assert output.startswith(f"{place}: failed, step 5/6")
        assert "the card fell off the bus" in output
        assert "the newest checkpoint is checkpoint-4; the same command resumes from it" in output
        status, output, _ = command_line("status", "--json", place)
        values = json.loads(output)[0]
        assert (values["run_dir"], values["state"], values["checkpoint"]) == (place, "failed", "checkpoint-4")
        assert values["heartbeat"]["step"] == 5


def raise_from(answer: tuple[int, str, str]) -> None:
    assert answer[0] == 2
    raise UsageError(answer[2])


def test_an_adapter_that_does_not_arrive_fails_the_run_and_is_made_again_elsewhere(
    sft: Config, tmp_path: Path, machine: Any, bucket: Bucket, train_once: Any, tiny_model: Path
) -> None:
    whole = undisturbed(sft, tmp_path, train_once, tiny_model, "sft")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(sft))
    run_dir = Path(sft["cogumi"]["run_dir"])
    denied = lambda verb, path: (403, "AccessDenied") if verb == "PUT" and "/adapter/" in path else None  # noqa: E731
    bucket.proxy.faults = denied
    status, output = machine("train", "my.yaml", more="mirrored_run.ADAPTER_SECONDS = 0.5")
    assert status == 1, output
    assert "FAIL  mirrored adapter: it has not arrived: " in output
    checks = read_json(run_dir / "verdict.json")["checks"]
    assert [check["name"] for check in checks if not check["passed"]] == ["mirrored adapter"]
    assert "DONE" not in bucket.files()["run"]
    bucket.proxy.faults = lambda *_: None
    shutil.rmtree(run_dir)
    status, output = machine("train", "my.yaml")
    assert status == 0, output
    assert "nothing is left to train" in output
    assert the_same(run_dir, whole)
    assert logged(run_dir) == logged(whole)


@pytest.mark.parametrize("how", ["moved", "destroyed"])
def test_the_best_checkpoint_is_found_again(sft: Config, stop_after: Any, tmp_path: Path, how: str) -> None:
    """The best is the worst here, so that it is not the last."""
    sft["cogumi"] |= {"mirror": str(tmp_path / "mirror")}
    sft["train"] |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    sft["train"] |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    whole = cogumi.train(sft, cogumi__run_dir=str(tmp_path / "whole"), cogumi__mirror=None)
    stop_after(5)
    with pytest.raises(RuntimeError, match="fell off"):
        cogumi.train(sft)
    stop_after(0)
    run_dir = Path(sft["cogumi"]["run_dir"])
    elsewhere = tmp_path / "elsewhere"
    if how == "moved":
        shutil.move(run_dir, elsewhere)
    else:
        shutil.rmtree(run_dir)
    result = cogumi.train(sft, cogumi__run_dir=str(elsewhere))
    assert result.passed, str(result.verdict)
    state = read_json(elsewhere / "checkpoints" / "checkpoint-6" / "trainer_state.json")
    assert Path(state["best_model_checkpoint"]).name == "checkpoint-2"
    assert the_same(elsewhere, whole.run_dir)
    names = {path.name for path in (tmp_path / "mirror").iterdir()}
    assert names == {"checkpoint-2", "checkpoint-4", "checkpoint-6", "run", "adapter"}


def test_a_best_checkpoint_that_is_gone_fails_a_check(sft: Config, stop_after: Any, tmp_path: Path) -> None:
    sft["train"] |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    sft["train"] |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    sft["cogumi"] |= {"mirror": None}
    stop_after(5)
    with pytest.raises(RuntimeError, match="fell off"):
        cogumi.train(sft)
    stop_after(0)
    shutil.rmtree(Path(sft["cogumi"]["run_dir"]) / "checkpoints" / "checkpoint-2")
    result = cogumi.train(sft)
    assert [check.name for check in result.verdict.checks if not check.passed] == ["best checkpoint"]


def test_where_all_is_damaged_the_command_in_the_message_starts_over(
    sft: Config, stop_after: Any, tmp_path: Path, command_line: Any
) -> None:
    sft["cogumi"] |= {"mirror": str(tmp_path / "mirror")}
    config = tmp_path / "my.yaml"
    config.write_text(yaml.safe_dump(sft))
    stop_after(5)
    with pytest.raises(RuntimeError, match="fell off"):
        cogumi.train(config)
    stop_after(0)
    shutil.rmtree(run_dir := Path(sft["cogumi"]["run_dir"]))
    for manifest in (tmp_path / "mirror").glob(f"checkpoint-*/{MANIFEST_NAME}"):
        manifest.write_text("{}")
    status, _, error = command_line("train", config)
    assert status == 2
    assert "none of its 2 checkpoints can be resumed from" in error
    assert not run_dir.exists()
    typed = re.search(r"start over at step 0, on purpose and with an empty mirror: cogumi (.*)", error)
    assert typed is not None, error
    status, output, error = command_line(*shlex.split(typed[1]))
    assert status == 0, error
    assert "finished, step 6/6" in output


@pytest.mark.slow("a training for each damaged file")
@pytest.mark.parametrize(
    "how", ["flipped", *(pytest.param(how, marks=pytest.mark.sweep) for how in ("shorter", "gone"))]
)
def test_a_damaged_mirror_is_continued_from_what_is_whole_or_refused(
    sft: Config, stop_after: Any, tmp_path: Path, how: str, train_once: Any, tiny_model: Path
) -> None:
    """Each file of the newest checkpoint, and what is read of the run: the bits of an undisturbed run, or nothing."""
    whole = undisturbed(sft, tmp_path, train_once, tiny_model, "sft")
    stop_after(5)
    with pytest.raises(RuntimeError, match="fell off"):
        cogumi.train(sft, cogumi__mirror=str(tmp_path / "mirror"))
    stop_after(0)
    run_dir, ends = Path(sft["cogumi"]["run_dir"]), []
    files = sorted(path.relative_to(tmp_path / "mirror") for path in (tmp_path / "mirror" / "checkpoint-4").iterdir())
    files += [Path("run", name) for name in ("config.yaml", "status.json", "flags.json", "heartbeat.json", "run.log")]
    for file in files:
        shutil.rmtree(run_dir)
        shutil.copytree(tmp_path / "mirror", place := tmp_path / f"damaged-{len(ends)}")
        data = (place / file).read_bytes()
        (place / file).unlink()
        if how != "gone":
            half = len(data) // 2
            (place / file).write_bytes(data[:half] if how == "shorter" else data[:half] + b"\xff" + data[half + 1 :])
        try:
            cogumi.train(sft, cogumi__mirror=str(place))
            ends.append("continued")
            assert logged(run_dir) == logged(whole), file
            assert the_same(run_dir, whole), file
        except UsageError as error:
            ends.append(str(error))
            assert not run_dir.exists(), file
            run_dir.mkdir()
    assert len(files) >= 12
    refused = [end for end in ends if end != "continued"]
    assert len(files) >= 12
    assert [end.partition(" cannot be read (")[0] for end in refused] == [f"mirror {tmp_path}/damaged-13"] * len(
        refused
    )
    assert len(refused) <= 1  # a configuration that is no text


def test_a_fetch_that_was_interrupted_is_made_again(sft: Config, stop_after: Any, tmp_path: Path) -> None:
    sft["cogumi"] |= {"mirror": str(tmp_path / "mirror")}
    stop_after(5)
    with pytest.raises(RuntimeError, match="fell off"):
        cogumi.train(sft)
    stop_after(0)
    run_dir = Path(sft["cogumi"]["run_dir"])
    run_dir.rename(fetched := run_dir.with_name(f".{run_dir.name}-fetched"))
    (fetched / "checkpoints" / "checkpoint-4" / "optimizer.pt").write_bytes(b"half of")
    result = cogumi.train(sft)
    assert result.passed, str(result.verdict)
    assert not fetched.exists()


def test_a_mirror_of_an_older_cogumi_is_continued(
    sft: Config, stop_after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_once: Any, tiny_model: Path
) -> None:
    from cogumi.training import loop

    whole = undisturbed(sft, tmp_path, train_once, tiny_model, "sft")
    sft["cogumi"] |= {"mirror": str(tmp_path / "mirror")}
    stop_after(5)
    with monkeypatch.context() as older:
        older.setattr(loop, "pack_run", lambda *_: None)
        with pytest.raises(RuntimeError, match="fell off"):
            cogumi.train(sft)
    stop_after(0)
    shutil.rmtree(tmp_path / "mirror" / "run")
    shutil.rmtree(run_dir := Path(sft["cogumi"]["run_dir"]))
    result = cogumi.train(sft)
    assert result.passed, str(result.verdict)
    assert the_same(run_dir, whole)


@pytest.mark.parametrize("part", ["adapter_model.safetensors", MANIFEST_NAME])
def test_a_finished_run_whose_adapter_is_damaged_makes_it_again(sft: Config, tmp_path: Path, part: str) -> None:
    sft["cogumi"] |= {"mirror": str(tmp_path / "mirror")}
    first = cogumi.train(sft)
    shutil.move(first.run_dir, kept := tmp_path / "first")
    damaged = tmp_path / "mirror" / "adapter" / part
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    result = cogumi.train(sft)
    assert result.passed, str(result.verdict)
    assert the_same(result.run_dir, kept)
    assert logged(result.run_dir) == logged(kept)
    assert (tmp_path / "mirror" / "adapter" / part).read_bytes()[-1:] != b"x"


def test_the_best_checkpoint_stays_in_the_mirror_and_follows_the_newest(bucket: Bucket, tmp_path: Path) -> None:
    mirror, reached, go_on = Mirror(bucket.url), threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if path.endswith("checkpoint-2/optimizer.pt") and method == "PUT":
            reached.set()
            go_on.wait(60)

    bucket.proxy.faults = hold
    paths = {step: make(tmp_path, step) for step in (2, 4, 6, 8)}
    assert mirror.lag() == {"perf/mirror_lag_steps": 0, "perf/mirror_lag_seconds": 0}
    mirror.send(paths[2])
    assert reached.wait(60)
    mirror.best = paths[4]
    for step in (4, 6):
        mirror.send(paths[step])
    lag = mirror.lag()
    assert lag["perf/mirror_lag_steps"] == 6
    assert lag["perf/mirror_lag_seconds"] > 0
    go_on.set()
    assert mirror.finish(60) == []
    assert mirror.lag() == {"perf/mirror_lag_steps": 0, "perf/mirror_lag_seconds": 0}
    assert mirror.reached == 6
    puts = [path.split("/")[-2] for method, path in bucket.proxy.requests if method == "PUT" and "optimizer" in path]
    assert puts == ["checkpoint-2", "checkpoint-6", "checkpoint-4"]
    mirror.send(paths[8])
    assert mirror.finish(60) == []
    assert bucket.files().keys() == {"checkpoint-4", "checkpoint-6", "checkpoint-8"}
    mirror.best = paths[8]
    mirror.send(make(tmp_path, 10))
    assert mirror.finish(60) == []
    assert bucket.files().keys() == {"checkpoint-8", "checkpoint-10"}


@pytest.mark.slow("a link ten times slower than the saves, for seconds")
def test_over_a_slow_link_the_newest_whole_checkpoint_is_two_transfers_old_at_most(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers: list[float] = []

    def timed(self: Mirror, checkpoint: Path) -> Exception | None:
        began = time.monotonic()
        failure = transfer(self, checkpoint)
        transfers.append(time.monotonic() - began)
        return failure

    def slow(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("optimizer.pt"):
            time.sleep(2)

    transfer = Mirror.mirror
    monkeypatch.setattr(Mirror, "mirror", timed)
    bucket.proxy.faults = slow
    mirror, saved, ages = Mirror(bucket.url), dict[int, float](), list[float]()
    for step in range(1, 61):  # one each 0.2 s, a tenth of a transfer
        saved[step] = time.monotonic()
        mirror.send(make(tmp_path, step))
        time.sleep(max(0.0, saved[step] + 0.2 - time.monotonic()))
        ages.append(time.monotonic() - saved[mirror.reached or 1])
    assert mirror.finish(60) == []
    assert len(transfers) >= 4
    assert max(ages) <= 2 * max(transfers) + 0.5, (ages, transfers)


def test_a_mirror_that_is_late_is_a_yellow_flag() -> None:
    def flag(seconds: float) -> Any:
        row = {"step": 3, "perf/mirror_lag_steps": 40.0, "perf/mirror_lag_seconds": seconds}
        return rules.mirror(RunHistory(SFT, [row], [row]))

    assert rules.mirror(RunHistory(SFT, [], [])) is None
    assert flag(0.0).level == "green"
    late = flag(1300.0)
    assert (late.level, late.evidence) == ("yellow", "at step 3 it is 40 steps and 1300 s behind the newest checkpoint")


def test_a_sanity_check_is_continued_on_another_machine(
    sft: Config, tmp_path: Path, train_once: Any, tiny_model: Path
) -> None:
    whole = undisturbed(sft, tmp_path, train_once, tiny_model, "sft")
    sft["cogumi"] |= {"mirror": str(tmp_path / "mirror")}
    cogumi.train(sft, cogumi__sanity=3)
    shutil.rmtree(run_dir := Path(sft["cogumi"]["run_dir"]))
    with pytest.raises(UsageError, match="its first steps were checked"):
        cogumi.train(sft, cogumi__sanity=3)
    shutil.rmtree(run_dir)
    assert not (tmp_path / "mirror" / "adapter").exists(), "it is not the run's"
    result = cogumi.train(sft)
    assert logged(result.run_dir) == logged(whole)
    assert the_same(result.run_dir, whole)


def test_a_run_goes_to_a_repository(hub: HubServer, tmp_path: Path) -> None:
    run_dir, adapter = tmp_path / "run", tmp_path / "adapter"
    run_dir.mkdir()
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    for name in ("config.yaml", "status.json", "run.log"):
        (run_dir / name).write_text('{"state": "failed"}\n' * 100_000)
    Mirror(f"hf://{REPOSITORY}/mine")
    sender = RunMirror(run_dir, f"hf://{REPOSITORY}/mine")
    sender.adapter = adapter
    sender.send()
    assert (sender.trouble, sender.adapter) == ("", None)
    (there := tmp_path / "there").mkdir()
    fetch_files(sender.place, there)
    assert {path.name for path in there.iterdir()} == {"config.yaml", "status.json", "run.log"}
    assert (there / "config.yaml").read_bytes() == (run_dir / "config.yaml").read_bytes()
    assert (there / "run.log").stat().st_size == 1_000_000
    commits = len(list((hub.root / "model" / REPOSITORY).iterdir()))
    sender.send()
    assert len(list((hub.root / "model" / REPOSITORY).iterdir())) == commits, "nothing has changed"


@pytest.mark.slow("two runs of two processes")
@pytest.mark.usefixtures("prepared_workers")
def test_several_processes_are_told_that_the_run_is_finished(sft: Config, tmp_path: Path) -> None:
    sft["cogumi"] |= {"mirror": str(tmp_path / "mirror"), "processes": 2}
    first = cogumi.train(sft)
    shutil.move(first.run_dir, kept := tmp_path / "first")
    result = cogumi.train(sft)
    assert result.metrics == first.metrics
    assert the_same(result.run_dir, kept)


def test_waiting_for_the_adapter_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cogumi.core import liveness
    from cogumi.telemetry import mirrored_run

    monkeypatch.setattr(mirrored_run, "ADAPTER_SECONDS", 0.5)
    sender, before = RunMirror(tmp_path / "run", str(tmp_path / "mirror")), liveness.signs
    sender.adapter = tmp_path / "adapter"
    assert sender.wait_for_adapter() == "its upload takes too long"
    assert liveness.signs > before
