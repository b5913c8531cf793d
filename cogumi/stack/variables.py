"""Environment variables, and files in the way, that change which code an import finds or what it does."""

import os
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from cogumi.core.errors import Finding

# Libraries that torch's wheels bring themselves: another copy on LD_LIBRARY_PATH is taken instead.
BROUGHT = (
    "libcudart",
    "libcublas",
    "libcublasLt",
    "libcudnn",
    "libnccl",
    "libnvJitLink",
    "libcusparse",
    "libcufft",
    "libnvrtc",
)
# Modules whose place in the environment somebody else's copy could take.
MODULES = (
    "torch", "torchvision", "triton", "torchao", "numpy", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers",
    "huggingface_hub", "bitsandbytes", "safetensors", "pyarrow", "polars", "pandas", "unsloth", "xformers", "flash_attn", "vllm",
)  # fmt: skip
YES = ("1", "on", "yes", "true")


def findings(environment: Mapping[str, str], work: Path) -> Iterator[Finding]:
    said = [
        *libraries(environment),
        *shadows(environment, work),
        *of_bitsandbytes(environment),
        *of_cuda(environment),
        *of_the_hub(environment),
    ]
    yield from said or [Finding("environment", "ok", "no variable is in the way")]


def libraries(environment: Mapping[str, str]) -> Iterator[Finding]:
    for place in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if not place:
            continue
        names = sorted({path.name.partition(".so")[0] for path in Path(place).glob("lib*.so*")} & set(BROUGHT))
        if names:
            cause = "torch brings these libraries itself, and the linker takes these instead: symbols are missing, or calls fail"
            yield Finding("LD_LIBRARY_PATH", "warning", f"{place}: {', '.join(names)}", cause, "unset LD_LIBRARY_PATH")
    if preloaded := environment.get("LD_PRELOAD"):
        yield Finding("LD_PRELOAD", "note", f"{preloaded}, loaded into every process")


def shadows(environment: Mapping[str, str], work: Path) -> Iterator[Finding]:
    """Copies of the stack's modules that are found before the environment's own."""
    for place in environment.get("PYTHONPATH", "").split(os.pathsep):
        names = modules_in(Path(place)) if place else []
        if names:
            cause = "these are imported instead of the ones that are installed here"
            yield Finding("PYTHONPATH", "warning", f"{place}: {', '.join(names)}", cause, "unset PYTHONPATH")
    own = Path(site.getusersitepackages())
    if site.ENABLE_USER_SITE and (names := modules_in(own)):
        cause = "packages of pip install --user are imported before those of the system, whatever is installed there"
        yield Finding(
            "user site",
            "warning",
            f"{own}: {', '.join(names)}",
            cause,
            "export PYTHONNOUSERSITE=1, or work in a virtual environment",
        )
    # A notebook and `python -m` look in the current directory first.
    if work.resolve() not in {Path(place).resolve() for place in sys.path if place.endswith("-packages")} and (
        names := modules_in(work)
    ):
        cause = (
            "a notebook and python -m import these from the current directory, instead of the packages of these names"
        )
        yield Finding(
            "work directory",
            "warning",
            f"{work}: {', '.join(names)}",
            cause,
            "rename them, or work in another directory",
        )
    if home := environment.get("PYTHONHOME"):
        cause = "Python takes its standard library from there, which must be of the very same version"
        yield Finding("PYTHONHOME", "warning", home, cause, "unset PYTHONHOME")


def modules_in(place: Path) -> list[str]:
    """Those of MODULES that an import would find in a directory: NAME.py, or NAME/__init__.py."""
    return [name for name in MODULES if (place / f"{name}.py").is_file() or (place / name / "__init__.py").is_file()]


def of_bitsandbytes(environment: Mapping[str, str]) -> Iterator[Finding]:
    if version := environment.get("BNB_CUDA_VERSION"):
        cause = "bitsandbytes loads its library for that CUDA release, and not the one that fits torch"
        yield Finding("BNB_CUDA_VERSION", "warning", version, cause, "unset BNB_CUDA_VERSION")


def of_cuda(environment: Mapping[str, str]) -> Iterator[Finding]:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        cause = "every GPU is hidden from torch"
        yield Finding("CUDA_VISIBLE_DEVICES", "warning", repr(visible), cause, "unset CUDA_VISIBLE_DEVICES")
    elif visible:
        yield Finding("CUDA_VISIBLE_DEVICES", "note", f"{visible}: torch sees these GPUs alone")
    if environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding(
            "CUDA_LAUNCH_BLOCKING", "note", "1: every kernel is waited for, for debugging; training is slower"
        )


def of_the_hub(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environment.get(name, "").lower() in YES:
            yield Finding(
                name, "note", f"{environment[name]}: nothing is downloaded; only what is in the cache can be used"
            )
            return
