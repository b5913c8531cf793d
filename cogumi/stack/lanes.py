"""The lanes: which wheels belong together, for which driver, how far proven. Read from lanes.json; loads no torch.

lanes.json is generated (`make lock`) from requirements/lanes.toml, the pinned files and the GPU results.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cogumi.core.errors import UsageError

# (package, version the lane pins, version that is installed or None)
Drift = tuple[str, str, str | None]


@dataclass(frozen=True)
class Lane:
    """One set of wheels, as it is for this Python and this platform.

    file: the pinned one, relative to the repository. cuda: the release that its torch is built for, "13.0"; None: a CPU
    build. driver: the oldest NVIDIA driver that runs it, "580"; None: it needs no GPU. glibc: the oldest C library for
    which every pin has a wheel. state: unresolved, unfetched, resolver-proven, tested or known-good, as
    requirements/lanes.toml has it. known_good: the result that proved it on a card. pins: version by normalized name,
    without packages whose version depends on Python's patch release.
    """

    name: str
    purpose: str
    file: str
    cuda: str | None
    driver: str | None
    glibc: str
    state: str
    known_good: Mapping[str, str] | None
    tested: str | None
    unproven: str | None
    pins: Mapping[str, str]


@cache
def lanes() -> tuple[Lane, ...]:
    """Every lane, in the order in which the set-up prefers them."""
    read: dict[str, Any] = json.loads(Path(__file__).with_name("lanes.json").read_text())
    system = {"linux": "linux", "darwin": "macos"}.get(sys.platform, sys.platform)
    here = f"{system} {sys.version_info.major}.{sys.version_info.minor}"
    found = []
    for name, lane in read.items():
        pins = lane.pop("pins") | lane.pop("pins_apart").get(here, {})
        found.append(Lane(name=name, pins=pins, **lane))
    return tuple(found)


def lane(name: str) -> Lane:
    """The lane of that name; KeyError for another."""
    return {each.name: each for each in lanes()}[name]


def lane_for(driver: str | None) -> Lane:
    """What requirements/install.sh picks for an NVIDIA driver ("580.95.05"), or for none.

    Raises UsageError for a driver that is older than every lane's, and for one that is no version.
    """
    if driver is None:
        return lane("cpu")
    found = re.match(r"\d+", driver)
    if found is None:
        raise UsageError(
            f"NVIDIA driver {driver!r}: that is no version", fix="nvidia-smi should say one such as 580.95.05"
        )
    for_gpus = [(int(each.driver), each) for each in lanes() if each.driver is not None]
    fitting = [each for oldest, each in for_gpus if oldest <= int(found[0])]
    if not fitting:
        oldest, last = min(for_gpus, key=lambda pair: pair[0])
        raise UsageError(
            f"NVIDIA driver {driver} is too old: CUDA {last.cuda} needs {oldest} or newer", fix="choose another host"
        )
    return fitting[0]


def installed_lane() -> Lane | None:
    """The lane that this environment is meant to be: of those with its torch, built for its CUDA, the one closest to it.

    None without torch, and for a torch that is in no lane.
    """
    version, cuda = torch_build()
    if version is None:
        return None
    public, installed = version.partition("+")[0], installed_versions()
    candidates = [
        each for each in lanes() if each.pins.get("torch", "").partition("+")[0] == public and each.cuda == cuda
    ]
    return min(candidates, key=lambda each: len(drift(each, installed)), default=None)


def drift(lane: Lane, installed: Mapping[str, str] | None = None) -> list[Drift]:
    """Every package that is not installed at the version that the lane pins. Reads metadata only, in about 0.1 s."""
    installed = installed_versions() if installed is None else installed
    found = ((name, pinned, installed.get(name)) for name, pinned in lane.pins.items())
    return [each for each in found if not is_pinned(each[2], each[1], lane.cuda)]


def installed_versions() -> dict[str, str]:
    """Version by normalized name of every distribution on sys.path; of two with one name the first, as import does.

    What a broken installation left behind, without a METADATA file, is not installed.
    """
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name, version = read_metadata(distribution, "Name"), read_metadata(distribution, "Version")
        if name is not None and version is not None:
            found.setdefault(normalize_name(name), version)
    return found


def read_metadata(distribution: importlib.metadata.Distribution, key: str) -> str | None:
    """A line of its metadata, of which `distribution.metadata` would parse the whole README as well."""
    head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
    found = re.search(rf"^{key}: *(\S+)", head, re.MULTILINE)
    return found[1] if found else None


def normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def torch_build() -> tuple[str | None, str | None]:
    """(version, CUDA release) of the installed torch from its version.py, which is read and not run.

    The index's wheel of 2.11.0 calls itself 2.11.0 in its metadata and 2.11.0+cu130 there. (None, None) without torch;
    the release is None for a CPU build.
    """
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    source = Path(str(torch.locate_file("torch/version.py")))
    text = source.read_text() if source.exists() else ""
    cuda = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return torch.version, cuda[1] if cuda else None


def is_pinned(installed: str | None, pinned: str, cuda: str | None) -> bool:
    """Whether an installed version is the pinned one; a local version beyond the pin must be the lane's own build."""
    if installed is None or installed == pinned:
        return installed is not None
    public, _, local = installed.partition("+")
    return public == pinned and local == ("cpu" if cuda is None else "cu" + cuda.replace(".", ""))
