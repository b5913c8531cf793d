"""How long the forecast of a step takes and what memory, for an 8B and a 20B mixture of experts.

Each runs in a process of its own, from a config.json; its time includes the imports and the search for the largest batch,
length and rank. How near it comes is tests/test_memory.py's.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row, row

SECONDS = {"llama-3.1-8b": 20, "gpt-oss-20b": 60}
GIB = 4
FORECAST = """
import json, resource, sys, time
started = time.monotonic()
from transformers import AutoConfig
from cogumi.config.schema import load_config
from cogumi.forecast.training_step import Work
from cogumi.rl.patching import patch
from cogumi.forecast.memory_forecast import step_on, target_of
patch(graph_break="off")
run = load_config({"model": {"name": "x"}, "lora": {"r": 16, "lora_alpha": 32}, "data": {"source": "cogumi:stdlib"},
    "train": {"max_steps": 1, "gradient_checkpointing": True}, "cogumi": {"method": "sft"}})
found = step_on(run, AutoConfig.from_pretrained(sys.argv[1]), Work("sft", 2, 2048), target_of("H100 SXM"))
print(json.dumps({"seconds": time.monotonic() - started, "peak": found.forecast.peak, "stage": found.forecast.fullest.stage,
    "breakdown": found.forecast.breakdown, "largest": vars(found.largest),
    "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def run(quick: bool = False) -> Iterator[Row]:
    """`quick`: the 8B alone."""
    from transformers import GptOssConfig, LlamaConfig

    configs = {
        "llama-3.1-8b": LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, architectures=["LlamaForCausalLM"],
        ),
        "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32, architectures=["GptOssForCausalLM"]),
    }  # fmt: skip
    for name, config in list(configs.items())[: 1 if quick else 2]:
        with tempfile.TemporaryDirectory(prefix="cogumi-benchmark-") as place:
            config.save_pretrained(Path(place))
            done = subprocess.run([sys.executable, "-c", FORECAST, place], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        parts = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in found["breakdown"].items())
        case = f"{name}, LoRA r=16, 2 x 2048 tokens, layers recomputed"
        yield row("preflight", case, "forecast, imports included", found["seconds"], "s", target=f"<= {SECONDS[name]}")
        yield row("preflight", case, "memory of the forecast", found["rss"] / 2**30, "GiB", target=f"<= {GIB}")
        yield row("preflight", case, "peak on an H100", found["peak"] / 2**30, "GiB", note=f"{found['stage']}: {parts}")
