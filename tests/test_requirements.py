"""The lanes say what they promise: exact pins, hashes, wheels only, no CUDA where there is no GPU."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cogumi.stack import lanes as package_lanes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "requirements"))
import package_file  # noqa: E402

STABLE = ROOT / "requirements-stable-precompiled.txt"
LANES = [STABLE, *sorted((ROOT / "requirements").glob("*.txt"))]
LANES = [lane for lane in LANES if lane.name != "cpu-overrides.txt"]
SOURCES = tomllib.loads((ROOT / "requirements" / "lanes.toml").read_text())["lane"]
WRITTEN = json.loads((ROOT / "cogumi" / "stack" / "lanes.json").read_text())


def pins(lane: Path) -> dict[str, list[tuple[Requirement, int]]]:
    """Requirement and number of hashes by package name (a name may be pinned once per Python)."""
    collected: dict[str, list[tuple[Requirement, int]]] = {}
    text = re.sub(r"(?m)^(#.*|--only-binary.*)$", "", lane.read_text()).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        requirement = Requirement(line.split(" --hash")[0])
        collected.setdefault(requirement.name, []).append((requirement, line.count("--hash=sha256:")))
    return collected


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_every_requirement_is_an_exact_pin_with_hashes_from_wheels_only(lane: Path) -> None:
    assert "--only-binary :all:" in lane.read_text().splitlines()
    for requirement, hashes in (pin for several in pins(lane).values() for pin in several):
        if requirement.url is None:
            assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        else:
            assert re.fullmatch(r"https://download\.pytorch\.org/whl/cu\d+/[^/]+\.whl", requirement.url), requirement
        assert hashes > 0, requirement


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_no_platform_is_skipped_silently(lane: Path) -> None:
    """A marker may leave out a package another platform needs; it must not leave out what every platform needs."""
    unmarked = [name for name, several in pins(lane).items() if any(r.marker is None for r, _ in several)]
    assert len(unmarked) >= 0.6 * len(pins(lane))


def wanted(source: str) -> dict[str, Requirement]:
    """What a source of a lane asks for, and the sources that it includes."""
    collected: dict[str, Requirement] = {}
    for line in (ROOT / "requirements" / source).read_text().splitlines():
        if line.startswith("-r "):
            collected |= wanted(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            requirement = Requirement(line)
            collected[requirement.name] = requirement
    return collected


@pytest.mark.parametrize("name", [name for name, lane in WRITTEN.items() if lane["state"] != "unresolved"])
def test_a_lane_is_what_its_source_asks_for(name: str) -> None:
    """`make lock` was run after a source was changed."""
    pinned = [WRITTEN[name]["pins"], *WRITTEN[name]["pins_apart"].values()]
    for package, asked in wanted(SOURCES[name]["source"]).items():
        versions = [pins[package] for pins in pinned if package in pins]
        assert versions, f"{package} is not pinned"
        assert all(asked.specifier.contains(version, prereleases=True) for version in versions), (asked, versions)


def test_the_lane_for_older_drivers_has_the_pins_of_the_stable_one() -> None:
    stable, older = WRITTEN["stable"]["pins"], WRITTEN["stable-cu128"]["pins"]
    apart = {name for name in stable.keys() | older.keys() if stable.get(name) != older.get(name)}
    assert {name for name in apart if not name.startswith(("nvidia-", "cuda-"))} == {"torch", "torchvision"}
    # torchao's extensions are for CUDA 13; the wheel without them is the only one admitted.
    [(torchao, hashes)] = pins(ROOT / "requirements" / "stable-cu128.txt")["torchao"]
    assert (str(torchao.specifier), hashes) == ("==0.17.0", 1)


@pytest.mark.parametrize("name", ["stable", "stable-cu128", "next"])
def test_a_gpu_lane_names_nvidias_packages_for_one_cuda_only(name: str) -> None:
    named = {m[1] for package in WRITTEN[name]["pins"] if (m := re.search(r"^nvidia-.*-cu(\d+)$", package))}
    assert named == {WRITTEN[name]["cuda"].partition(".")[0]}


def test_the_stable_file_begins_with_what_a_pip_user_types_and_names_one_package_of_another_host() -> None:
    text = STABLE.read_text()
    head = text[: text.index("--only-binary")]
    commands = [line.strip("# ") for line in head.splitlines() if line.strip("# ").startswith("pip ")]
    assert commands == [f"pip install -r {STABLE.name}", "pip install --no-deps -e ."]
    assert re.search(r"Python 3\.11 or 3\.12", head)
    urls = [requirement.url for several in pins(STABLE).values() for requirement, _ in several if requirement.url]
    assert urls == [requirement.url for requirement, _ in pins(STABLE)["xformers"]]


def test_the_stable_lane_without_a_gpu_has_its_pins_and_no_cuda() -> None:
    """The CPU lane has today's releases instead, and no CUDA either."""
    stable_cpu, stable = pins(ROOT / "requirements" / "stable-cpu.txt"), pins(STABLE)
    for named in stable_cpu, pins(ROOT / "requirements" / "cpu.txt"):
        assert not [name for name in named if name.startswith(("nvidia-", "cuda-", "triton"))]
    pinned_apart = {n for n in stable_cpu if n in stable and stable_cpu[n][0][0].specifier != stable[n][0][0].specifier}
    # setuptools: torch 2.11 asks for < 82.
    assert pinned_apart <= {"torch", "setuptools"}


def test_the_page_has_the_table_of_the_pinned_files() -> None:
    """Lanes that pin a package with a published advisory are named with it."""
    page = (ROOT / "docs" / "stack.md").read_text()
    assert package_file.lane_table(WRITTEN) in page
    assert "CVE-2025-3000** (torch before 2.13.0; lanes stable, stable-cu128, stable+vllm)" in page


def test_the_cpu_builds_of_torch_are_admitted_beside_the_indexs() -> None:
    lane = (ROOT / "requirements" / "cpu.txt").read_text()
    builds = re.findall(r"--hash=sha256:(\w+)", (ROOT / "requirements" / "cpu-torch.txt").read_text())
    assert len(builds) == 2
    assert all(f"--hash=sha256:{build}" in lane for build in builds)


def test_what_is_installed_here_is_a_lane() -> None:
    lane = package_lanes.installed_lane()
    assert lane is not None
    assert package_lanes.drift(lane) == []
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout


def test_an_installed_wheel_is_told_of_other_versions_and_not_of_parts_it_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its extras leave packages out, and it has no pinned files to install from."""
    installed = package_lanes.installed_versions()
    del installed["jupyterlab"]
    monkeypatch.setattr(package_lanes, "installed_versions", lambda: installed)
    assert package_lanes.check_lane().fix.endswith("-r requirements/cpu.txt")
    monkeypatch.setattr(package_lanes, "IS_CLONE", False)
    assert package_lanes.check_lane().state == "ok"
    pinned = installed["rich"]
    installed["rich"] = "1.0"
    assert package_lanes.check_lane().fix.endswith(f"install rich=={pinned}")
    del installed["rich"]
    assert package_lanes.check_lane().fix.endswith("-m pip install cogumi")


# ------------------------------------------------------------------------------------------- what the package knows


def test_the_package_knows_the_pinned_files_as_they_are() -> None:
    """`make lock` was run, or at least `python requirements/lock.py --package`, after any file here was changed."""
    assert package_file.package_file({}) == WRITTEN


def test_a_package_pinned_once_per_python_is_pinned_apart() -> None:
    text = "--only-binary :all:\n\na==1 \\\n    --hash=sha256:0\n"
    text += "b==2 ; python_version < '3.12'\nb==3 ; python_version >= '3.12'\n"
    text += "c==4 ; sys_platform == 'darwin'\nd==5 ; python_full_version < '3.11.5'\n"
    text += "e @ https://host/e-6.0%2Bcu128-cp311-cp311-linux_x86_64.whl ; python_version == '3.11' \\\n    --hash=sha256:0\n"
    assert package_file.shared_pins(text, ["linux"]) == {
        "pins": {"a": "1"},
        "pins_apart": {"linux 3.11": {"b": "2", "e": "6.0+cu128"}, "linux 3.12": {"b": "3"}},
    }


def test_a_lane_without_its_file_is_unresolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(package_file, "ROOT", tmp_path)
    assert {lane["state"] for lane in package_file.package_file({}).values()} == {"unresolved"}
