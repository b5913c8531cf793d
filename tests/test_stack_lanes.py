"""The package knows its lanes without the repository: which one fits a driver, which one is installed, what drifted."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from cogumi.stack import lanes as stack_lanes
from cogumi.stack.lanes import Lane, drift, installed_lane, lanes

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


def test_every_installed_version_is_the_one_importlib_reports() -> None:
    actual = stack_lanes.installed_versions()
    assert {name: importlib.metadata.version(name) for name in actual} == actual
