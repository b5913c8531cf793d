"""The parts of the doctor that import nothing: interpreter, box, disks, variables, what is installed."""

import importlib.metadata
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from disk_mounts import fill, mounting

from cogumi.core.disk_space import Filesystem, Space, filesystem_of
from cogumi.core.errors import Finding
from cogumi.core.formatting import pip_command
from cogumi.core.worker import Worker
from cogumi.diagnostics import checkup
from cogumi.diagnostics.checkup import DoctorReport, render_finding
from cogumi.stack import driver, host, installed

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


# --------------------------------------------------------------------------------------------------------------- kernels


@pytest.fixture
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first directory in which Jupyter looks; the others are empty."""
    for name in ("JUPYTER_DATA_DIR", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(site, "getuserbase", lambda: str(tmp_path / "user"))
    return tmp_path / "jupyter"


def kernelspec(root: Path, name: str, text: str) -> Path:
    path = root / "kernels" / name / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def starting(python: str, language: str = "python") -> str:
    return json.dumps({"argv": [python, "-m", "ipykernel_launcher"], "language": language})


def test_kernels_of_this_environment_and_of_another(jupyter: Path) -> None:
    kernelspec(jupyter, "python3", starting("/usr/bin/python3"))
    kernelspec(jupyter, "cogumi", starting(sys.executable))
    kernelspec(jupyter, "other", starting("/opt/other/bin/python"))
    kernelspec(jupyter, "ir", starting("R", "R"))
    found = {each.figure: each for each in checkup.kernel_findings()}
    assert found["python3 starts /usr/bin/python3"].state == "note"
    assert found["other starts /opt/other/bin/python"].state == "note"
    assert found["cogumi: this environment"].state == "ok"
    assert len(found) == 3


class Release(tuple[object, ...]):
    releaselevel = property(lambda self: self[3])


@pytest.mark.parametrize("release", [(3, 10, 13, "final", 0), (3, 11, 0, "candidate", 1)])
def test_another_python_is_fatal_and_the_installer_gets_one(
    release: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", Release(release))
    found = checkup.python_finding()
    assert (found.state, found.fix.split(":")[0]) == ("fatal", "sh requirements/install.sh")


@pytest.mark.parametrize("name", ["python3", "cogumi"])
def test_a_kernel_that_notebooks_take_by_themselves_is_of_this_environment(name: str, jupyter: Path) -> None:
    kernelspec(jupyter, name, starting("/usr/bin/python3"))
    (found,) = checkup.kernel_findings()
    assert (found.state, found.figure) == ("warning", f"{name} starts /usr/bin/python3")
    assert found.fix.startswith(f"{sys.executable} -m ipykernel install --user")


def test_the_first_kernel_of_a_name_counts_and_a_bare_python_is_the_servers(jupyter: Path, tmp_path: Path) -> None:
    kernelspec(jupyter, "python3", starting("python3"))
    kernelspec(tmp_path / "env" / "share" / "jupyter", "Python3", starting("/opt/other/bin/python"))
    (found,) = checkup.kernel_findings()
    assert (found.state, found.figure) == ("ok", "python3: this environment")


def test_the_paths_are_jupyters_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = pytest.importorskip("jupyter_core.paths")
    monkeypatch.setenv("JUPYTER_PATH", f"{tmp_path}/one{os.pathsep}{tmp_path}/two")
    ours = [str(each) for each in checkup.jupyter_paths()]
    theirs = paths.jupyter_path()
    assert [each for each in ours if each in theirs] == list(dict.fromkeys(theirs))


@pytest.mark.parametrize("text", ["{", "[]", '{"argv": []}', '{"language": "python"}', "\x00"])
def test_a_kernel_that_cannot_be_read_is_left_out_as_jupyter_does(jupyter: Path, text: str) -> None:
    kernelspec(jupyter, "broken", text)
    (jupyter / "kernels" / "directory" / "kernel.json").mkdir(parents=True)
    kernelspec(jupyter, "cogumi", starting(sys.executable))
    (found,) = checkup.kernel_findings()
    assert found.figure == "cogumi: this environment"


def test_another_active_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    found = checkup.python_finding()
    assert (found.state, found.fix) == ("warning", f"run {tmp_path}/bin/python -m cogumi doctor")


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("glibc", "2.27", "fatal"),
        ("glibc", "2.28", "note"),
        ("glibc", "2.31", "note"),
        ("glibc", "2.32", "ok"),
        ("", "", "fatal"),
    ],
)
def test_c_libraries(name: str, version: str, state: str) -> None:
    assert checkup.glibc_finding(name, version).state == state


# ------------------------------------------------------------------------------------------------------------------ boxes


def on(mount: str, kind: str) -> Filesystem:
    return Filesystem((), mount, "", kind, kind in ("nfs4", "fuse"), Space(0, 0, 0, None, None, False))


POD = {"RUNPOD_POD_ID": "abc123"}


def test_which_box_it_is(tmp_path: Path) -> None:
    assert host.find_host(POD, tmp_path) == ("RunPod", "RUNPOD_POD_ID=abc123")
    assert host.find_host({"VAST_CONTAINERLABEL": "C.12"}, tmp_path)[0] == "Vast"
    assert host.find_host({}, tmp_path) == ("machine", "")
    (tmp_path / ".dockerenv").touch()
    assert host.find_host({}, tmp_path)[0] == "container"
    (tmp_path / "etc" / "vast_boot.d").mkdir(parents=True)
    assert host.find_host({}, tmp_path) == ("Vast", "/etc/vast_boot.d")


def test_a_login_over_ssh_has_the_variables_of_the_first_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNPOD_POD_ID", raising=False)
    (tmp_path / "environ").write_bytes(b"HOME=/root\0RUNPOD_POD_ID=abc\0SECRET=1\0RUNPOD_\0")
    told = host.host_environment(tmp_path / "environ")
    assert told["RUNPOD_POD_ID"] == "abc"
    assert "SECRET" not in told
    assert host.host_environment(tmp_path / "none") == dict(os.environ)


@pytest.mark.parametrize(
    ("kind", "disk", "lost"),
    [
        ("RunPod", on("/", "overlay"), "stop"),
        ("RunPod", on("/workspace", "ext4"), "end"),
        ("RunPod", on("/workspace", "fuse"), ""),
        ("Vast", on("/", "overlay"), "end"),
        ("Vast", on("/workspace", "ext4"), ""),
        ("container", on("/", "overlay"), "end"),
        ("container", on("/data", "ext4"), ""),
        ("machine", on("/", "ext4"), ""),
        ("machine", on("/tmp", "tmpfs"), "stop"),
    ],
)
def test_what_stays(kind: str, disk: Filesystem, lost: str) -> None:
    when, where = host.loss_of(disk, kind)
    assert when == lost
    assert bool(where) == bool(lost)


def test_a_work_directory_in_memory_is_warned_of(tmp_path: Path) -> None:
    with mounting(tmp_path) as mount:
        disk = mount()
        found = host.check_directory(disk, "machine")
    assert found.state == "warning"
    assert found.cause == f"{disk} is in memory: what is written here is lost when the box stops"


@pytest.mark.parametrize(
    ("option", "said"), [("ro", "cannot be written to"), ("size=8m,nr_inodes=1", "inodes are taken")]
)
def test_a_work_directory_that_takes_no_file(tmp_path: Path, option: str, said: str) -> None:
    with mounting(tmp_path) as mount:
        found = host.check_directory(mount(options=option), "machine")
    assert (found.state, said in found.cause) == ("warning", True)


def test_the_hub_cache_on_a_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if filesystem_of(tmp_path).space.free < 1 << 30:
        pytest.skip("the disk of the tests is nearly full")
    with mounting(tmp_path) as mount:
        small = mount(name="small")
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HOME", str(small / "hf"))
        found = host.check_hub_cache(tmp_path, "machine")
    place = Path(filesystem_of(tmp_path).mount) / ".cache"
    assert (found.state, found.fix) == ("warning", f"export HF_HOME={place / 'hf'}")
    assert "which is one 8B model" in found.cause


def test_a_nearly_full_disk_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    with mounting(tmp_path) as mount:
        disk = mount(options="size=100m")
        fill(disk, 0.5)
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", str(disk))
        found = host.check_temporary_files()
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert (found.state, found.cause) == ("warning", "less than 200 MB is left there for temporary files")


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
        ({"PYTHONHOME": "/usr"}, "PYTHONHOME", "warning", "/usr"),
        ({"BNB_CUDA_VERSION": "124"}, "BNB_CUDA_VERSION", "warning", "124"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES", "warning", "''"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES", "warning", "'-1'"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES", "note", "1: torch sees these GPUs alone"),
        ({"TRANSFORMERS_OFFLINE": "1"}, "TRANSFORMERS_OFFLINE", "note", "1: nothing is downloaded"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", "note", "1: every kernel is waited for"),
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


# -------------------------------------------------------------------------------------------------------------- installed


def distribution(name: str, version: str, *libraries: Path) -> installed.Distribution:
    return installed.Distribution(name, version, Path("/x"), True, [(path, None) for path in libraries])


def test_what_is_installed_here_is_whole() -> None:
    found = installed.distributions()
    assert {"torch", "numpy", "pyarrow"} <= {each.name for each in found}
    assert next(each.version for each in found if each.name == "numpy") == importlib.metadata.version("numpy")
    assert sum(len(each.libraries) for each in found) > 100
    assert [each.figure for each in installed.check_files(found) if each.state != "note"] == []
    assert list(installed.check_duplicates(found)) == []


def test_libraries_of_two_cuda_majors() -> None:
    names = ["nvidia-nccl-cu12", "nvidia-cublas", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-ml-py"]
    (found,) = installed.check_cuda_mix([distribution(name, "1") for name in names], "13.0")
    assert (found.state, found.figure) == ("warning", "1 for CUDA 12, 2 for CUDA 13")
    assert found.fix == pip_command("uninstall -y nvidia-nccl-cu12")
    assert list(installed.check_cuda_mix([distribution(name, "1") for name in names[1:]], "13.0")) == []


def test_two_versions_over_each_other() -> None:
    (found,) = installed.check_duplicates(
        [distribution("torch", "2.13.0"), distribution("torch", "2.11.0"), distribution("numpy", "1")]
    )
    assert found.figure == "torch: 2.11.0 and 2.13.0"


@needs_gcc
def test_an_extension_for_another_cuda_major(tmp_path: Path) -> None:
    """Real libraries: one called libcudart.so.12, and one linked to it."""
    (tmp_path / "cudart.c").write_text("int cudaRuntimeGetVersion(void) { return 12040; }")
    (tmp_path / "mine.c").write_text(
        "int cudaRuntimeGetVersion(void); int mine(void) { return cudaRuntimeGetVersion(); }"
    )
    make = ["gcc", "-shared", "-fPIC", "-o"]
    cudart, mine, plain = (tmp_path / name for name in ("libcudart.so.12", "_C.so", "plain.so"))
    subprocess.run([*make, str(cudart), str(tmp_path / "cudart.c"), "-Wl,-soname,libcudart.so.12"], check=True)
    subprocess.run([*make, str(mine), str(tmp_path / "mine.c"), str(cudart)], check=True)
    subprocess.run([*make, str(plain), str(tmp_path / "cudart.c")], check=True)
    (tmp_path / "cut.so").write_bytes(mine.read_bytes()[:100])
    here = [
        distribution("xformers", "0.0.35", mine),
        distribution("numpy", "2.3.5", plain, tmp_path / "gone.so"),
        distribution("cut", "1", tmp_path / "cut.so"),
    ]
    (found,) = installed.check_cuda_majors(here, "13.0")
    assert (found.state, found.figure) == ("warning", "xformers 0.0.35")
    assert found.cause == "it needs libcudart.so.12, and torch is built for CUDA 13.0"
    (fine,) = installed.check_cuda_majors(here, "12.8")
    assert (fine.state, fine.figure) == ("ok", "every package with CUDA code has it for CUDA 12, like torch (1)")
    (none,) = installed.check_cuda_majors(here, None)
    assert none.state == "skipped"


# ----------------------------------------------------------------------------------------------------------------- drivers


@pytest.mark.parametrize(
    ("cuda", "torch", "state"),
    [((13, 0), "13.0", "ok"), ((12, 4), "12.8", "ok"), ((12, 8), None, "ok"), ((12, 8), "13.0", "fatal")],
)
def test_which_driver_runs_which_torch(cuda: tuple[int, int], torch: str | None, state: str) -> None:
    """Any driver of a major runs every release of that major."""
    found = driver.check_cuda_version("550.127.05", cuda, torch)
    if found.state == "warning":
        pytest.skip("this machine has cuda-compat")
    assert found.state == state


def test_a_driver_older_than_every_lane() -> None:
    found = driver.check_cuda_version("470.1", (11, 4), "13.0")
    assert found.fix == "another host (driver 580 or newer)"


def test_a_driver_without_a_card_and_one_that_does_not_answer() -> None:
    fitting, card = driver.check_driver({"version": "580.1", "cuda": [13, 0], "cards": []}, "", "13.0")
    assert (fitting.state, card.state, card.figure) == ("ok", "warning", "none")
    (silent,) = driver.check_driver(None, "no answer in 120 s", "13.0")
    assert (silent.state, silent.figure) == ("fatal", "NVML: no answer in 120 s")


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
        other = worker.receive()
        assert is_running(other)
    assert not is_running(other)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


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
