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
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "HF_HOME",
    "HF_HUB_CACHE",
    "TMPDIR",
    "JUPYTER_PATH",
    "JUPYTER_DATA_DIR",
)


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
        return subprocess.run(
            [str(self.python), *words],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def make_environment(place: Path, on_top: bool = True) -> Environment:
    """An environment in `place`; on_top: of the packages here, otherwise with nothing but cogumi."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "env")], check=True)
    python = place / "env" / "bin" / "python"
    packages = place / "env" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    below = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")] if on_top else []
    # A .pth is read after the directory that it is in.
    (packages / "below.pth").write_text("\n".join([str(ROOT), *dict.fromkeys(below)]) + "\n")
    home = place / "home"
    home.mkdir()
    return Environment(python, packages, home)


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
# A management library of a driver: nvmlInit_v2 answers ANSWER, the driver is VERSION and runs CUDA up to CUDA.
NVML = """
#include <string.h>
int nvmlInit_v2(void) { return ANSWER; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "Driver Not Loaded"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strncpy(text, VERSION, length); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)1; return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned length) { strncpy(text, "NVIDIA H100 80GB HBM3", length); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) { memory[0] = 85520809984ULL; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
"""


def fake_nvml(place: Path, answer: int = 0, version: str = "580.95.05", cuda: int = 13000) -> dict[str, str]:
    """A libnvidia-ml.so.1 in `place`, compiled; the variable by which it is found."""
    place.mkdir()
    (place / "nvml.c").write_text(NVML)
    meaning = [f"-DANSWER={answer}", f'-DVERSION="{version}"', f"-DCUDA={cuda}"]
    library = place / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", *meaning, str(place / "nvml.c"), "-o", str(library)], check=True)
    return {"LD_LIBRARY_PATH": str(place)}


def failing_nvidia_smi(place: Path) -> dict[str, str]:
    """An nvidia-smi that says what the real one says without a driver; the PATH on which it is found first."""
    place.mkdir()
    tool = place / "nvidia-smi"
    said = (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running."
    )
    tool.write_text(f'#!/bin/sh\necho "{said}"\nexit 9\n')
    tool.chmod(0o755)
    return {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}
