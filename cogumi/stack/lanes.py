"""The lanes: which wheels belong together, for which driver, how far proven; and what is installed, against them.

Loads no torch. lanes.json is generated (`make lock`) from requirements/lanes.toml, the pinned files and the GPU results.
"""

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cogumi.core.errors import Finding, State, UsageError
from cogumi.core.formatting import format_bytes, pip_command

INSTALL = "sh requirements/install.sh"
MOST = 6  # names in one line
# What cogumi imports itself, as pyproject.toml has it: without one of these nothing trains.
NEEDED = (
    "accelerate", "blake3", "datasets", "filelock", "fsspec", "httpx", "huggingface-hub", "jinja2", "numpy", "peft",
    "platformdirs", "polars", "psutil", "pyarrow", "pydantic", "pyyaml", "rich", "safetensors", "tokenizers", "torch",
    "tqdm", "transformers", "trl", "typer",
)  # fmt: skip
# Debian takes RECORD out of the packages that it makes of distributions.
OF_THE_SYSTEM = Path("/usr/lib/python3/dist-packages")
LIBRARY = re.compile(r"\.so(\.\d+)*$")

# (package, version the lane pins, version that is installed or None)
Drift = tuple[str, str, str | None]


@dataclass(frozen=True)
class Lane:
    """One set of wheels, as it is for this Python and this platform.

    file: the pinned one, relative to the repository. cuda: the release of its torch, "13.0"; None: a CPU build. driver:
    the oldest NVIDIA driver that runs it, "580"; None: it needs no GPU. state: as requirements/lanes.toml has it. pins:
    version by normalized name, without packages whose version depends on Python's patch release.
    """

    name: str
    file: str
    cuda: str | None
    driver: str | None
    state: str
    pins: Mapping[str, str]


@cache
def lanes() -> dict[str, Lane]:
    """Every lane by its name, in the order in which the set-up prefers them."""
    read: dict[str, Any] = json.loads(Path(__file__).with_name("lanes.json").read_text())
    system = {"linux": "linux", "darwin": "macos"}.get(sys.platform, sys.platform)
    here = f"{system} {sys.version_info.major}.{sys.version_info.minor}"
    found = {}
    for name, each in read.items():
        plain = {key: each[key] for key in ("file", "cuda", "driver", "state")}
        found[name] = Lane(name, pins=each["pins"] | each["pins_apart"].get(here, {}), **plain)
    return found


def lane_for(driver: str | None) -> Lane:
    """What requirements/install.sh picks for a driver ("580.95.05") or none. UsageError for one too old."""
    if driver is None:
        return lanes()["cpu"]
    found = re.match(r"\d+", driver)
    if found is None:
        fix = "nvidia-smi should say one such as 580.95.05"
        raise UsageError(f"NVIDIA driver {driver!r}: that is no version", fix=fix)
    for_gpus = [(int(each.driver), each) for each in lanes().values() if each.driver is not None]
    for oldest, each in for_gpus:
        if oldest <= int(found[0]):
            return each
    oldest, last = min(for_gpus, key=lambda pair: pair[0])
    too_old = f"NVIDIA driver {driver} is too old: CUDA {last.cuda} needs {oldest} or newer"
    raise UsageError(too_old, fix="choose another host")


def installed_lane() -> Lane | None:
    """Of the lanes with this torch, built for its CUDA, the one closest to what is installed; None for none."""
    version, cuda = torch_build()
    if version is None:
        return None
    public, installed = version.partition("+")[0], installed_versions()
    same_torch = [each for each in lanes().values() if each.pins.get("torch", "").partition("+")[0] == public]
    candidates = [each for each in same_torch if each.cuda == cuda]
    return min(candidates, key=lambda each: len(drift(each, installed)), default=None)


def drift(lane: Lane, installed: Mapping[str, str] | None = None) -> list[Drift]:
    """Every package that is not installed at the version that the lane pins. Reads metadata only, in about 0.1 s."""
    installed = installed_versions() if installed is None else installed
    found = ((name, pinned, installed.get(name)) for name, pinned in lane.pins.items())
    # A local version beyond the pin is the lane's own build.
    build = "cpu" if lane.cuda is None else "cu" + lane.cuda.replace(".", "")
    return [each for each in found if each[2] not in (each[1], f"{each[1]}+{build}")]


def installed_versions() -> dict[str, str]:
    """Version by normalized name of every distribution on sys.path that has a METADATA file; the first of two."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name, version = read_metadata(distribution, "Name"), read_metadata(distribution, "Version")
        if name is not None and version is not None:
            found.setdefault(normalize_name(name), version)
    return found


def read_metadata(distribution: importlib.metadata.Distribution, key: str) -> str | None:
    """A line of its metadata; `distribution.metadata` would parse the whole README as well."""
    head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
    found = re.search(rf"^{key}: *(\S+)", head, re.MULTILINE)
    return found[1] if found else None


def normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def torch_build() -> tuple[str | None, str | None]:
    """(version, CUDA release or None) of torch from its version.py, which is not run; (None, None) without it."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    source = Path(str(torch.locate_file("torch/version.py")))
    text = source.read_text() if source.exists() else ""
    cuda = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return torch.version, cuda[1] if cuda else None


# ---------------------------------------------------------------------------------------------- whether it is as it should be


def join_names(names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def check_files() -> Iterator[Finding]:
    """What an installation that was cut short leaves: no RECORD, files that are missing or shorter than they should be."""
    for each in importlib.metadata.distributions():
        place = Path(str(each._path))  # type: ignore[attr-defined]  # no public name tells where it lies
        name = normalize_name(place.name.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")[0])
        version, record = read_metadata(each, "Version"), each.read_text("RECORD")
        recorded = record is not None or place.suffix != ".dist-info" or place.parent == OF_THE_SYSTEM
        missing = [part for part, there in {"RECORD": recorded, "METADATA": version}.items() if not there]
        broken = []
        for line in (record or "").splitlines():
            path, size = line.partition(",")[0], line.rpartition(",")[2]
            if LIBRARY.search(path) and size.isdigit():
                library = Path(str(each.locate_file(path)))
                there = library.stat().st_size if library.exists() else 0
                if there != int(size):
                    broken.append(f"{library.name} ({format_bytes(there)} of {format_bytes(int(size))})")
        without = f"without {' and '.join(missing)}" if missing else ""
        if said := "; ".join(filter(None, (without, join_names(broken)))):
            cause = "its installation was cut short, or files of it were removed since"
            again = pip_command(f"install --force-reinstall --no-deps {name}=={version}")
            fix = f"remove {place}, then {INSTALL}" if missing else again
            state: State = "fatal" if name in NEEDED else "warning"
            yield Finding("installed", state, f"{name}: {said}", cause, fix)


def check_lane() -> Finding:
    """What is installed, against what the lane of this torch pins."""
    versions = installed_versions()
    if absent := [name for name in NEEDED if name not in versions]:
        return Finding("installed", "fatal", f"missing: {join_names(absent)}", "nothing trains without these", INSTALL)
    lane = installed_lane()
    if lane is None:
        figure = f"torch {versions['torch']}"
        cause = f"{figure} is in none of the lanes, so nothing here was tried together"
        return Finding("lane", "warning", figure, cause, INSTALL)
    others = drift(lane, versions)
    figure = f"{lane.name}, {lane.state}: {len(lane.pins) - len(others)} of {len(lane.pins)} packages as pinned"
    if not others:
        return Finding("lane", "ok", figure)
    named = [f"{name} {there or 'not installed'} (pinned {pinned})" for name, pinned, there in others]
    fix = pip_command(f"install --require-hashes --no-deps --only-binary :all: -r {lane.file}")
    return Finding("lane", "warning", figure, f"not what the lane pins: {join_names(named)}", fix)
