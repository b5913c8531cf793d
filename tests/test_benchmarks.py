"""The harness says what happened; probes and forecasts really run, on the CPU with tiny models."""

import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import commands, gpu, gpu_checks, harness, overhead
from benchmarks.harness import Finished, row
from cogumi.core.run_directory import read_jsonl

pytestmark = pytest.mark.slow("of the benchmarks, not of the package")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    # On tiny shapes two threads only wait for each other, for seconds on a busy machine.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def well_formed(rows):
    keys = set(row("benchmark", "case", "metric", 1.0))
    for each in rows:
        assert set(each) == keys
        assert each["value"] is not None or each["note"]
        if isinstance(each["value"], float):
            assert math.isfinite(each["value"])
    json.dumps(rows, allow_nan=False)
    return rows


def test_interleave_takes_turns_and_leaves_the_warmup_out():
    calls = []
    times = harness.interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=2)
    assert "".join(calls) == "abbaabbaab"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    own = iter([3.0, 1.0, 2.0])
    assert harness.interleave({"a": lambda: next(own)}, repeats=2) == {"a": [1.0, 2.0]}


def test_ratio_is_the_median_of_adjacent_pairs():
    # The neighbour slowed the second pair down tenfold: the medians' ratio would be 0.55, each pair's is 0.5.
    assert harness.ratio({"ours": [1, 10, 1.1], "peer": [2, 20, 2.0]}, "ours", "peer") == (0.5, 0.5, 0.55)


@pytest.mark.parametrize(
    ("value", "target", "ok"), [(1, "<= 2", True), (3, "<= 2", False), (3, ">= 2", True), (3, "fast", None)]
)
def test_target_decides_ok(value, target, ok):
    assert row("b", "c", "m", value, target=target)["ok"] is ok


def test_a_process_that_is_late_ends_with_its_children():
    started = time.monotonic()
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(subprocess.TimeoutExpired):
        harness.run_process(harness.python(parent), timeout=0.5)
    assert time.monotonic() - started < 10
    assert not [each for each in psutil.Process().children(recursive=True) if child in each.cmdline()]


def test_smoke_reports_the_last_line_of_a_failure_and_no_times(monkeypatch):
    failed = Finished(1, 3.0, "preflight ok\nRuntimeError: no loss ran\n")
    monkeypatch.setattr(commands, "run_process", lambda *_, **__: failed)
    (only,) = well_formed(list(commands.smoke(quick=True)))
    assert (only["ok"], only["note"]) == (False, "RuntimeError: no loss ran")
    monkeypatch.setattr(commands, "run_process", lambda *_, **__: Finished(0, 130.0, "ok", 2**30))
    rows = well_formed(list(commands.smoke()))
    assert [(each["metric"], each["ok"]) for each in harness.failed(rows)] == [("wall time", False)]


def test_unknown_name_and_missing_card_end_with_one_line_and_status_2(capsys):
    assert command.main(["nope"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("unknown benchmark 'nope': one of cpu, gpu, importing, ")
    if not torch.cuda.is_available():
        assert command.main(["gpu"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("no CUDA device: ")


def test_a_failing_entry_keeps_its_rows_and_the_others(monkeypatch, tmp_path, capsys):
    def entry(name, quick):
        yield row(name, "case", "time", 1.0, "s", target="<= 2")
        if name == "panel":
            raise KeyError("gone")

    monkeypatch.setattr(command, "entry", entry)
    path = tmp_path / "deep" / "out.json"
    assert command.main(["cpu", "--quick", "--json", str(path)]) == 1
    saved = json.loads(path.read_text())
    rows = well_formed(saved["rows"])
    assert {each["benchmark"] for each in rows} == set(command.CPU)
    assert [each["note"] for each in harness.failed(rows)] == ["failed: KeyError: 'gone'"]
    assert "KeyError: 'gone'" in capsys.readouterr().out
    assert saved["machine"]["cores"] >= 1
    assert saved["versions"]["torch"] == importlib.metadata.version("torch")
    assert set(saved["git"]) == {"commit", "dirty"}
    assert command.main(["importing", "--json", str(path)]) == 0


@pytest.mark.parametrize(("words", "status"), [([], 1), (["--quick"], 0)])
def test_a_missed_target_is_a_failure_of_a_whole_run_alone(words, status, monkeypatch, tmp_path):
    missed = row("importing", "case", "time", 3.0, "s", target="<= 2")
    monkeypatch.setattr(command, "entry", lambda name, quick: [missed])
    assert command.main(["importing", *words, "--json", str(tmp_path / "out.json")]) == status


def test_importing_entry_and_dated_file_name(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert command.main(["importing", "--quick"]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"{harness.date.today().isoformat()}-importing-quick-")
    assert {each["metric"] for each in json.loads(path.read_text())["rows"]} == {"time", "heavy modules loaded"}


def test_a_number_that_is_not_one_is_a_failure_and_not_saved(tmp_path):
    lost = row("b", "c", "m", math.nan, spread=(0.0, math.nan), target="<= 1")
    assert (lost["value"], lost["spread"], lost["ok"], lost["note"]) == (None, None, False, "failed: nan")
    with pytest.raises(ValueError, match="Out of range float"):
        harness.save("b", [{"value": math.nan}], 1.0, {}, tmp_path / "out.json")


def slow_check(setting: gpu.Setting) -> Iterator[dict[str, Any]]:
    yield row("slow", "first", "figure", 1.0)
    time.sleep(60)


def crash(setting: gpu.Setting) -> Iterator[dict[str, Any]]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield row("crash", "-", "-", None)


def quick_check(setting: gpu.Setting) -> Iterator[dict[str, Any]]:
    yield row("slow", "first", "figure", 2.0)


def test_a_check_that_is_killed_keeps_its_figures_and_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [gpu.Check(name, limit, "") for name, limit in (("slow", 1), ("crash", 30))]
    checks.insert(0, next(check for check in gpu.CHECKS if check.name == "environment"))
    monkeypatch.setattr(gpu, "CHECKS", tuple(checks))
    monkeypatch.setattr(gpu_checks, "slow", slow_check, raising=False)
    monkeypatch.setattr(gpu_checks, "crash", crash, raising=False)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    first = tmp_path / "first.json"
    assert gpu.main(["--device", "cpu", "--json", str(first)]) == 1
    rows = well_formed(json.loads(first.read_text())["rows"])
    notes = [(each["benchmark"], each["value"], each["note"]) for each in rows if each["benchmark"] != "environment"]
    assert notes == [
        ("slow", 1.0, ""),
        ("slow", None, "failed: killed after 1 s, its time box"),
        ("crash", None, "failed: ended by SIGKILL"),
    ]
    monkeypatch.setattr(gpu_checks, "slow", quick_check)
    monkeypatch.setattr(gpu_checks, "environment", crash)  # finished before, so it is not run again
    resumed = ["--device", "cpu", "--resume", str(first.with_suffix(".jsonl")), "--json", str(first)]  # the same file
    assert gpu.main([*resumed, "--only", "environment", "slow"]) == 0
    again = json.loads(first.read_text())["rows"]
    assert [each for each in again if each["benchmark"] == "environment"] == rows[: len(again) - 1]
    assert [each["value"] for each in again if each["benchmark"] == "slow"] == [2.0]


def test_no_check_starts_when_the_budget_is_spent(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert gpu.main(["--device", "cpu", "--budget", "0", "--json", str(path)]) == 0
    rows = well_formed(json.loads(path.read_text())["rows"])
    assert [each["benchmark"] for each in rows] == [check.name for check in gpu.CHECKS]
    assert {each["note"] for each in rows} == {"skipped: out of time"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--only", "merge-chek"], "--only: no check 'merge-chek'; --list prints them"),
        (["--resume", "nowhere.jsonl"], "--resume: nowhere.jsonl is not a file"),
        (["--resume", "Makefile"], "--resume: Makefile is not a .jsonl; pass the one beside it"),
        (["--json", "a.jsonl"], "--json a.jsonl: name a .json; the lines go to a .jsonl beside it"),
        (["--budget", "-1"], "--budget -1 is negative; give the seconds for all checks"),
    ],
)
def test_wrong_words_of_the_gpu_list_are_refused(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(words) == 2
    assert capsys.readouterr().err == f"{error}\n"


# What these run has tests of its own: tests/test_smoke.py, test_memory.py, test_step_rows of the GSPO benchmarks.
COVERED = {"smoke", "forecasts", "gspo-step"}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param({check.name for check in gpu.CHECKS} - COVERED, id="most"),
        pytest.param(COVERED, id="covered", marks=pytest.mark.sweep),
    ],
)
def test_every_check_of_a_card_runs_on_a_cpu(names: set[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--budget", "1500", "--json", str(path)]
    command += ["--only", *names]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=False)
    rows = well_formed(json.loads(path.read_text())["rows"])
    broken = [each for each in rows if each["note"].startswith(("failed", "skipped"))]
    assert not broken, f"{broken}\n{done.stderr[-3000:]}"
    finished = {line["check"] for line in read_jsonl(path.with_suffix(".jsonl")) if line.get("finished")}
    assert finished == names
    missing = {each["benchmark"] for each in rows if each["note"].startswith("missing: unsloth")}
    assert missing == ({"gpu_probes", "ratios-unsloth", "sft-speed-unsloth"} if names != COVERED else set())


def test_figures_of_two_processes_count_the_one_that_waited_least() -> None:
    # CPU, clock, callbacks' CPU, callbacks by the clock, exchange, CPU of all threads; the second process waits a second in
    # each exchange.
    first = [[0.0, 0, 0, 0, 0, 0], [1.0, 2, 0.1, 0.25, 0.125, 1.5], [2.0, 4, 0.2, 0.5, 0.25, 3.0]]
    second = [[0.0, 0, 0, 0, 0, 0], [1.0, 2, 0.1, 1.25, 1.125, 1], [2.0, 4, 0.2, 2.5, 2.25, 2]]
    assert overhead.figures([first, second]) == {
        "step|ms": 2000,
        "callbacks|CPU ms/step": pytest.approx(100),
        "exchange between the processes|ms/step": 125,
        "share of a step|%": pytest.approx(10),
        "share of a step by the clock|%": pytest.approx(12.5),
        "CPU of other threads, share of a step|%": pytest.approx(50),
    }


def test_the_callbacks_of_a_run_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CASES", {"alone": (1, "none")})
    rows = {each["metric"]: each["value"] for each in well_formed(list(overhead.run(quick=True)))}
    assert 0 < rows["share of a step by the clock"] < 100
    assert rows["callbacks"] > 0
