"""Environments that are broken for real: a virtual environment on top of this one, in which some packages are others."""

import os
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What would change what the doctor says, wherever the tests run.
REMOVED = (
    "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HF_HOME", "HF_HUB_CACHE", "TMPDIR", "JUPYTER_PATH",
    "JUPYTER_DATA_DIR",
)  # fmt: skip


@dataclass
class Environment:
    """A virtual environment; `packages` is its site-packages, in front of those of the environment the tests run in."""

    python: Path
    packages: Path
    home: Path
    variables: dict[str, str] = field(default_factory=dict)

    def put(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.packages / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    def install(self, name: str, version: str, files: Mapping[str, str]) -> None:
        """A package of these files, with the metadata that an installer writes."""
        record = "".join(f"{path},,{len(textwrap.dedent(text))}\n" for path, text in files.items())
        place = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self.put({**files, f"{place}/METADATA": metadata, f"{place}/RECORD": record})

    def run(self, *words: str, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in REMOVED}
        environment = {**kept, "HOME": str(self.home), **self.variables, **variables}
        work = self.home / "work"
        work.mkdir(exist_ok=True)
        command = [str(self.python), *words]
        return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=timeout)


def make_environment(place: Path, on_top: bool = True) -> Environment:
    """An environment in `place`; on_top: of the packages here, otherwise with nothing but cogumi."""
    below = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")] if on_top else []
    python, packages = make_venv(place / "env", str(ROOT), *dict.fromkeys(below))
    home = place / "home"
    home.mkdir()
    return Environment(python, packages, home)


def make_venv(place: Path, *below: str) -> tuple[Path, Path]:
    """A virtual environment on top of the packages in these directories: its Python, and the directory of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    packages = place / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    # A .pth is read after the directory that it is in.
    (packages / "below.pth").write_text("".join(f"{path}\n" for path in below))
    return place / "bin" / "python", packages


# ------------------------------------------------------------------------------------------------------- what is broken

# torchvision/_meta_registrations.py registers this where its extension was not loaded, which is so beside another torch.
# The message is torch's own.
WRONG_TORCHVISION = {
    "torchvision/__init__.py": """\
        import torch

        __version__ = "0.26.0"
        torch.library.register_fake("torchvision::nms")(lambda boxes, scores, threshold: None)
        """
}
# What an extension built against NumPy 1 does when it is imported: it asks NumPy for its table of functions under the name
# that NumPy 1 had for it. The message is NumPy's own.
OLD_NUMPY_EXTENSION = {
    "pandas/__init__.py": """\
        from numpy.core._multiarray_umath import _ARRAY_API
        """
}
HANGING = {
    "torch/__init__.py": """\
        import subprocess, time

        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1001"], start_new_session=True)
        time.sleep(1000)
        """
}
CRASHING = {
    "torchvision/__init__.py": """\
        import ctypes

        ctypes.string_at(0)
        """
}
# The linker's message, as torch's __init__ raises it where its CUDA libraries are not installed. Raised and not provoked: a
# machine may have that library.
NO_CUDA_LIBRARY = {
    "torch/__init__.py": """\
        raise ImportError("libcudart.so.13: cannot open shared object file: No such file or directory")
        """,
    "torch/version.py": """\
        __version__ = '2.11.0+cu130'
        cuda: Optional[str] = '13.0'
        """,
}
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)


def nvidia_smi(place: Path, said: str, status: int = 0) -> dict[str, str]:
    """An nvidia-smi that says this and ends with this status; the PATH on which it is found first."""
    place.mkdir()
    tool = place / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "{said}"\nexit {status}\n')
    tool.chmod(0o755)
    return {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}


def failing_nvidia_smi(place: Path) -> dict[str, str]:
    """What the real one says without a driver."""
    return nvidia_smi(place, NO_DRIVER, 9)
