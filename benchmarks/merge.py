"""Merging an adapter into bases of 3 and 8 GB: time against `cp -r`, and PEFT, processor time by part, memory
and the error of sampled elements. Kills, full disks and equal bytes by any number of workers are in tests/test_merge_safety.py.

A full run writes up to 17 GB at a time into the
temporary directory (TMPDIR), up to 7 GB into a tmpfs, and takes about half an hour. Each time is that of a whole process,
`sync` included, with the inputs dropped from the page cache. Sides take turns, so that a neighbour's load on a shared disk
falls on all.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from peft import LoraConfig
from safetensors import safe_open

from benchmarks.harness import Finished, Row, attempt, missing, python, ratio_row, row, run_process, values_row
from benchmarks.models import LLAMA_1B, Inputs, Shape, forget_cached, write_inputs

# 14 of Llama-3.1-8B's layers.
LARGER = Shape("14 layers of Llama-3.1-8B", 4096, 14336, 14, 32, 8, 128256, tied=False)
TINY = Shape("tiny Llama", 64, 160, 2, 4, 2, 512, tied=True)
TMPFS = Path("/dev/shm")

COGUMI = """
import sys
from cogumi.merge import merge_adapter
merge_adapter(sys.argv[2], sys.argv[3], base=sys.argv[1], progress=False)
"""
# What each stage's thread computes, and the process before and beside them.
COGUMI_PARTS = """
import json, sys, time
before = time.process_time()
from cogumi.merge import merge_adapter, stream
parts = {"imports": time.process_time() - before}
def count(place, name, part):
    original = getattr(place, name)
    def counted(*arguments):
        start = time.thread_time()
        try:
            return original(*arguments)
        finally:
            parts[part] = parts.get(part, 0.0) + time.thread_time() - start
    setattr(place, name, counted)
count(stream, "read_stored_rows", "reading the base")
count(stream.FileDigest, "add", "two hashes")
count(stream, "merge_rows", "merging")
count(stream, "write_run", "writing")
count(stream, "verify_run", "reading back, comparing")
merge_adapter(sys.argv[2], sys.argv[3], base=sys.argv[1], progress=False)
parts["all"] = time.process_time()
print(json.dumps(parts))
"""
IMPORTS = "import torch"
MERGE_IMPORTS = "import cogumi.cli.app, cogumi.merge"
PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model = PeftModel.from_pretrained(model, sys.argv[2])
model.merge_and_unload().save_pretrained(sys.argv[3])
"""


@dataclass(frozen=True)
class Scale:
    """Sizes of a run. timed: hold the times to their targets."""

    big: Shape = LLAMA_1B
    larger: Shape = LARGER
    shard_bytes: int = 2_000_000_000
    rank: int = 16
    repeats: int = 5
    disk_bytes: int = 17_000_000_000
    timed: bool = True


FULL = Scale()
QUICK = Scale(TINY, TINY, 100_000, 4, 1, 100_000_000, timed=False)


def time_rows(shape: Shape, folder: Path, scale: Scale, disk: str, ratio: float) -> Iterator[Row]:
    """Time all sides in turns, forwards and backwards alternately; PEFT in the first turn only.

    disk: name of the folder's disk. ratio: limit of cogumi's time over that of `cp -r`.
    """
    inputs = write_inputs(shape, folder / "timed", shard_bytes=scale.shard_bytes, rank=scale.rank)
    out = folder / "out"
    files = (inputs.base, inputs.adapter, out)
    commands = {
        "cogumi": python(COGUMI, *files),
        "cp -r": ["cp", "-r", str(inputs.base), str(out)],
        "import torch": python(IMPORTS),
        "imports of cogumi merge": python(MERGE_IMPORTS),
        "parts": python(COGUMI_PARTS, *files),
        "PEFT": python(PEFT, *files),
    }
    runs: dict[str, list[Finished]] = {name: [] for name in commands}
    for turn in range(scale.repeats):
        names = [name for name in commands if turn == 0 or name != "PEFT"]
        for name in reversed(names) if turn % 2 else names:
            forget_cached(inputs.base, inputs.adapter)
            runs[name].append(run_process(commands[name], sync=True))
            shutil.rmtree(out, ignore_errors=True)
    case = f"{shape.name}, {inputs.base_bytes / 1e9:.2f} GB, r={scale.rank} all-linear, {disk}"
    yield from seconds_and_ratios(case, runs, ratio if scale.timed else None)
    yield from part_rows(
        case, [json.loads(part.output.splitlines()[-1]) for part in runs["parts"]], inputs, scale.timed
    )
    yield from memory_rows(case, inputs, runs)
    run_process(commands["cogumi"])
    beyond, looked = sampled_violations(inputs, out)
    note = "computed here: half an ulp + 2^-20 (|W| + |delta|)"
    yield row("merge", case, "sampled elements off", beyond, f"of {looked:,}", target="<= 0", note=note)
    shutil.rmtree(out)
    shutil.rmtree(folder / "timed")


def seconds_and_ratios(case: str, runs: dict[str, list[Finished]], ratio: float | None) -> Iterator[Row]:
    """`ratio`: hold the ratios to their targets."""
    times = {name: [each.seconds for each in finished] for name, finished in runs.items() if name != "parts"}
    for name, seconds in times.items():
        target = "<= 2" if ratio and name == "imports of cogumi merge" else ""
        yield values_row("merge", case, f"time, {name}", seconds, "s", target=target)
    target = f"<= {ratio}" if ratio else ""
    yield ratio_row("merge", case, "cogumi / cp -r", times, "cogumi", "cp -r", target=target)
    adjacent = {"PEFT": times["PEFT"], "cogumi": times["cogumi"][: len(times["PEFT"])]}
    target = ">= 4" if ratio else ""
    yield ratio_row("merge", case, "PEFT / cogumi", adjacent, "PEFT", "cogumi", target=target)


def part_rows(case: str, found: list[dict[str, float]], inputs: Inputs, judged: bool) -> Iterator[Row]:
    """Processor seconds by part, over the bytes of the base; the imports are no part of a GB."""
    size = inputs.base_bytes / 1e9
    for each in found:
        each["the rest"] = each["all"] - sum(seconds for part, seconds in each.items() if part != "all")
        each["all but the imports"] = each["all"] - each["imports"]
    for part in (part for part in found[0] if part not in ("all", "imports")):
        seconds = [each.get(part, 0.0) / size for each in found]
        target = "<= 3" if judged and part == "all but the imports" else ""
        yield values_row("merge", case, f"processor time, {part}", seconds, "s/GB", target=target)
    yield values_row("merge", case, "processor time, imports", [each["imports"] for each in found], "s")


def memory_rows(case: str, inputs: Inputs, runs: dict[str, list[Finished]]) -> Iterator[Row]:
    """Peak anonymous memory over that of the imports, the largest of all runs."""
    peaks = {name: [each.anonymous for each in found] for name, found in runs.items() if name not in ("cp -r", "parts")}
    if not all(map(max, peaks.values())):
        yield missing("merge", case, "/proc/PID/status, for the peak memory")
        return
    highest, imports = {name: max(found) for name, found in peaks.items()}, min(peaks["import torch"])
    for name, peak in highest.items():
        note = f"file pages included: {max(each.resident for each in runs[name]) / 2**20:,.0f} MiB"
        yield row("merge", case, f"peak anonymous memory, {name}", peak / 2**20, "MiB", note=note)
    over = (highest["cogumi"] - imports) / 2**20
    metric = "peak anonymous memory, cogumi - import torch"
    yield row("merge", case, metric, over, "MiB", target="<= 150")


def tmpfs_rows(scale: Scale) -> Iterator[Row]:
    """The times where a copy is one in memory, for the sizes that fit."""
    for shape, ratio in ((scale.big, 2.0), (scale.larger, 1.5)):
        # Base, output, and the model that PEFT holds.
        needed = 3.3 * shape.bytes if scale.timed else 0
        if not TMPFS.is_dir() or min(shutil.disk_usage(TMPFS).free, psutil.virtual_memory().available) < needed:
            note = f"skipped: {TMPFS} and the memory have no {needed / 1e9:.0f} GB"
            yield row("merge", f"{shape.name}, tmpfs", "-", None, note=note)
            continue
        with tempfile.TemporaryDirectory(prefix="cogumi-merge-", dir=TMPFS) as name:
            yield from time_rows(shape, Path(name), scale, "tmpfs", ratio)


def sampled_violations(inputs: Inputs, out: Path, rows: int = 8) -> tuple[int, int]:
    """(violations, elements looked at) on some rows of every merged tensor, in float64, without any code of cogumi's.

    |out - (W + delta)| <= half a bfloat16 ulp of W + delta + 2^-20 (|W| + |delta|), delta = scaling * B @ A.
    """
    config = LoraConfig.from_pretrained(str(inputs.adapter))
    scaling, beyond, looked = config.lora_alpha / config.r, 0, 0
    generator = torch.Generator().manual_seed(0)
    base, merged = tensor_files(inputs.base), tensor_files(out)
    with safe_open(inputs.adapter / "adapter_model.safetensors", framework="pt") as factors:
        for key in (key for key in factors.keys() if ".lora_A." in key):  # noqa: SIM118
            name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            left = factors.get_tensor(key.replace(".lora_A.", ".lora_B.")).double()
            right = factors.get_tensor(key).double()
            with safe_open(base[name], framework="pt") as before, safe_open(merged[name], framework="pt") as after:
                weights, outs = before.get_slice(name), after.get_slice(name)
                for i in torch.randint(len(left), (rows,), generator=generator).tolist():
                    weight, got = weights[i].double(), outs[i].double()
                    delta = scaling * (left[i] @ right)
                    # frexp: 2^(exponent - 1) <= |x| < 2^exponent, and bfloat16 has 7 bits after the leading one.
                    exponent = torch.frexp(weight + delta).exponent
                    half_ulp = torch.ldexp(torch.ones_like(weight), exponent - 1 - 7 - 1)
                    allowed = half_ulp + 2.0**-20 * (weight.abs() + delta.abs())
                    beyond += int((~((got - weight - delta).abs() <= allowed)).sum())
                    looked += len(got)
    return beyond, looked


def tensor_files(directory: Path) -> dict[str, Path]:
    """File by tensor name."""
    collected: dict[str, Path] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            collected |= dict.fromkeys(file.keys(), path)
    return collected


def run(quick: bool = False) -> Iterator[Row]:
    scale = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="cogumi-merge-") as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free
        if free < scale.disk_bytes:
            note = f"skipped: needs {scale.disk_bytes / 1e9:.0f} GB in TMPDIR, {free / 1e9:.1f} GB are free"
            yield row("merge", scale.big.name, "-", None, note=note)
            return
        yield from attempt("merge", "time", partial(time_rows, scale.big, folder, scale, "disk", 2.0))
        yield from attempt("merge", "larger", partial(time_rows, scale.larger, folder, scale, "disk", 1.5))
        yield from attempt("merge", "in memory", partial(tmpfs_rows, scale))
