"""`cogumi doctor`: what is wrong with this machine and this environment, in the order in which things depend on each other.

It changes nothing, needs no network, and imports nothing native in its own process. At the first finding that is fatal it
stops, as everything after that would only be a consequence.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

from cogumi.core.errors import Finding, State
from cogumi.core.notices import working
from cogumi.diagnostics import interpreter
from cogumi.diagnostics.import_checks import Step, run_steps
from cogumi.stack import driver, host, installed, variables
from cogumi.stack.host import box_of, environment_of_the_box
from cogumi.stack.probes import HUB_FLASH_ATTN

TIMEOUT = 120.0  # seconds: importing torch from a network volume for the first time takes one minute
WIDTH = 120
# Two processes at once, each with its own import of torch: one compiles, the other imports the libraries of a training.
FIRST = ("torch", "matmul", "attention", "torchvision", "triton", "xformers", "flash_attn", "compiler", "unsloth")
SECOND = ("data", "libraries", "bitsandbytes", "four_bit")
ESSENTIAL = ("torch", "data", "libraries")  # without these nothing trains
SOME_PACKAGE = (
    "torchvision",
    "triton",
    "xformers",
    "flash_attn",
    "unsloth",
    "bitsandbytes",
)  # looked at where installed
NEEDS_CUDA = ("triton", "xformers", "flash_attn", "unsloth")


@dataclass(frozen=True)
class DoctorReport:
    """What was found. compiling: what torch.compile does here, as a run's compile.json has it; None if not looked at."""

    findings: tuple[Finding, ...]
    seconds: float
    compiling: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong: notes are not, and what was skipped because it is not there."""
        return not any(each.state in ("warning", "fatal") for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "findings": [asdict(each) for each in self.findings],
            "compiling": self.compiling,
        }

    def __str__(self) -> str:
        return "\n".join([*(line for each in self.findings for line in lines(each)), "", self.summary()])

    def summary(self) -> str:
        counted = {state: sum(each.state == state for each in self.findings) for state in ("fatal", "warning", "note")}
        wrong = ", ".join(f"{number} {state}" for state, number in counted.items() if number)
        return f"{len(self.findings)} looked at: {wrong or 'nothing to say'}; {self.seconds:.1f} s"


@dataclass
class Seen:
    """What one check found that a later one needs."""

    timeout: float
    work: Path
    torch_cuda: str | None = None
    distributions: list[installed.Distribution] = field(default_factory=list)
    steps: dict[str, Step] = field(default_factory=dict)


@working("doctor: this machine and its packages are being checked")
def doctor(timeout: float = TIMEOUT) -> DoctorReport:
    """Look at this machine and this environment; takes a quarter of a minute, changes nothing and leaves no files.

    timeout: seconds that a process which imports native code may take before it is killed. What goes wrong is a finding,
    not an exception.
    """
    began = time.perf_counter()
    seen = Seen(timeout, Path.cwd())
    found: list[Finding] = []
    for number, (name, check) in enumerate(CHECKS):
        try:
            found += check(seen)
        except OSError as error:  # a disk that does not answer, no process to be had: said, and the rest looked at
            place = f"{error.filename}: " if error.filename else ""
            found.append(Finding(name, "warning", f"could not be looked at: {place}{error.strerror or error}"))
        if any(each.state == "fatal" for each in found):
            later = [name for name, _ in CHECKS[number + 1 :]]
            if later:
                found.append(Finding("not looked at", "skipped", f"{', '.join(later)}: mend what is fatal first"))
            break
    return DoctorReport(tuple(found), time.perf_counter() - began, compiling(seen))


# ------------------------------------------------------------------------------------------------------- without importing


def the_interpreter(_: Seen) -> Iterator[Finding]:
    yield from interpreter.python()
    yield from interpreter.kernels()


def the_c_library(_: Seen) -> Iterator[Finding]:
    yield from interpreter.machine()


def the_disks(seen: Seen) -> Iterator[Finding]:
    yield from host.findings(box_of(environment_of_the_box()), seen.work)


def the_driver(seen: Seen) -> Iterator[Finding]:
    from cogumi.stack.lanes import torch_build

    _, seen.torch_cuda = torch_build()
    (step,) = run_steps(["driver"], seen.timeout, environment(None))
    yield from driver.findings(step.answer, step.error, seen.torch_cuda)
    if seen.torch_cuda is None and step.answer and step.answer.get("cards") and find_spec("torch"):
        cause = "torch is a CPU build, and this machine has a GPU that it cannot use"
        yield Finding("torch", "warning", "CPU build", cause, f"remove {sys.prefix}, then {installed.INSTALL}")


def the_environment(seen: Seen) -> Iterator[Finding]:
    yield from variables.findings(os.environ, seen.work)
    seen.distributions = installed.distributions()
    yield from installed.mixed(seen.distributions, seen.torch_cuda)


def the_packages(seen: Seen) -> Iterator[Finding]:
    yield from installed.broken(seen.distributions)
    yield from installed.doubled(seen.distributions)
    yield from installed.against_lane(seen.distributions)


def the_libraries(seen: Seen) -> Iterator[Finding]:
    yield from installed.cuda_majors(seen.distributions, seen.torch_cuda)


# ----------------------------------------------------------------------------------------------- by importing, in processes


def torch_itself(seen: Seen) -> Iterator[Finding]:
    """Runs every step, of which the later checks tell."""
    with tempfile.TemporaryDirectory(prefix="cogumi-doctor-", ignore_cleanup_errors=True) as scratch:
        own = environment(scratch)
        there = [name for name in (*FIRST, *SECOND) if name not in SOME_PACKAGE or find_spec(name) is not None]
        chains = [[name for name in chain if name in there] for chain in (FIRST, SECOND)]
        stop = Event()
        with ThreadPoolExecutor(len(chains)) as pool:
            running = [pool.submit(run_steps, chain, seen.timeout, own, ESSENTIAL, stop) for chain in chains]
            try:
                seen.steps = {step.name: step for each in running for step in each.result()}
            finally:
                stop.set()  # Ctrl-C: the pool waits for its threads
    if "torch" not in seen.steps:
        yield Finding("torch", "skipped", "ended before it answered, as what follows had failed")
        return
    yield of_torch(seen.steps["torch"])
    if not seen.steps["torch"].error:
        yield from (of_probe(seen.steps[name], name) for name in ("matmul",) if name in seen.steps)


def environment(scratch: str | None) -> dict[str, str]:
    """Of the processes: what is compiled or written on import goes into a directory that is removed afterwards."""
    found = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if scratch is not None:
        # Without a GPU inductor finds out which vector instructions the C++ compiler knows by compiling for each, and
        # compiles torch's headers apart first. Both pay in a run, and here take longer than what is tried.
        found.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
        found.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
        places = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "UNSLOTH_COMPILE_LOCATION", "MPLCONFIGDIR")
        found |= dict.fromkeys(places, scratch)
    return found


def of_torch(step: Step) -> Finding:
    if step.error:
        return failed("torch", step, "fatal")
    answer = step.answer
    build = f"for CUDA {answer['cuda']}" if answer["cuda"] else "a CPU build"
    more = "".join(f"; {metric} {figured(value)} {unit}".rstrip() for metric, value, unit, _ in answer["readings"][1:])
    return Finding("torch", "ok", f"{answer['version']}, {build}; computes on {answer['device']}{more}")


def the_training_libraries(seen: Seen) -> Iterator[Finding]:
    for name, what in (("data", "data libraries"), ("libraries", "training libraries")):
        if name not in seen.steps:
            return
        step = seen.steps[name]
        if step.error:
            yield failed(what, step, "fatal")
            return
        yield warned(
            Finding(what, "ok", ", ".join(f"{module} {version}" for module, version in step.answer.items())), step
        )


def the_probes(seen: Seen) -> Iterator[Finding]:
    absent = []
    for name in SOME_PACKAGE:
        if name not in seen.steps:
            absent.append(name)
        else:
            yield of_probe(seen.steps[name], name, seen.steps["torch"].answer["device"])
    if absent:
        yield Finding("not installed", "skipped", ", ".join(absent))


def of_probe(step: Step, what: str, device: str = "cpu") -> Finding:
    if step.error and device == "cpu" and what in NEEDS_CUDA:
        return Finding(what, "note", f"installed; it needs a GPU, and there is none ({step.error})")
    if step.error:
        return failed(what, step, "warning")
    figure = "; ".join(
        f"{metric} {figured(value)} {unit}".strip() + (f" ({note})" if note else "")
        for metric, value, unit, note in step.answer
    )
    return warned(Finding(what, "ok", figure), step)


def figured(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def the_attention(seen: Seen) -> Iterator[Finding]:
    step = seen.steps["attention"]
    if step.error:
        yield failed("attention", step, "warning")
        return
    timed = ", ".join(f"{name} {value:.2f} ms" for name, value, _, _ in step.answer["readings"] if value is not None)
    flash, asked = seen.steps.get("flash_attn"), "torch's sdpa"
    if step_device(seen) == "cuda" and flash and not flash.error:
        asked = "flash-attn, where a model's class has it"
    elif step_device(seen) == "cuda" and find_spec("kernels") is not None:
        asked = f"{HUB_FLASH_ATTN}, where a model's class has flash attention and a run finds that it works, else torch's sdpa"
    yield Finding("attention", "ok", f"{asked}; of sdpa's kernels {step.answer['chosen']} is taken ({timed})")


def step_device(seen: Seen) -> str:
    return str(seen.steps["torch"].answer["device"])


def the_compiler(seen: Seen) -> Iterator[Finding]:
    """What `torch.compile` does here, for 4-bit layers and at all, and which variables change that."""
    if step := seen.steps.get("four_bit"):
        if step.error:
            yield failed("4-bit layers", step, "warning")
        else:
            report = step.answer["report"]
            for each in report["variables"]:
                state: State = "warning" if each["effect"] == "off" else "note"
                yield Finding("torch.compile", state, f"{each['name']}={each['value']}: {each['meaning']}")
            for each in report["foreign"]:
                yield Finding("torch.compile", "note", f"patched by others: {each}")
            tried = "; ".join(["", *step.answer["probes"]])
            how = f"{report['strategy']}: " if report["strategy"] else ""
            yield Finding("4-bit layers", "ok", f"{how}{report['strategy_reason']}{tried}")
    if step := seen.steps.get("compiler"):
        if step.error:
            yield failed("compiler", step, "warning")
        elif step.answer["error"]:
            yield explained(
                Finding("compiler", "warning", step.answer["error"], "torch.compile does not work here"),
                step.answer["error"],
            )
        else:
            yield Finding(
                "compiler", "ok", f"torch compiles here (the smallest function in {step.answer['seconds']:.1f} s)"
            )


def compiling(seen: Seen) -> dict[str, Any] | None:
    layers, compiler = seen.steps.get("four_bit"), seen.steps.get("compiler")
    if layers is None or layers.error or compiler is None or compiler.error:
        return None
    return {**layers.answer["report"], "compiler": compiler.answer}


# ------------------------------------------------------------------------------------------------------------- what failed


def failed(what: str, step: Step, state: State) -> Finding:
    """A finding on a step that failed, with cause and fix where what it wrote is a known failure."""
    plain = Finding(
        what,
        state,
        step.error,
        "not one of the known failures",
        "cogumi doctor --explain FILE, with all that the import printed",
    )
    return explained(plain, f"{step.said}\n{step.error}")


def warned(fine: Finding, step: Step) -> Finding:
    """A step that worked may have printed that something in it does not."""
    return explained(fine, step.said, "warning")


def explained(plain: Finding, text: str, state: State | None = None) -> Finding:
    from cogumi.diagnostics.signatures import explain

    known = explain(text)
    if not known:
        return plain
    first = known[0]
    told = first.name in [each.name for each in explain(plain.figure)]
    figure = plain.figure if told else f"{plain.figure}; {first.line}"
    return Finding(plain.what, state or plain.state, figure, first.cause, first.fix)


CHECKS: tuple[tuple[str, Callable[[Seen], Iterator[Finding]]], ...] = (
    ("Python", the_interpreter),
    ("C library", the_c_library),
    ("disks", the_disks),
    ("driver", the_driver),
    ("environment", the_environment),
    ("packages", the_packages),
    ("CUDA majors", the_libraries),
    ("torch", torch_itself),
    ("libraries", the_training_libraries),
    ("probes", the_probes),
    ("attention", the_attention),
    ("torch.compile", the_compiler),
)


# ---------------------------------------------------------------------------------------------------------------- as a table


def lines(finding: Finding, width: int | None = None) -> Iterator[str]:
    """One finding as lines of a table; a fix is never broken, as it is to be copied."""
    columns = width or min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    start = f"{finding.state:8} {finding.what:18} "
    below = " " * 9
    yield from textwrap.wrap(
        f"{start}{one_line(finding.figure)}", columns, subsequent_indent=" " * len(start), break_on_hyphens=False
    ) or [start.rstrip()]
    if finding.cause:
        yield from textwrap.wrap(
            f"{below}cause  {one_line(finding.cause)}",
            columns,
            subsequent_indent=f"{below}       ",
            break_on_hyphens=False,
        )
    for number, line in enumerate(finding.fix.splitlines()):
        yield f"{below}{'       ' if number else 'fix    '}{line}"


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)
