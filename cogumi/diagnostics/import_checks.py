"""The part of `cogumi doctor` that imports native code: steps, run one after another in a process of their own.

One process runs steps until one fails, so that they share an import of torch; what is left runs in a new process, as a failed
import leaves halves behind. This file is run by its path, with the steps as arguments, and answers in marked lines.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

MARK = "cogumi step: "
SHOWN = 240  # characters of an error
KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# What an environment of any lane must be able to import before it can train.
DATA = ("numpy", "pandas", "pyarrow", "polars", "tokenizers", "safetensors")
LIBRARIES = ("transformers", "datasets", "accelerate", "peft", "trl")


@dataclass(frozen=True)
class Step:
    """The outcome of one step. answer: what it returned, None where it failed. said: what it wrote to standard error."""

    name: str
    answer: Any = None
    error: str = ""
    said: str = ""
    seconds: float = 0.0


# ------------------------------------------------------------------------------------------------- in the doctor's process


def run_steps(
    names: Sequence[str],
    timeout: float,
    environment: Mapping[str, str],
    needed: Sequence[str] = (),
    stop: Event | None = None,
) -> list[Step]:
    """Run steps for at most `timeout` seconds a process. After one of `needed` has failed no more are run, and `stop` is
    set, which ends those who look at it too. Raises OSError where no process can be had."""
    from cogumi.core.worker import run_command  # not found yet where this file is run by its path

    stop = stop or Event()
    done: list[Step] = []
    while (left := names[len(done) :]) and not stop.is_set():
        command = [sys.executable, "-B", "-P", "-X", "faulthandler", __file__, *left]
        ended = run_command(command, timeout, environment, stop)
        marked = [line.removeprefix(MARK) for line in ended.stdout.splitlines() if line.startswith(MARK)]
        answers = [json.loads(line) for line in marked]
        found = [Step(**each, said=stderr_of_step(ended.stderr, each["name"])) for each in answers]
        if stop.is_set():
            return done + found
        if not found or (len(found) < len(left) and not found[-1].error):
            # It ended, or was ended, in the middle of the step after the last that answered.
            how = ended.how if ended.status is not None else f"no answer in {timeout:.0f} s"
            found.append(Step(left[len(found)], error=how, said=stderr_of_step(ended.stderr, left[len(found)])))
        done += found
        if any(run_step.error and run_step.name in needed for run_step in found):
            stop.set()
    return done


def stderr_of_step(stderr: str, name: str) -> str:
    """What was written to standard error during one step."""
    _, found, rest = stderr.partition(f"{MARK}{name}\n")
    return rest.partition(MARK)[0] if found else stderr.partition(MARK)[0]


# ------------------------------------------------------------------------------------------------------ in the other process


def main(names: Sequence[str]) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(KILLED_WITH_PARENT, signal.SIGKILL)
    gc.disable()  # it would look through what is being imported again and again
    for name in names:
        print(f"{MARK}{name}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        answer, error = None, ""
        try:
            answer = run_step(name)
        except BaseException as raised:  # noqa: BLE001  a package may raise anything when imported, SystemExit too; it is reported
            traceback.print_exc()
            where = "".join(f"{note}: " for note in getattr(raised, "__notes__", ()))
            error = f"{where}{type(raised).__name__}: {' '.join(str(raised).split())}"[:SHOWN]
        sys.stderr.flush()
        said = {"name": name, "answer": answer, "error": error, "seconds": round(time.perf_counter() - began, 3)}
        # On a line of its own, whatever was printed without an end.
        print(f"\n{MARK}{json.dumps(said, default=str)}", flush=True)
        if error:
            return 1
    return 0


def run_step(name: str) -> Any:
    """What a step answers: one of STEPS, or of the probes."""
    if name in WITHOUT_TORCH:
        return WITHOUT_TORCH[name]()
    import torch

    from cogumi.stack.probes import PROBES

    run = STEPS.get(name) or PROBES[name]
    return run("cuda" if torch.cuda.is_available() else "cpu")


def import_all(names: Sequence[str]) -> dict[str, str]:
    """Import those that are installed; their versions."""
    found = {}
    for name in names:
        if importlib.util.find_spec(name) is not None:
            try:
                found[name] = str(getattr(importlib.import_module(name), "__version__", "?"))
            except BaseException as raised:
                raised.add_note(name)
                raise
    return found


def step_torch(device: str) -> dict[str, Any]:
    """The build, the device, and one small product of matrices, right or not."""
    import torch

    from cogumi.stack.probes import probe_torch

    readings = probe_torch(device)
    one = torch.arange(64, dtype=torch.float32, device=device).reshape(8, 8)
    product = (one @ torch.eye(8, device=device)).cpu()
    if not torch.equal(product, one.cpu()):
        raise RuntimeError("a product of matrices is wrong on this device")
    return {"device": device, "version": torch.__version__, "cuda": torch.version.cuda, "readings": readings}


def step_attention(device: str) -> dict[str, Any]:
    """Which of torch's attention kernels is taken for causal bfloat16 attention here, and what each takes."""
    import torch
    from torch.nn.attention import SDPBackend

    from cogumi.patches.torch_internals import chosen_attention
    from cogumi.stack.probes import _qkv, probe_sdpa

    query, key, value = _qkv(device, torch.bfloat16)
    chosen = SDPBackend(chosen_attention(query, key, value))
    return {"chosen": chosen.name, "readings": probe_sdpa(device)}


def step_four_bit(device: str) -> dict[str, Any]:
    """What torch.compile does to 4-bit layers here, and what the environment does to torch.compile."""
    from cogumi.compile.compile_report import examine_process
    from cogumi.patches.graph_break import CompileProbe

    report = examine_process()
    return {"report": report, "probes": [str(CompileProbe(**each)) for each in report["probes"]]}


def step_compiler(device: str) -> dict[str, Any]:
    from dataclasses import asdict

    import torch

    from cogumi.compile.compile_report import try_compiler

    return asdict(try_compiler(torch.device(device), backward=False))


def step_driver() -> dict[str, Any]:
    from cogumi.stack.driver import ask_nvml

    return ask_nvml()


WITHOUT_TORCH: dict[str, Callable[[], Any]] = {
    "driver": step_driver,
    "data": lambda: import_all(DATA),
    "libraries": lambda: import_all(LIBRARIES),
}
STEPS: dict[str, Callable[[str], Any]] = {
    "torch": step_torch,
    "attention": step_attention,
    "four_bit": step_four_bit,
    "compiler": step_compiler,
}

if __name__ == "__main__":
    # This cogumi, and not another one that is installed; and only cogumi from here, everything else from where it would come.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import cogumi.stack  # noqa: F401

    del sys.path[0]
    sys.exit(main(sys.argv[1:]))
