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
import proof  # noqa: E402
from elf_reader import cuda_major  # noqa: E402

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


def test_the_cpu_lane_shares_the_pins_and_has_no_cuda() -> None:
    cpu, stable = pins(ROOT / "requirements" / "cpu.txt"), pins(STABLE)
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
    lane = package_lanes.installed_lane()
    assert lane is not None
    assert package_lanes.drift(lane) == []
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout


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
    assert {lane["state"] for lane in package_file.package_file({}, tmp_path).values()} == {"unresolved"}


# --------------------------------------------------------------------------------------------- proof by a run on a card


def gpu_result(**changes: object) -> dict[str, object]:
    """What `python -m benchmarks gpu` would save where the stable lane works: made up, and never committed."""
    stable = WRITTEN["stable"]["pins"]
    probes = [{"benchmark": "gpu_probes", "case": case, "value": 1.0, "ok": None, "note": ""} for case in proof.PROBES]
    probes[0]["note"] = "built for CUDA 13.0, cuDNN 91900"
    names = ("torch", "torchvision", "triton", "transformers", "trl", "peft", "bitsandbytes", "unsloth", "xformers")
    made_up: dict[str, object] = {
        "name": "gpu", "date": "2026-12-01T10:00:00+00:00", "machine": {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.95.05"},
        "versions": {name: stable[name] for name in names} | {"flash-attn": None}, "rows": probes,
    }  # fmt: skip
    return made_up | changes


def states(tmp_path: Path, result: dict[str, object]) -> dict[str, str]:
    (tmp_path / "2026-12-01-gpu-nvidia-h100.json").write_text(json.dumps(result))
    return {name: lane["state"] for name, lane in package_file.package_file({}, tmp_path).items()}


def test_a_result_on_a_card_makes_its_lane_known_good_and_no_other(tmp_path: Path) -> None:
    before = {name: lane["state"] for name, lane in package_file.package_file({}, tmp_path).items()}
    assert states(tmp_path, gpu_result()) == before | {"stable": "known-good"}
    (tmp_path / "2026-11-30-gpu-older.json").write_text(json.dumps(gpu_result(date="2026-11-30T10:00:00+00:00")))
    assert package_file.package_file({}, tmp_path)["stable"]["known_good"] == {
        "date": "2026-12-01T10:00:00+00:00",
        "card": "NVIDIA H100 80GB HBM3",
        "driver": "580.95.05",
        "result": "2026-12-01-gpu-nvidia-h100.json",
    }


def probe_rows(**changes: dict[str, object]) -> list[dict[str, object]]:
    rows = gpu_result()["rows"]
    assert isinstance(rows, list)
    return [row | changes.get(row["case"], {}) for row in rows]


UNPROVEN = {
    "quick": {"name": "gpu (quick)"},
    "no card": {"machine": {"gpu": None, "driver": None}},
    "another torch": {"versions": {"torch": "2.13.0", "trl": "1.15.0", "transformers": "5.17.0"}},
    "another trl": {"versions": {"torch": "2.11.0", "trl": "1.14.0", "transformers": "5.17.0"}},
    "a half environment": {"versions": {"torch": "2.11.0"}},
    "a probe that failed": {"rows": probe_rows(triton={"value": None, "ok": False})},
    "a package that is missing": {"rows": probe_rows(xformers={"value": None})},
    "torch for another CUDA": {"rows": probe_rows(torch={"note": "built for CUDA 12.8, cuDNN 91900"})},
    "no probes": {"rows": []},
}


@pytest.mark.parametrize("case", UNPROVEN)
def test_what_does_not_prove_the_lane(case: str, tmp_path: Path) -> None:
    assert states(tmp_path, gpu_result(**UNPROVEN[case]))["stable"] == "resolver-proven"


# ------------------------------------------------------------------------------------------- one CUDA per lane (ELF)

ELF = json.loads((ROOT / "requirements" / "elf.json").read_text())


def cuda_majors(lane: str) -> dict[str, set[int]]:
    """CUDA majors that the lane's wheels need, by wheel. A library with a CUDA in its name is one of several, of which the
    package loads the one for torch's: those of other CUDAs do not count."""
    collected = {}
    for wheel in ELF["lanes"][lane]["wheels"]:
        needs = ELF["wheels"][wheel].get("needs", {})
        names = [name for library in needs if not re.search(r"cuda\d\d|cu1\d", library) for name in needs[library]]
        collected[wheel] = {major for name in names if (major := cuda_major(name))}
    return collected


LINKED = [name for name, lane in WRITTEN.items() if lane["cuda"] and lane["state"] != "unresolved"]


@pytest.mark.parametrize("name", LINKED)
def test_a_lane_is_linked_to_one_cuda(name: str) -> None:
    """As read from the wheels on the date in elf.json; `make elf` reads them again."""
    assert ELF["lanes"][name]["pins"] == WRITTEN[name]["pins"] | WRITTEN[name]["pins_apart"]["linux 3.12"], "make elf"
    majors = cuda_majors(name)
    assert set().union(*majors.values()) == {int(WRITTEN[name]["cuda"].partition(".")[0])}, majors


def test_which_wheels_nobody_could_read_is_known() -> None:
    unfetched = {wheel for wheel, read in ELF["wheels"].items() if "unfetched" in read}
    assert {wheel.split("/whl/")[1].split("-")[0] for wheel in unfetched} <= {
        "cu130/xformers",
        "cu128/torch",
        "cu128/torchvision",
    }


@pytest.mark.parametrize("name", ["stable", "next"])
def test_the_indexs_xformers_would_not_fit(name: str) -> None:
    """Why these lanes take PyTorch's build: once the index's is for their CUDA too, it can go back."""
    [(wheel, majors)] = [pair for pair in cuda_majors("stable-cu128").items() if pair[0].startswith("xformers-")]
    assert wheel.startswith(f"xformers-{WRITTEN[name]['pins']['xformers']}-")
    assert majors == {12}
