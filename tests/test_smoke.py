"""The command a new user runs first, as a subprocess, with its real stages; on a fresh machine its cache is cold."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import prepared_process
import pytest

from cogumi.core.errors import UsageError
from cogumi.smoke import STAGES, Report, run_stage


def smoke(*words: str, cwd: Path, python: Sequence[str] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    command = [*python, "-m", "cogumi.smoke", *words]
    return subprocess.run(command, cwd=cwd, env=here(), capture_output=True, text=True, check=False)


def here() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow("two whole trainings")
@pytest.mark.timeout(900)
def test_the_whole_smoke_run_passes(tmp_path: Path) -> None:
    done = smoke("--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads((tmp_path / "run" / "smoke.json").read_text())
    assert report["passed"] is True
    assert {row["stage"] for row in report["rows"]} == {"doctor", "stack", "preflight", "sft", "gspo", "compare"}
    checked = {row["checked"] for row in report["rows"]}
    assert {"held-out loss falls by >= 10 %", "reward, last quarter above first", "merged logits"} <= checked
    assert [list(sample) for sample in report["samples"]] == [["asked", "base", "SFT", "GSPO", "right"]] * 5
    assert report["exact"]["base"] + 0.1 <= report["exact"]["SFT"] < report["exact"]["GSPO"]
    assert sum(sample["GSPO"].strip() == sample["right"] for sample in report["samples"]) >= 2
    assert report["careless"]["base"] == 0
    assert report["careless"]["SFT"] > 0.1 > 2 * report["careless"]["GSPO"]
    assert f"{len(report['rows'])} of {len(report['rows'])} checks" in done.stdout.replace("\n", " ")
    assert (tmp_path / "run" / "sft" / "DONE").exists()
    assert (tmp_path / "run" / "gspo" / "DONE").exists()


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_quick_with_a_model_of_ones_own(tiny_model: Path, tmp_path: Path) -> None:
    """A random model learns too little in 15 steps to pass every check: the run says which, and exits with status 1."""
    done = smoke("--quick", "--json", "--model", str(tiny_model), "--run-dir", "run", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["passed"] is False
    assert report["quick"] is True
    failed = {row["checked"] for row in report["rows"] if not row["passed"]}
    assert failed == {"held-out loss falls by >= 10 %"}


def test_a_model_that_is_not_there_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = smoke("--model", "no/such/model", cwd=tmp_path, python=prepared_process.python(here()))
    assert done.returncode == 2
    assert done.stderr.startswith("cogumi: model.name: no model at 'no/such/model'")
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = smoke("--run-dir", "file/run", cwd=tmp_path, python=prepared_process.python(here()))
    assert done.returncode == 2
    assert done.stderr.startswith("cogumi: file/run: cannot write the run directory")
    assert done.stderr.count("\n") == 1


def test_stages_beyond_the_time_limit_are_reported(tmp_path: Path) -> None:
    done = smoke("--limit", "6", "--run-dir", "run", "--json", cwd=tmp_path, python=prepared_process.python(here()))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    late = [row["stage"] for row in report["rows"] if row["figure"] == "not reached in 6 s"]
    assert late == list(STAGES)[-len(late) :]
    assert {"sft", "gspo", "compare"} <= {*late}
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished, checks failed"


def test_a_stage_that_raises_is_a_failed_row() -> None:
    report = Report(Path("unused"), quick=False)

    def broken() -> None:
        report.add("gspo", "first", "1", True)
        raise RuntimeError("the grader is down")

    assert not run_stage(report, "gspo", broken)
    assert [row.passed for row in report.rows] == [True, False]
    assert report.rows[-1].figure == "RuntimeError: the grader is down"
    assert not report.passed


def test_a_mistake_of_the_user_is_no_row() -> None:
    report = Report(Path("unused"), quick=False)

    def mistaken() -> None:
        raise UsageError("no such reward")

    with pytest.raises(UsageError, match="no such reward"):
        run_stage(report, "gspo", mistaken)
    assert report.rows == []
