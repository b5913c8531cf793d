"""The part of `cogumi doctor` that imports native code: steps, run one after another in a process of their own.

One process runs steps until one fails, so that they share an import of torch. The remaining steps run in a new process,
because a failed import leaves half-imported modules behind.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Event
from typing import Any

from cogumi.core.worker import Worker
from cogumi.stack.driver import ask_nvml

SHOWN = 240  # characters of an error
KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# What an environment of any lane must be able to import before it can train.
DATA = ("numpy", "pandas", "pyarrow", "polars", "tokenizers", "safetensors")
LIBRARIES = ("transformers", "datasets", "accelerate", "peft", "trl")


@dataclass(frozen=True)
class Step:
    """The outcome of one step. answer: what it returned, None where it failed. said: what it printed."""

    name: str
    answer: Any = None
    error: str = ""
    said: str = ""


def run_steps(
    names: Sequence[str],
    timeout: float,
    environment: Mapping[str, str],
    needed: Sequence[str] = (),
    stop: Event | None = None,
) -> list[Step]:
    """Run steps, each for at most `timeout` seconds. After one of `needed` has failed no more are run, and `stop` is set,
    which ends those who look at it too. Raises OSError where no process can be had."""
    stop = stop or Event()
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
                    if name in needed:
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


WITHOUT_TORCH: dict[str, Callable[[], Any]] = {
    "driver": ask_nvml,
    "data": lambda: import_all(DATA),
    "libraries": lambda: import_all(LIBRARIES),
}
STEPS: dict[str, Callable[[str], Any]] = {
    "torch": step_torch,
    "attention": step_attention,
    "four_bit": step_four_bit,
    "compiler": step_compiler,
}
