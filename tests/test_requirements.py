"""The lanes say what they promise: exact pins, hashes, wheels only, no CUDA where there is no GPU."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
STABLE = ROOT / "requirements-stable-precompiled.txt"
LANES = [STABLE, *sorted((ROOT / "requirements").glob("*.txt"))]
LANES = [lane for lane in LANES if lane.name != "cpu-overrides.txt"]
DECIDED = {
    "transformers": "5.17.0", "trl": "1.15.0", "peft": "0.21.2", "accelerate": "1.15.0", "datasets": "4.8.5",
    "bitsandbytes": "0.50.2", "huggingface-hub": "1.33.0", "numpy": "2.3.5", "polars": "2.1.0", "pyarrow": "26.0.1",
}  # fmt: skip


def pins(lane: Path) -> dict[str, list[tuple[Requirement, int]]]:
    """Requirement and number of hashes by package name (a name may be pinned once per Python)."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    text = re.sub(r"(?m)^(#.*|--only-binary.*)$", "", lane.read_text()).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        requirement = Requirement(line.split(" --hash")[0])
        found.setdefault(requirement.name, []).append((requirement, line.count("--hash=sha256:")))
    return found


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_every_requirement_is_an_exact_pin_with_hashes_from_wheels_only(lane: Path) -> None:
    assert "--only-binary :all:" in lane.read_text().splitlines()
    for requirement, hashes in (pin for several in pins(lane).values() for pin in several):
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert hashes > 0, requirement


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_no_platform_is_skipped_silently(lane: Path) -> None:
    """A marker may leave out a package another platform needs; it must not leave out what every platform needs."""
    unmarked = [name for name, several in pins(lane).items() if any(r.marker is None for r, _ in several)]
    assert len(unmarked) >= 0.6 * len(pins(lane))


def test_the_gpu_lane_is_the_one_decided() -> None:
    lane = {name: str(several[0][0].specifier) for name, several in pins(STABLE).items()}
    decided = DECIDED | {"torch": "2.11.0", "torchvision": "0.26.0", "triton": "3.6.0", "unsloth": "2026.10.7"}
    assert {name: lane[name] for name in decided} == {name: f"=={version}" for name, version in decided.items()}
    cuda_majors = {m[1] for name in lane if (m := re.search(r"^nvidia-.*-cu(\d+)$", name))}
    assert cuda_majors == {"13"}


def test_the_cpu_lane_shares_the_pins_and_has_no_cuda() -> None:
    cpu, stable = pins(ROOT / "requirements" / "cpu.txt"), pins(STABLE)
    assert {name: str(cpu[name][0][0].specifier) for name in DECIDED} == {n: f"=={v}" for n, v in DECIDED.items()}
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-", "triton"))]
    pinned_apart = {n for n in cpu if n in stable and cpu[n][0][0].specifier != stable[n][0][0].specifier}
    # setuptools: torch 2.11 asks for < 82.
    assert pinned_apart <= {"torch", "setuptools"}


def test_the_cpu_builds_of_torch_are_admitted_beside_the_indexs() -> None:
    lane = (ROOT / "requirements" / "cpu.txt").read_text()
    builds = re.findall(r"--hash=sha256:(\w+)", (ROOT / "requirements" / "cpu-torch.txt").read_text())
    assert len(builds) == 2
    assert all(f"--hash=sha256:{build}" in lane for build in builds)


def test_what_is_installed_here_is_a_lane() -> None:
    lane = "cpu.txt" if importlib.metadata.version("torch").endswith("+cpu") else "cpu-index-torch.txt"
    pinned = pins(ROOT / "requirements" / lane)
    wrong = {
        name: importlib.metadata.version(name)
        for name, version in DECIDED.items()
        if importlib.metadata.version(name) != version
    }
    assert not wrong
    assert "trl" in pinned
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout


def run_installer(tmp_path: Path, python3: str) -> subprocess.CompletedProcess[str]:
    """The installer where `python3` is the given shell script and nothing else is on PATH."""
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "requirements" / "install.sh", tmp_path / "requirements")
    (tmp_path / "bin").mkdir()
    for tool in ("dirname", "rm"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    (tmp_path / "bin" / "python3").write_text(f"#!/bin/sh\n{python3}\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    command = ["/bin/sh", "requirements/install.sh"]
    environment = {"PATH": str(tmp_path / "bin")}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


def test_without_a_fitting_python_the_installer_says_so_and_makes_nothing(tmp_path: Path) -> None:
    done = run_installer(tmp_path, "exit 1")  # what a Python 3.10 answers to the version question
    assert done.returncode == 2
    assert "cogumi needs Python 3.11 or 3.12" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_python_without_venv_is_told_what_to_install(tmp_path: Path) -> None:
    done = run_installer(tmp_path, '[ "$1" = -c ]')  # the version is right, and `-m venv` fails
    assert done.returncode == 2
    assert "apt-get install python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()
