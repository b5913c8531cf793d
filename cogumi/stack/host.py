"""Checks of the machine: NVIDIA's driver, disks, and environment variables that change what an import finds."""

import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from cogumi.core.disk_space import filesystem_of, hub_cache, nearest_existing
from cogumi.core.errors import Finding
from cogumi.core.formatting import format_bytes
from cogumi.stack.lanes import INSTALL, lanes

QUERY = ("--query-gpu=driver_version,memory.total,name", "--format=csv,noheader,nounits")
GPU_ROW = re.compile(r"\d[\d.]*,[^,]*,")
INFOROM_CORRUPTED = 14  # a status of nvidia-smi that is a warning: the GPU computes
OTHER_HOST = "rent another host: a driver cannot be repaired from inside a container"
GIVE_GPU = "start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility; else take another host"
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
CONTAINER_FILESYSTEMS = ("overlay", "fuse.fuse-overlayfs", "aufs")
MIN_CACHE_BYTES = 20_000_000_000  # an 8B model in bfloat16
MIN_SCRATCH_BYTES = 200_000_000  # compilers and temporary files
# Libraries in torch's wheels: the linker prefers another copy on LD_LIBRARY_PATH.
TORCH_LIBRARIES = {
    "libcudart", "libcublas", "libcublasLt", "libcudnn", "libnccl", "libnvJitLink", "libcusparse", "libcufft", "libnvrtc",
}  # fmt: skip
# Modules that another copy on the path could shadow.
MODULES = (
    "torch", "torchvision", "triton", "torchao", "numpy", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers",
    "huggingface_hub", "bitsandbytes", "safetensors", "pyarrow", "polars", "pandas", "unsloth", "xformers", "flash_attn", "vllm",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the driver


def check_driver(torch_cuda: str | None, timeout: float) -> Iterator[Finding]:
    """Run `nvidia-smi` for at most `timeout` seconds; check that the driver runs torch for `torch_cuda` ("13.0")."""
    tool, sign = shutil.which("nvidia-smi"), find_gpu_sign()
    if tool is None and not sign:
        yield Finding("driver", "note", "no NVIDIA GPU; everything runs on the CPU")
        return
    if tool is None:
        cause = f"there is an NVIDIA GPU ({sign}), but none of its driver's tools and libraries"
        yield Finding("driver", "fatal", "no nvidia-smi", cause, GIVE_GPU)
        return
    try:
        done = subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        cause = "the driver does not answer: a GPU that fell off the bus, or a broken installation"
        yield Finding("driver", "fatal", f"nvidia-smi: no answer in {timeout:g} s", cause, OTHER_HOST)
        return
    lines = (done.stdout + done.stderr).strip().splitlines()
    gpus = [[cell.strip() for cell in line.split(",", 2)] for line in lines if GPU_ROW.match(line)]
    if done.returncode not in (0, INFOROM_CORRUPTED) or not gpus:
        yield explain_driver_error(tool, lines[0] if lines else "")
        return
    yield check_driver_version(gpus[0][0], torch_cuda)
    for index, (_, memory, name) in enumerate(gpus):
        room = f", {int(memory) / 1024:.1f} GiB" if memory.isdigit() else ""
        yield Finding(f"GPU {index}", "ok", f"{name}{room}")
    for line in lines:
        if not GPU_ROW.match(line):
            yield Finding("nvidia-smi", "note", line)


def explain_driver_error(tool: str, error: str) -> Finding:
    """Explain the first line of a failed `nvidia-smi`, which is NVML's message."""
    if "No devices were found" in error:
        cause = "the driver is there, but this container was given no GPU"
        return Finding("GPU", "warning", "none", cause, "start it with --gpus all, or rent a box with a GPU")
    if "mismatch" in error:
        cause = (
            "the driver's libraries and its kernel module have different versions: it was upgraded without a restart"
        )
        return Finding("driver", "fatal", error, cause, "restart the host; on a rented box take another one")
    cause = f"{tool} is there, but the driver cannot be used: it belongs to another machine, or half of it is missing"
    return Finding("driver", "fatal", error or "nvidia-smi prints nothing", cause, GIVE_GPU)


def find_gpu_sign(system: Path = Path("/")) -> str:
    """Return a trace of an NVIDIA GPU in the kernel's files, "" for none. Needs none of the driver's libraries."""
    for place in ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvidia0"):
        if (system / place).exists():
            return f"/{place}"
    for device in (system / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):  # removed meanwhile, or not readable
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == "0x10de" and kind.startswith("0x03"):  # NVIDIA; a display controller
                return f"PCI device {device.name}"
    return ""


def check_driver_version(version: str, torch_cuda: str | None) -> Finding:
    """Check the driver's version. All CUDA releases of a major version run on any driver of that major version."""
    major = (torch_cuda or "").partition(".")[0]
    same_major = [lane for lane in lanes().values() if (lane.cuda or "").startswith(f"{major}.")]
    needed = [int(lane.driver) for lane in same_major if lane.driver]
    if torch_cuda is None or int(version.partition(".")[0]) >= min(needed, default=0):
        return Finding("driver", "ok", version)
    cause = f"torch here is built for CUDA {torch_cuda}, and this driver is too old for that"
    fix = f"another host (driver {min(needed)} or newer), or a new environment: rm -r .venv; {INSTALL}"
    return Finding("driver", "fatal", version, cause, fix)


def count_oom_kills(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; 0 where it does not count."""
    paths = dict(line.split(":", 2)[1:] for line in groups.read_text().splitlines()) if groups.exists() else {}
    roots = {"memory.events": (mount, ""), "memory.oom_control": (mount / "memory", "memory")}  # of cgroup 2 and 1
    for name, (root, kind) in roots.items():
        for file in (root / paths.get(kind, "").lstrip("/") / name, root / name):  # a container's group may be the root
            if file.exists():
                return int(dict(map(str.split, file.read_text().splitlines())).get("oom_kill", 0))
    return 0


# ------------------------------------------------------------------------------------------------------------- the disks


def check_disks(work: Path) -> Iterator[Finding]:
    """Check that temporary files, runs and models can be written, and that runs and models outlive the box."""
    tmpdir, free_space = os.environ.get("TMPDIR"), "free space (cogumi disk status), or"
    try:
        temporary = Path(tempfile.gettempdir())  # writes a file to find out
    except FileNotFoundError:
        cause = "no directory for temporary files can be written to: every disk is full, or read-only"
        yield Finding(
            "temporary files", "fatal", tmpdir or "/tmp", cause, f"{free_space} set TMPDIR to a disk with room"
        )
        return
    for title, path, minimum, fix in (
        ("temporary files", temporary, MIN_SCRATCH_BYTES, "set TMPDIR to a disk with room"),
        ("work directory", work, 0, "work on a disk that you may write to; cogumi.mirror copies checkpoints"),
        ("Hugging Face cache", hub_cache(), MIN_CACHE_BYTES, "set HF_HOME to a larger disk that persists"),
    ):
        disk = filesystem_of(path)
        figure = f"{path}: {format_bytes(disk.space.free)} free of {format_bytes(disk.space.total)}"
        causes = {
            f"TMPDIR={tmpdir} cannot be written to (it is full, read-only or no directory), so {path} is taken": (
                tmpdir and path == temporary and Path(tmpdir).absolute() != path.absolute()
            ),
            "runs are written here, and it cannot be written to": (
                path == work and (disk.space.read_only or not os.access(nearest_existing(path), os.W_OK))
            ),
            "no inodes are free: no file can be created": disk.space.inodes_free == 0,
            f"less than {format_bytes(minimum)} is free": disk.space.free < minimum,
            f"{disk.mount} is in memory: files here are lost when the box stops": (
                disk.kind in MEMORY_FILESYSTEMS and path != temporary
            ),
        }
        if cause := next((cause for cause, applies in causes.items() if applies), ""):
            yield Finding(title, "warning", figure, cause, f"{free_space} {fix}")
        elif path == work and disk.kind in CONTAINER_FILESYSTEMS:
            lost = "the container's own disk, which is lost with it, or when a pod stops"
            yield Finding(title, "note", f"{figure}; {lost}")
        else:
            yield Finding(title, "ok", figure)


# --------------------------------------------------------------------------------------------------------- the variables


def check_variables(environment: Mapping[str, str], work: Path) -> Iterator[Finding]:
    findings = [*check_paths(environment, work), *check_settings(environment)]
    yield from findings or [Finding("environment", "ok", "no variable is in the way")]


def check_paths(environment: Mapping[str, str], work: Path) -> Iterator[Finding]:
    """Look for copies of torch's libraries and of the stack's modules that are found before the installed ones."""
    for place in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        names = sorted({path.name.partition(".so")[0] for path in Path(place).glob("lib*.so*")} & TORCH_LIBRARIES)
        if names:
            cause = "the linker takes these instead of torch's own libraries: symbols are missing, or calls fail"
            yield Finding("LD_LIBRARY_PATH", "warning", f"{place}: {', '.join(names)}", cause, "unset LD_LIBRARY_PATH")
    cause = "these are imported instead of the installed ones"
    on_path = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    places = [("PYTHONPATH", place, cause, "unset PYTHONPATH") for place in on_path]
    if site.ENABLE_USER_SITE:
        cause = "packages of pip install --user are imported before those of the system"
        fix = "export PYTHONNOUSERSITE=1, or work in a virtual environment"
        places.append(("user site", site.getusersitepackages(), cause, fix))
    if work.resolve() not in {Path(place).resolve() for place in sys.path if place.endswith("-packages")}:
        cause = "a notebook and python -m import these instead of the packages of these names"
        places.append(("work directory", str(work), cause, "rename them, or work elsewhere"))
    for title, place, cause, fix in places:
        files = {name: (Path(place, f"{name}.py"), Path(place, name, "__init__.py")) for name in MODULES}
        if shadowing := [name for name, either in files.items() if any(map(Path.is_file, either))]:
            yield Finding(title, "warning", f"{place}: {', '.join(shadowing)}", cause, fix)


def check_settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    if version := environment.get("BNB_CUDA_VERSION"):
        cause = "bitsandbytes loads its library for that CUDA release, not for torch's"
        yield Finding("BNB_CUDA_VERSION", "warning", version, cause, "unset BNB_CUDA_VERSION")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        yield Finding("CUDA_VISIBLE_DEVICES", "warning", repr(visible), "every GPU is hidden from torch", "unset it")
