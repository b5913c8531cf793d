"""What the merge benchmark runs, each as a process of its own, timed and with its anonymous memory watched."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import ROOT
from benchmarks.merge_inputs import Inputs

# Where `sh requirements/install.sh peers` puts what is only compared with.
PEERS = ROOT / ".venv" / "peers"

COGUMI = """
import sys
import cogumi
report = cogumi.merge_adapter(sys.argv[2], sys.argv[3], base=sys.argv[1], progress=False)
import torch
print(report.largest_error, torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0)
"""
# A small merge first, so that what transformers and PEFT import late is there too; arguments 4 to 6 are its own.
COGUMI_WARM = """
import os, sys, time
import torch, transformers, peft
from cogumi.merge import merge_adapter
merge_adapter(sys.argv[5], sys.argv[6], base=sys.argv[4], progress=False)
os.sync()
start = time.perf_counter()
merge_adapter(sys.argv[2], sys.argv[3], base=sys.argv[1], progress=False)
os.sync()
print(time.perf_counter() - start)
"""
IMPORTS = "import torch, transformers, peft"
PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model = PeftModel.from_pretrained(model, sys.argv[2])
model.merge_and_unload().save_pretrained(sys.argv[3])
"""
AXOLOTL = """
import sys
sys.path.append(sys.argv[4])
from axolotl.cli.utils.lora_merge import merge_lora_sharded_efficient
merge_lora_sharded_efficient(sys.argv[1], sys.argv[2], sys.argv[3], device="cpu")
"""
WORKERS = """
import sys
from cogumi.merge import merge_adapter
merge_adapter(sys.argv[2], sys.argv[3], base=sys.argv[1], workers=int(sys.argv[4]), progress=False)
"""


def python(code: str, inputs: Inputs, out: Path, *more: str | Path) -> list[str]:
    return [sys.executable, "-c", code, *(str(each) for each in (inputs.base, inputs.adapter, out, *more))]


def axolotl_is_here() -> bool:
    """Beside .venv's packages or among them. It pins other versions of nearly everything, so it is in no lane."""
    return (PEERS / "axolotl").is_dir() or importlib.util.find_spec("axolotl") is not None


@dataclass(frozen=True)
class Finished:
    """seconds: from start to exit. anonymous: peak bytes of RssAnon + RssShmem, children included; high_water: VmHWM of
    the process alone, file pages included. Both None where there is no /proc."""

    seconds: float
    anonymous: int | None
    high_water: int | None
    output: str


def run_and_watch(command: list[str], interval: float = 0.02, sync: bool = False) -> Finished:
    """Run `command`, reading its memory every `interval` seconds; `sync` flushes the disks before the clock stops.

    Raises RuntimeError with the last line it said when it fails.
    """
    peaks: dict[str, int] = {}
    done = threading.Event()
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watcher = threading.Thread(target=watch_memory, args=(process.pid, peaks, done, interval))
    watcher.start()
    try:
        output, errors = process.communicate()
        if sync:
            os.sync()
        seconds = time.perf_counter() - start
    finally:  # interrupted from the keyboard: nothing of it stays behind
        done.set()
        watcher.join()
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        said = errors.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"exit status {process.returncode}: {said[-1]}")
    return Finished(seconds, peaks.get("anonymous"), peaks.get("VmHWM"), output)


def watch_memory(pid: int, peaks: dict[str, int], done: threading.Event, interval: float) -> None:
    """Fill `peaks` until `done` is set. Children are looked for twice a second, as that means reading all of /proc."""
    if sys.platform != "linux":
        return
    family, looked = [pid], time.monotonic()
    while not done.wait(interval):
        if time.monotonic() - looked > 0.5:
            family, looked = [pid, *children(pid)], time.monotonic()
        found = [status_bytes(each) for each in family]
        anonymous = sum(each.get("RssAnon", 0) + each.get("RssShmem", 0) for each in found)
        peaks["anonymous"] = max(peaks.get("anonymous", 0), anonymous)
        peaks["VmHWM"] = max(peaks.get("VmHWM", 0), found[0].get("VmHWM", 0))


def children(pid: int) -> list[int]:
    try:
        return [each.pid for each in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:  # it ended between two looks
        return []


def status_bytes(pid: int) -> dict[str, int]:
    """The sizes in /proc/PID/status, in bytes; none of them once the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended between two looks
        return {}
    return {name: 1024 * int(kilobytes) for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
