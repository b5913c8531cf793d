"""What an installed cogumi knows of the lanes (cogumi/stack/lanes.json): lanes.toml and the pinned files in one."""

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12")
PLATFORMS = {
    "linux": {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"},
    "macos": {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64", "os_name": "posix"},
}
# "linux 3.11" and so on: what markers are evaluated in. Two patch releases each, as some markers ask for one.
ENVIRONMENTS = {
    f"{name} {python}": tuple(
        platform | {"python_version": python, "python_full_version": f"{python}.{patch}"} for patch in (0, 9)
    )
    for name, platform in PLATFORMS.items()
    for python in PYTHONS
}


def table() -> tuple[dict[str, Any], dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Lanes, additions and wheels of lanes.toml."""
    read = tomllib.loads((Path(__file__).parent / "lanes.toml").read_text())
    return read["lane"], read["addition"], read["wheels"]


def requirements_of(text: str) -> list[str]:
    """The requirements of a pinned file, each with its hashes and its line end."""
    return [each for each in re.split(r"(?m)^(?=\S)", text) if re.match("[a-zA-Z0-9]", each)]


def pins(text: str, environment: str) -> dict[str, str]:
    """Version by name, of what a pinned file installs in one of ENVIRONMENTS, whatever the patch release."""
    found = {}
    for line in requirements_of(text):
        requirement = Requirement(line.split(" \\\n")[0].strip())
        marker = requirement.marker
        if marker is None or all(marker.evaluate(each) for each in ENVIRONMENTS[environment]):
            found[canonicalize_name(requirement.name)] = version(requirement)
    return found


def version(requirement: Requirement) -> str:
    if requirement.url is None:
        return str(requirement.specifier).removeprefix("==")
    return str(parse_wheel_filename(unquote(requirement.url.rpartition("/")[2]))[1])


def package_file(files: dict[Path, str]) -> dict[str, Any]:
    """The content of lanes.json; `files` holds texts that are not on the disk yet."""
    described = {}
    for name, entry in table()[0].items():
        text = text_of(entry, files)
        described[name] = {key: entry.get(key) for key in ("file", "cuda", "driver")}
        described[name] |= shared_pins(text, entry["platforms"]) if text else {"pins": {}, "pins_apart": {}}
        described[name]["state"] = state(entry, text)
    return described


def text_of(entry: dict[str, Any], files: dict[Path, str]) -> str | None:
    path = ROOT / entry["file"]
    return files.get(path) or (path.read_text() if path.exists() else None)


def shared_pins(text: str, platforms: list[str]) -> dict[str, Any]:
    """`pins`: what the lane pins everywhere; `pins_apart`: what else in one environment, or at another version."""
    each = {name: pins(text, name) for name in ENVIRONMENTS if name.split()[0] in platforms}
    everywhere = set.intersection(*(set(found.items()) for found in each.values()))
    apart = {name: dict(sorted(set(found.items()) - everywhere)) for name, found in each.items()}
    return {"pins": dict(sorted(everywhere)), "pins_apart": apart}


def state(entry: dict[str, Any], text: str | None) -> str:
    if text is None:
        return "unresolved"
    return "tested" if "tested" in entry else "ran on a card" if "ran" in entry else "resolved"


def lane_table(described: dict[str, Any]) -> str:
    """The generated part of docs/stack.md: lanes with their main versions and states, and advisories."""
    packages = ("torch", "transformers", "trl", "unsloth", "vllm")
    titles = ["lane", "for", "CUDA, driver", *packages, "tests run on it", "ran on a card"]
    rows = [titles, ["---"] * len(titles)]
    for name, entry in table()[0].items():
        pins = described[name]["pins"]
        for each in reversed(described[name]["pins_apart"].values()):
            pins = each | pins
        card = f"{entry['cuda']}, >= {entry['driver']}" if "driver" in entry else "-"
        tests = entry.get("tested", entry.get("partly_tested", "no"))
        versions = [pins.get(package, "-").partition("+")[0] for package in packages]
        rows.append([f"[{name}](../{entry['file']})", entry["purpose"], card, *versions, tests, entry.get("ran", "no")])
    advisories = []
    for advisory in tomllib.loads((Path(__file__).parent / "lanes.toml").read_text())["advisory"]:
        package, fixed = advisory["package"], Version(advisory["fixed"])
        affected = [
            name
            for name, lane in described.items()
            if any(
                Version(pins[package]) < fixed
                for pins in (lane["pins"], *lane["pins_apart"].values())
                if package in pins
            )
        ]
        text = f"**{advisory['id']}** ({package} before {fixed}; lanes {', '.join(affected)}): {advisory['meaning']}"
        advisories += [text] if affected else []
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", *advisories])
