"""`cogumi doctor`: check this machine and this environment, in the order of their dependencies.

It changes nothing, needs no network, and imports nothing native in its own process. It stops at the first fatal finding: later
ones would only be consequences.
"""

import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cogumi.core.errors import Finding, State
from cogumi.core.notices import show_seconds
from cogumi.core.worker import Worker
from cogumi.stack import host, lanes

TIMEOUT = 120.0  # seconds: importing torch from a network volume for the first time takes one minute
WIDTH = 120
SUPPORTED = ((3, 11), (3, 12))  # pyproject.toml
# unsloth has to be imported before transformers.
STEPS = (
    "torch", "matmul", "torchvision", "triton", "xformers", "flash_attn", "unsloth", "data", "libraries", "bitsandbytes",
)  # fmt: skip
ESSENTIAL = ("torch", "data", "libraries")  # without these nothing trains
OPTIONAL_PACKAGES = ("torchvision", "triton", "xformers", "flash_attn", "unsloth", "bitsandbytes")
NEEDS_CUDA = ("triton", "xformers", "flash_attn", "unsloth")
# Modules that every lane must import.
IMPORTED = {
    "data": ("numpy", "pandas", "pyarrow", "polars", "tokenizers", "safetensors"),
    "libraries": ("transformers", "datasets", "accelerate", "peft", "trl"),
}
MAX_ERROR_CHARS = 240


@dataclass(frozen=True)
class DoctorReport:
    """Findings of the doctor, and the seconds that it took."""

    findings: tuple[Finding, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """True without warnings and fatal findings; notes and skipped checks are fine."""
        return not any(finding.state in ("warning", "fatal") for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed, "seconds": round(self.seconds, 1)}

    def __str__(self) -> str:
        lines = [line for finding in self.findings for line in render_finding(finding)]
        return "\n".join([*lines, "", self.summary()])

    def summary(self) -> str:
        counts = Counter(finding.state for finding in self.findings)
        problems = ", ".join(f"{counts[state]} {state}" for state in ("fatal", "warning", "note") if counts[state])
        return f"{len(self.findings)} checked: {problems or 'nothing to say'}; {self.seconds:.1f} s"


@dataclass(frozen=True)
class Step:
    """Result of one step: its return value (None if it failed), the error, and its output."""

    name: str
    answer: Any = None
    error: str = ""
    output: str = ""


@dataclass
class CheckupState:
    """Results of checks that later ones need."""

    timeout: float
    work: Path
    torch_cuda: str | None = None
    steps: dict[str, Step] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cuda" if any(metric == "architectures" for metric, *_ in self.steps["torch"].answer) else "cpu"


@show_seconds("doctor: this machine and its packages are being checked")
def doctor(timeout: float = TIMEOUT) -> DoctorReport:
    """Check this machine and this environment in about 15 seconds; changes nothing and leaves no files.

    Args:
        timeout: Seconds that one step, such as importing torch, may take before its process is killed.

    Returns:
        The findings. A failing check is a finding, not an exception.
    """
    began = time.perf_counter()
    seen = CheckupState(timeout, Path.cwd())
    findings: list[Finding] = []
    for number, (name, check) in enumerate(CHECKS):
        try:
            findings += check(seen)
        except OSError as error:  # a disk does not answer, or no process can start: report it, and go on
            place = f"{error.filename}: " if error.filename else ""
            findings.append(Finding(name, "warning", f"could not be checked: {place}{error.strerror or error}"))
        if any(finding.state == "fatal" for finding in findings):
            if later := [name for name, _ in CHECKS[number + 1 :]]:
                findings.append(Finding("not checked", "skipped", f"{', '.join(later)}: fix what is fatal first"))
            break
    return DoctorReport(tuple(findings), time.perf_counter() - began)


def check_driver(seen: CheckupState) -> Iterator[Finding]:
    _, seen.torch_cuda = lanes.torch_build()
    findings = list(host.check_driver(seen.torch_cuda, seen.timeout))
    yield from findings
    if seen.torch_cuda is None and any(finding.what == "GPU 0" for finding in findings) and find_spec("torch"):
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
    """Run every step; later checks report the others."""
    names = [name for name in STEPS if name not in OPTIONAL_PACKAGES or find_spec(name)]
    with tempfile.TemporaryDirectory(prefix="cogumi-doctor-", ignore_cleanup_errors=True) as scratch:
        seen.steps = {step.name: step for step in run_steps(names, seen.timeout, step_environment(scratch))}
    if seen.steps["torch"].error:
        yield describe_failure("torch", seen.steps["torch"], "fatal")
    else:
        yield from (describe_probe(seen.steps[name]) for name in ("torch", "matmul") if name in seen.steps)


def step_environment(scratch: str) -> dict[str, str]:
    """Return variables that send all compiled and written files into a directory that is removed afterwards."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONSAFEPATH"] = "1"  # files of the working directory must not shadow modules
    places = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "UNSLOTH_COMPILE_LOCATION", "MPLCONFIGDIR")
    return environment | dict.fromkeys(places, scratch)


def check_libraries(seen: CheckupState) -> Iterator[Finding]:
    for name, title in (("data", "data libraries"), ("libraries", "training libraries")):
        step = seen.steps.get(name)
        if step is None:
            return
        if step.error:
            yield describe_failure(title, step, "fatal")
            return
        versions = ", ".join(f"{module} {version}" for module, version in step.answer.items())
        yield with_explanation(Finding(title, "ok", versions), step.output, "warning")


def check_probes(seen: CheckupState) -> Iterator[Finding]:
    for name in OPTIONAL_PACKAGES:
        if name in seen.steps:
            yield describe_probe(seen.steps[name], seen.device)
    if absent := [name for name in OPTIONAL_PACKAGES if name not in seen.steps]:
        yield Finding("not installed", "skipped", ", ".join(absent))


def describe_probe(step: Step, device: str = "cpu") -> Finding:
    """Turn the result of one library probe into a finding: ok with its measurements, a note, or a warning."""
    if step.error and device == "cpu" and step.name in NEEDS_CUDA:
        return Finding(step.name, "note", f"installed; it needs a GPU, and there is none ({step.error})")
    if step.error:
        return describe_failure(step.name, step, "warning")
    readings = []
    for metric, value, unit, note in step.answer:
        number = f"{value:.3g}" if isinstance(value, float) else str(value)
        readings.append(f"{metric} {number} {unit}".strip() + (f" ({note})" if note else ""))
    figure = "; ".join(readings)
    # A probe that passed may still have printed that a part of it failed.
    return with_explanation(Finding(step.name, "ok", figure), step.output, "warning")


def describe_failure(title: str, step: Step, state: State) -> Finding:
    """Report a failed step, with cause and fix if its output has a known failure."""
    fix = "cogumi doctor --explain FILE, with all that the import printed"
    plain = Finding(title, state, step.error, "not one of the known failures", fix)
    return with_explanation(plain, f"{step.output}\n{step.error}")


def with_explanation(plain: Finding, text: str, state: State | None = None) -> Finding:
    from cogumi.core.signatures import explain

    known = explain(text)
    if not known:
        return plain
    first = known[0]
    told = first.name in [signature.name for signature in explain(plain.figure)]
    figure = plain.figure if told else f"{plain.figure}; {first.line}"
    return Finding(plain.what, state or plain.state, figure, first.cause, first.fix)


CHECKS: tuple[tuple[str, Callable[[CheckupState], Iterable[Finding]]], ...] = (
    ("Python", lambda _: [check_python()]),
    ("disks", lambda seen: host.check_disks(seen.work)),
    ("driver", check_driver),
    ("environment", lambda seen: host.check_variables(os.environ, seen.work)),
    ("packages", lambda _: [lanes.check_lane()]),
    ("torch", check_torch),
    ("libraries", check_libraries),
    ("probes", check_probes),
)


def render_finding(finding: Finding, width: int | None = None) -> Iterator[str]:
    """Format a finding as lines of a table; a fix is never wrapped, so that it can be copied."""
    columns = width or min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    heads = {f"{finding.state:8} {finding.what:18} ": finding.figure}
    if finding.cause:
        heads[f"{' ' * 9}cause  "] = finding.cause
    for head, text in heads.items():
        line, indent = head + " ".join(text.split()), " " * len(head)
        yield from textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False)
    for number, line in enumerate(finding.fix.splitlines()):
        yield f"{' ' * 9}{'       ' if number else 'fix    '}{line}"


# ------------------------------------------------------------------------------------------------ steps in other processes


def run_steps(names: Sequence[str], timeout: float, environment: Mapping[str, str]) -> list[Step]:
    """Run steps in another process, one after another, each for at most `timeout` seconds, until one of ESSENTIAL fails.

    They share one process and its import of torch until one fails; a new one runs the rest, because a failed import leaves
    half-imported modules behind. Raises OSError if no process can be started.
    """
    done: list[Step] = []
    while len(done) < len(names) and not (done and done[-1].name in ESSENTIAL and done[-1].error):
        with closing(Worker("it", environment)) as worker:
            heard = 0
            for name in names[len(done) :]:
                worker.send(try_step, name)
                try:
                    answer, error = worker.receive(timeout)
                except RuntimeError as failure:
                    answer, error = None, str(failure)
                output = worker.hear(heard)
                heard += len(output)
                done.append(Step(name, answer, error, output.decode(errors="replace")))
                if error:
                    break
    return done


def try_step(name: str) -> tuple[Any, str]:
    """Run a step in the other process; return its JSON values, and its exception in one line."""
    try:
        return json.loads(json.dumps(run_step(name), default=str)), ""
    except BaseException as raised:  # noqa: BLE001  a package may raise anything when imported, SystemExit too; it is reported
        traceback.print_exc()
        where = "".join(f"{note}: " for note in getattr(raised, "__notes__", ()))
        return None, f"{where}{type(raised).__name__}: {' '.join(str(raised).split())}"[:MAX_ERROR_CHARS]


def run_step(name: str) -> Any:
    """Import a group of IMPORTED and return the versions, or run a probe."""
    if name in IMPORTED:
        versions = {}
        for module in filter(find_spec, IMPORTED[name]):
            try:
                versions[module] = str(getattr(importlib.import_module(module), "__version__", "?"))
            except BaseException as raised:
                raised.add_note(module)
                raise
        return versions
    import torch

    from cogumi.stack.probes import PROBES

    return PROBES[name]("cuda" if torch.cuda.is_available() else "cpu")
