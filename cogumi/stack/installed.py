"""What is installed: against the lane's pins, whole or half, and whether its native libraries ask for one CUDA major."""

import importlib.metadata
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cogumi.core.disk_space import spoken
from cogumi.core.errors import Finding
from cogumi.core.formatting import pip

INSTALL = "sh requirements/install.sh"
MOST = 6  # names in one line
# What cogumi imports itself, as pyproject.toml has it: without one of these nothing trains.
NEEDED = (
    "accelerate", "beautifulsoup4", "datasets", "fsspec", "huggingface-hub", "ipywidgets", "matplotlib", "numpy", "peft",
    "platformdirs", "polars", "psutil", "pyarrow", "pydantic", "pyyaml", "rapidfuzz", "rich", "safetensors", "tokenizers",
    "torch", "transformers", "trl", "typer",
)  # fmt: skip
# Debian takes RECORD out of the packages that it makes of distributions.
OF_THE_SYSTEM = Path("/usr/lib/python3/dist-packages")
LIBRARY = re.compile(r"\.so(\.\d+)*$")


@dataclass
class Distribution:
    """One distribution on sys.path. place: its metadata directory; libraries: path, and size as its RECORD has it."""

    name: str
    version: str | None
    place: Path
    recorded: bool
    libraries: list[tuple[Path, int | None]] = field(default_factory=list)


def distributions() -> list[Distribution]:
    found = []
    for each in importlib.metadata.distributions():
        place = Path(str(each._path))  # type: ignore[attr-defined]  # no public name tells where it lies
        name = place.name.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")[0]
        head = (each.read_text("METADATA") or each.read_text("PKG-INFO") or "").partition("\n\n")[0]
        version = re.search(r"^Version: *(\S+)", head, re.MULTILINE)
        record = each.read_text("RECORD")
        one = Distribution(
            normal(name),
            version[1] if version else None,
            place,
            record is not None or place.suffix != ".dist-info" or place.parent == OF_THE_SYSTEM,
        )
        for line in (record or "").splitlines():
            path, _, size = line.partition(",")[0], *line.rpartition(",")[1:]
            if LIBRARY.search(path):
                one.libraries.append((Path(str(each.locate_file(path))), int(size) if size.isdigit() else None))
        found.append(one)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --------------------------------------------------------------------------------------------------------- mixed, or half


def mixed(found: list[Distribution], torch_cuda: str | None) -> Iterator[Finding]:
    """NVIDIA's libraries of two CUDA majors beside each other: whichever is loaded first serves both."""
    by_major: dict[str, list[str]] = {}
    for each in found:
        if each.name.startswith("nvidia-") and (major := re.search(r"-cu(1\d)$", each.name)):
            by_major.setdefault(major[1], []).append(each.name)
    if len(by_major) < 2:
        return
    own = (torch_cuda or "").split(".")[0]
    strangers = sorted(name for major, names in by_major.items() if major != own for name in names)
    figure = ", ".join(f"{len(names)} for CUDA {major}" for major, names in sorted(by_major.items()))
    cause = "libraries of two CUDA majors are installed, and some share a file name: symbols go missing"
    fix = pip(f"uninstall -y {' '.join(strangers)}") if own in by_major else f"make the environment anew: {INSTALL}"
    yield Finding("NVIDIA libraries", "warning", figure, cause, fix)


def broken(found: list[Distribution]) -> Iterator[Finding]:
    """What an installation that was cut short leaves: no RECORD, files that are missing or shorter than they should be."""
    for each in found:
        said = []
        if not each.recorded or each.version is None:
            missing = [
                name for name, there in (("RECORD", each.recorded), ("METADATA", each.version is not None)) if not there
            ]
            said.append(f"without {' and '.join(missing)}")
        gone, cut = [], []
        for path, size in each.libraries:
            try:
                actual = path.stat().st_size
            except OSError:
                gone.append(path.name)
                continue
            if size is not None and actual != size:
                cut.append(f"{path.name} ({spoken(actual)} of {spoken(size)})")
        said += [f"{shortened(gone)} missing"] * bool(gone) + [f"{shortened(cut)} not whole"] * bool(cut)
        if said:
            state = "fatal" if each.name in NEEDED else "warning"
            cause = "its installation was cut short, or files of it were removed since"
            yield Finding("installed", state, f"{each.name}: {'; '.join(said)}", cause, reinstall(each))  # type: ignore[arg-type]
    for place in sorted({each.place.parent for each in found}):
        left = sorted(path.name for path in place.glob("~*") if path.is_dir())
        if left:
            cause = "pip was ended while it replaced these packages"
            yield Finding("installed", "note", f"{shortened(left)} in {place}: {cause}; they may be removed")


def reinstall(each: Distribution) -> str:
    pinned = f"{each.name}=={each.version}" if each.version else each.name
    if each.version is None or not each.recorded:
        return f"remove {each.place}, then {INSTALL}"
    return pip(f"install --force-reinstall --no-deps {pinned}")


def doubled(found: list[Distribution]) -> Iterator[Finding]:
    """Two versions of one distribution in one directory: an upgrade that did not take the old one away."""
    seen: dict[tuple[str, Path], list[str]] = {}
    for each in found:
        seen.setdefault((each.name, each.place.parent), []).append(str(each.version))
    for (name, _), versions in seen.items():
        if len(set(versions)) > 1:
            cause = "two versions lie over each other; which files are whose is not known"
            fix = f"{pip(f'uninstall -y {name}')} (until it is gone), then {INSTALL}"
            yield Finding("installed", "warning", f"{name}: {' and '.join(sorted(set(versions)))}", cause, fix)


# ---------------------------------------------------------------------------------------------------------------- the lane


def against_lane(found: list[Distribution]) -> Iterator[Finding]:
    """What is installed, against what the lane of this torch pins."""
    there = {each.name for each in found if each.version is not None}
    absent = [name for name in NEEDED if name not in there]
    if absent:
        cause = "nothing trains without these"
        yield Finding("installed", "fatal", f"missing: {shortened(absent)}", cause, INSTALL)
        return
    from cogumi.stack.lanes import drift, installed_lane

    lane = installed_lane()
    if lane is None:
        version = next(each.version for each in found if each.name == "torch")
        cause = f"torch {version} is in none of the lanes, so nothing here was tried together"
        yield Finding("lane", "warning", f"torch {version}", cause, INSTALL)
        return
    others = drift(lane)
    missing = [name for name, _, installed in others if installed is None]
    differing = [f"{name} {installed} (pinned {pinned})" for name, pinned, installed in others if installed is not None]
    figure = f"{lane.name}, {lane.state}: {len(lane.pins) - len(others)} of {len(lane.pins)} packages as pinned"
    if not others:
        yield Finding("lane", "ok", figure)
        return
    said = [f"{shortened(differing)}"] * bool(differing) + [f"not installed: {shortened(missing)}"] * bool(missing)
    cause = f"not what the lane pins: {'; '.join(said)}"
    fix = pip(f"install --require-hashes --no-deps --only-binary :all: -r {lane.file}")
    yield Finding("lane", "warning", figure, cause, fix)


# --------------------------------------------------------------------------------------------------------------- CUDA majors


def cuda_majors(found: list[Distribution], torch_cuda: str | None) -> Iterator[Finding]:
    """Packages all of whose CUDA libraries are for another major than torch's; pip and metadata do not see that."""
    from cogumi.stack.elf import cuda_major, needed

    if torch_cuda is None:
        yield Finding("CUDA majors", "skipped", "torch is a CPU build")
        return
    own = int(torch_cuda.split(".")[0])
    looked, strangers = 0, False
    for each in found:
        if each.name.startswith("nvidia-"):
            continue
        asked: dict[int, str] = {}
        for path, _ in each.libraries:
            try:
                sonames = needed(path)
            except (OSError, ValueError):
                continue  # missing or cut short, which is said above; or no ELF file
            asked |= {major: soname for soname in sonames if (major := cuda_major(soname)) is not None}
        looked += bool(asked)
        # bitsandbytes has a library for each major, and takes the one that fits.
        if asked and own not in asked:
            strangers = True
            cause = f"it needs {', '.join(asked.values())}, and torch is built for CUDA {torch_cuda}"
            fix = f"{pip(f'uninstall -y {each.name}')}, or its wheel for CUDA {own} from PyTorch's index"
            yield Finding("CUDA majors", "warning", f"{each.name} {each.version}", cause, fix)
    if not strangers:
        yield Finding("CUDA majors", "ok", f"every package with CUDA code has it for CUDA {own}, like torch ({looked})")


def shortened(names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
