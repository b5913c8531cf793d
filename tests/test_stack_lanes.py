"""The package knows its lanes without the repository: which one fits a driver, which one is installed, what drifted."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cogumi.core.errors import UsageError
from cogumi.stack import lanes as stack_lanes
from cogumi.stack.lanes import Lane, drift, installed_lane, lane_for, lanes

PROJECT = Path(__file__).parents[1]


def install(site: Path, name: str, version: str, version_py: str = "") -> None:
    """A distribution as pip leaves it, with nothing in it but its version.py, if it has one."""
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: of the README\n"
    )
    if version_py:
        (site / name).mkdir()
        (site / name / "version.py").write_text(version_py)


def torch_of(cuda: str | None) -> str:
    return (
        f"from typing import Optional\n__version__ = 'x'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of its own: metadata is looked for there only."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def put(site: Path, wanted: Lane, **versions: str) -> None:
    for name, version in (dict(wanted.pins) | versions).items():
        install(site, name, version, torch_of(wanted.cuda) if name == "torch" else "")


@pytest.mark.parametrize("name", list(lanes()))
def test_a_lane_that_is_installed_is_recognised_and_has_not_drifted(name: str, site: Path) -> None:
    put(site, lanes()[name])
    actual = installed_lane()
    assert actual is not None
    assert (actual.name, drift(actual)) == (name, [])


def test_the_cpu_build_of_torch_is_the_cpu_lanes_and_no_drift(site: Path) -> None:
    put(site, lanes()["cpu"], torch="2.13.0+cpu")
    assert installed_lane() == lanes()["cpu"]
    assert drift(lanes()["cpu"]) == []
    of_the_other = drift(lanes()["cpu-index-torch"])
    assert ("torch", "2.13.0", "2.13.0+cpu") in of_the_other
    assert any(name == "nvidia-cublas" and installed is None for name, _, installed in of_the_other)


def test_a_build_for_another_cuda_is_drift(site: Path) -> None:
    put(site, lanes()["stable"], torch="2.11.0+cu128")
    assert drift(lanes()["stable"]) == [("torch", "2.11.0", "2.11.0+cu128")]


def test_what_is_missing_and_what_is_another_version_is_named(site: Path) -> None:
    expected = lanes()["stable"]
    put(site, expected, trl="1.16.0")
    (site / f"xformers-{expected.pins['xformers']}.dist-info" / "METADATA").unlink()  # a broken uninstallation
    install(site, "flash_attn", "2.8.1")  # not in the lane: nothing to compare with
    assert drift(expected) == [("trl", "1.15.0", "1.16.0"), ("xformers", "0.0.35", None)]
    assert installed_lane() == expected


def test_names_are_compared_normalized(site: Path) -> None:
    put(site, lanes()["stable"])
    about = site / "typing_extensions-4.16.0.dist-info" / "METADATA"
    about.write_text("Metadata-Version: 2.1\nName: Typing_.Extensions\nVersion: 4.16.0\n")
    assert drift(lanes()["stable"]) == []


def test_without_torch_or_with_an_unknown_one_there_is_no_lane(site: Path) -> None:
    assert installed_lane() is None
    install(site, "torch", "2.12.1", torch_of("13.0"))
    assert installed_lane() is None


def test_torch_without_its_files_is_no_lane_on_a_gpu(site: Path) -> None:
    install(site, "torch", "2.11.0")
    assert installed_lane() is None


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        (None, "cpu"),
        ("580.65.06", "stable"),
        ("615", "stable"),
        ("579.1", "stable-cu128"),
        ("525.60.13", "stable-cu128"),
    ],
)
def test_the_lane_for_a_driver(driver: str | None, name: str) -> None:
    assert lane_for(driver).name == name


@pytest.mark.parametrize(
    ("driver", "says"), [("470.256.02", "CUDA 12.8 needs 525 or newer"), ("[N/A]", "not a version")]
)
def test_a_driver_no_lane_is_for(driver: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        lane_for(driver)


def test_the_table_is_in_the_wheel_and_loads_no_torch(tmp_path: Path) -> None:
    """pip builds the wheel as it would for a user; the lanes are read from what is in it."""
    source = tmp_path / "source"  # a copy, because setuptools leaves its build/ behind
    shutil.copytree(PROJECT / "cogumi", source / "cogumi", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / file, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(source)]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    code = "import sys, cogumi.stack.lanes as l; print(len(l.lanes()), l.__file__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=site, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(lanes())), str(site / "cogumi" / "stack" / "lanes.py"), "False"]


def test_every_installed_version_is_the_one_importlib_reports() -> None:
    actual = stack_lanes.installed_versions()
    assert {name: importlib.metadata.version(name) for name in actual} == actual
