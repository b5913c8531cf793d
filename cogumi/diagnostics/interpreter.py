"""Which Python this is, and whether the notebook's kernels are the same one."""

import json
import os
import platform
import site
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cogumi.core.errors import Finding
from cogumi.core.formatting import pip

SUPPORTED = ((3, 11), (3, 12))  # pyproject.toml
GLIBC = (2, 28)  # of the wheels that every lane takes: manylinux_2_28
GLIBC_FLASH_ATTN = (2, 32)  # of flash-attn's own wheels
INSTALL = "sh requirements/install.sh"


def python() -> Iterator[Finding]:
    version, here = platform.python_version(), sys.prefix
    place = f"{version} in {here}" + ("" if sys.prefix != sys.base_prefix else ", which is no virtual environment")
    if sys.version_info[:2] not in SUPPORTED or sys.version_info.releaselevel != "final":
        cause = f"every lane is for a release of Python 3.11 or 3.12, and this is {version}"
        yield Finding("Python", "fatal", place, cause, f"{INSTALL}: it prints the one command that gets Python 3.12")
        return
    active = os.environ.get("VIRTUAL_ENV")
    if active and not same_directory(Path(active), Path(here)):
        cause = (
            f"the active environment is {active}, and this is another Python: what is installed there is not seen here"
        )
        yield Finding("Python", "warning", place, cause, f"run {Path(active) / 'bin' / 'python'} -m cogumi doctor")
    else:
        yield Finding("Python", "ok", place)


def machine() -> Iterator[Finding]:
    system, processor = platform.system(), platform.machine()
    if system == "Darwin" and processor == "arm64":
        yield Finding("C library", "ok", f"macOS {platform.mac_ver()[0]} on {processor}")
        return
    if (system, processor) != ("Linux", "x86_64"):
        cause = f"the lanes are for Linux on x86-64, and for macOS on Apple silicon; this is {system} on {processor}"
        yield Finding("C library", "warning", f"{system} {processor}", cause, "take such a machine")
        return
    yield glibc(*platform.libc_ver())


def glibc(name: str, version: str) -> Finding:
    if name != "glibc":
        cause = "wheels for Linux (manylinux) need glibc; this system has another C library, as Alpine does"
        return Finding(
            "C library", "fatal", name or "unknown", cause, "take an Ubuntu 22.04 or Debian 12 image, or newer"
        )
    found = tuple(map(int, version.split(".")[:2]))
    if found < GLIBC:
        cause = f"the wheels need glibc {spelled(GLIBC)} or newer"
        return Finding(
            "C library", "fatal", f"glibc {version}", cause, "take an Ubuntu 22.04 or Debian 12 image, or newer"
        )
    if found < GLIBC_FLASH_ATTN:
        wants = f"flash-attn's own wheels need {spelled(GLIBC_FLASH_ATTN)}; nothing else here does"
        return Finding("C library", "note", f"glibc {version}: {wants}")
    return Finding("C library", "ok", f"glibc {version}")


def spelled(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


# ------------------------------------------------------------------------------------------------------------- notebooks


@dataclass(frozen=True)
class Kernel:
    """A Python kernel that Jupyter would offer. python: what it starts; None: the Jupyter server's own Python."""

    name: str
    directory: Path
    python: str | None


def kernels() -> Iterator[Finding]:
    """Notebook kernels that are not this environment, in which cogumi and its wheels would not be found."""
    found, unreadable = kernelspecs()
    for path, why in unreadable:
        cause = "Jupyter leaves this kernel out, or cannot start it"
        yield Finding(
            "notebook kernel", "warning", f"{path}: {why}", cause, f"jupyter kernelspec remove {path.parent.name}"
        )
    here = os.path.dirname(os.path.abspath(sys.executable))
    others = [each for each in found if each.python and not same_directory(Path(each.python).parent, Path(here))]
    ours = [each.name for each in found if each not in others]
    add = f"{sys.executable} -m ipykernel install --user --name cogumi, and choose the kernel cogumi"
    for each in others:
        # The notebooks name the kernel cogumi; where there is none of ours, Jupyter preselects python3.
        wrong = each.name == "cogumi" or (each.name == "python3" and "cogumi" not in ours)
        yield Finding(
            "notebook kernel",
            "warning" if wrong else "note",
            f"{each.name} starts {each.python}",
            f"a notebook with this kernel does not run in this environment ({sys.prefix})",
            "" if ours and not wrong else add,
        )
    if in_a_kernel() and (away := package_elsewhere()):
        cause = "this kernel imports cogumi from another environment, and everything else from its own"
        yield Finding("notebook kernel", "warning", f"{sys.executable} with cogumi from {away}", cause, add)
    if ours:
        yield Finding("notebook kernel", "ok", f"{', '.join(ours)}: this environment")
    elif not others and not unreadable:
        yield Finding("notebook kernel", "note", f"none is installed here; {pip('install ipykernel')} makes one")


def kernelspecs() -> tuple[list[Kernel], list[tuple[Path, str]]]:
    """The Python kernels on Jupyter's paths, the first of a name as Jupyter takes it; and those that cannot be read."""
    found: dict[str, Kernel] = {}
    unreadable: list[tuple[Path, str]] = []
    for root in jupyter_paths():
        for path in sorted(root.glob("kernels/*/kernel.json")):
            name = path.parent.name.lower()
            if name in found:
                continue
            try:
                spec = json.loads(path.read_text(encoding="utf-8"))
                command = spec["argv"][0]
            except OSError as error:
                unreadable.append((path, error.strerror or str(error)))
                continue
            except (ValueError, KeyError, TypeError, IndexError):
                unreadable.append((path, "not a kernel's JSON with an argv"))
                continue
            if str(spec.get("language", "python")).lower() == "python":
                bare = command in ("python", "python3", f"python3.{sys.version_info.minor}")
                found[name] = Kernel(name, path.parent, None if bare else str(command))
    return list(found.values()), unreadable


def jupyter_paths() -> list[Path]:
    """Where Jupyter looks for kernels, as jupyter_core.paths.jupyter_path does."""
    home = Path.home()
    own = home / "Library/Jupyter" if sys.platform == "darwin" else xdg_data(home) / "jupyter"
    user = [Path(os.environ.get("JUPYTER_DATA_DIR") or own), Path(site.getuserbase()) / "share/jupyter"]
    environment = [Path(sys.prefix) / "share/jupyter"]
    told = [Path(part) for part in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if part]
    between = environment + user if sys.prefix != sys.base_prefix else user + environment
    return list(dict.fromkeys([*told, *between, Path("/usr/local/share/jupyter"), Path("/usr/share/jupyter")]))


def xdg_data(home: Path) -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")


def in_a_kernel() -> bool:
    return "ipykernel" in sys.modules


def package_elsewhere() -> str:
    """The environment that cogumi is imported from, where that is not this one; "" otherwise, also for a clone."""
    place = Path(__file__).resolve()
    packages = next((each for each in place.parents if each.name in ("site-packages", "dist-packages")), None)
    if packages is None or packages.is_relative_to(Path(sys.prefix).resolve()):
        return ""
    return str(packages)


def same_directory(one: Path, other: Path) -> bool:
    """Directories, not files: the python of a virtual environment is a link to the one it was made with."""
    return os.path.realpath(one) == os.path.realpath(other)
