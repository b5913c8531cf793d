"""The doctor in environments that are broken for real, and what it leaves behind."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broken_environments import (
    CRASHING,
    HANGING,
    NO_CUDA_LIBRARY,
    OLD_NUMPY_EXTENSION,
    ROOT,
    WRONG_TORCHVISION,
    Environment,
    failing_nvidia_smi,
    make_environment,
    nvidia_smi,
)
from disk_mounts import Mount, fill
from processes import processes_with

from cogumi.stack.host import check_driver, find_gpu_sign

DOC = ROOT / "docs" / "doctor.md"


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return make_environment(tmp_path)


def examine(environment: Environment, **variables: str) -> tuple[dict[str, Any], int]:
    """The report of `cogumi doctor --json` there, and its exit status. There is no traceback, ever."""
    done = environment.run("-m", "cogumi", "doctor", "--json", **variables)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return json.loads(done.stdout), done.returncode


def of(report: dict[str, Any], what: str, state: str) -> dict[str, Any]:
    """The one finding of a kind."""
    (found,) = (finding for finding in report["findings"] if (finding["what"], finding["state"]) == (what, state))
    return found


def names(report: dict[str, Any]) -> list[str]:
    return [finding["what"] for finding in report["findings"]]


# -------------------------------------------------------------------------------------------------------- the whole of it


ORDER = [
    "Python", "temporary files", "work directory", "driver", "lane", "torch", "matmul", "data libraries",
    "training libraries", "bitsandbytes",
]  # fmt: skip


def test_every_part_is_checked_in_order(environment: Environment, tmp_path: Path) -> None:
    """And nothing is left: no file, no process."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = """if True:
        import json, sys
        import cogumi
        report = cogumi.doctor()
        native = [name for name in ("torch", "numpy", "pandas", "transformers") if name in sys.modules]
        print(json.dumps({"report": report.as_dict(), "native": native, "text": str(report)}))
    """
    done = environment.run("-c", code, TMPDIR=str(scratch), CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["native"] == []
    report = said["report"]
    assert [name for name in dict.fromkeys(names(report)) if name in ORDER] == ORDER
    assert not [finding for finding in report["findings"] if finding["state"] == "fatal"]
    assert of(report, "CUDA_VISIBLE_DEVICES", "warning")
    assert not report["passed"]
    for finding in report["findings"]:
        assert f"{finding['state']:8} {finding['what']}" in said["text"]
        assert finding["fix"] in said["text"]
    assert not list(scratch.iterdir())
    assert [path for path in environment.home.rglob("*") if path.is_file()] == []
    assert left_running(environment) == []


@pytest.mark.sweep
def test_a_good_environment_is_found_good(environment: Environment) -> None:
    report, status = examine(environment)
    wrong = [finding for finding in report["findings"] if finding["state"] in ("warning", "fatal")]
    assert (wrong, status, report["passed"]) == ([], 0, True)


def left_running(environment: Environment) -> list[str]:
    """Commands of processes that were started by the doctor in this environment, or by what it imported."""
    return [" ".join(process.info["cmdline"]) for process in processes_with("HOME", environment.home)]


# ------------------------------------------------------------------------------------------------------ broken packages


def broken_packages(name: str, version: str, files: dict[str, str]) -> "Break":
    def install(environment: Environment, _: Path) -> dict[str, str]:
        environment.install(name, version, files)
        return {}

    return install


Break = Callable[[Environment, Path], dict[str, str]]
# Heading of the doc, what breaks the environment, and the finding that says so: what, state, words of figure, cause and fix.
BROKEN: dict[str, tuple[Break, str, str, str, str]] = {
    "torchvision of another torch": (
        broken_packages("torchvision", "0.26.0", WRONG_TORCHVISION),
        "training libraries", "operator torchvision::nms does not exist", "torchvision is of another", "install.sh",
    ),
    "An extension built for NumPy 1": (
        broken_packages("pandas", "2.0.3", OLD_NUMPY_EXTENSION),
        "data libraries", "^pandas: ImportError: A module that was compiled using NumPy 1.x cannot be run in NumPy 2", "numpy 1",
        "install",
    ),
    "A library of CUDA that is not there": (
        broken_packages("torch", "2.11.0", NO_CUDA_LIBRARY),
        "torch", "libcudart.so.13: cannot open shared object file", "CUDA", "install",
    ),
    "A driver without its libraries": (
        lambda _, tmp_path: failing_nvidia_smi(tmp_path / "bin"),
        "driver", "communicate with the NVIDIA driver", "nvidia-smi is there", "--gpus all",
    ),
}  # fmt: skip
SLOW = pytest.mark.slow("every library until trl asks for torchvision; the NumPy case fails the same way, sooner")


@pytest.mark.parametrize(
    "heading", [pytest.param(heading, marks=[SLOW] if "torchvision" in heading else []) for heading in BROKEN]
)
def test_a_broken_environment(heading: str, environment: Environment, tmp_path: Path) -> None:
    """Each is named with cause and fix, exit status 1; and the doc shows what is printed."""
    break_it, what, *words = BROKEN[heading]
    report, status = examine(environment, **break_it(environment, tmp_path))
    assert status == 1
    finding = of(report, what, "fatal")
    shown = in_words(section(heading))
    for part, pattern in zip(("figure", "cause", "fix"), words, strict=True):
        assert re.search(pattern, finding[part]), (part, finding[part])
        assert in_words(finding[part]) in shown, f"docs/doctor.md, {heading}, does not show: {finding[part]}"
    assert in_words(f"fatal {what}") in shown
    assert "not checked" in names(report)
    assert left_running(environment) == []


def section(heading: str) -> str:
    """The printed block below a heading of the doc."""
    match = re.search(rf"^### {re.escape(heading)}\n.*?^```\n(.*?)^```", DOC.read_text(), re.MULTILINE | re.DOTALL)
    assert match, f"docs/doctor.md has no section {heading!r} with a block"
    return match[1]


def in_words(text: str) -> str:
    """Without what differs by machine and run: figures, paths, and where lines break."""
    text = re.sub(r"(?<![\w.])~?(?:/[\w.@~+-]+)+/?|\.venv[\w./]*", "PATH", text)
    text = re.sub(r"\d+(?:\.\d+)*", "#", text)
    return re.sub(r"\s+", " ", text)


def test_a_hanging_import_is_ended_with_all_that_it_started(environment: Environment) -> None:
    environment.put(HANGING)
    code = "import cogumi, json; print(json.dumps(cogumi.doctor(timeout=2).as_dict()))"
    done = environment.run("-c", code)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (fatal,) = (finding for finding in report["findings"] if finding["state"] == "fatal")
    assert re.fullmatch(r"it was ended after 2\.\d s without an answer", fatal["figure"])
    assert left_running(environment) == []


def test_a_crash_takes_only_its_own_step_along(environment: Environment) -> None:
    environment.put(CRASHING)
    code = """if True:
        import json, os
        from cogumi.diagnostics.checkup import run_steps
        steps = run_steps(["torchvision", "data"], 60, dict(os.environ))
        print(json.dumps([[step.name, step.error, step.output] for step in steps]))
    """
    done = environment.run("-c", code)
    crashed, after = json.loads(done.stdout)
    assert crashed[:2] == ["torchvision", "it was ended by SIGSEGV"]
    assert "Fatal Python error: Segmentation fault" in crashed[2]
    assert after[:2] == ["data", ""]


# ---------------------------------------------------------------------------------------------------- half an installation


def test_packages_that_are_missing(tmp_path: Path) -> None:
    """An environment with nothing in it, so without what the command line itself is made of."""
    empty = make_environment(tmp_path, on_top=False)
    done = empty.run("-m", "cogumi", "doctor", COLUMNS="100")
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert "fatal    installed          missing: accelerate, blake3, filelock" in done.stdout
    assert "sh requirements/install.sh" in done.stdout
    assert done.stderr == "cogumi: the command line cannot be loaded: No module named 'typer'\n"
    other = empty.run("-m", "cogumi", "train", "a.yaml")
    assert (other.returncode, other.stdout, len(other.stderr.splitlines())) == (1, "", 2)


def test_everything_cogumi_imports_is_asked_for() -> None:
    import tomllib

    from cogumi.core.errors import TRAINING_PACKAGES
    from cogumi.stack.lanes import NEEDED

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for names, expected in (
        (NEEDED, project["dependencies"]),
        (TRAINING_PACKAGES, project["optional-dependencies"]["train"]),
    ):
        assert sorted(names) == sorted(re.split(r"[<>=]", each)[0] for each in expected)


@pytest.mark.parametrize("name", ["peft", "torch"])
def test_metadata_that_is_gone(name: str, environment: Environment) -> None:
    """As an interrupted installation leaves it; the package in front hides the whole one below it."""
    environment.install(name, "0.21.2", {f"{name}/__init__.py": "raise ImportError('half a package')"})
    (environment.packages / f"{name}-0.21.2.dist-info" / "METADATA").unlink()
    report, status = examine(environment)
    assert status == 1
    assert [finding for finding in report["findings"] if finding["state"] == "fatal"]


# ----------------------------------------------------------------------------------------------------------------- drivers


H100 = "580.95.05, 81559, NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("said", "status", "findings"),
    [
        (
            "Failed to initialize NVML: Driver/library version mismatch", 18,
            [("driver", "fatal", "upgraded without a restart")],
        ),
        ("No devices were found", 6, [("GPU", "warning", "this container was given no GPU")]),
        (H100, 0, [("driver", "ok", "580.95.05"), ("GPU 0", "ok", "NVIDIA H100 80GB HBM3, 79.6 GiB")]),
        (
            f"{H100}\nWARNING: infoROM is corrupted at gpu 0000:B3:00.0", 14,
            [("driver", "ok", "580.95.05"), ("GPU 0", "ok", "79.6 GiB"), ("nvidia-smi", "note", "infoROM is corrupted")],
        ),
        ("[N/A], 81559, NVIDIA H100 80GB HBM3", 0, [("driver", "fatal", "the driver cannot be used")]),
    ],
)  # fmt: skip
def test_the_answers_of_a_driver(
    said: str, status: int, findings: list[tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", said, status)["PATH"])
    for finding, (what, state, words) in zip(check_driver("13.0", 60), findings, strict=True):
        assert (finding.what, finding.state) == (what, state)
        assert words in (finding.cause or finding.figure)


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", "", 0)["PATH"])
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 1000\n")
    (silent,) = check_driver("13.0", 0.2)
    assert (silent.state, silent.figure) == ("fatal", "nvidia-smi: no answer in 0.2 s")


def test_a_driver_too_old_for_torch(environment: Environment, tmp_path: Path) -> None:
    """Nothing native of that torch is loaded, and nothing after it."""
    environment.install("torch", "2.11.0", NO_CUDA_LIBRARY)
    report, status = examine(environment, **nvidia_smi(tmp_path / "bin", H100.replace("580.95", "550.127")))
    assert status == 1
    finding = of(report, "driver", "fatal")
    assert finding["figure"] == "550.127.05"
    assert finding["cause"] == "torch here is built for CUDA 13.0, and this driver is too old for that"
    assert "driver 580 or newer" in finding["fix"]
    assert names(report)[-1] == "not checked"


def test_no_gpu_at_all_is_a_note() -> None:
    if find_gpu_sign() or shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU, or its tools")
    (finding,) = check_driver(None, 60)
    assert (finding.state, finding.figure) == ("note", "no NVIDIA GPU; everything runs on the CPU")


def test_a_gpu_that_the_kernel_shows(tmp_path: Path) -> None:
    assert find_gpu_sign(tmp_path) == ""
    device = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    assert find_gpu_sign(tmp_path) == ""
    (device / "class").write_text("0x040300\n")  # its sound
    assert find_gpu_sign(tmp_path) == ""
    (device / "class").write_text("0x030200\n")
    assert find_gpu_sign(tmp_path) == "PCI device 0000:01:00.0"


# --------------------------------------------------------------------------------------------------------------- full disks


def test_a_full_disk_for_temporary_files(environment: Environment, mount: Mount, tmp_path: Path) -> None:
    disk = mount()
    fill(disk, 1.0)
    told = environment.run("-m", "cogumi", "doctor", "--json", TMPDIR=str(disk), **failing_nvidia_smi(tmp_path / "bin"))
    report = json.loads(told.stdout)
    assert told.returncode == 1
    finding = of(report, "temporary files", "warning")
    assert finding["cause"].startswith(f"TMPDIR={disk} cannot be written to")
    assert "it is full" in finding["cause"]


# ------------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def doctor(command_line: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`cogumi doctor` with these words and this standard input: (exit status, standard output, standard error)."""

    def run(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        return command_line("doctor", *words)

    return run


KNOWN = "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory\n"


def test_a_traceback_is_explained(tmp_path: Path, doctor: Callable[..., Any]) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"\xff\xfe\x00" + KNOWN.encode())
    status, output, wrong = doctor("--explain", path)
    assert (status, wrong) == (0, "")
    assert "libcudart.so.13" in output
    as_json = json.loads(doctor("--explain", "-", "--json", stdin=KNOWN)[1])
    assert as_json["known"]
    assert as_json["diagnoses"][0]["fix"] in output


@pytest.mark.parametrize(
    ("source", "stdin", "status", "said"),
    [
        ("-", "Traceback (most recent call last):\nKeyError: 'mine'\n", 1, "unknown: none of the "),
        ("not-there.txt", "", 2, "cogumi: --explain not-there.txt: No such file or directory"),
        (".", "", 2, "cogumi: --explain .: Is a directory"),
        ("-", "", 2, "cogumi: --explain -: it holds no text"),
    ],
)
def test_a_text_that_is_not_explained(
    source: str, stdin: str, status: int, said: str, doctor: Callable[..., Any]
) -> None:
    code, *streams = doctor("--explain", source, stdin=stdin)
    assert code == status
    assert streams[status - 1].startswith(said)
    assert not streams[2 - status]
