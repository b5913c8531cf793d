"""`cogumi doctor`: what is wrong with this machine and this environment, in the order in which things depend on each other.

It changes nothing, needs no network, and imports nothing native in its own process. At the first finding that is fatal it
stops, as everything after that would only be a consequence.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import site
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
from cogumi.core.formatting import pip_command
from cogumi.core.notices import show_seconds
from cogumi.diagnostics.import_checks import Step, run_steps
from cogumi.stack import driver, host, installed
from cogumi.stack.lanes import torch_build
from cogumi.stack.probes import HUB_FLASH_ATTN

TIMEOUT = 120.0  # seconds: importing torch from a network volume for the first time takes one minute
WIDTH = 120
SUPPORTED = ((3, 11), (3, 12))  # pyproject.toml
# Two processes at once, each with its own import of torch: one compiles, the other imports the libraries of a training.
FIRST = ("torch", "matmul", "attention", "torchvision", "triton", "xformers", "flash_attn", "compiler", "unsloth")
SECOND = ("data", "libraries", "bitsandbytes", "four_bit")
ESSENTIAL = ("torch", "data", "libraries")  # without these nothing trains
# Tried where they are installed.
SOME_PACKAGE = ("torchvision", "triton", "xformers", "flash_attn", "unsloth", "bitsandbytes")
NEEDS_CUDA = ("triton", "xformers", "flash_attn", "unsloth")


@dataclass(frozen=True)
class DoctorReport:
    """What was found. compiling: what torch.compile does here, as a run's decisions.json has it; None if not checked."""

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
        return "\n".join([*(line for each in self.findings for line in render_finding(each)), "", self.summary()])

    def summary(self) -> str:
        counted = {state: sum(each.state == state for each in self.findings) for state in ("fatal", "warning", "note")}
        wrong = ", ".join(f"{number} {state}" for state, number in counted.items() if number)
        return f"{len(self.findings)} checked: {wrong or 'nothing to say'}; {self.seconds:.1f} s"


@dataclass
class CheckupState:
    """What one check found that a later one needs."""

    timeout: float
    work: Path
    torch_cuda: str | None = None
    distributions: list[installed.Distribution] = field(default_factory=list)
    steps: dict[str, Step] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.steps["torch"].answer["device"])


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
    layers, compiler = seen.steps.get("four_bit"), seen.steps.get("compiler")
    compiling = None
    if layers is not None and not layers.error and compiler is not None and not compiler.error:
        compiling = {**layers.answer["report"], "compiler": compiler.answer}
    return DoctorReport(tuple(found), time.perf_counter() - began, compiling)


def check_python(_: CheckupState) -> Iterator[Finding]:
    yield python_finding()
    yield from kernel_findings()


def check_disks(seen: CheckupState) -> Iterator[Finding]:
    yield from host.check_disks(host.host_environment(), seen.work)


def check_driver(seen: CheckupState) -> Iterator[Finding]:
    _, seen.torch_cuda = torch_build()
    (step,) = run_steps(["driver"], seen.timeout, environment(None))
    yield from driver.check_driver(step.answer, step.error, seen.torch_cuda)
    if seen.torch_cuda is None and step.answer and step.answer.get("cards") and find_spec("torch"):
        cause = "torch is a CPU build, and this machine has a GPU that it cannot use"
        yield Finding("torch", "warning", "CPU build", cause, f"remove {sys.prefix}, then {installed.INSTALL}")


def check_environment(seen: CheckupState) -> Iterator[Finding]:
    yield from host.check_variables(os.environ, seen.work)
    seen.distributions = installed.distributions()
    yield from installed.check_cuda_mix(seen.distributions, seen.torch_cuda)


def check_packages(seen: CheckupState) -> Iterator[Finding]:
    yield from installed.check_files(seen.distributions)
    yield from installed.check_duplicates(seen.distributions)
    yield from installed.check_lane(seen.distributions)


def python_finding() -> Finding:
    version, here = platform.python_version(), sys.prefix
    place = f"{version} in {here}" + ("" if sys.prefix != sys.base_prefix else ", which is no virtual environment")
    if sys.version_info[:2] not in SUPPORTED or sys.version_info.releaselevel != "final":
        cause = f"every lane is for a release of Python 3.11 or 3.12, and this is {version}"
        fix = f"{installed.INSTALL}: it prints the one command that gets Python 3.12"
        return Finding("Python", "fatal", place, cause, fix)
    active = os.environ.get("VIRTUAL_ENV")
    if active and os.path.realpath(active) != os.path.realpath(here):
        cause = f"the active environment is {active}, and this is another Python: its packages are not seen here"
        return Finding("Python", "warning", place, cause, f"run {Path(active) / 'bin' / 'python'} -m cogumi doctor")
    return Finding("Python", "ok", place)


def c_library(_: CheckupState) -> Iterator[Finding]:
    system, processor = platform.system(), platform.machine()
    if system == "Darwin" and processor == "arm64":
        yield Finding("C library", "ok", f"macOS {platform.mac_ver()[0]} on {processor}")
    elif (system, processor) != ("Linux", "x86_64"):
        cause = f"the lanes are for Linux on x86-64, and for macOS on Apple silicon; this is {system} on {processor}"
        yield Finding("C library", "warning", f"{system} {processor}", cause, "take such a machine")
    else:
        yield glibc_finding(*platform.libc_ver())


def glibc_finding(name: str, version: str) -> Finding:
    newer = "take an Ubuntu 22.04 or Debian 12 image, or newer"
    if name != "glibc":
        cause = "wheels for Linux (manylinux) need glibc; this system has another C library, as Alpine does"
        return Finding("C library", "fatal", name or "unknown", cause, newer)
    found, figure = tuple(map(int, version.split(".")[:2])), f"glibc {version}"
    if found < (2, 28):  # of the wheels that every lane takes: manylinux_2_28
        return Finding("C library", "fatal", figure, "the wheels need glibc 2.28 or newer", newer)
    if found < (2, 32):
        return Finding("C library", "note", f"{figure}: flash-attn's own wheels need 2.32; nothing else here does")
    return Finding("C library", "ok", figure)


def kernel_findings() -> Iterator[Finding]:
    """Notebook kernels that are not this environment, in which cogumi and its wheels would not be found."""
    what, found = "notebook kernel", kernelspecs()
    # Directories, not files: the python of a virtual environment is a link to the one it was made with.
    here = os.path.realpath(os.path.dirname(os.path.abspath(sys.executable)))
    others = {name: start for name, start in found.items() if start and os.path.realpath(Path(start).parent) != here}
    ours = [name for name in found if name not in others]
    for name, start in others.items():
        # The notebooks name the kernel cogumi; where there is none of ours, Jupyter preselects python3.
        wrong = name == "cogumi" or (name == "python3" and "cogumi" not in ours)
        cause = f"a notebook with this kernel does not run in this environment ({sys.prefix})"
        add = f"{sys.executable} -m ipykernel install --user --name cogumi, and choose the kernel cogumi"
        fix = "" if ours and not wrong else add
        yield Finding(what, "warning" if wrong else "note", f"{name} starts {start}", cause, fix)
    if ours:
        yield Finding(what, "ok", f"{', '.join(ours)}: this environment")
    elif not others:
        yield Finding(what, "note", f"none is installed here; {pip_command('install ipykernel')} makes one")


def kernelspecs() -> dict[str, str]:
    """The Python kernels on Jupyter's paths, the first of a name as Jupyter takes it, with the Python that each starts.

    "" for the Jupyter server's own Python. What cannot be read is left out, as Jupyter does.
    """
    found: dict[str, str] = {}
    for path in (path for root in jupyter_paths() for path in sorted(root.glob("kernels/*/kernel.json"))):
        try:
            spec = json.loads(path.read_text(encoding="utf-8"))
            command, language = str(spec["argv"][0]), str(spec.get("language", "python"))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue
        if language.lower() == "python":
            bare = command in ("python", "python3", f"python3.{sys.version_info.minor}")
            found.setdefault(path.parent.name.lower(), "" if bare else command)
    return found


def jupyter_paths() -> list[Path]:
    """Where Jupyter looks for kernels, as jupyter_core.paths.jupyter_path does."""
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share") / "jupyter"
    own = home / "Library/Jupyter" if sys.platform == "darwin" else data
    user = [Path(os.environ.get("JUPYTER_DATA_DIR") or own), Path(site.getuserbase()) / "share/jupyter"]
    environment = [Path(sys.prefix) / "share/jupyter"]
    told = [Path(part) for part in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if part]
    between = environment + user if sys.prefix != sys.base_prefix else user + environment
    return list(dict.fromkeys([*told, *between, Path("/usr/local/share/jupyter"), Path("/usr/share/jupyter")]))


def check_torch(seen: CheckupState) -> Iterator[Finding]:
    """Runs every step, of which the later checks tell."""
    with tempfile.TemporaryDirectory(prefix="cogumi-doctor-", ignore_cleanup_errors=True) as scratch:
        own = environment(scratch)
        absent = [name for name in SOME_PACKAGE if find_spec(name) is None]
        chains = [[name for name in chain if name not in absent] for chain in (FIRST, SECOND)]
        stop = Event()
        with ThreadPoolExecutor(len(chains)) as pool:
            running = [pool.submit(run_steps, chain, seen.timeout, own, ESSENTIAL, stop) for chain in chains]
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
        build = f"for CUDA {step.answer['cuda']}" if step.answer["cuda"] else "a CPU build"
        figures = [f"{step.answer['version']}, {build}; computes on {seen.device}"]
        figures += [format_reading(*each[:3]) for each in step.answer["readings"][1:]]
        yield Finding("torch", "ok", "; ".join(figures))
        if "matmul" in seen.steps:
            yield describe_probe(seen.steps["matmul"], "matmul")


def environment(scratch: str | None) -> dict[str, str]:
    """Of the processes: what is compiled or written on import goes into a directory that is removed afterwards."""
    found = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found["PYTHONSAFEPATH"] = "1"  # a file of the working directory is no module of the stack
    if scratch is not None:
        # Without a GPU inductor finds out which vector instructions the C++ compiler knows by compiling for each, and
        # compiles torch's headers apart first. Both pay in a run, and here take longer than what is tried.
        found.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
        found.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
        places = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "UNSLOTH_COMPILE_LOCATION", "MPLCONFIGDIR")
        found |= dict.fromkeys(places, scratch)
    return found


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
    absent = [name for name in SOME_PACKAGE if name not in seen.steps]
    for name in SOME_PACKAGE:
        if name in seen.steps:
            yield describe_probe(seen.steps[name], name, seen.device)
    if absent:
        yield Finding("not installed", "skipped", ", ".join(absent))


def describe_probe(step: Step, what: str, device: str = "cpu") -> Finding:
    if step.error and device == "cpu" and what in NEEDS_CUDA:
        return Finding(what, "note", f"installed; it needs a GPU, and there is none ({step.error})")
    if step.error:
        return describe_failure(what, step, "warning")
    # A step that worked may have printed that something in it does not.
    figure = "; ".join(format_reading(*each) for each in step.answer)
    return with_explanation(Finding(what, "ok", figure), step.said, "warning")


def format_reading(metric: str, value: Any, unit: str, note: str = "") -> str:
    spoken = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"{metric} {spoken} {unit}".strip() + (f" ({note})" if note else "")


def check_attention(seen: CheckupState) -> Iterator[Finding]:
    step = seen.steps["attention"]
    if step.error:
        yield describe_failure("attention", step, "warning")
        return
    timed = ", ".join(f"{name} {value:.2f} ms" for name, value, _, _ in step.answer["readings"] if value is not None)
    flash, asked = seen.steps.get("flash_attn"), "torch's sdpa"
    if seen.device == "cuda" and flash and not flash.error:
        asked = "flash-attn, where a model's class has it"
    elif seen.device == "cuda" and find_spec("kernels") is not None:
        asked = f"{HUB_FLASH_ATTN}, where a model's class has flash attention and a run finds that it works, else torch's sdpa"
    yield Finding("attention", "ok", f"{asked}; of sdpa's kernels {step.answer['chosen']} is taken ({timed})")


def check_compiler(seen: CheckupState) -> Iterator[Finding]:
    """What `torch.compile` does here, for 4-bit layers and at all, and which variables change that."""
    if step := seen.steps.get("four_bit"):
        if step.error:
            yield describe_failure("4-bit layers", step, "warning")
        else:
            report = step.answer["report"]
            for each in report["variables"]:
                state: State = "warning" if each["effect"] == "off" else "note"
                yield Finding("torch.compile", state, f"{each['name']}={each['value']}: {each['meaning']}")
            for each in report["foreign"]:
                yield Finding("torch.compile", "note", f"patched by others: {each}")
            how = f"{report['strategy']}: " if report["strategy"] else ""
            tried = "; ".join([report["strategy_reason"], *step.answer["probes"]])
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


CHECKS: tuple[tuple[str, Callable[[CheckupState], Iterator[Finding]]], ...] = (
    ("Python", check_python),
    ("C library", c_library),
    ("disks", check_disks),
    ("driver", check_driver),
    ("environment", check_environment),
    ("packages", check_packages),
    ("CUDA majors", lambda seen: installed.check_cuda_majors(seen.distributions, seen.torch_cuda)),
    ("torch", check_torch),
    ("libraries", check_libraries),
    ("probes", check_probes),
    ("attention", check_attention),
    ("torch.compile", check_compiler),
)


def render_finding(finding: Finding, width: int | None = None) -> Iterator[str]:
    """One finding as lines of a table; a fix is never broken, as it is to be copied."""
    columns = width or min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    start, below = f"{finding.state:8} {finding.what:18} ", " " * 9
    for head, rest, text in (
        (start, " " * len(start), finding.figure),
        (f"{below}cause  ", f"{below}       ", finding.cause),
    ):
        if text or head == start:
            one_line = head + " ".join(text.split())
            yield from textwrap.wrap(one_line, columns, subsequent_indent=rest, break_on_hyphens=False)
    for number, line in enumerate(finding.fix.splitlines()):
        yield f"{below}{'       ' if number else 'fix    '}{line}"
