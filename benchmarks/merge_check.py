"""Resident memory of the stage after the training: live logits, merge, and the check of the merged model's logits.

A child process runs the functions of a run on a base of random weights in bfloat16, with an adapter that PEFT saved. Its
peak (VmHWM) is compared with what it was before the live model was loaded. Needs 4 GB of memory and 7 GB of disk.
`python -m benchmarks.merge_check BASE ADAPTER RUN_DIR` is the child.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.harness import Row, row, run_process, status_bytes
from benchmarks.models import LLAMA_1B, Shape, write_inputs
from cogumi.config.schema import load_config
from cogumi.training import finish

QUICK = Shape("Llama of 94 million weights", 768, 2048, 14, 12, 4, 4000, tied=False)  # few logits beside the weights


def run(quick: bool = False) -> Iterator[Row]:
    """Peak bytes for each parameter, and beyond the model in its dtype."""
    shape = QUICK if quick else LLAMA_1B
    result = measure_stage(shape)
    failed, share = result["failed"], result["bytes"] / result["parameters"]
    note, beyond = f"failed: {failed}" if failed else "", result["bytes"] - 2 * result["parameters"]
    yield row("merge_check", shape.name, "peak resident memory a parameter", share, "B", target="<= 3.0", note=note)
    yield row("merge_check", shape.name, "peak beyond the model in bfloat16", beyond / 2**30, "GiB", target="<= 1.0")
    yield row("merge_check", shape.name, "checks", int(not failed), "", target=">= 1", note=note)


def measure_stage(shape: Shape) -> dict[str, Any]:
    """Figures that the child printed."""
    with tempfile.TemporaryDirectory(prefix="cogumi-merge-check-") as scratch:
        inputs = write_inputs(shape, Path(scratch), shard_bytes=5 * 10**9, rank=16)
        words = (inputs.base, inputs.adapter, scratch)
        finished = run_process([sys.executable, "-m", "benchmarks.merge_check", *map(str, words)])
    return dict(json.loads(finished.output.splitlines()[-1]))


def merge_and_check(
    base: Path, adapter: Path, run_dir: Path, device: str, released: Callable[[], None]
) -> tuple[int, list[str]]:
    """Return the number of the base's parameters, and the checks that failed. released: called without the live model."""
    model, options = {"name": str(base), "dtype": "bfloat16"}, {"method": "sft", "run_dir": str(run_dir)}
    run = load_config({"model": model, "data": {"source": str(base)}, "cogumi": options})
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16", device_map={"": device})
    live: Any = PeftModel.from_pretrained(loaded, adapter)
    parameters = sum(weight.numel() for name, weight in live.named_parameters() if "lora_" not in name)
    tokens = torch.randint(2, live.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
    recorded = finish.record_live(run, live, adapter, tokens, None)
    del live, loaded
    gc.collect()
    released()
    _, checks = finish.try_merge(run, adapter, str(base), recorded, None)
    return parameters, [str(check) for check in checks if not check.passed or "not compared" in check.figure]


if __name__ == "__main__":
    before = status_bytes(os.getpid())["resident"]
    base, adapter, run_dir = map(Path, sys.argv[1:])
    parameters, failed = merge_and_check(base, adapter, run_dir, "cpu", lambda: None)
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert peak is not None
    print(json.dumps({"parameters": parameters, "bytes": 1024 * int(peak[1]) - before, "failed": failed}))
