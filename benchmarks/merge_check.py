"""Resident memory of the stage after the training: live logits, merge, and the check of the merged model's logits.

A child process runs the functions of a run on a base of random weights in bfloat16, with an adapter that PEFT saved. Its
peak (VmHWM) is compared with what it was before the live model was loaded. Needs 4 GB of memory and 7 GB of disk.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, python, row, run_process
from benchmarks.models import LLAMA_1B, Shape, write_inputs

QUICK = Shape("Llama of 94 million weights", 768, 2048, 14, 12, 4, 4000, tied=False)  # few logits beside the weights

STAGE = """
import gc, json, re, sys
from pathlib import Path
from typing import Any
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from cogumi.config.schema import load_config
from cogumi.training import finish

def status(name):
    return 1024 * int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

base, adapter, run_dir = sys.argv[1:]
model = {"name": base, "dtype": "bfloat16"}
run = load_config({"model": model, "data": {"source": base}, "cogumi": {"method": "sft", "run_dir": run_dir}})
before = status("VmRSS")
live = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16"), adapter)
parameters = sum(each.numel() for name, each in live.named_parameters() if "lora_" not in name)
tokens = torch.randint(live.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
recorded = finish.record_live(run, live, Path(adapter), tokens, None)
del live
gc.collect()
merged, checks = finish.try_merge(run, Path(adapter), base, recorded, None)
figures = {"parameters": parameters, "bytes": status("VmHWM") - before, "passed": all(each.passed for each in checks)}
print(json.dumps(figures | {"checks": [str(each) for each in checks]}))
"""


def run(quick: bool = False) -> Iterator[Row]:
    """Peak bytes for each parameter, and beyond the model in its dtype."""
    shape = QUICK if quick else LLAMA_1B
    result = measure_stage(shape)
    compared = result["passed"] and "not compared" not in str(result["checks"])
    note = "" if compared else f"failed: {result['checks']}"
    share, beyond = result["bytes"] / result["parameters"], result["bytes"] - 2 * result["parameters"]
    yield row("merge_check", shape.name, "peak resident memory a parameter", share, "B", target="<= 3.0", note=note)
    yield row("merge_check", shape.name, "peak beyond the model in bfloat16", beyond / 2**30, "GiB", target="<= 1.0")
    yield row("merge_check", shape.name, "checks", int(compared), "", target=">= 1", note=note)


def measure_stage(shape: Shape) -> dict[str, Any]:
    """Figures that the child printed."""
    with tempfile.TemporaryDirectory(prefix="cogumi-merge-check-") as scratch:
        inputs = write_inputs(shape, Path(scratch), shard_bytes=5 * 10**9, rank=16)
        finished = run_process(python(STAGE, inputs.base, inputs.adapter, scratch))
    return dict(json.loads(finished.output.splitlines()[-1]))
