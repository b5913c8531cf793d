"""What compiles on this machine, what Dynamo did, and why: for a run's decisions.json and log, and for `cogumi doctor`."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch

from cogumi.disk import inductor_cache
from cogumi.patches import graph_break
from cogumi.patches.torch_internals import (
    dynamo_counts,
    dynamo_left_as_found,
    dynamo_switched_off_by,
    first_line,
    with_code_of_its_own,
)

log = logging.getLogger("cogumi")
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

# name -> (values with that effect, None for any; effect; meaning). Where each is read: tests/test_compiling_environment.py.
KNOWN: dict[str, tuple[tuple[str, ...] | None, str, str]] = {
    "TORCHDYNAMO_DISABLE": (("1",), "off", "torch compiles nothing in this process; leave it out"),
    "TORCH_COMPILE_DISABLE": (("1",), "off", "Dynamo skips every frame, so nothing is compiled; leave it out"),
    "TORCH_COMPILE": (None, "nothing", "read by nothing in torch, transformers or unsloth; leave it out"),
    "UNSLOTH_DISABLE_DYNAMO": (None, "nothing", "read by nothing, unsloth included; leave it out"),
    "UNSLOTH_COMPILE_DISABLE": (None, "changes", "unsloth compiles none of its own modules; others still compile"),
    "TORCHDYNAMO_SUPPRESS_ERRORS": (None, "changes", "what fails to compile runs uncompiled; cogumi reports it"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (("1",), "changes", "every run compiles anew"),
    "ACCELERATE_DYNAMO_BACKEND": (None, "changes", "accelerate compiles the whole model, which captures little of it"),
}


@dataclass(frozen=True)
class CompileVariable:
    """One variable that is set. effect: "off" (nothing compiles), "changes" (compiling) or "nothing" (no library reads it)."""

    name: str
    value: str
    effect: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.meaning}"


def list_variables(environ: Mapping[str, str] = os.environ) -> list[CompileVariable]:
    """Those of the known variables that are set, in the order of KNOWN."""
    found = []
    for name, (values, effect, meaning) in KNOWN.items():
        value = environ.get(name)
        launched = name == "ACCELERATE_DYNAMO_BACKEND" and value is not None and value.lower() == "no"
        if value is None or launched:  # `accelerate launch` sets "no" where nothing is to be compiled
            continue
        if values is not None and value not in values:
            effect, meaning = "nothing", f"only {' or '.join(values)} has an effect; leave it out"
        found.append(CompileVariable(name, value, effect, meaning))
    return found


def describe_process() -> dict[str, Any]:
    """What holds for anything that is compiled in this process: versions, 4-bit layers, patches and variables."""
    found = graph_break.verdict() or graph_break.ProbeVerdict("", graph_break.status().reason)
    return {
        "versions": graph_break.versions(),
        "strategy": found.strategy,
        "strategy_reason": found.reason,
        "probes": [asdict(each) for each in found.probes],
        "patched": list(found.patched),
        "foreign": graph_break.foreign_patches(),
        "variables": [asdict(each) for each in list_variables()],
    }


def examine_process() -> dict[str, Any]:
    """`describe_process` with 4-bit layers tried, for `cogumi doctor`; what is tried for it is undone."""
    applied_before = graph_break.verdict()
    graph_break.apply("auto")
    report = describe_process()
    if applied_before is None:
        graph_break.undo()
    return report


@dataclass(frozen=True)
class CompilerFound:
    """error: why nothing can be compiled, "" where it can. seconds: that a tiny function took, compiled and run."""

    error: str
    seconds: float


def try_compiler(device: torch.device, backward: bool = True) -> CompilerFound:
    """Compile a function of two lines with inductor for a device, and run it forward and backward, or forward alone."""
    began, error = time.perf_counter(), ""
    if by := dynamo_switched_off_by():
        return CompilerFound(f"nothing is compiled, because of {by}", 0.0)

    def smallest(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    with torch.random.fork_rng(), dynamo_left_as_found(), torch.enable_grad():
        x = torch.ones(64, device=device, requires_grad=backward)
        try:
            y = torch.compile(with_code_of_its_own(smallest))(x)
            if backward:
                torch.autograd.grad(y, x)
        except Exception as failure:  # noqa: BLE001  what a missing compiler raises differs by machine; it is reported
            error = first_line(failure)
            if device.type == "cpu" and "InvalidCxxCompiler" in f"{type(failure).__name__} {failure}":
                error += "; install g++, or name a C++ compiler in CXX"
    return CompilerFound(error, time.perf_counter() - began)


def keep_compiled_code() -> Path:
    """Have inductor keep what it compiles in the user's cache, where the next run finds it, unless told where already."""
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


@dataclass(frozen=True)
class DynamoCounts:
    """What Dynamo did in this process.

    breaks: reason -> how often. seconds: spent compiling, forward and backward. operations: calls in the graphs, those of
    a graph that layers share once.
    """

    graphs: int
    breaks: dict[str, int]
    recompiles: int
    seconds: float
    operations: int

    def since(self, before: "DynamoCounts") -> "DynamoCounts":
        breaks = {reason: n - before.breaks.get(reason, 0) for reason, n in self.breaks.items()}
        return DynamoCounts(
            self.graphs - before.graphs,
            {reason: n for reason, n in breaks.items() if n},
            max(0, self.recompiles - before.recompiles),  # which a reset sets back
            self.seconds - before.seconds,
            self.operations - before.operations,
        )


def read_counts() -> DynamoCounts:
    return DynamoCounts(*dynamo_counts())
