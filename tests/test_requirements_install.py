"""The set-up picks the lane by the driver it finds, and says in one line what it cannot do."""

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from urllib.parse import unquote

import pytest

from cogumi.stack import lanes as package_lanes
from cogumi.stack.probes import HUB_FLASH_ATTN
from tests.broken_environments import Environment, make_environment

ROOT = Path(__file__).parents[1]
STABLE = ROOT / "requirements-stable-precompiled.txt"


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


STABLE_FILES = ["requirements-stable-precompiled.txt", "requirements/xformers-cu130.txt"]


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
    lane = package_lanes.lane_for(version).name
    asked = (tmp_path / "asked.txt").read_text().splitlines()
    assert f"requirements/flash_attn.py {lane}" in asked
    assert [line.split()[3] for line in asked if line.startswith("-m ipykernel install")] == ["--sys-prefix", "--user"]
    assert package_lanes.lane_for(version).file == files[0]


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


ONLY_XFORMERS = 'echo "unsloth 2026.10.9 requires xformers, which is not installed."; exit 1'


def test_without_pytorchs_index_the_stable_lane_is_installed_but_for_xformers(tmp_path: Path) -> None:
    done = run_installer(tmp_path, venv_maker("xformers-cu130.txt", ONLY_XFORMERS), driver("580.95.05"))
    assert done.returncode == 0, done.stderr
    assert "unsloth uses torch's attention" in done.stdout
    assert installed(tmp_path) == STABLE_FILES


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


# ------------------------------------------------------------------------------------------- a Python that is too old

# A python3 that is the given release for the question of the installer, and to which pip gives a uv that makes a Python.
OTHER_PYTHON = """
case "$*" in
--version) echo Python {release} ;;
-c*) exec {python} -c "import sys; sys.version_info = {info}; exec(sys.argv[1])" "$2" ;;
"-m pip install --target .python uv")
    mkdir -p .python/bin
    cat >.python/bin/uv <<'UV'
#!/bin/sh
[ "$*" = "python install --no-bin --install-dir .python 3.12" ] || exit 3
mkdir -p .python/cpython-3.12.9-linux-x86_64-gnu/bin
cp bin/made .python/cpython-3.12.9-linux-x86_64-gnu/bin/python3.12
UV
    chmod +x .python/bin/uv ;;
*) exit 4 ;;
esac
"""


@pytest.mark.parametrize(
    ("release", "info"), [("3.10.13", (3, 10, 13, "final", 0)), ("3.11.0rc1", (3, 11, 0, "candidate", 1))]
)
def test_a_box_with_another_python_is_told_the_one_command_that_gets_one(
    release: str, info: tuple[object, ...], tmp_path: Path
) -> None:
    """3.11.0rc1 is what Ubuntu 22.04 has as python3.11. What uv would download is pretended, the rest is run."""
    script = OTHER_PYTHON.replace("{release}", release).replace("{info}", repr(info))
    done = run_installer(tmp_path, script.replace("{python}", sys.executable))
    assert done.returncode == 2
    assert f"this machine has Python {release}" in done.stderr
    assert not (tmp_path / ".venv").exists()
    (command,) = (line for line in done.stderr.splitlines() if line.startswith("python3 -m pip"))
    (tmp_path / "bin" / "made").write_text(f"#!/bin/sh\n{venv_maker()}")
    (tmp_path / "bin" / "made").chmod(0o755)
    for tool in ("cp", "sh"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    environment = {"PATH": str(tmp_path / "bin")}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path)[-1] == "requirements/cpu.txt"


# ------------------------------------------------------------------------------------------- flash-attn, which may fail

LOADS = "__version__ = '2.8.3'"
LOADS_NOT = "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E')"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("flash"))


def wheel(place: Path, source: str) -> Path:
    """A wheel of flash-attn with this as its package."""
    path, info = place / "flash_attn-2.8.3-py3-none-any.whl", "flash_attn-2.8.3.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flash_attn/__init__.py", source)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def try_flash_attn(environment: Environment, place: Path, url: str, sha256: str, python: str = "") -> str:
    """What requirements/flash_attn.py says where lanes.toml names this wheel."""
    python = python or f"{sys.version_info.major}.{sys.version_info.minor}"
    table = place / "lanes.toml"
    table.write_text(f'[[flash_attn]]\nlane = "stable"\npython = "{python}"\nurl = "{url}"\nsha256 = "{sha256}"\n')
    done = environment.run(str(ROOT / "requirements" / "flash_attn.py"), "stable", str(table), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return done.stdout


def has_flash_attn(environment: Environment) -> bool:
    return environment.run("-c", "import importlib.metadata as m; m.version('flash-attn')").returncode == 0


def test_flash_attn_that_loads_stays(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    made = wheel(tmp_path, LOADS)
    hashed = hashlib.sha256(made.read_bytes()).hexdigest()
    assert "installed, and it loads" in try_flash_attn(environment, tmp_path, made.as_uri(), hashed)
    assert has_flash_attn(environment)
    made.unlink()  # a second time nothing is asked for
    assert "flash-attn 2.8.3: installed" in try_flash_attn(environment, tmp_path, made.as_uri(), hashed)


@pytest.mark.parametrize("case", ["does not load", "another hash", "unreachable", "unknown"])
def test_flash_attn_that_fails_is_taken_out_and_one_line_says_why(
    case: str, environment: Environment, tmp_path: Path
) -> None:
    made = wheel(tmp_path, LOADS_NOT if case == "does not load" else LOADS)
    hashed = "0" * 64 if case == "another hash" else hashlib.sha256(made.read_bytes()).hexdigest()
    url = f"http://127.0.0.1:9/{made.name}" if case == "unreachable" else made.as_uri()
    said = try_flash_attn(environment, tmp_path, url, hashed, "3.9" if case == "unknown" else "")
    because = {
        "does not load": "undefined symbol: _ZN3c105Error",
        "another hash": "DO NOT MATCH THE HASHES",  # pip's own words
        "unreachable": url,
        "unknown": "no wheel with a known hash",
    }
    assert "not installed" in said
    assert because[case] in said
    assert HUB_FLASH_ATTN in said
    assert "sdpa" in said
    assert not has_flash_attn(environment)


def test_the_wheels_of_flash_attn_are_of_a_lane_and_of_its_torch() -> None:
    lanes = package_lanes.lanes()
    entries = tomllib.loads((ROOT / "requirements" / "lanes.toml").read_text())["flash_attn"]
    assert entries
    for entry in entries:
        lane = lanes[entry["lane"]]
        torch = lane.pins["torch"].partition("+")[0].rpartition(".")[0]
        assert lane.cuda is not None
        python = f"cp{entry['python'].replace('.', '')}"
        assert f"cu{lane.cuda.replace('.', '')}torch{torch}-{python}-{python}-linux_x86_64.whl" in unquote(entry["url"])
        assert re.fullmatch(r"[0-9a-f]{64}", entry["sha256"])
        assert package_lanes.lane_for(lane.driver).name == lane.name  # the installer tries it
