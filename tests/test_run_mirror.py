"""Runs whose machine is destroyed: the process group killed, the run directory removed, the same command typed again.

The machine is a process of its own; what it writes to moto's S3 server goes through a proxy, which also says when it is killed.
"""

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prepared_process
import pytest
import yaml
from mirror_server import Bucket, s3_server
from test_training_unfinished import logged, the_same

from cogumi.core.run_directory import read_json

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


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(server: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    made = Bucket(server, f"run-{abs(hash(request.node.name))}")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.proxy.stop()


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
