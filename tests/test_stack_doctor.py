"""The doctor in environments that are broken for real, and what it leaves behind."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
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
from disk_mounts import fill, mounting

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


def test_every_part_is_looked_at_in_order_and_nothing_is_left(environment: Environment, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = """if True:
        import json, sys
        import cogumi
        report = cogumi.doctor()
        native = [name for name in ("torch", "numpy", "pandas", "transformers") if name in sys.modules]
        print(json.dumps({"report": report.as_dict(), "native": native, "text": str(report)}))
    """
    # Dynamo switched off: compiling is most of the time.
    done = environment.run("-c", code, TORCHDYNAMO_DISABLE="1", TMPDIR=str(scratch))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["native"] == []
    report = said["report"]
    order = [
        "Python",
        "temporary files",
        "work directory",
        "driver",
        "lane",
        "torch",
        "matmul",
    ]
    order += [
        "data libraries",
        "training libraries",
        "bitsandbytes",
        "torch.compile",
        "4-bit layers",
        "compiler",
    ]
    assert [name for name in dict.fromkeys(names(report)) if name in order] == order
    assert not [finding for finding in report["findings"] if finding["state"] == "fatal"]
    assert "TORCHDYNAMO_DISABLE=1: torch compiles nothing" in of(report, "torch.compile", "warning")["figure"]
    assert "nothing is compiled, because of TORCHDYNAMO_DISABLE=1" in of(report, "compiler", "warning")["figure"]
    assert not report["passed"]
    for finding in report["findings"]:
        assert f"{finding['state']:8} {finding['what']}" in said["text"]
        assert finding["fix"] in said["text"]
    assert not list(scratch.iterdir())
    assert [path for path in environment.home.rglob("*") if path.is_file()] == []
    assert left_running(environment) == []


@pytest.mark.sweep
def test_a_good_environment_is_found_good_in_time(environment: Environment) -> None:
    began = os.times()
    report, status = examine(environment)
    ended = os.times()
    wrong = [finding for finding in report["findings"] if finding["state"] in ("warning", "fatal")]
    assert (wrong, status, report["passed"]) == ([], 0, True)
    assert of(report, "compiler", "ok")
    assert of(report, "4-bit layers", "ok")["figure"].startswith("none: ")
    # Two processes of it at once: 15 s of two cores. The time on the wall depends on who else is at work.
    used = (ended.children_user + ended.children_system) - (began.children_user + began.children_system)
    assert used < 40, f"{used:.0f} s of processor time"
    assert [path for path in environment.home.rglob("*") if path.is_file()] == []


def left_running(environment: Environment) -> list[str]:
    """Commands of processes that were started by the doctor in this environment, or by what it imported."""
    home = f"HOME={environment.home}".encode()
    collected = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if home in (process / "environ").read_bytes().split(b"\0"):
                collected.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return collected


# ------------------------------------------------------------------------------------------------------ broken packages


def wrong_torchvision(environment: Environment, _: Path) -> dict[str, str]:
    environment.install("torchvision", "0.26.0", WRONG_TORCHVISION)
    return {"TORCHDYNAMO_DISABLE": "1"}


def old_numpy_extension(environment: Environment, _: Path) -> dict[str, str]:
    environment.install("pandas", "2.0.3", OLD_NUMPY_EXTENSION)
    return {}


def no_cuda_library(environment: Environment, _: Path) -> dict[str, str]:
    environment.install("torch", "2.11.0", NO_CUDA_LIBRARY)
    return {}


def missing_driver(_: Environment, tmp_path: Path) -> dict[str, str]:
    return failing_nvidia_smi(tmp_path / "bin")


Break = Callable[[Environment, Path], dict[str, str]]
# Heading of the doc, what breaks the environment, and the finding that says so: what, state, words of figure, cause and fix.
BROKEN: list[tuple[str, Break, tuple[str, str, str, str, str]]] = [
    (
        "torchvision of another torch",
        wrong_torchvision,
        (
            "training libraries",
            "fatal",
            "operator torchvision::nms does not exist",
            "torchvision is of another",
            "install.sh",
        ),
    ),
    (
        "An extension built for NumPy 1",
        old_numpy_extension,
        (
            "data libraries",
            "fatal",
            "^pandas: ImportError: A module that was compiled using NumPy 1.x cannot be run in NumPy 2",
            "numpy 1",
            "install",
        ),
    ),
    (
        "A library of CUDA that is not there",
        no_cuda_library,
        ("torch", "fatal", "libcudart.so.13: cannot open shared object file", "CUDA", "install"),
    ),
    (
        "A driver without its libraries",
        missing_driver,
        ("driver", "fatal", "communicate with the NVIDIA driver", "nvidia-smi is there", "--gpus all"),
    ),
]


def slow_cases() -> list[object]:
    slow = pytest.mark.slow("every library until trl asks for torchvision; the NumPy case fails the same way, sooner")
    marks = {"torchvision of another torch": [slow]}
    return [pytest.param(*each, id=each[0], marks=marks.get(each[0], [])) for each in BROKEN]


@pytest.mark.parametrize(("heading", "break_it", "expected"), slow_cases())
def test_a_broken_environment(
    heading: str, break_it: Break, expected: tuple[str, str, str, str, str], environment: Environment, tmp_path: Path
) -> None:
    """Each is named with cause and fix, exit status 1; and the doc shows what is printed."""
    variables = break_it(environment, tmp_path)
    report, status = examine(environment, **variables)
    assert status == 1
    what, state, *words = expected
    finding = of(report, what, state)
    for part, pattern in zip(("figure", "cause", "fix"), words, strict=True):
        assert re.search(pattern, finding[part]), (part, finding[part])
    fatal = [finding for finding in report["findings"] if finding["state"] == "fatal"]
    assert ("not checked" in names(report)) == bool(fatal)
    shown = in_words(section(heading))
    said = [*(finding[part] for part in ("figure", "cause", "fix")), f"{state} {what}"]
    for part in said:
        assert in_words(part) in shown, f"docs/doctor.md, {heading}, does not show: {part}"
    assert left_running(environment) == []


# Real releases that do not fit: torchvision 0.26.0 is for torch 2.11.0, and pandas 2.0.3 was built against NumPy 1.
UNFIT = [
    (["torchvision==0.26.0"], "training libraries", "operator torchvision::nms does not exist", "torchvision"),
    (["pandas==2.0.3", "pytz", "tzdata"], "data libraries", "pandas: ValueError: numpy.dtype size changed", "numpy"),
]


@pytest.mark.sweep
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="pandas 2.0.3 has no wheel for it")
@pytest.mark.parametrize(("wheels", "what", "figure", "cause"), UNFIT, ids=[each[1] for each in UNFIT])
def test_a_release_that_does_not_fit(
    wheels: list[str], what: str, figure: str, cause: str, environment: Environment, tmp_path: Path
) -> None:
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run([*download, *wheels], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"the package index does not answer: {done.stderr.strip().splitlines()[-1]}")
    for wheel in tmp_path.glob("*.whl"):
        shutil.unpack_archive(wheel, environment.packages, "zip")
    report, status = examine(environment)
    finding = of(report, what, "fatal")
    assert status == 1
    assert figure in finding["figure"]
    assert cause in finding["cause"]
    assert "install.sh" in finding["fix"]


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
    # Of the two chains, one comes to the import first and ends the other.
    (fatal,) = (finding for finding in report["findings"] if finding["state"] == "fatal")
    assert re.fullmatch(r"it was ended after 2\.\d s without an answer", fatal["figure"])
    assert left_running(environment) == []


def test_what_a_doctor_that_is_killed_started_ends_with_it(environment: Environment) -> None:
    environment.put(
        {
            "pandas/__init__.py": "import time, pathlib, os; pathlib.Path(os.environ['HOME'], 'here').touch(); time.sleep(1000)"
        }
    )
    code = "import cogumi; cogumi.doctor()"
    variables = {**os.environ, "HOME": str(environment.home), "TMPDIR": str(environment.home)}
    with subprocess.Popen([str(environment.python), "-c", code], env=variables, cwd=environment.home) as process:
        waited(lambda: (environment.home / "here").exists())
        process.kill()
    waited(lambda: left_running(environment) == [])


def waited(condition: Callable[[], bool], seconds: float = 60) -> None:
    import time

    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing came of it"
        time.sleep(0.05)


def test_a_crash_takes_only_its_own_step_along(environment: Environment) -> None:
    environment.put(CRASHING)
    code = """if True:
        import json, os
        from threading import Event
        from cogumi.diagnostics.checkup import run_steps
        steps = run_steps(["torchvision", "data"], 60, dict(os.environ), Event())
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
    assert "fatal    installed          missing: accelerate, blake3, datasets, filelock" in done.stdout
    assert "sh requirements/install.sh" in done.stdout
    assert done.stderr == "cogumi: the command line cannot be loaded: No module named 'typer'\n"
    other = empty.run("-m", "cogumi", "train", "a.yaml")
    assert (other.returncode, other.stdout, len(other.stderr.splitlines())) == (1, "", 2)


def test_everything_cogumi_imports_is_asked_for() -> None:
    import tomllib

    from cogumi.stack.lanes import NEEDED

    expected = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(NEEDED) == sorted(re.split(r"[<>=]", each)[0] for each in expected)


def test_an_installation_that_was_cut_short(environment: Environment) -> None:
    environment.install(
        "torch", "2.13.0", {"torch/__init__.py": "", "torch/lib/libtorch_cpu.so": "0123456789", "torch/_C.so": "x"}
    )
    (environment.packages / "torch" / "lib" / "libtorch_cpu.so").write_text("0123")
    (environment.packages / "torch" / "_C.so").unlink()
    report, status = examine(environment)
    assert status == 1
    finding = of(report, "installed", "fatal")
    assert finding["figure"] == "torch: libtorch_cpu.so (4 B of 10 B), _C.so (0 B of 1 B)"
    python = shlex.quote(str(environment.python))
    assert finding["fix"] == f"{python} -m pip install --force-reinstall --no-deps torch==2.13.0"
    assert names(report)[-1] == "not checked"


@pytest.mark.parametrize("gone", ["RECORD", "METADATA"])
def test_metadata_that_is_gone(environment: Environment, gone: str) -> None:
    environment.install("peft", "0.21.2", {"peft/__init__.py": ""})
    (environment.packages / "peft-0.21.2.dist-info" / gone).unlink()
    report, status = examine(environment)
    assert status == 1
    fatal = [finding for finding in report["findings"] if finding["state"] == "fatal"]
    assert fatal[0]["figure"] == f"peft: without {gone}"
    assert "peft-0.21.2.dist-info, then sh requirements/install.sh" in fatal[0]["fix"]


def test_torch_without_metadata(environment: Environment) -> None:
    environment.install("torch", "2.13.0", {"torch/__init__.py": ""})
    (environment.packages / "torch-2.13.0.dist-info" / "METADATA").unlink()
    report, status = examine(environment)
    assert status == 1
    assert "torch: without METADATA" in [
        finding["figure"] for finding in report["findings"] if finding["state"] == "fatal"
    ]


# ----------------------------------------------------------------------------------------------------------------- drivers


@pytest.mark.parametrize(
    ("said", "what", "state", "cause"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "driver", "fatal", "upgraded without a restart"),
        ("No devices were found", "GPU", "warning", "this container was given no GPU"),
    ],
)
def test_a_driver_that_refuses(
    said: str, what: str, state: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", said, 18)["PATH"])
    (finding,) = check_driver("13.0", 60)
    assert (finding.what, finding.state) == (what, state)
    assert cause in finding.cause


H100 = "580.95.05, 81559, NVIDIA H100 80GB HBM3"


def test_a_driver_and_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", H100)["PATH"])
    driver, card = check_driver("13.0", 60)
    assert (driver.state, driver.figure) == ("ok", "580.95.05")
    assert (card.what, card.state, card.figure) == ("GPU 0", "ok", "NVIDIA H100 80GB HBM3, 79.6 GiB")


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
    assert "stable-cu128" in finding["fix"]
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


def test_a_full_disk_for_temporary_files(environment: Environment, tmp_path: Path) -> None:
    with mounting(tmp_path) as mount:
        disk = mount()
        fill(disk, 1.0)
        told = environment.run(
            "-m", "cogumi", "doctor", "--json", TMPDIR=str(disk), **failing_nvidia_smi(tmp_path / "bin")
        )
    report = json.loads(told.stdout)
    assert told.returncode == 1
    finding = of(report, "temporary files", "warning")
    assert finding["cause"].startswith(f"TMPDIR={disk} cannot be written to")
    assert "it is full" in finding["cause"]


def test_no_disk_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    from cogumi.stack.host import check_temporary_files

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    findings = check_temporary_files()
    assert (findings.state, findings.fix.startswith("free space")) == ("fatal", True)


# ------------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def doctor(command_line: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`cogumi doctor` with these words and this standard input: (exit status, standard output, standard error)."""

    def run(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        return command_line("doctor", *words)

    return run


KNOWN = "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory\n"


def test_a_pasted_traceback_is_explained(tmp_path: Path, doctor: Callable[..., Any]) -> None:
    path = tmp_path / "log.txt"
    path.write_text(KNOWN)
    status, output, wrong = doctor("--explain", path)
    assert (status, wrong) == (0, "")
    assert doctor("--explain", "-", stdin=KNOWN) == (0, output, "")
    assert "libcudart.so.13" in output
    as_json = json.loads(doctor("--explain", "-", "--json", stdin=KNOWN)[1])
    assert as_json["known"]
    assert as_json["diagnoses"][0]["fix"] in output


def test_an_unknown_text_says_so(doctor: Callable[..., Any]) -> None:
    status, output, wrong = doctor("--explain", "-", stdin="Traceback (most recent call last):\nKeyError: 'mine'\n")
    assert (status, wrong) == (1, "")
    assert output.startswith("unknown: none of the ")
    assert "KeyError: 'mine'" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--explain", "not-there.txt"), "cogumi: --explain not-there.txt: No such file or directory"),
        (("--explain", "."), "cogumi: --explain .: Is a directory"),
        (("--explain", "-"), "cogumi: --explain -: it holds no text"),
    ],
)
def test_used_wrongly_is_one_line_and_status_2(words: tuple[str, ...], said: str, doctor: Callable[..., Any]) -> None:
    status, shown, wrong = doctor(*words)
    assert (status, shown, len(wrong.splitlines())) == (2, "", 1)
    assert wrong.startswith(said)


def test_a_binary_file_is_read_as_text(tmp_path: Path, doctor: Callable[..., Any]) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe\x00" + KNOWN.encode())
    assert doctor("--explain", path)[0] == 0
