"""The machine as a run finds it: the provider, the disks and what stays on them, and the variables that change imports.

RunPod: the container's disk is cleared when a pod stops; a volume disk (/workspace) stays until the pod is terminated; a
network volume stays (docs.runpod.io/pods/storage). Vast: stopping keeps everything; destroying or recycling keeps volumes
alone (docs.vast.ai). Read there in November 2026; not tried on either.
"""

import os
import site
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cogumi.core.disk_space import Filesystem, filesystem_of, hub_cache, nearest_existing
from cogumi.core.errors import Finding
from cogumi.core.formatting import format_bytes

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
OWN_DISK = ("overlay", "fuse.fuse-overlayfs", "aufs")  # of a container
BASE = 20_000_000_000  # bytes: an 8B model in bfloat16, and its tokenizer
SCRATCH = 200_000_000  # bytes: what compilers and temporary files take
SHARED = 1 << 30  # bytes: Docker's default is 64 MiB, which loaders and NCCL overrun
# Libraries that torch's wheels bring themselves: another copy on LD_LIBRARY_PATH is taken instead.
BROUGHT = {
    "libcudart", "libcublas", "libcublasLt", "libcudnn", "libnccl", "libnvJitLink", "libcusparse", "libcufft", "libnvrtc",
}  # fmt: skip
# Modules of the stack whose place in the environment another copy could take.
MODULES = (
    "torch", "torchvision", "triton", "torchao", "numpy", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers",
    "huggingface_hub", "bitsandbytes", "safetensors", "pyarrow", "polars", "pandas", "unsloth", "xformers", "flash_attn", "vllm",
)  # fmt: skip


def find_host(environment: Mapping[str, str], system: Path = Path("/")) -> tuple[str, str]:
    """("RunPod", "Vast", "container" or "machine", by what it is known)."""
    if pod := environment.get("RUNPOD_POD_ID"):
        return "RunPod", f"RUNPOD_POD_ID={pod}"
    if label := environment.get("VAST_CONTAINERLABEL"):
        return "Vast", f"VAST_CONTAINERLABEL={label}"
    signs = {"etc/vast_boot.d": "Vast", ".dockerenv": "container", "run/.containerenv": "container"}
    found = ((kind, f"/{sign}") for sign, kind in signs.items() if (system / sign).exists())
    return next(found, ("machine", ""))


def host_environment(first_process: Path = Path("/proc/1/environ")) -> dict[str, str]:
    """This process's variables, over those that the container was started with: a login over SSH does not inherit them."""
    try:
        entries = first_process.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        entries = []  # no /proc, or another user's
    told = dict(entry.split("=", 1) for entry in entries if entry.startswith(("RUNPOD_", "VAST_")) and "=" in entry)
    return {**told, **os.environ}


def loss_of(disk: Filesystem, host: str) -> tuple[str, str]:
    """(when what is on a disk is lost: "stop", "end" of the box or "" where nothing says so, in words)."""
    if disk.kind in IN_MEMORY:
        return "stop", f"{disk.mount} is in memory"
    own = disk.mount == "/" or disk.kind in OWN_DISK
    if host == "RunPod" and own:
        return "stop", "the container disk"
    if host == "RunPod" and not disk.network:
        return "end", f"{disk.mount}, which is lost when the pod is terminated, unless it is a network volume"
    if host == "Vast" and own:
        return "end", "the container's own disk, which is lost when the box is destroyed or recycled"
    if host == "container" and own:
        return "end", "the container's own disk, which is lost when it is removed"
    return "", ""


def check_disks(environment: Mapping[str, str], work: Path) -> Iterator[Finding]:
    host, sign = find_host(environment)
    yield Finding("box", "ok", f"{host} ({sign})" if sign else "no sign of RunPod, Vast or a container")
    yield check_temporary_files()
    yield check_directory(work, host)
    yield check_hub_cache(work, host)
    yield from check_shared_memory()


def check_temporary_files() -> Finding:
    """Whether temporary files can be made: compilers, Arrow and tokenizers write some."""
    what, told = "temporary files", os.environ.get("TMPDIR")
    elsewhere = "or set TMPDIR to a disk with room"
    try:
        place = Path(tempfile.gettempdir())  # which writes a file to find out
    except FileNotFoundError:
        cause = "no directory for temporary files can be written to: every disk is full, or read-only"
        return Finding(what, "fatal", told or "/tmp", cause, f"free space (cogumi disk status), {elsewhere}")
    free = filesystem_of(place).space.free
    figure = f"{place}: {format_bytes(free)} free"
    if told and Path(told).absolute() != place.absolute():
        cause = f"TMPDIR={told} cannot be written to, so {place} is taken: {why_not_writable(Path(told))}"
        return Finding(what, "warning", figure, cause, f"free space in {told}, {elsewhere}")
    if free < SCRATCH:
        cause = f"less than {format_bytes(SCRATCH)} is left there for temporary files"
        return Finding(what, "warning", figure, cause, f"free space, {elsewhere}")
    return Finding(what, "ok", figure)


def why_not_writable(path: Path) -> str:
    if not path.is_dir():
        return "it is no directory"
    space = filesystem_of(path).space
    if space.read_only:
        return "it is read-only"
    return "its disk is full" if space.free < 1_000_000 or space.inodes_free == 0 else "it takes no file"


def check_directory(path: Path, host: str) -> Finding:
    """Whether the directory that holds runs can be written to, and what becomes of it."""
    what, disk = "work directory", filesystem_of(path)
    space = disk.space
    figure = f"{path}: {format_bytes(space.free)} free of {format_bytes(space.total)}"
    if space.read_only or not os.access(nearest_existing(path), os.W_OK):
        cause = "runs/ and checkpoints/ are written here, and it cannot be written to"
        return Finding(what, "warning", figure, cause, "work in a directory that you may write to")
    if space.inodes_free == 0:
        cause = "all its inodes are taken: no file can be made"
        return Finding(what, "warning", figure, cause, "remove many small files")
    when, where = loss_of(disk, host)
    if when == "stop":
        cause = f"{where}: what is written here is lost when the box stops"
        elsewhere = "/workspace" if host == "RunPod" else "a directory on a disk"
        return Finding(what, "warning", figure, cause, f"work in {elsewhere}; cogumi.mirror keeps a copy elsewhere")
    return Finding(what, "note", f"{figure}; {where}") if when else Finding(what, "ok", figure)


def check_hub_cache(work: Path, host: str) -> Finding:
    """The cache of models, which grows by tens of gigabytes, on a disk that has no room for it or does not stay."""
    what, path = "Hugging Face cache", hub_cache()
    disk = filesystem_of(path)
    when, where = loss_of(disk, host)
    figure = f"{path}: {format_bytes(disk.space.free)} free of {format_bytes(disk.space.total)}"
    others = [filesystem_of(place) for place in (work, Path("/workspace")) if place.is_dir()]
    roomiest = max(others, key=writable_bytes)
    elsewhere = roomiest.mount != disk.mount and writable_bytes(roomiest) > 2 * writable_bytes(disk)
    move = f"export HF_HOME={Path(roomiest.mount) / '.cache' / 'hf'}"
    if disk.space.free < BASE:
        roomier = f"; {roomiest.mount} has {format_bytes(writable_bytes(roomiest))}" if elsewhere else ""
        cause = f"less than {format_bytes(BASE)} is left, which is one 8B model{roomier}"
        instead = "free space (cogumi disk status), or take a box with a larger disk"
        return Finding(what, "warning", figure, cause, move if elsewhere else instead)
    if when == "stop":
        cause = f"{where}: every start of the box downloads the models again"
        return Finding(what, "warning", figure, cause, move if elsewhere else "set HF_HOME to a disk that stays")
    return Finding(what, "ok", figure)


def writable_bytes(disk: Filesystem) -> int:
    return 0 if disk.space.read_only else disk.space.free


def check_shared_memory() -> Iterator[Finding]:
    what, place = "shared memory", Path("/dev/shm")
    if not place.is_dir():
        return
    space = filesystem_of(place).space
    figure = f"/dev/shm: {format_bytes(space.free)} free of {format_bytes(space.total)}"
    if space.total >= SHARED:
        yield Finding(what, "ok", figure)
        return
    cause = "loaders with workers, NCCL and vLLM pass data through it, and end with a bus error when it is full"
    fix = "start the container with --shm-size=8g, or set dataloader_num_workers: 0"
    yield Finding(what, "warning", figure, cause, fix)


def check_variables(environment: Mapping[str, str], work: Path) -> Iterator[Finding]:
    """Environment variables, and files in the way, that change which code an import finds or what it does."""
    found = [*check_library_paths(environment), *check_shadowing(environment, work), *check_settings(environment)]
    yield from found or [Finding("environment", "ok", "no variable is in the way")]


def check_library_paths(environment: Mapping[str, str]) -> Iterator[Finding]:
    for place in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        names = sorted({path.name.partition(".so")[0] for path in Path(place).glob("lib*.so*")} & BROUGHT)
        if names:
            cause = "torch brings these libraries itself, and the linker takes these instead: symbols are missing, or calls fail"
            yield Finding("LD_LIBRARY_PATH", "warning", f"{place}: {', '.join(names)}", cause, "unset LD_LIBRARY_PATH")
    if preloaded := environment.get("LD_PRELOAD"):
        yield Finding("LD_PRELOAD", "note", f"{preloaded}, loaded into every process")


def check_shadowing(environment: Mapping[str, str], work: Path) -> Iterator[Finding]:
    """Copies of the stack's modules that are found before the environment's own."""
    for place in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
        if names := modules_in(Path(place)):
            cause = "these are imported instead of the ones that are installed here"
            yield Finding("PYTHONPATH", "warning", f"{place}: {names}", cause, "unset PYTHONPATH")
    own = Path(site.getusersitepackages())
    if site.ENABLE_USER_SITE and (names := modules_in(own)):
        cause = "packages of pip install --user are imported before those of the system, whatever is installed there"
        fix = "export PYTHONNOUSERSITE=1, or work in a virtual environment"
        yield Finding("user site", "warning", f"{own}: {names}", cause, fix)
    # A notebook and `python -m` look in the current directory first.
    installed = {Path(place).resolve() for place in sys.path if place.endswith("-packages")}
    if work.resolve() not in installed and (names := modules_in(work)):
        cause = (
            "a notebook and python -m import these from the current directory, instead of the packages of these names"
        )
        fix = "rename them, or work in another directory"
        yield Finding("work directory", "warning", f"{work}: {names}", cause, fix)
    if home := environment.get("PYTHONHOME"):
        cause = "Python takes its standard library from there, which must be of the very same version"
        yield Finding("PYTHONHOME", "warning", home, cause, "unset PYTHONHOME")


def modules_in(place: Path) -> str:
    """Those of MODULES that an import would find in a directory: NAME.py, or NAME/__init__.py."""
    found = (name for name in MODULES if (place / f"{name}.py").is_file() or (place / name / "__init__.py").is_file())
    return ", ".join(found)


def check_settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    if version := environment.get("BNB_CUDA_VERSION"):
        cause = "bitsandbytes loads its library for that CUDA release, and not the one that fits torch"
        yield Finding("BNB_CUDA_VERSION", "warning", version, cause, "unset BNB_CUDA_VERSION")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        cause = "every GPU is hidden from torch"
        yield Finding("CUDA_VISIBLE_DEVICES", "warning", repr(visible), cause, "unset CUDA_VISIBLE_DEVICES")
    elif visible:
        yield Finding("CUDA_VISIBLE_DEVICES", "note", f"{visible}: torch sees these GPUs alone")
    if environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        slow = "1: every kernel is waited for, for debugging; training is slower"
        yield Finding("CUDA_LAUNCH_BLOCKING", "note", slow)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environment.get(name, "").lower() in ("1", "on", "yes", "true"):
            only = "nothing is downloaded; only what is in the cache can be used"
            yield Finding(name, "note", f"{environment[name]}: {only}")
            return
