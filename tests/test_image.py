"""The Dockerfile, as far as it can be read without building it (docs/quickstart.md says what was built)."""

import fnmatch
import re
import subprocess
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
DOCKERFILE = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in DOCKERFILE.splitlines() if line.startswith(f"{name} ")]


def test_the_base_has_the_lanes_cuda_and_a_python_that_cogumi_takes() -> None:
    """Ubuntu 24.04's python3 is 3.12."""
    (base,) = instructions("ARG")
    cuda, ubuntu = re.fullmatch(r"BASE=nvidia/cuda:(\d+\.\d+)\.\d+-runtime-ubuntu(\d+\.\d+)", base).groups()  # type: ignore[union-attr]
    stable = (ROOT / "requirements-stable-precompiled.txt").read_text()
    assert re.search(rf"^cuda-toolkit(\[.*\])?=={re.escape(cuda)}\.", stable, re.MULTILINE), cuda
    requires = re.search(r'requires-python = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert requires is not None
    assert {"24.04": "3.12"}[ubuntu] in SpecifierSet(requires[1])


def test_what_the_build_reads_is_not_left_out() -> None:
    """The installer, the lane, what pyproject.toml names, the package with its data, and the notebooks are in the context."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sent = [path for path in tracked if not any(is_ignored(path, pattern) for pattern in IGNORED)]
    assert {"requirements/install.sh", "requirements/flash_attn.py", "requirements/lanes.toml"} <= set(sent)
    assert {"requirements-stable-precompiled.txt", "pyproject.toml", "README.md", "LICENSE", "configs"} <= set(sent)
    for folder in ("cogumi/", "notebooks/", "requirements/"):
        assert [path for path in tracked if path.startswith(folder) and path not in sent] == []
    assert not any(path.startswith(("tests/", "benchmarks/")) for path in sent)
    assert {".git", ".venv*", "runs"} <= set(IGNORED)


def is_ignored(path: str, pattern: str) -> bool:
    parts = path.split("/")
    tails = range(len(parts)) if pattern.startswith("**/") else range(1)
    return any(
        fnmatch.fnmatch("/".join(parts[at:end]), pattern.removeprefix("**/"))
        for at in tails
        for end in range(at + 1, len(parts) + 1)
    )


def test_the_lane_is_one_that_the_installer_takes_and_caches_are_below_the_volume() -> None:
    (lane,) = re.findall(r"cd /opt/cogumi && LANE=(\w+) .*sh requirements/install\.sh", DOCKERFILE)
    assert f'"${{LANE:-}}" = {lane} ]' in (ROOT / "requirements/install.sh").read_text()
    values = dict(word.split("=", 1) for word in instructions("ENV")[0].split())
    assert values["PATH"].startswith("/opt/cogumi/.venv/bin:")
    assert all(values[name].startswith("/workspace/") for name in ("HF_HOME", "XDG_CACHE_HOME"))


def test_the_start_command_is_a_shells() -> None:
    (command,) = instructions("CMD")
    subprocess.run(["sh", "-n", "-c", command], check=True)
    for run in instructions("RUN"):
        subprocess.run(["sh", "-n", "-c", run], check=True)


def test_a_login_by_ssh_gets_the_variables(tmp_path: Path) -> None:
    """The step that writes them, with another file for /etc/environment."""
    step = next(run for run in instructions("RUN") if "/etc/environment" in run)
    environment = {
        "PATH": "/opt/cogumi/.venv/bin:/usr/bin:/bin",
        "HF_HOME": "/h",
        "XDG_CACHE_HOME": "/x",
        "SECRET": "s",
    }
    command = step.replace("/etc/environment", str(tmp_path / "environment"))
    subprocess.run(["sh", "-c", command], env=environment, check=True)
    lines = sorted((tmp_path / "environment").read_text().splitlines())
    assert lines == ["HF_HOME=/h", "PATH=/opt/cogumi/.venv/bin:/usr/bin:/bin", "XDG_CACHE_HOME=/x"]
