"""Lanes: sets of wheels that belong together, with the driver they need; and the comparison with what is installed.

Loads no torch. lanes.json is generated (`make lock`) from requirements/lanes.toml, the pinned files and the GPU results.
"""

import importlib.metadata
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cogumi.core.errors import TRAINING_PACKAGES, Finding
from cogumi.core.formatting import install_command, join_names, pip_command

MAX_NAMES = 6  # in one line
REPOSITORY = Path(__file__).parents[2]
IS_CLONE = (REPOSITORY / "requirements/install.sh").is_file()  # else installed as a wheel
INSTALL = "sh requirements/install.sh" + ("" if IS_CLONE else " in a clone of cogumi")
# The dependencies in pyproject.toml: without one of these nothing works.
NEEDED = (
    "accelerate", "blake3", "filelock", "fsspec", "huggingface-hub", "jinja2", "numpy", "peft", "platformdirs",
    "psutil", "pydantic", "pyyaml", "rich", "safetensors", "tokenizers", "torch", "tqdm", "transformers", "typer",
)  # fmt: skip

# (package, version the lane pins, version that is installed or None)
Drift = tuple[str, str, str | None]


@dataclass(frozen=True)
class Lane:
    """One set of wheels for this Python and this platform.

    file: relative to the repository. cuda: of its torch, "13.0"; None for a CPU build. driver: the oldest that runs it, "580".
    pins: version by normalized name, without packages that depend on Python's patch release.
    """

    name: str
    file: str
    cuda: str | None
    driver: str | None
    state: str
    pins: Mapping[str, str]


@cache
def lanes() -> dict[str, Lane]:
    """Return every lane by name, in the order in which the installer prefers them."""
    entries: dict[str, Any] = json.loads(Path(__file__).with_name("lanes.json").read_text())
    system = {"linux": "linux", "darwin": "macos"}.get(sys.platform, sys.platform)
    here = f"{system} {sys.version_info.major}.{sys.version_info.minor}"
    by_name = {}
    for name, entry in entries.items():
        plain = {key: entry[key] for key in ("file", "cuda", "driver", "state")}
        by_name[name] = Lane(name, pins=entry["pins"] | entry["pins_apart"].get(here, {}), **plain)
    return by_name


def installed_lane() -> Lane | None:
    """Return the lane with this torch and its CUDA that is closest to what is installed; None for none."""
    version, cuda = torch_build()
    if version is None:
        return None
    public, installed = version.partition("+")[0], installed_versions()
    same_torch = [lane for lane in lanes().values() if lane.pins.get("torch", "").partition("+")[0] == public]
    candidates = [lane for lane in same_torch if lane.cuda == cuda]
    return min(candidates, key=lambda lane: len(drift(lane, installed)), default=None)


def drift(lane: Lane, installed: Mapping[str, str] | None = None) -> list[Drift]:
    """Return every package that is not installed at the lane's version. Reads metadata only, in about 0.1 s."""
    installed = installed_versions() if installed is None else installed
    versions = ((name, pinned, installed.get(name)) for name, pinned in lane.pins.items())
    # A local version beyond the pin is the lane's own build.
    build = "cpu" if lane.cuda is None else "cu" + lane.cuda.replace(".", "")
    return [
        (name, pinned, version) for name, pinned, version in versions if version not in (pinned, f"{pinned}+{build}")
    ]


def installed_versions() -> dict[str, str]:
    """Return version by normalized name of every distribution on sys.path with metadata; the first one of a name."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name, version = read_metadata(distribution, "Name"), read_metadata(distribution, "Version")
        if name is not None and version is not None:
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return versions


def read_metadata(distribution: importlib.metadata.Distribution, key: str) -> str | None:
    """Read one field; `distribution.metadata` would parse the whole README as well."""
    head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
    match = re.search(rf"^{key}: *(\S+)", head, re.MULTILINE)
    return match[1] if match else None


def torch_build() -> tuple[str | None, str | None]:
    """Return (version, CUDA release or None) of torch without importing it; (None, None) without torch."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    source = Path(str(torch.locate_file("torch/version.py")))
    text = source.read_text() if source.exists() else ""
    cuda = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return torch.version, cuda[1] if cuda else None


def check_lane() -> Finding:
    versions = installed_versions()
    if absent := [name for name in NEEDED if name not in versions]:
        figure = f"missing: {join_names(absent, MAX_NAMES)}"
        fix = INSTALL if IS_CLONE else pip_command("install cogumi")
        return Finding("installed", "fatal", figure, "nothing works without these", fix)
    if absent := [name for name in TRAINING_PACKAGES if name not in versions]:
        figure, fix = f"not installed: {join_names(absent, MAX_NAMES)}", install_command("train")
        if len(absent) == len(TRAINING_PACKAGES):
            return Finding("training", "note", f"{figure}; merges, checks and the disk monitor work", "", fix)
        return Finding("training", "warning", figure, "nothing trains without these", fix)
    lane = installed_lane()
    if lane is None:
        figure = f"torch {versions['torch']}"
        cause = f"{figure} is in none of the lanes: this combination is untested"
        return Finding("lane", "warning", figure, cause, INSTALL)
    others = drift(lane, versions)
    figure = f"{lane.name}, {lane.state}: {len(lane.pins) - len(others)} of {len(lane.pins)} packages as pinned"
    words = f"--require-hashes --no-deps --only-binary :all: -r {lane.file}"
    if not IS_CLONE:  # extras leave packages out
        others = [(name, pinned, version) for name, pinned, version in others if version is not None]
        words = " ".join(f"{name}=={pinned}" for name, pinned, _ in others)
    if not others:
        return Finding("lane", "ok", figure)
    named = [f"{name} {version or 'not installed'} (pinned {pinned})" for name, pinned, version in others]
    fix = pip_command(f"install {words}")
    return Finding("lane", "warning", figure, f"not what the lane pins: {join_names(named, MAX_NAMES)}", fix)
