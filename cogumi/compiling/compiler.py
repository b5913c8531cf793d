"""Is there a compiler on this machine that torch's inductor can use, and how long does the smallest thing take it?"""

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import torch

from cogumi.disk.owners import inductor_cache
from cogumi.patches.graph_break_probes import anew, first_line, left_as_found, switched_off_by

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
