"""The set-up picks the lane by the driver it finds, and says in one line what it cannot do."""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cogumi.stack import lanes as package_lanes
from cogumi.stack.probes import HUB_FLASH_ATTN
from tests.broken_environments import NO_DRIVER, Environment, make_environment

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "requirements"))
from package_file import pins, requirements_of  # noqa: E402

STABLE = ROOT / "requirements-stable-precompiled.txt"


def run_installer(
    tmp_path: Path, python3: str, nvidia_smi: str = "", lacking: str = "", stable: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the installer with only the shell scripts `python3` and `nvidia-smi` ("": none) and basic tools on PATH.

    The kernel's signs of a GPU are looked for below tmp_path. stable: another text for the stable lane's file.
    """
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements", ignore=shutil.ignore_patterns("*.py", lacking))
    installer = tmp_path / "requirements" / "install.sh"
    installer.write_text(re.sub(r" (?=/(proc|dev|sys)/(?!null))", f" {tmp_path}", installer.read_text()))
    (tmp_path / STABLE.name).write_text(stable or STABLE.read_text())
    (tmp_path / "bin").mkdir()
    for tool in ("cat", "chmod", "dirname", "grep", "head", "mkdir", "rm", "sed", "uname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    for tool, script in {"python3": python3, "nvidia-smi": nvidia_smi}.items():
        if script:
            (tmp_path / "bin" / tool).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "bin" / tool).chmod(0o755)
    command = ["/bin/sh", "requirements/install.sh"]
    environment = {"PATH": str(tmp_path / "bin"), **variables}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


# Makes a .venv whose python writes down what it is asked for, and to which nothing of PyTorch's own is to be had if $1 says so.
MAKES_VENV = """[ "$1" = -c ] && exit 0
mkdir -p "$3/bin" && cat >"$3/bin/python" <<'END'
#!/bin/sh
echo "$@" >>asked.txt
case "$*" in *{unreachable}*) exit 1 ;; *" -r "*) {install} ;; esac
case "$*" in *"pip check") {check} ;; esac
END
chmod +x "$3/bin/python"
"""


def venv_maker(
    unreachable: str = "nothing at all", check: str = "echo No broken requirements found.", install: str = ""
) -> str:
    """The script of a python3; `check` and `install` are the scripts for `pip check` and `pip install -r`."""
    script = MAKES_VENV.replace("{unreachable}", f'"{unreachable}"').replace("{check}", check)
    return script.replace("{install}", install)


def driver(version: str) -> str:
    return f'case "$1" in -L) ;; *) echo {version} ;; esac'


def installed(tmp_path: Path) -> list[str]:
    """The pinned files that pip was given, in order."""
    return re.findall(r" -r (\S+)", (tmp_path / "asked.txt").read_text())


STABLE_FILES = [".venv/without-xformers.txt", ".venv/xformers.txt"]
CPU_FILES = ["requirements/cpu-torch.txt", "requirements/cpu.txt"]
OLDER_FILES = ["requirements/stable-cu128.txt"]
ONLY_XFORMERS = 'echo "unsloth 2026.10.9 requires xformers, which is not installed."; exit 1'
WITHOUT_XFORMERS = venv_maker(".venv/xformers.txt", ONLY_XFORMERS)
TWO_CONFLICTS = venv_maker(
    ".venv/xformers.txt", 'echo "trl 1.15.0 requires datasets, which is not installed."; ' + ONLY_XFORMERS
)
FAILS = f'echo "{NO_DRIVER}"; exit 9'


def show_gpu(root: Path, kind: str) -> None:
    """Put the kernel's signs of an NVIDIA GPU below `root`."""
    if kind == "driver":
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").touch()
        return
    for address, vendor, device_class in (
        ("0000:00:1f.0", "0x8086", "0x030000"),
        ("0000:01:00.0", "0x10de", "0x030200"),
    ):
        device = root / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(device_class + "\n")


# nvidia-smi, signs of a GPU, variables; the files that are installed, and words of the output.
INSTALLS = {
    "580": (driver("580.65.06"), "", {}, STABLE_FILES, "stable lane"),
    "610": (driver("610.10"), "", {}, STABLE_FILES, "stable lane"),
    "579": (driver("579.99"), "", {}, OLDER_FILES, "CUDA 12.8"),
    "525": (driver("525.60.13"), "", {}, OLDER_FILES, "CUDA 12.8"),
    "no driver": ("", "", {}, CPU_FILES, "no NVIDIA GPU: installing the CPU lane"),
    "nvidia-smi without a GPU": ("exit 9", "", {}, CPU_FILES, "no NVIDIA GPU"),
    "a GPU without tools": ("", "pci", {}, CPU_FILES, "/sys/bus/pci/devices/0000:01:00.0), but no nvidia-smi"),
    "stable on request, as in an image": ("", "", {"LANE": "stable"}, STABLE_FILES, "not asked, LANE=stable"),
    "cpu on request": (FAILS, "driver", {"LANE": "cpu"}, CPU_FILES, "no GPU is to be used"),
}


@pytest.mark.parametrize(("smi", "sign", "variables", "files", "said"), INSTALLS.values(), ids=INSTALLS)
def test_the_lane_that_the_installer_picks(
    smi: str, sign: str, variables: dict[str, str], files: list[str], said: str, tmp_path: Path
) -> None:
    if sign:
        show_gpu(tmp_path, sign)
    done = run_installer(tmp_path, venv_maker(), smi, **variables)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert installed(tmp_path) == files
    asked = (tmp_path / "asked.txt").read_text().splitlines()
    assert [line.split()[3] for line in asked if line.startswith("-m ipykernel install")] == ["--sys-prefix", "--user"]
    lane = {STABLE_FILES[0]: "stable", OLDER_FILES[0]: "stable-cu128"}.get(files[0])
    assert (f"requirements/flash_attn.py {lane}" in asked) == (lane is not None)
    if files == STABLE_FILES:  # the file of the lane, in two parts
        parts = [requirements_of((tmp_path / file).read_text()) for file in files]
        assert sorted(parts[0] + parts[1]) == sorted(requirements_of(STABLE.read_text()))
        assert [part.split()[0] for part in parts[1]] == ["xformers"]


# python3, nvidia-smi, signs of a GPU, a file that is lacking, and words of the one message.
REFUSED = {
    "driver fails": (venv_maker(), FAILS, "driver", "", f"/version), but nvidia-smi fails: {NO_DRIVER}"),
    "driver fails, pci": (venv_maker(), FAILS, "pci", "", "LANE=cpu sh requirements/install.sh"),
    "524": (venv_maker(), driver("524.99"), "", "", "NVIDIA driver 524.99 cannot run"),
    "lane unresolved": (venv_maker(), driver("535.183.01"), "", "stable-cu128.txt", "a host with driver 580 or newer"),
    "no version": (venv_maker(), driver("'[N/A]'"), "", "", "'[N/A]', which is no version"),
    "Python 3.10": ("exit 1", "", "", "", "cogumi needs Python 3.11 or 3.12"),
    "no venv": ('[ "$1" = -c ]', "", "", "", "apt-get install python3-venv"),
}


@pytest.mark.parametrize(("python3", "smi", "sign", "lacking", "said"), REFUSED.values(), ids=REFUSED)
def test_what_the_installer_refuses(python3: str, smi: str, sign: str, lacking: str, said: str, tmp_path: Path) -> None:
    if sign:
        show_gpu(tmp_path, sign)
    done = run_installer(tmp_path, python3, smi, lacking=lacking)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(("python3", "status"), [(WITHOUT_XFORMERS, 0), (TWO_CONFLICTS, 1)])
def test_pytorchs_index_does_not_answer(python3: str, status: int, tmp_path: Path) -> None:
    """The stable lane is installed but for xformers; any other conflict still fails."""
    done = run_installer(tmp_path, python3, driver("580.95.05"))
    assert done.returncode == status, done.stderr
    assert "unsloth uses torch's attention" in done.stdout
    assert installed(tmp_path) == STABLE_FILES
    assert ("trl 1.15.0 requires datasets" in done.stdout) == bool(status)
    assert "requires xformers" not in done.stdout


# ------------------------------------------------------------------------- the stable file, for pip's own resolver


def make_wheel(path: Path, metadata: str = "", files: dict[str, str] | None = None) -> Path:
    """Write a wheel of this name; metadata: more lines for METADATA."""
    name, version, *tag = path.stem.split("-")
    written = {
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{name}-{version}.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {'-'.join(tag)}\n",
        f"{name}-{version}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (written | (files or {})).items():
            archive.writestr(file, text)
    return path


# The extras of cuda-toolkit that a torch for CUDA asks for, as in the source of the lane for older drivers.
TOOLKIT = re.findall(r"cuda-toolkit\[(.*)\]", (ROOT / "requirements/stable-cu128.in").read_text())[0].split(",")
# Metadata of packages that only a GPU lane has; of all others it is read from what is installed.
GPU_METADATA = {
    "torch": f"Requires-Dist: cuda-toolkit[{','.join(TOOLKIT)}]==13.0.2; platform_system == 'Linux'\n"
    "Requires-Dist: cuda-bindings<14,>=13.0.3\nRequires-Dist: nvidia-cudnn-cu13==9.19.0.56\nRequires-Dist: triton==3.6.0\n",
    "cuda-toolkit": "".join(f"Provides-Extra: {extra}\n" for extra in TOOLKIT)
    + "Requires-Dist: nvidia-cublas==13.1.0.3.*; extra == 'cublas'\n",
    "unsloth": "Requires-Dist: xformers>=0.0.27.post2\nRequires-Dist: torch<2.15,>=2.4\nRequires-Dist: unsloth_zoo>=2026.10.9\n",
    "xformers": "Requires-Dist: torch>=2.10\nRequires-Dist: numpy\n",
    "sigstore-rekor-types": "Requires-Dist: pydantic[email]<3,>=2\n",
}
PYTORCH = "https://download.pytorch.org"


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stub wheel for each pin of the stable lane, and the lane's file with the hashes of these wheels."""
    place = tmp_path_factory.mktemp("stubs")
    text = STABLE.read_text()
    for pin in requirements_of(text):
        requirement = Requirement(pin.partition(" \\\n")[0])
        if requirement.url is not None:
            path = place / requirement.url.removeprefix(f"{PYTORCH}/")
        else:
            version = str(requirement.specifier).removeprefix("==")
            path = place / f"{requirement.name.replace('-', '_')}-{version}-py3-none-any.whl"
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = GPU_METADATA.get(requirement.name, "")
        with contextlib.suppress(PackageNotFoundError):
            installed = distribution(requirement.name)
            if not metadata and installed.version == path.stem.split("-")[1]:
                lines = [f"{key}: {value}\n" for key, value in installed.metadata.items()]
                metadata = "".join(line for line in lines if line.startswith(("Requires-Dist:", "Provides-Extra:")))
        if requirement.name in ("bleach", "jsonschema", "pydantic"):  # required with an extra by other packages
            make_wheel(
                place / f"{requirement.name}-{version}.999-py3-none-any.whl"
            )  # pip 23.2 takes it if only the name is pinned
        digest = hashlib.sha256(make_wheel(path, metadata).read_bytes()).hexdigest()
        text = text.replace(pin, pin.partition(" \\\n")[0] + f" \\\n    --hash=sha256:{digest}\n")
    (place / STABLE.name).write_text(text)
    return place


@pytest.fixture
def pip_variables(stubs: Path, tmp_path: Path) -> dict[str, str]:
    """Variables with which pip sees an empty environment, no index but the stubs, and reports instead of installing."""
    found = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(stubs)}
    found |= {"PIP_DRY_RUN": "1", "PIP_IGNORE_INSTALLED": "1", "PIP_NO_CACHE_DIR": "1"}
    return found | {"PIP_REPORT": str(tmp_path / "report.json")}


@pytest.fixture
def host(stubs: Path) -> Iterator[str]:
    """The address of a server that has what is on download.pytorch.org."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=stubs)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def resolved(report: Path) -> dict[str, str]:
    """Version by name of what pip would install."""
    entries = json.loads(report.read_text())["install"]
    return {canonicalize_name(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in entries}


@pytest.mark.slow("pip resolves 215 packages: 15 s")
@pytest.mark.skipif(sys.platform != "linux", reason="the lane is for Linux")
def test_the_stable_file_is_installed_by_the_command_that_it_names(
    stubs: Path, host: str, pip_variables: dict[str, str], tmp_path: Path
) -> None:
    text = (stubs / STABLE.name).read_text()
    command = next(line.strip("# ") for line in text.splitlines() if line.startswith("#     pip install"))
    (tmp_path / STABLE.name).write_text(text.replace(PYTORCH, host))
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=tmp_path, env=pip_variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    python = f"linux {sys.version_info.major}.{sys.version_info.minor}"
    assert resolved(tmp_path / "report.json").items() >= pins(text, python).items()


@pytest.mark.slow("pip resolves 215 packages: 15 s")
@pytest.mark.skipif(sys.platform != "linux", reason="the lane is for Linux")
def test_the_installer_leaves_xformers_out_where_its_host_does_not_answer(
    stubs: Path, pip_variables: dict[str, str], tmp_path: Path
) -> None:
    text = (stubs / STABLE.name).read_text()
    python3 = venv_maker(check=ONLY_XFORMERS, install=f'exec {sys.executable} "$@"')  # pip itself
    unreachable = text.replace(PYTORCH, "http://127.0.0.1:9")
    done = run_installer(tmp_path, python3, driver("580.95.05"), stable=unreachable, **pip_variables)
    assert done.returncode == 0, done.stderr
    assert "unsloth uses torch's attention" in done.stdout
    without = pins(text, f"linux {sys.version_info.major}.{sys.version_info.minor}")
    del without["xformers"]
    actual = resolved(tmp_path / "report.json")
    assert actual.items() >= without.items()
    assert "xformers" not in actual


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
    return make_wheel(place / "flash_attn-2.8.3-py3-none-any.whl", files={"flash_attn/__init__.py": source})


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


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("does not load", "undefined symbol: _ZN3c105Error"),
        ("another hash", "DO NOT MATCH THE HASHES"),  # pip's own words
        ("unreachable", "http://127.0.0.1:9/flash_attn"),
        ("unknown", "no wheel with a known hash"),
    ],
)
def test_flash_attn_that_fails_is_removed_with_one_line(
    case: str, said: str, environment: Environment, tmp_path: Path
) -> None:
    made = wheel(tmp_path, LOADS_NOT if case == "does not load" else LOADS)
    hashed = "0" * 64 if case == "another hash" else hashlib.sha256(made.read_bytes()).hexdigest()
    url = f"http://127.0.0.1:9/{made.name}" if case == "unreachable" else made.as_uri()
    line = try_flash_attn(environment, tmp_path, url, hashed, "3.9" if case == "unknown" else "")
    assert "not installed" in line
    assert said in line
    assert f"{HUB_FLASH_ATTN} or torch's sdpa" in line
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
        assert lane.name in ("stable", "stable-cu128")  # for which the installer tries it
