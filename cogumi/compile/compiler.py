"""Is there a compiler, and the variables that torch.compile is given."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import torch

from cogumi.disk import inductor_cache
from cogumi.patches.graph_break_probes import anew, first_line, left_as_found, switched_off_by


@dataclass(frozen=True)
class Variable:
    """One variable that is set. effect: "off" (nothing compiles), "changes" (compiling) or "nothing" (nobody reads it)."""

    name: str
    value: str
    effect: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.meaning}"


# name -> (values with that effect, None for any; effect; meaning). Where each is read: tests/test_compiling_environment.py.
KNOWN: dict[str, tuple[tuple[str, ...] | None, str, str]] = {
    "TORCHDYNAMO_DISABLE": (("1",), "off", "torch compiles nothing in this process; leave it out"),
    "TORCH_COMPILE_DISABLE": (("1",), "off", "Dynamo skips every frame, so nothing is compiled; leave it out"),
    "TORCH_COMPILE": (None, "nothing", "read by nothing in torch, transformers or unsloth; leave it out"),
    "UNSLOTH_DISABLE_DYNAMO": (None, "nothing", "read by nothing, unsloth included; leave it out"),
    "UNSLOTH_COMPILE_DISABLE": (
        None,
        "changes",
        "unsloth compiles none of its own modules; says nothing about what others compile",
    ),
    "TORCHDYNAMO_SUPPRESS_ERRORS": (
        None,
        "changes",
        "what fails to compile runs uncompiled without a word; cogumi says it all the same",
    ),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (("1",), "changes", "every run compiles anew"),
    "ACCELERATE_DYNAMO_BACKEND": (
        None,
        "changes",
        "accelerate compiles the whole model at once, which captures little of one that is checkpointed",
    ),
}
# What `accelerate launch` sets where it is not to compile.
ASKS_NOTHING = ("ACCELERATE_DYNAMO_BACKEND", "no")


def variables(environ: Mapping[str, str] | None = None) -> list[Variable]:
    """Those of the known variables that are set (by default in this process), in the order of KNOWN."""
    found = os.environ if environ is None else environ
    said = []
    for name, (values, effect, meaning) in KNOWN.items():
        value = found.get(name)
        if value is None or (name, value.lower()) == ASKS_NOTHING:
            continue
        if values is not None and value not in values:
            said.append(Variable(name, value, "nothing", f"only {' or '.join(values)} has an effect; leave it out"))
        else:
            said.append(Variable(name, value, effect, meaning))
    return said


# ------------------------------------------------------------------------------------------------------------- compiler


log = logging.getLogger("cogumi")

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class CompilerFound:
    """error: why nothing can be compiled, "" where it can. seconds: that a tiny function took, compiled and run."""

    error: str
    seconds: float

    def __str__(self) -> str:
        return f"compiler: {self.error or f'torch compiles here (the smallest function in {self.seconds:.1f} s)'}"


def try_compiler(device: torch.device, backward: bool = True) -> CompilerFound:
    """Compile a function of two lines with inductor for a device, and run it forward and backward, or forward alone."""
    began = time.perf_counter()
    if by := switched_off_by():
        return CompilerFound(f"nothing is compiled, because of {by}", 0.0)

    def smallest(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    with torch.random.fork_rng(), left_as_found(), torch.enable_grad():
        x = torch.ones(64, device=device, requires_grad=backward)
        try:
            y = torch.compile(anew(smallest))(x)
            if backward:
                torch.autograd.grad(y, x)
        except Exception as error:  # noqa: BLE001  what a missing compiler raises differs by machine; it is reported
            advice = (
                "; install g++, or name a C++ compiler in CXX" if device.type == "cpu" and is_missing(error) else ""
            )
            return CompilerFound(f"{first_line(error)}{advice}", time.perf_counter() - began)
    return CompilerFound("", time.perf_counter() - began)


def keep_compiled_code() -> Path:
    """Have inductor keep what it compiles in the user's cache, where the next run finds it, unless told where already.

    Its own default is a temporary directory, which a rented machine loses when it stops; importing it sets the variable to that.
    """
    told = os.environ.get(CACHE_VARIABLE)
    own = Path(platformdirs.user_cache_dir("cogumi")) / "compiled"
    place = Path(told) if told and told != str(inductor_cache()) else own
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled code is not kept between runs: %s cannot be made (%s)", place, error.strerror)
        return Path(told or inductor_cache())
    os.environ[CACHE_VARIABLE] = str(place)
    return place


def is_missing(error: BaseException) -> bool:
    """Whether inductor found no C++ compiler at all, which it says in the name of an error that it wraps."""
    return "InvalidCxxCompiler" in f"{type(error).__name__} {error}"
