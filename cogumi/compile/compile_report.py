"""What compiles on this machine, what Dynamo did, and why: for a run's decisions.json and log, and for `cogumi doctor`."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from cogumi.compile.layers import decoder_of, parts_of
from cogumi.core.durability import NO_SPACE
from cogumi.core.run_directory import write_section
from cogumi.disk import inductor_cache
from cogumi.patches import graph_break
from cogumi.patches.graph_break import CompileProbe
from cogumi.patches.torch_internals import (
    dynamo_counts,
    dynamo_left_as_found,
    dynamo_switched_off_by,
    first_line,
    set_call,
    with_code_of_its_own,
)

log = logging.getLogger("cogumi")


# ---------------------------------------------------------------------------------------------------- the environment


@dataclass(frozen=True)
class CompileVariable:
    """One variable that is set. effect: "off" (nothing compiles), "changes" (compiling) or "nothing" (no library reads it)."""

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
    "UNSLOTH_COMPILE_DISABLE": (None, "changes", "unsloth compiles none of its own modules; others still compile"),
    "TORCHDYNAMO_SUPPRESS_ERRORS": (None, "changes", "what fails to compile runs uncompiled; cogumi reports it"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (("1",), "changes", "every run compiles anew"),
    "ACCELERATE_DYNAMO_BACKEND": (None, "changes", "accelerate compiles the whole model, which captures little of it"),
}
# What `accelerate launch` sets where it is not to compile.
ASKS_NOTHING = ("ACCELERATE_DYNAMO_BACKEND", "no")


def list_variables(environ: Mapping[str, str] | None = None) -> list[CompileVariable]:
    """Those of the known variables that are set (by default in this process), in the order of KNOWN."""
    found = os.environ if environ is None else environ
    told = []
    for name, (values, effect, meaning) in KNOWN.items():
        value = found.get(name)
        if value is None or (name, value.lower()) == ASKS_NOTHING:
            continue
        if values is not None and value not in values:
            effect, meaning = "nothing", f"only {' or '.join(values)} has an effect; leave it out"
        told.append(CompileVariable(name, value, effect, meaning))
    return told


# ------------------------------------------------------------------------------------------------------- the compiler


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class CompilerFound:
    """error: why nothing can be compiled, "" where it can. seconds: that a tiny function took, compiled and run."""

    error: str
    seconds: float


def try_compiler(device: torch.device, backward: bool = True) -> CompilerFound:
    """Compile a function of two lines with inductor for a device, and run it forward and backward, or forward alone."""
    began = time.perf_counter()
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
        except Exception as error:  # noqa: BLE001  what a missing compiler raises differs by machine; it is reported
            # Inductor found no C++ compiler at all, which it says in the name of an error that it wraps.
            missing = device.type == "cpu" and "InvalidCxxCompiler" in f"{type(error).__name__} {error}"
            advice = "; install g++, or name a C++ compiler in CXX" if missing else ""
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


# ------------------------------------------------------------------------------------------------------ what was compiled


@dataclass(frozen=True)
class DynamoCounts:
    """What Dynamo did in this process. breaks: reason -> how often. seconds: spent compiling, forward and backward."""

    graphs: int
    breaks: dict[str, int] = field(default_factory=dict)
    recompiles: int = 0
    seconds: float = 0.0

    def since(self, before: "DynamoCounts") -> "DynamoCounts":
        breaks = {reason: n - before.breaks.get(reason, 0) for reason, n in self.breaks.items()}
        return DynamoCounts(
            self.graphs - before.graphs,
            {reason: n for reason, n in breaks.items() if n},
            max(0, self.recompiles - before.recompiles),  # which a reset sets back
            self.seconds - before.seconds,
        )


def read_counts() -> DynamoCounts:
    return DynamoCounts(*dynamo_counts())


def count_operations(model: nn.Module, told: Callable[[int, int], None]) -> None:
    """In the next forward pass with gradients: tell how many operations it has, and how many run outside compiled code.

    Operations are calls of aten's and of other operators that no operator makes. The pass is made three times more.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler writes of its own beginning and end to stderr
    parts = parts_of(model)

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        with torch.random.fork_rng():
            module(*args, **kwargs)  # compiles: the compiler's own operations are not to be among them
            outside = count_profiled(module, args, kwargs)
            calls = [set_call(part, None) for part in parts]
            every = count_profiled(module, args, kwargs)
            for part, call in zip(parts, calls, strict=True):
                set_call(part, call)
        told(every, outside)

    handle = decoder_of(model).register_forward_pre_hook(count, with_kwargs=True)


def count_profiled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        module(*args, **kwargs)
    return sum(iterate_uncompiled(event for event in profiler.events() if event.cpu_parent is None))


def iterate_uncompiled(events: Iterable[Any]) -> Iterator[int]:
    """1 for each operator that no other operator calls, compiled code left out."""
    for event in events:
        if event.name.startswith("Torch-Compiled Region"):
            continue
        if "::" in event.name:
            yield 1
        else:  # a range of the profiler's own, or of a Python-side function
            yield from iterate_uncompiled(event.cpu_children)


@dataclass
class CompileReport:
    """mode: what was asked for (auto, layers, off; "" outside a run). decision: layers or off, with its reason; "" before it.

    versions: of torch and bitsandbytes. strategy: what was done for 4-bit layers, `graph_break.STRATEGIES`; probes: what was
    tried for that. patched, foreign: what cogumi, and who else, replaced. variables: of the environment. operations:
    of one forward pass through the decoder; operations_outside: those of them that do not run in compiled code. None for
    what was not measured. counts: since the patching.
    """

    mode: str
    versions: dict[str, str]
    strategy: str
    strategy_reason: str
    probes: tuple[CompileProbe, ...]
    patched: tuple[str, ...]
    foreign: tuple[str, ...]
    variables: tuple[CompileVariable, ...]
    before: DynamoCounts
    decision: str = ""
    reason: str = ""
    operations: int | None = None
    operations_outside: int | None = None
    counts: DynamoCounts | None = None
    seconds_per_step_eager: float | None = None
    seconds_per_step: float | None = None
    prepared: tuple[str, ...] = ()

    @classmethod
    def from_process(cls, mode: str = "") -> "CompileReport":
        """What holds in this process now."""
        found = graph_break.verdict() or graph_break.ProbeVerdict("", graph_break.status().reason)
        return cls(
            mode,
            graph_break.versions(),
            found.strategy,
            found.reason,
            found.probes,
            found.patched,
            tuple(graph_break.foreign_patches()),
            tuple(list_variables()),
            read_counts(),
        )

    def process_lines(self) -> list[str]:
        """Lines on what holds for anything that is compiled here."""
        said = [f"versions: {', '.join(f'{name} {version}' for name, version in self.versions.items())}"]
        said += [str(each) for each in self.variables]
        said += [f"tried: {each}" for each in self.probes]
        how = f"{self.strategy}: " if self.strategy else ""
        said.append(f"4-bit layers: {how}{self.strategy_reason}")
        if self.patched:
            said.append(f"patched by cogumi: {', '.join(self.patched)}")
        if self.foreign:
            said.append(f"patched by others: {', '.join(self.foreign)}")
        return said

    def model_lines(self) -> list[str]:
        """Lines on a model that was compiled, some steps later."""
        assert self.counts is not None
        found, breaks = self.counts, sum(self.counts.breaks.values())
        said = [
            f"{found.graphs} graphs, {breaks} breaks, {found.recompiles} recompiles, {found.seconds:.1f} s compiling"
        ]
        said += [f"{n} breaks: {' '.join(reason.split())[:200]}" for reason, n in found.breaks.items()]
        if self.operations and self.operations_outside is not None:
            inside = self.operations - self.operations_outside
            share = inside / self.operations
            said.append(f"{inside} of {self.operations} operations of a forward pass are compiled ({share:.1%})")
        if self.seconds_per_step is not None:
            eager = self.seconds_per_step_eager
            before = "" if eager is None else f" instead of {eager:.2f} s"
            said.append(f"a step takes {self.seconds_per_step:.2f} s{before}")
        return said

    def write(self, path: Path) -> None:
        """As JSON; a disk that is full is said, and ends nothing."""
        content = asdict(self)
        del content["before"]
        try:
            write_section(path, "compile", content)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            log.warning("%s is not written: %s", path, error.strerror)


def examine_process() -> CompileReport:
    """What holds on this machine for what is compiled here, for `cogumi doctor`; what is tried for it is undone."""
    applied_before = graph_break.verdict()
    graph_break.apply("auto")
    report = CompileReport.from_process()
    if applied_before is None:
        graph_break.undo()
    return report
