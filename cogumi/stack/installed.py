"""What is installed: against the lane's pins, whole or half, and whether its native libraries ask for one CUDA major."""

import importlib.metadata
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from mmap import ACCESS_READ, mmap
from pathlib import Path

from cogumi.core.errors import Finding, State
from cogumi.core.formatting import format_bytes, pip_command
from cogumi.stack.lanes import drift, installed_lane, normalize_name, read_metadata

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
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB = 0, 1, 5
LONGEST_NAME = 4096
# Libraries whose soname carries CUDA's own major version. cufft, curand, cusolver and cusparse count on their own.
CUDA_LIBRARY = re.compile(
    r"lib(?:cudart|cublas|cublasLt|nvrtc|nvJitLink|cupti|nvblas|nvjpeg)(?:[.-][0-9a-f]{8})?\.so\.(\d+)"
)


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
        record = each.read_text("RECORD")
        recorded = record is not None or place.suffix != ".dist-info" or place.parent == OF_THE_SYSTEM
        one = Distribution(normalize_name(name), read_metadata(each, "Version"), place, recorded)
        for line in (record or "").splitlines():
            path, size = line.partition(",")[0], line.rpartition(",")[2]
            if LIBRARY.search(path):
                one.libraries.append((Path(str(each.locate_file(path))), int(size) if size.isdigit() else None))
        found.append(one)
    return found


def join_names(names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def check_cuda_mix(found: list[Distribution], torch_cuda: str | None) -> Iterator[Finding]:
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
    remove = pip_command(f"uninstall -y {' '.join(strangers)}")
    fix = remove if own in by_major else f"make the environment anew: {INSTALL}"
    yield Finding("NVIDIA libraries", "warning", figure, cause, fix)


def check_files(found: list[Distribution]) -> Iterator[Finding]:
    """What an installation that was cut short leaves: no RECORD, files that are missing or shorter than they should be."""
    for each in found:
        parts = {"RECORD": each.recorded, "METADATA": each.version is not None}
        missing = [name for name, there in parts.items() if not there]
        said = [f"without {' and '.join(missing)}"] if missing else []
        sizes = [(path, size, path.stat().st_size if path.exists() else None) for path, size in each.libraries]
        if gone := [path.name for path, _, there in sizes if there is None]:
            said.append(f"{join_names(gone)} missing")
        wrong = [(path, size, there) for path, size, there in sizes if None not in (size, there) and size != there]
        if wrong:
            cut = [
                f"{path.name} ({format_bytes(there or 0)} of {format_bytes(size or 0)})" for path, size, there in wrong
            ]
            said.append(f"{join_names(cut)} not whole")
        if said:
            cause = "its installation was cut short, or files of it were removed since"
            again = pip_command(f"install --force-reinstall --no-deps {each.name}=={each.version}")
            fix = f"remove {each.place}, then {INSTALL}" if missing else again
            state: State = "fatal" if each.name in NEEDED else "warning"
            yield Finding("installed", state, f"{each.name}: {'; '.join(said)}", cause, fix)
    for place in sorted({each.place.parent for each in found}):
        if left := sorted(path.name for path in place.glob("~*") if path.is_dir()):
            cause = "pip was ended while it replaced these packages"
            yield Finding("installed", "note", f"{join_names(left)} in {place}: {cause}; they may be removed")


def check_duplicates(found: list[Distribution]) -> Iterator[Finding]:
    """Two versions of one distribution in one directory: an upgrade that did not take the old one away."""
    seen: dict[tuple[str, Path], set[str]] = {}
    for each in found:
        seen.setdefault((each.name, each.place.parent), set()).add(str(each.version))
    for (name, _), versions in seen.items():
        if len(versions) > 1:
            cause = "two versions lie over each other; which files are whose is not known"
            fix = f"{pip_command(f'uninstall -y {name}')} (until it is gone), then {INSTALL}"
            yield Finding("installed", "warning", f"{name}: {' and '.join(sorted(versions))}", cause, fix)


def check_lane(found: list[Distribution]) -> Iterator[Finding]:
    """What is installed, against what the lane of this torch pins."""
    versions = {each.name: each.version for each in found if each.version is not None}
    if absent := [name for name in NEEDED if name not in versions]:
        yield Finding("installed", "fatal", f"missing: {join_names(absent)}", "nothing trains without these", INSTALL)
        return
    lane = installed_lane()
    if lane is None:
        figure = f"torch {versions['torch']}"
        cause = f"{figure} is in none of the lanes, so nothing here was tried together"
        yield Finding("lane", "warning", figure, cause, INSTALL)
        return
    others = drift(lane)
    figure = f"{lane.name}, {lane.state}: {len(lane.pins) - len(others)} of {len(lane.pins)} packages as pinned"
    if not others:
        yield Finding("lane", "ok", figure)
        return
    named = [f"{name} {there or 'not installed'} (pinned {pinned})" for name, pinned, there in others]
    fix = pip_command(f"install --require-hashes --no-deps --only-binary :all: -r {lane.file}")
    yield Finding("lane", "warning", figure, f"not what the lane pins: {join_names(named)}", fix)


def check_cuda_majors(found: list[Distribution], torch_cuda: str | None) -> Iterator[Finding]:
    """Packages all of whose CUDA libraries are for another major than torch's; pip and metadata do not see that."""
    if torch_cuda is None:
        yield Finding("CUDA majors", "skipped", "torch is a CPU build")
        return
    own, examined, strangers = int(torch_cuda.split(".")[0]), 0, False
    for each in found:
        asked: dict[int, str] = {}
        for path, _ in each.libraries if not each.name.startswith("nvidia-") else ():
            try:
                sonames = needed_libraries(path)
            except (OSError, ValueError):
                continue  # missing or cut short, which is said above; or no ELF file
            asked |= {major: soname for soname in sonames if (major := cuda_major(soname)) is not None}
        examined += bool(asked)
        # bitsandbytes has a library for each major, and takes the one that fits.
        if asked and own not in asked:
            strangers = True
            cause = f"it needs {', '.join(asked.values())}, and torch is built for CUDA {torch_cuda}"
            fix = f"{pip_command(f'uninstall -y {each.name}')}, or its wheel for CUDA {own} from PyTorch's index"
            yield Finding("CUDA majors", "warning", f"{each.name} {each.version}", cause, fix)
    if not strangers:
        figure = f"every package with CUDA code has it for CUDA {own}, like torch ({examined})"
        yield Finding("CUDA majors", "ok", figure)


def cuda_major(soname: str) -> int | None:
    """13 for libcudart.so.13, 11 for libcublas.so.11.0; None for a library that says nothing of CUDA's version."""
    found = CUDA_LIBRARY.match(soname)
    return int(found[1]) if found else None


def needed_libraries(source: bytes | Path) -> tuple[str, ...]:
    """The DT_NEEDED sonames of an ELF file, in its order; of a file, only the few pages that say so are read.

    Read from the file itself: nothing is loaded or run. `pip check` and package metadata do not see that one extension
    wants libcudart.so.12 and the next libcudart.so.13. Layout: the System V ABI, "Object Files" and "Dynamic Linking".
    Raises ValueError for what is not a whole 64-bit little-endian ELF file, saying what is wrong; OSError as open() does.
    """
    if isinstance(source, bytes):
        return read_needed(source)
    with source.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        try:
            return read_needed(mapped)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


def read_needed(data: bytes | mmap) -> tuple[str, ...]:
    def part(offset: int, size: int) -> bytes:
        if offset + size > len(data):
            raise ValueError(f"truncated ELF file: it ends at byte {len(data)}, and byte {offset + size} is needed")
        return data[offset : offset + size]

    header = part(0, 64)
    if header[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    if header[4:6] != b"\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (start,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
    if count and size != 56:
        raise ValueError(f"not an ELF file: program headers of {size} bytes instead of 56")
    # (type, flags, offset in the file, address in memory, physical address, size in the file, size in memory, alignment)
    segments = list(struct.iter_unpack("<IIQQQQQQ", part(start, 56 * count)))
    dynamic = next((each for each in segments if each[0] == PT_DYNAMIC), None)
    if dynamic is None:
        return ()  # linked statically
    section = part(dynamic[2], dynamic[5])
    pairs = struct.iter_unpack("<QQ", section[: len(section) // 16 * 16])
    entries = list(takewhile(lambda pair: pair[0] != DT_NULL, pairs))
    table = next((value for tag, value in entries if tag == DT_STRTAB), -1)
    names = []
    for address in (table + value for tag, value in entries if tag == DT_NEEDED):
        inside = (each for each in segments if each[0] == PT_LOAD and each[3] <= address < each[3] + each[5])
        segment = next(inside, None)
        if table < 0 or segment is None:
            raise ValueError("not a loadable ELF file: its string table is in no loadable segment")
        begin = segment[2] + address - segment[3]
        end = data.find(b"\0", begin, begin + LONGEST_NAME)
        if end < 0:
            raise ValueError("not a loadable ELF file: a name in its string table does not end")
        names.append(data[begin:end].decode("utf-8", "replace"))
    return tuple(names)
