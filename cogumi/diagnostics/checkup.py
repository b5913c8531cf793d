"""`cogumi doctor`: what is wrong with this machine and this environment, in the order in which things depend on each other.

It changes nothing, needs no network, and imports nothing native in its own process. At the first finding that is fatal it
stops, as everything after that would only be a consequence.
"""

import ctypes
import gc
import importlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

from cogumi.core.errors import Finding, State
from cogumi.core.notices import show_seconds
from cogumi.core.worker import Worker
from cogumi.stack import host, lanes

TIMEOUT = 120.0  # seconds: importing torch from a network volume for the first time takes one minute
WIDTH = 120
SUPPORTED = ((3, 11), (3, 12))  # pyproject.toml
# Two processes at once, each with its own import of torch: one compiles, the other imports the libraries of a training.
FIRST = ("torch", "matmul", "torchvision", "triton", "xformers", "flash_attn", "compiler", "unsloth")
SECOND = ("data", "libraries", "bitsandbytes", "four_bit")
ESSENTIAL = ("torch", "data", "libraries")  # without these nothing trains
# Tried where they are installed.
SOME_PACKAGE = ("torchvision", "triton", "xformers", "flash_attn", "unsloth", "bitsandbytes")
NEEDS_CUDA = ("triton", "xformers", "flash_attn", "unsloth")
# What an environment of any lane must be able to import before it can train.
IMPORTED = {
    "data": ("numpy", "pandas", "pyarrow", "polars", "tokenizers", "safetensors"),
    "libraries": ("transformers", "datasets", "accelerate", "peft", "trl"),
}
SHOWN = 240  # characters of an error
KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class DoctorReport:
    """What was found. seconds: how long it took."""

    findings: tuple[Finding, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong: notes are not, and what was skipped because it is not there."""
        return not any(each.state in ("warning", "fatal") for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        found = [asdict(each) for each in self.findings]
        return {"passed": self.passed, "seconds": round(self.seconds, 1), "findings": found}

    def __str__(self) -> str:
        return "\n".join([*(line for each in self.findings for line in render_finding(each)), "", self.summary()])

    def summary(self) -> str:
        counted = {state: sum(each.state == state for each in self.findings) for state in ("fatal", "warning", "note")}
        wrong = ", ".join(f"{number} {state}" for state, number in counted.items() if number)
        return f"{len(self.findings)} checked: {wrong or 'nothing to say'}; {self.seconds:.1f} s"


@dataclass(frozen=True)
class Step:
    """The outcome of one step. answer: what it returned, None where it failed. said: what it printed."""

    name: str
    answer: Any = None
    error: str = ""
    said: str = ""


@dataclass
class CheckupState:
    """What one check found that a later one needs."""

    timeout: float
    work: Path
    torch_cuda: str | None = None
    steps: dict[str, Step] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cuda" if any(metric == "architectures" for metric, *_ in self.steps["torch"].answer) else "cpu"


@show_seconds("doctor: this machine and its packages are being checked")
def doctor(timeout: float = TIMEOUT) -> DoctorReport:
    """Look at this machine and this environment; takes a quarter of a minute, changes nothing and leaves no files.

    timeout: seconds that one step, such as importing torch, may take before its process is killed. What goes wrong is a
    finding, not an exception.
    """
    began = time.perf_counter()
    seen = CheckupState(timeout, Path.cwd())
    found: list[Finding] = []
    for number, (name, check) in enumerate(CHECKS):
        try:
            found += check(seen)
        except OSError as error:  # a disk that does not answer, no process to be had: said, and the rest looked at
            place = f"{error.filename}: " if error.filename else ""
            found.append(Finding(name, "warning", f"could not be checked: {place}{error.strerror or error}"))
        if any(each.state == "fatal" for each in found):
            if later := [name for name, _ in CHECKS[number + 1 :]]:
                found.append(Finding("not checked", "skipped", f"{', '.join(later)}: fix what is fatal first"))
            break
    return DoctorReport(tuple(found), time.perf_counter() - began)


def check_disks(seen: CheckupState) -> Iterator[Finding]:
    yield host.check_temporary_files()
    yield host.check_directory(seen.work)
    yield host.check_hub_cache(seen.work)


def check_driver(seen: CheckupState) -> Iterator[Finding]:
    _, seen.torch_cuda = lanes.torch_build()
    found = list(host.check_driver(seen.torch_cuda, seen.timeout))
    yield from found
    if seen.torch_cuda is None and any(each.what == "GPU 0" for each in found) and find_spec("torch"):
        cause = "torch is a CPU build, and this machine has a GPU that it cannot use"
        yield Finding("torch", "warning", "CPU build", cause, f"remove {sys.prefix}, then {lanes.INSTALL}")


def check_python() -> Finding:
    version, here = platform.python_version(), sys.prefix
    place = f"{version} in {here}" + ("" if sys.prefix != sys.base_prefix else ", which is no virtual environment")
    if sys.version_info[:2] not in SUPPORTED or sys.version_info.releaselevel != "final":
        cause = f"every lane is for a release of Python 3.11 or 3.12, and this is {version}"
        fix = f"{lanes.INSTALL}: it prints the one command that gets Python 3.12"
        return Finding("Python", "fatal", place, cause, fix)
    active = os.environ.get("VIRTUAL_ENV")
    if active and os.path.realpath(active) != os.path.realpath(here):
        cause = f"the active environment is {active}, and this is another Python: its packages are not seen here"
        return Finding("Python", "warning", place, cause, f"run {Path(active) / 'bin' / 'python'} -m cogumi doctor")
    return Finding("Python", "ok", place)


def check_torch(seen: CheckupState) -> Iterator[Finding]:
    """Runs every step, of which the later checks tell."""
    with tempfile.TemporaryDirectory(prefix="cogumi-doctor-", ignore_cleanup_errors=True) as scratch:
        own = environment(scratch)
        chains = [[name for name in chain if name not in SOME_PACKAGE or find_spec(name)] for chain in (FIRST, SECOND)]
        stop = Event()
        with ThreadPoolExecutor(len(chains)) as pool:
            running = [pool.submit(run_steps, chain, seen.timeout, own, stop) for chain in chains]
            try:
                seen.steps = {step.name: step for each in running for step in each.result()}
            finally:
                stop.set()  # Ctrl-C: the pool waits for its threads
    step = seen.steps.get("torch")
    if step is None:
        yield Finding("torch", "skipped", "ended before it answered, as what follows had failed")
    elif step.error:
        yield describe_failure("torch", step, "fatal")
    else:
        yield from (describe_probe(seen.steps[name]) for name in ("torch", "matmul") if name in seen.steps)


def environment(scratch: str) -> dict[str, str]:
    """Of the processes: what is compiled or written on import goes into a directory that is removed afterwards."""
    # Without a GPU inductor finds out which vector instructions the C++ compiler knows by compiling for each, and
    # compiles torch's headers apart first. Both pay in a run, and here take longer than what is tried.
    found = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", **os.environ}
    found |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found["PYTHONSAFEPATH"] = "1"  # a file of the working directory is no module of the stack
    places = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "UNSLOTH_COMPILE_LOCATION", "MPLCONFIGDIR")
    return found | dict.fromkeys(places, scratch)


def check_libraries(seen: CheckupState) -> Iterator[Finding]:
    for name, what in (("data", "data libraries"), ("libraries", "training libraries")):
        step = seen.steps.get(name)
        if step is None:
            return
        if step.error:
            yield describe_failure(what, step, "fatal")
            return
        versions = ", ".join(f"{module} {version}" for module, version in step.answer.items())
        yield with_explanation(Finding(what, "ok", versions), step.said, "warning")


def check_probes(seen: CheckupState) -> Iterator[Finding]:
    for name in SOME_PACKAGE:
        if name in seen.steps:
            yield describe_probe(seen.steps[name], seen.device)
    if absent := [name for name in SOME_PACKAGE if name not in seen.steps]:
        yield Finding("not installed", "skipped", ", ".join(absent))


def describe_probe(step: Step, device: str = "cpu") -> Finding:
    if step.error and device == "cpu" and step.name in NEEDS_CUDA:
        return Finding(step.name, "note", f"installed; it needs a GPU, and there is none ({step.error})")
    if step.error:
        return describe_failure(step.name, step, "warning")
    figure = "; ".join(format_reading(*each) for each in step.answer)
    # A step that worked may have printed that something in it does not.
    return with_explanation(Finding(step.name, "ok", figure), step.said, "warning")


def format_reading(metric: str, value: Any, unit: str, note: str = "") -> str:
    spoken = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"{metric} {spoken} {unit}".strip() + (f" ({note})" if note else "")


def check_compiler(seen: CheckupState) -> Iterator[Finding]:
    """What `torch.compile` does here, for 4-bit layers and at all, and which variables change that."""
    if step := seen.steps.get("four_bit"):
        if step.error:
            yield describe_failure("4-bit layers", step, "warning")
        else:
            report = step.answer
            off = report["switched_off_by"]
            for each in report["variables"]:
                yield Finding("torch.compile", "warning" if off and each.startswith(f"{off}:") else "note", each)
            how = f"{report['strategy']}: " if report["strategy"] else ""
            tried = "; ".join([report["strategy_reason"], *report["probes"]])
            yield Finding("4-bit layers", "ok", f"{how}{tried}")
    if step := seen.steps.get("compiler"):
        if step.error:
            yield describe_failure("compiler", step, "warning")
        elif error := step.answer["error"]:
            yield with_explanation(Finding("compiler", "warning", error, "torch.compile does not work here"), error)
        else:
            seconds = step.answer["seconds"]
            yield Finding("compiler", "ok", f"torch compiles here (the smallest function in {seconds:.1f} s)")


def describe_failure(what: str, step: Step, state: State) -> Finding:
    """A finding on a step that failed, with cause and fix where what it wrote is a known failure."""
    fix = "cogumi doctor --explain FILE, with all that the import printed"
    plain = Finding(what, state, step.error, "not one of the known failures", fix)
    return with_explanation(plain, f"{step.said}\n{step.error}")


def with_explanation(plain: Finding, text: str, state: State | None = None) -> Finding:
    from cogumi.diagnostics.signatures import explain

    known = explain(text)
    if not known:
        return plain
    first = known[0]
    told = first.name in [each.name for each in explain(plain.figure)]
    figure = plain.figure if told else f"{plain.figure}; {first.line}"
    return Finding(plain.what, state or plain.state, figure, first.cause, first.fix)


CHECKS: tuple[tuple[str, Callable[[CheckupState], Iterable[Finding]]], ...] = (
    ("Python", lambda _: [check_python()]),
    ("disks", check_disks),
    ("driver", check_driver),
    ("environment", lambda seen: host.check_variables(os.environ, seen.work)),
    ("packages", lambda _: [*lanes.check_files(), lanes.check_lane()]),
    ("torch", check_torch),
    ("libraries", check_libraries),
    ("probes", check_probes),
    ("torch.compile", check_compiler),
)


def render_finding(finding: Finding, width: int | None = None) -> Iterator[str]:
    """One finding as lines of a table; a fix is never broken, as it is to be copied."""
    columns = width or min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    heads = {f"{finding.state:8} {finding.what:18} ": finding.figure}
    if finding.cause:
        heads[f"{' ' * 9}cause  "] = finding.cause
    for head, text in heads.items():
        line, indent = head + " ".join(text.split()), " " * len(head)
        yield from textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False)
    for number, line in enumerate(finding.fix.splitlines()):
        yield f"{' ' * 9}{'       ' if number else 'fix    '}{line}"


# ------------------------------------------------------------------------------------------- what runs in other processes


def run_steps(names: Sequence[str], timeout: float, environment: Mapping[str, str], stop: Event) -> list[Step]:
    """Run steps in another process, one after another, each for at most `timeout` seconds.

    One process runs steps until one fails, so that they share an import of torch. A new one runs the remaining steps, as
    a failed import leaves half-imported modules behind. After one of ESSENTIAL has failed no more are run, and `stop` is
    set, which ends those who look at it too. Raises OSError where no process can be had.
    """
    done: list[Step] = []
    while len(done) < len(names) and not stop.is_set():
        with closing(Worker("it", environment)) as worker:
            heard = 0
            for name in names[len(done) :]:
                worker.send(try_step, name)
                try:
                    answer, error = worker.receive(timeout, stop)
                except RuntimeError as failure:
                    answer, error = None, str(failure)
                    if stop.is_set():
                        return done
                said = worker.hear(heard)
                heard += len(said)
                done.append(Step(name, answer, error, said.decode(errors="replace")))
                if error:
                    if name in ESSENTIAL:
                        stop.set()
                    break
    return done


def try_step(name: str) -> tuple[Any, str]:
    """What a step answers, in values of JSON, and what it raised, in a line; in the other process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(KILLED_WITH_PARENT, signal.SIGKILL)
    gc.disable()  # it would look through what is being imported again and again
    try:
        return json.loads(json.dumps(run_step(name), default=str)), ""
    except BaseException as raised:  # noqa: BLE001  a package may raise anything when imported, SystemExit too; it is reported
        traceback.print_exc()
        where = "".join(f"{note}: " for note in getattr(raised, "__notes__", ()))
        return None, f"{where}{type(raised).__name__}: {' '.join(str(raised).split())}"[:SHOWN]


def run_step(name: str) -> Any:
    """What a step answers: the versions of IMPORTED, or what a probe or another step finds."""
    if name in IMPORTED:
        return import_all(IMPORTED[name])
    import torch

    from cogumi.stack.probes import PROBES

    steps = {**PROBES, "four_bit": step_four_bit, "compiler": step_compiler}
    return steps[name]("cuda" if torch.cuda.is_available() else "cpu")


def import_all(names: Sequence[str]) -> dict[str, str]:
    """Import those that are installed; their versions."""
    found = {}
    for name in filter(find_spec, names):
        try:
            found[name] = str(getattr(importlib.import_module(name), "__version__", "?"))
        except BaseException as raised:
            raised.add_note(name)
            raise
    return found


def step_four_bit(_: str) -> dict[str, Any]:
    """What torch.compile does to 4-bit layers here, and what the environment does to torch.compile."""
    from cogumi.compile.compile_report import describe_process
    from cogumi.patches import graph_break

    graph_break.apply("auto")
    return describe_process()


def step_compiler(device: str) -> dict[str, Any]:
    import torch

    from cogumi.compile.compile_report import try_compiler

    began = time.perf_counter()
    error = try_compiler(torch.device(device), backward=False)
    return {"error": error, "seconds": time.perf_counter() - began}
