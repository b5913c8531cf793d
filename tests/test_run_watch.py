"""The watch of a run: real small runs that hang in a stage, spend their budget there, or keep a thread at their end."""

import dataclasses
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from finished_runs import small
from processes import until

import cogumi
from cogumi.telemetry.status import status_of
from cogumi.telemetry.throughput import Meter
from cogumi.training import watch as module

Config = dict[str, Any]
DEADLINE = 120  # what a broken watch costs a test, in seconds
LIMIT = 1.0  # of silence, from the moment at which a stage hangs
REWARD = """
calls = []
def letters(completions, **_):
    calls.append(1)
    if len(calls) > 1:  # the first is the try before the training
        import test_run_watch
        test_run_watch.hang()
    return [sum(map(str.isalpha, text)) / 100 for text in completions]
"""
# Where a run hangs, by stage. The first two are before there is a run directory.
PLACES = {
    "base": ("cogumi.training.run", "prepare_base"),
    "tokens": ("cogumi.data.cache", "_numbered"),
    "preflight": ("cogumi.core.worker", "Worker.receive"),
    "download": ("cogumi.training.finish", "fetch_into"),
    "load": ("transformers", "AutoModelForCausalLM.from_pretrained"),
    "engine": ("trl", "GRPOTrainer.__init__"),
    "rollout": ("trl", "GRPOTrainer._generate"),
    "reward": ("", ""),
    "save": ("peft", "PeftModel.save_pretrained"),
    "merge": ("cogumi.training.finish", "merge_adapter"),
}
EARLY = ("base", "tokens")
DEAF = ("tokens", "load", "rollout", "merge")  # to the signal, as a call into C++ is
mode: list[str] = []  # in the process of a run: what ends it, and the words of its stage


@pytest.fixture(scope="module", autouse=True)
def server() -> Any:
    """Imports beside the first tests what the processes that it will fork need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cogumi.training.run", "trl", "peft", "transformers.models.llama.modeling_llama"])
    forkserver.ensure_running()
    return context


@pytest.fixture
def gspo(tiny_model: Path, code_parquet: Path, tmp_path: Path) -> Config:
    (tmp_path / "own.py").write_text(REWARD)
    train = {
        "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8,
        "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 1,
    }  # fmt: skip
    return small(tiny_model, code_parquet, train, method="gspo", run_dir=str(tmp_path / "run"), on_hung="stop")


def hang() -> None:
    """Hang, with a limit that begins now: what came before may take as long as this machine needs."""
    print("hangs", time.monotonic(), flush=True)
    if mode[0] == "budget":  # of a minute
        elapsed, now = Meter.elapsed, time.monotonic()
        Meter.elapsed = lambda self: 60 + time.monotonic() - now  # type: ignore[method-assign]
        assert elapsed is not None
    else:
        module.STAGE_SECONDS.clear()
        module.OTHER_SECONDS = module.LEAVE_SECONDS = module.SAVE_SECONDS = LIMIT
    while True:
        try:
            time.sleep(1000)
        except SystemExit:
            if mode[1] not in DEAF:
                raise


def hangs_for_good(*_: Any, **__: Any) -> None:
    hang()


def run_hanging(ends_by: str, stage: str, config: Config, output: Path) -> None:
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    mode[:] = ends_by, stage
    place, name = PLACES[stage]
    with pytest.MonkeyPatch.context() as patched:
        if stage == "download":
            prepare = module_of("cogumi.training.run").prepare
            one = (object(),)
            patched.setattr(
                "cogumi.training.run.prepare", lambda *words: dataclasses.replace(prepare(*words), downloads=one)
            )
        if place:
            patched.setattr(f"{place}.{name}", hangs_for_good)
        cogumi.train(config)


def module_of(name: str) -> Any:
    return sys.modules[name]


def end_of(server: Any, ends_by: str, stage: str, config: Config, directory: Path) -> tuple[int, float, str]:
    """Run to the end: exit status, seconds from the hang on, and what it printed."""
    output = directory / "output"
    process = server.Process(target=run_hanging, args=(ends_by, stage, config, output))
    process.start()
    process.join(DEADLINE)
    ended = time.monotonic()
    if process.exitcode is None:
        process.kill()
        pytest.fail(f"it still runs: {output.read_text()}")
    text = output.read_text()
    assert "hangs" in text, text
    began = float(text.partition("hangs ")[2].split()[0])
    return process.exitcode, ended - began, text


def configure(gspo: Config, stage: str) -> Config:
    if stage == "tokens":
        gspo["data"]["fim"]["max_length"] = 150  # no other run's, whose tokens are in the cache
    if stage == "preflight":
        gspo["cogumi"]["preflight"] = "on"
    if stage == "reward":
        gspo["cogumi"]["rewards"] = [f"{Path(gspo['cogumi']['run_dir']).parent / 'own.py'}:letters"]
    return gspo


def stages(*first: str) -> list[Any]:
    """All stages, those that are not named as sweeps."""
    return [pytest.param(stage, marks=[] if stage in first else pytest.mark.sweep) for stage in PLACES]


@pytest.mark.parametrize("stage", stages("tokens", "download", "load", "save"))
def test_a_hang_ends_in_its_limit_with_stacks_and_can_be_resumed(
    server: Any, gspo: Config, tmp_path: Path, stage: str
) -> None:
    status, seconds, text = end_of(server, "hung", stage, configure(gspo, stage), tmp_path)
    assert status == 75, text
    assert seconds < 30  # 2 s, and what a loaded machine adds
    run_dir = tmp_path / "run"
    if stage in EARLY:
        assert not run_dir.exists()
        assert "the run hangs: no sign of life in the stage data" in text
        assert "in hangs_for_good" in text
        return
    stacks = (run_dir / "run.log").read_text()
    assert "in hang\n" in stacks
    found = status_of(run_dir)
    assert (found.state, found.retriable, found.ended) == ("hung", True, True)
    assert found.reason is not None
    assert found.reason.startswith("the run hangs: no sign of life in the stage")
    assert "the same command" in str(found)


@pytest.mark.slow("two runs")
def test_a_run_that_hung_in_its_first_rollout_goes_on_to_its_end(server: Any, gspo: Config, tmp_path: Path) -> None:
    gspo["cogumi"]["merge"] = False
    assert end_of(server, "hung", "rollout", gspo, tmp_path)[0] == 75
    assert cogumi.train(gspo).passed


@pytest.mark.parametrize("stage", stages("base", "download", "rollout", "merge"))
def test_a_budget_of_a_minute_holds_within_ten_seconds(server: Any, gspo: Config, tmp_path: Path, stage: str) -> None:
    gspo["cogumi"] |= {"max_hours": 1 / 60, "on_hung": "continue"}
    status, seconds, text = end_of(server, "budget", stage, configure(gspo, stage), tmp_path)
    assert status == 1, text
    assert seconds < 10 + 5  # for a loaded machine
    assert "the budget is spent: 0.01" in text
    if stage in EARLY:
        assert not (tmp_path / "run").exists()
        return
    found = status_of(tmp_path / "run")
    assert found.state == "budget spent"
    assert found.retriable is not True
    assert found.reason is not None
    assert "of cogumi.max_hours 0.0166667, in the stage" in found.reason
    assert "larger budget continues" in found.reason
    assert "in hang\n" in (tmp_path / "run" / "run.log").read_text()


def test_with_continue_a_hang_is_only_reported(gspo: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    hung: list[bool] = []

    def waits(load: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*words: Any, **options: Any) -> Any:
            if not hung:
                monkeypatch.setitem(module.STAGE_SECONDS, "load", LIMIT)
                log = Path(gspo["cogumi"]["run_dir"], "run.log")
                hung.append(until(lambda: "no sign of life in the stage load" in log.read_text()))
            return load(*words, **options)

        return waiting

    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", waits(AutoModelForCausalLM.from_pretrained))
    gspo["cogumi"] |= {"on_hung": "continue", "merge": False}
    assert cogumi.train(gspo).passed
    assert hung == [True]


# ---------------------------------------------------------------------------------------------------------------- the end


def run_to_a_late_end(config: Config, output: Path) -> None:
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cogumi.training.run.write_report", waits_for_an_hour)
        patched.setattr(module, "VERDICT_SECONDS", LIMIT)
        cogumi.train(config)


def waits_for_an_hour(*_: Any) -> None:
    time.sleep(3600)


def test_what_hangs_after_the_verdict_ends_with_the_status_of_the_verdict(
    server: Any, gspo: Config, tmp_path: Path
) -> None:
    gspo["cogumi"] |= {"on_hung": "continue", "merge": False}
    process = server.Process(target=run_to_a_late_end, args=(gspo, tmp_path / "output"))
    process.start()
    process.join(DEADLINE)
    assert process.exitcode == 0, (tmp_path / "output").read_text()
    assert status_of(tmp_path / "run").state == "finished"
    assert (tmp_path / "run" / "DONE").exists()
    assert "in waits_for_an_hour" in (tmp_path / "run" / "run.log").read_text()


PROGRAM = """
import sys, threading, time
from cogumi.cli import app
from cogumi.core import liveness
from cogumi.__main__ import main
liveness.EXIT_SECONDS = 1.0
def command_line():
    print("done")
    threading.Thread(target=time.sleep, args=(3600,)).start()
    sys.exit(int(sys.argv[1]))
app.main = command_line
main()
"""


@pytest.mark.parametrize("status", [0, 1, 75])
def test_a_thread_that_runs_on_keeps_no_process(status: int) -> None:
    words = [sys.executable, "-c", PROGRAM, str(status)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert ended.returncode == status
    assert ended.stdout == "done\n"
    assert "it ends now, with exit status" in ended.stderr
    assert "<string>" in ended.stderr or "threading.py" in ended.stderr  # the stacks
