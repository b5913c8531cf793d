"""What is known of a failed run: real processes that raise errors of known failures, are killed, or meet a dead network."""

import faulthandler
import html
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import prepared_process
import pytest
import yaml
from hub_server import HubServer
from processes import until

import cogumi
from cogumi.core.errors import RunFailed, UsageError
from cogumi.core.run_directory import CONSOLE, START, read_json, this_process, write_json
from cogumi.core.signatures import exit_status, known_cause_of
from cogumi.notebook.panel import render_head, take_snapshot
from cogumi.runs import supervisor
from cogumi.runs.handle import attach
from cogumi.stack.host import count_oom_kills
from cogumi.telemetry.status import status_of

HERE = Path(__file__).parent
Config = dict[str, Any]
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
BROKEN_CARD = (HERE / "signatures/gpu-broken.txt").read_text().split("\n", 1)[1].removeprefix("RuntimeError: ")

# `cogumi` whose second step raises an error: those of a GPU cannot be had here but by their words. Once, where a file says so.
FAILING = """
import os, sys
import httpx, torch, transformers
step = transformers.Trainer.training_step
def failing(self, *words, **options):
    if self.state.global_step == 1 and not os.path.exists(os.environ.get("MARK", "")):
        if "MARK" in os.environ:
            open(os.environ["MARK"], "w").close()
        raise {error}
    return step(self, *words, **options)
transformers.Trainer.training_step = failing
from cogumi.__main__ import main
main()
"""


@pytest.fixture
def fails(sft: Config, tmp_path: Path, prepared: str) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run `cogumi train` with an error in its second step."""

    def run(error: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "my.yaml").write_text(yaml.safe_dump(sft))
        words = [prepared, "-c", FAILING.format(error=error), "train", "my.yaml"]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (f"torch.cuda.OutOfMemoryError({OUT_OF_MEMORY!r})", 1, "cuda-out-of-memory"),
        (f"RuntimeError({BROKEN_CARD!r})", 75, "gpu-broken"),
        ("__import__('cogumi.rewards.named_rewards').rewards.named_rewards.RewardError('mine.py:3 raised')", 1, None),
        ("httpx.ReadTimeout('the judge of the reward does not answer')", 75, None),
        ("ValueError('boom')", 1, None),
    ],
)
def test_a_failed_run_names_its_known_cause_and_whether_to_try_again(
    error: str, code: int, cause: str | None, fails: Callable[[str], Any], tmp_path: Path
) -> None:
    done = fails(error)
    assert done.returncode == code, done.stderr[-3000:]
    is_short = cause is not None or "RewardError" in error  # else nobody knows what it was
    assert ("Traceback" in done.stderr) is not is_short, done.stderr
    # Where memory runs out, the last finished step is saved.
    again = "continues the run" if cause == "cuda-out-of-memory" else "starts the run again"
    said = f"cogumi: the traceback is in run/run.log; once the cause is mended, the same command {again}"
    assert (said in done.stderr) is is_short
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()
    assert (tmp_path / "run").exists(), done.stderr
    run = tmp_path / "run"
    record, status = read_json(run / "status.json"), status_of(run)
    assert (record["state"], record["retriable"]) == ("failed", code == 75)
    places = [str(status), str(attach(run).wait()), html.unescape((run / "report.html").read_text())]
    places += [html.unescape(render_head(take_snapshot(run))), (run / "run.log").read_text()]
    assert [("known cause: " in place) for place in places] == [cause is not None] * 5
    assert [("another try may succeed" in place) for place in places[:4]] == [code == 75] * 4
    if cause is not None:
        assert record["cause"].startswith(f"{cause}: ")
        assert all(f"{record['cause']} Fix: {record['fix'].rstrip('.')}" in place for place in places)
        assert json.loads(json.dumps(status.as_dict()))["fix"] == record["fix"]


def test_an_error_is_explained_by_its_own_words_and_its_explicit_causes_alone() -> None:
    boom, memory = ValueError("boom"), RuntimeError(OUT_OF_MEMORY)
    boom.__context__ = memory  # was being handled, no more
    assert known_cause_of(boom) == known_cause_of(UsageError(OUT_OF_MEMORY)) == {"retriable": False}
    boom.__cause__ = memory
    assert known_cause_of(boom)["cause"].startswith("cuda-out-of-memory: ")


def test_exit_statuses() -> None:
    def of(error: BaseException, cause: BaseException) -> int:
        error.__cause__ = cause
        return exit_status(error)

    request = httpx.Request("GET", "https://hub")
    failed = [httpx.HTTPStatusError("no", request=request, response=httpx.Response(n)) for n in (404, 429, 503)]
    assert [exit_status(error) for error in failed] == [1, 75, 75]
    assert of(UsageError("the hub does not answer"), httpx.ConnectError("no")) == 75
    assert of(UsageError("no such model"), failed[0]) == 2
    assert [exit_status(RunFailed("no", again)) for again in (False, True)] == [1, 75]
    assert exit_status(OSError("timed out")) == 1


@pytest.mark.usefixtures("none_left_behind")
def test_a_run_that_sigkill_ended_is_worth_another_try(
    sft: Config, tmp_path: Path, prepared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", prepared)
    run = cogumi.start(sft, train__max_steps=100_000)
    os.kill(read_json(tmp_path / "run" / START)["pid"], signal.SIGKILL)
    died = until(lambda: status if (status := run.status()).retriable else None)
    record = read_json(tmp_path / "run/status.json")
    assert (died.state, died.cause, record["state"], record["retriable"]) == ("died", None, "running", True)
    assert "cause" not in record  # nobody knows who killed it
    assert str(died).count("another try may succeed") == 1
    waited = subprocess.run([prepared, "-m", "cogumi", "wait", str(tmp_path / "run")], capture_output=True, timeout=60)
    assert waited.returncode == 75


@pytest.mark.parametrize(
    ("number", "kills", "cause", "retriable"),
    [
        (
            signal.SIGKILL,
            2,
            "killed: the kernel counted 2 kills for lack of memory meanwhile, of which this was likely one.",
            True,
        ),
        (signal.SIGKILL, 0, None, True),
        (signal.SIGABRT, 0, "nccl-timeout", True),
        (signal.SIGSEGV, 0, "nccl-timeout", True),
    ],
)
def test_a_supervisor_records_what_is_known_of_a_death_by_signal(
    number: int, kills: int, cause: str | None, retriable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((3, 3 + kills))
    monkeypatch.setattr(supervisor, "count_oom_kills", lambda: next(counts))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own process goes on obeying
    last_words = (HERE / "signatures/nccl-timeout.txt").read_text()
    trainer = os.fork()
    if trainer == 0:
        try:
            for name in (START, "status.json"):
                write_json(tmp_path / name, {**this_process(), "state": "running", "time": 1.0, "stage": "train"})
            (tmp_path / CONSOLE).write_text(f"{OUT_OF_MEMORY}\nINFO process {os.getpid()} of x, in /\n{last_words}\n")
            faulthandler.disable()
            os.kill(os.getpid(), number)
        finally:
            os._exit(0)
    supervisor.supervise(trainer, tmp_path)
    record, started, status = read_json(tmp_path / "status.json"), read_json(tmp_path / START), status_of(tmp_path)
    assert (status.state, started["exit"], record["retriable"]) == ("died", -number, retriable)
    assert (record.get("cause") or "").startswith(cause or "")
    assert record.get("cause") == started.get("cause") == status.cause
    assert (status.cause is None) == (cause is None)


@pytest.mark.parametrize(
    ("groups", "file", "content"),
    [
        ("0::/user.slice\n", "user.slice/memory.events", "max 9\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("0::/host/path\n", "memory.events", "oom 3\noom_kill 2\n"),  # a container that sees its own group as the root
        ("4:memory:/box\n0::/\n", "memory/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_the_kernels_count_of_oom_kills_is_read(groups: str, file: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(groups)
    assert count_oom_kills(tmp_path / "cgroup", tmp_path / "fs") == 0
    (tmp_path / "fs" / file).parent.mkdir(parents=True)
    (tmp_path / "fs" / file).write_text(content)
    assert count_oom_kills(tmp_path / "cgroup", tmp_path / "fs") == 2


@pytest.mark.usefixtures("none_left_behind")
def test_a_failure_at_an_import_of_the_training_process_is_explained(
    sft: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peft.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file: No such')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{HERE.parent}")
    with pytest.raises(RunFailed, match=r"known cause: cuda12-library-missing: .* Fix: "):
        cogumi.start(sft)


def test_a_hub_that_fails_is_worth_another_try_and_a_wrong_name_is_not(
    hub: HubServer, sft: Config, tmp_path: Path
) -> None:
    environment = os.environ | hub.environment(tmp_path / "cache")

    def run(command: str, name: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "my.yaml").write_text(yaml.safe_dump(sft | {"model": {"name": name}}))
        return prepared_process.run([command, "my.yaml"], tmp_path, environment)

    hub.publish("someone/model", {"config.json": b"{}"})
    assert run("train", "someone/modle").returncode == 2
    hub.faults = lambda method, path, headers: 503
    for command in ("train", "start"):
        done = run(command, "someone/model")
        assert (done.returncode, "does not answer" in done.stderr) == (75, True), done.stderr
    assert not (tmp_path / "run").exists()
