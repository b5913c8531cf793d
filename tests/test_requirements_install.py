"""The set-up picks the lane by the driver it finds, and says in one line what it cannot do."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cogumi.stack import lanes as package_lanes

ROOT = Path(__file__).parents[1]
STABLE = ROOT / "requirements-stable-precompiled.txt"
sys.path.insert(0, str(ROOT / "requirements"))
from package_file import requirements_of  # noqa: E402


def run_installer(
    tmp_path: Path, python3: str, nvidia_smi: str = "exit 9", lacking: str = ""
) -> subprocess.CompletedProcess[str]:
    """The installer where `python3` and `nvidia-smi` are the given shell scripts and nothing else is on PATH."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements", ignore=shutil.ignore_patterns("*.py", lacking))
    shutil.copy(STABLE, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("cat", "chmod", "dirname", "grep", "head", "mkdir", "rm", "sed", "uname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    for tool, script in {"python3": python3, "nvidia-smi": nvidia_smi}.items():
        (tmp_path / "bin" / tool).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / tool).chmod(0o755)
    command = ["/bin/sh", "requirements/install.sh"]
    environment = {"PATH": str(tmp_path / "bin")}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


# Makes a .venv whose python writes down what it is asked for, and to which nothing of PyTorch's own is to be had if $1 says so.
MAKES_VENV = """[ "$1" = -c ] && exit 0
mkdir -p "$3/bin" && cat >"$3/bin/python" <<'END'
#!/bin/sh
echo "$@" >>asked.txt
case "$*" in *{unreachable}*) exit 1 ;; esac
case "$*" in *"pip check") {check} ;; esac
END
chmod +x "$3/bin/python"
"""


def venv_maker(unreachable: str = "nothing at all", check: str = "echo No broken requirements found.") -> str:
    return MAKES_VENV.replace("{unreachable}", f'"{unreachable}"').replace("{check}", check)


def driver(version: str) -> str:
    return f'case "$1" in -L) ;; *) echo {version} ;; esac'


def installed(tmp_path: Path) -> list[str]:
    """The pinned files that pip was given, in order."""
    return re.findall(r" -r (\S+)", (tmp_path / "asked.txt").read_text())


STABLE_FILES = ["requirements/xformers-cu130.txt", "requirements-stable-precompiled.txt"]


@pytest.mark.parametrize(
    ("version", "files"),
    [
        ("580.65.06", STABLE_FILES),
        ("610.10", STABLE_FILES),
        ("579.99", ["requirements/stable-cu128.txt"]),
        ("525.60.13", ["requirements/stable-cu128.txt"]),
    ],
)
def test_the_installer_picks_the_lane_by_the_driver(version: str, files: list[str], tmp_path: Path) -> None:
    done = run_installer(tmp_path, venv_maker(), driver(version))
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path) == files
    assert package_lanes.lane_for(version).file == files[-1]


def test_without_a_driver_the_installer_takes_the_cpu_lane(tmp_path: Path) -> None:
    done = run_installer(tmp_path, venv_maker())
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path)[-1] == package_lanes.lane_for(None).file == "requirements/cpu.txt"


@pytest.mark.parametrize("version", ["524.99", "470.256.02"])
def test_a_driver_too_old_for_any_lane_gets_one_message_and_nothing_is_made(version: str, tmp_path: Path) -> None:
    done = run_installer(tmp_path, venv_maker(), driver(version))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"NVIDIA driver {version} cannot run" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_older_driver_is_refused_where_its_lane_is_unresolved(tmp_path: Path) -> None:
    done = run_installer(tmp_path, venv_maker(), driver("535.183.01"), lacking="stable-cu128.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert "choose a host with driver 580 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_driver_that_says_no_version_is_refused(tmp_path: Path) -> None:
    done = run_installer(tmp_path, venv_maker(), driver("'[N/A]'"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "'[N/A]', which is no version" in done.stderr


ONLY_XFORMERS = 'echo "unsloth 2026.10.7 requires xformers, which is not installed."; exit 1'


def test_without_pytorchs_index_the_stable_lane_is_installed_but_for_xformers(tmp_path: Path) -> None:
    done = run_installer(tmp_path, venv_maker("xformers-cu130.txt", ONLY_XFORMERS), driver("580.95.05"))
    assert done.returncode == 0, done.stderr
    assert "unsloth uses torch's attention" in done.stdout
    assert installed(tmp_path)[-1] == ".venv/without-xformers.txt"
    left, whole = (
        requirements_of(file.read_text())
        for file in (tmp_path / ".venv" / "without-xformers.txt", tmp_path / STABLE.name)
    )
    assert [pin for pin in whole if pin not in left] == [pin for pin in whole if pin.startswith("xformers @")]
    assert len(left) == len(whole) - 1


def test_without_pytorchs_index_any_other_conflict_still_fails(tmp_path: Path) -> None:
    check = 'echo "trl 1.15.0 requires datasets, which is not installed."; ' + ONLY_XFORMERS
    done = run_installer(tmp_path, venv_maker("xformers-cu130.txt", check), driver("580.95.05"))
    assert done.returncode == 1
    assert "trl 1.15.0 requires datasets" in done.stdout
    assert "requires xformers" not in done.stdout


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
