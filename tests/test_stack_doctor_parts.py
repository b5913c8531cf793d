"""The parts of the doctor that import nothing: interpreter, box, disks, variables, what is installed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from disk_mounts import Mount, fill
from processes import until

from cogumi.core.disk_space import filesystem_of
from cogumi.core.errors import Finding
from cogumi.core.worker import Worker
from cogumi.diagnostics import checkup
from cogumi.diagnostics.checkup import DoctorReport, render_finding
from cogumi.stack import host

# ----------------------------------------------------------------------------------------------------------- interpreter


class Release(tuple[object, ...]):
    releaselevel = property(lambda self: self[3])


@pytest.mark.parametrize("release", [(3, 10, 13, "final", 0), (3, 11, 0, "candidate", 1)])
def test_another_python_is_fatal_and_the_installer_gets_one(
    release: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", Release(release))
    findings = checkup.check_python()
    assert (findings.state, findings.fix.split(":")[0]) == ("fatal", "sh requirements/install.sh")


def test_another_active_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    findings = checkup.check_python()
    assert (findings.state, findings.fix) == ("warning", f"run {tmp_path}/bin/python -m cogumi doctor")


# ------------------------------------------------------------------------------------------------------------------ boxes


def disks(work: Path) -> dict[str, Finding]:
    return {finding.what: finding for finding in host.check_disks(work)}


@pytest.mark.parametrize(
    ("option", "cause"),
    [
        ("size=64m", "is in memory: files here are lost when the box stops"),
        ("ro", "cannot be written to"),
        ("size=8m,nr_inodes=1", "no inodes are free"),
    ],
)
def test_a_work_directory_that_loses_or_takes_no_file(mount: Mount, option: str, cause: str) -> None:
    finding = disks(mount(options=option))["work directory"]
    assert (finding.state, cause in finding.cause) == ("warning", True)


def test_the_disk_of_a_container_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = replace(filesystem_of(tmp_path), kind="overlay")
    monkeypatch.setattr(host, "filesystem_of", lambda path: overlay)
    finding = disks(tmp_path)["work directory"]
    assert (finding.state, "the container's own disk" in finding.figure) == ("note", True)


def test_small_disks_for_temporary_files_and_models(
    mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount(options="size=100m")
    fill(disk, 0.5)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(disk))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(disk / "hf"))
    findings = disks(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", None)
    for what, minimum in (("temporary files", "200 MB"), ("Hugging Face cache", "20.0 GB")):
        assert (findings[what].state, minimum in findings[what].cause) == ("warning", True)


def test_no_disk_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    (finding,) = host.check_disks(tmp_path)
    assert (finding.state, finding.fix.startswith("free space")) == ("fatal", True)


# -------------------------------------------------------------------------------------------------------------- variables


def test_nothing_in_the_way(tmp_path: Path) -> None:
    (found,) = host.check_variables(
        {"PATH": "/bin", "LD_LIBRARY_PATH": f":{tmp_path}", "PYTHONPATH": str(tmp_path)}, tmp_path
    )
    assert (found.state, found.figure) == ("ok", "no variable is in the way")


@pytest.mark.parametrize(
    ("environment", "what", "state", "figure"),
    [
        ({"LD_LIBRARY_PATH": "{place}"}, "LD_LIBRARY_PATH", "warning", "{place}: libcudart, libnvJitLink"),
        ({"PYTHONPATH": "{place}"}, "PYTHONPATH", "warning", "{place}: torch, datasets"),
        ({"BNB_CUDA_VERSION": "124"}, "BNB_CUDA_VERSION", "warning", "124"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES", "warning", "''"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES", "warning", "'-1'"),
    ],
)  # fmt: skip
def test_a_variable_in_the_way(tmp_path: Path, environment: dict[str, str], what: str, state: str, figure: str) -> None:
    place = tmp_path / "place"
    (place / "datasets").mkdir(parents=True)
    for name in ("libcudart.so.12", "libnvJitLink.so.12.4.127", "libother.so.1", "torch.py", "datasets/__init__.py"):
        (place / name).touch()
    told = {name: value.format(place=place) for name, value in environment.items()}
    (found,) = host.check_variables(told, tmp_path)
    assert (found.what, found.state) == (what, state)
    assert found.figure.startswith(figure.format(place=place))
    assert bool(found.fix) == (state == "warning")


def test_a_file_of_the_work_directory_that_hides_a_package(tmp_path: Path) -> None:
    (tmp_path / "tokenizers.py").touch()
    (tmp_path / "datasets").mkdir()  # of data: no package
    (found,) = host.check_variables({}, tmp_path)
    assert (found.what, found.state, found.figure) == ("work directory", "warning", f"{tmp_path}: tokenizers")


# ----------------------------------------------------------------------------------------------------------------- drivers


@pytest.mark.parametrize(
    ("version", "torch", "state"),
    [
        ("580.95.05", "13.0", "ok"),
        ("550.127.05", "12.8", "ok"),
        ("550.127.05", None, "ok"),
        ("550.127.05", "13.0", "fatal"),
    ],
)
def test_which_driver_runs_which_torch(version: str, torch: str | None, state: str) -> None:
    """Any driver of a major runs every release of that major."""
    assert host.check_driver_version(version, torch).state == state


# ------------------------------------------------------------------------------------------------------------------ apart


def fail(how: str) -> str:
    print(how, flush=True)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        time.sleep(1000)
    return how


def start_another() -> int:
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker("it", {**os.environ, "PYTHONPATH": str(Path(__file__).parent)})) as found:
        yield found


@pytest.mark.parametrize(("how", "said"), [("crash", "it was ended by SIGSEGV"), ("hang", "it was ended after 0.")])
def test_how_a_worker_ended(worker: Worker, how: str, said: str) -> None:
    from test_stack_doctor_parts import fail as importable

    worker.send(importable, how)
    with pytest.raises(RuntimeError, match=said):
        worker.receive(0.3 if how == "hang" else None)


def test_what_each_call_printed_is_its_own(worker: Worker) -> None:
    from test_stack_doctor_parts import fail as importable

    for said, start in (("one", 0), ("two", 4)):
        worker.send(importable, said)
        assert worker.receive() == said
        assert worker.hear(start).decode() == f"{said}\n"


def test_what_a_worker_left_running_is_ended() -> None:
    from test_stack_doctor_parts import start_another as importable

    with closing(Worker("it", {**os.environ, "PYTHONPATH": str(Path(__file__).parent)})) as worker:
        worker.send(importable)
        other = psutil.Process(worker.receive())
        assert other.status() != psutil.STATUS_ZOMBIE
    with suppress(psutil.NoSuchProcess):  # a killed process ends when the kernel next runs it
        until(lambda: other.status() == psutil.STATUS_ZOMBIE)


# ------------------------------------------------------------------------------------------------------------------ words


def test_a_finding_in_lines() -> None:
    finding = Finding(
        "driver", "fatal", "word " * 20, "cause " * 20, "python -m pip install --no-deps " + "x" * 90 + "\nsecond"
    )
    said = list(render_finding(finding, 60))
    assert said[0] == "fatal    driver             word word word word word word"
    assert all(len(line) <= 60 for line in said if "pip" not in line)
    assert said[-2] == f"         fix    {finding.fix.splitlines()[0]}"
    assert said[-1] == "                second"
    assert any(line.startswith("         cause  cause cause") for line in said)


@pytest.mark.parametrize(
    ("state", "passed"), [("ok", True), ("note", True), ("skipped", True), ("warning", False), ("fatal", False)]
)
def test_what_counts_as_wrong(state: str, passed: bool) -> None:
    report = DoctorReport((Finding("x", "ok"), Finding("y", state)), 1.25)  # type: ignore[arg-type]
    assert report.passed is passed
    assert report.as_dict()["passed"] is passed
    assert json.loads(json.dumps(report.as_dict()))["seconds"] == 1.2
