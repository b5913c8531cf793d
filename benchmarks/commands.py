"""What commands cost a user, each in a process of its own: `import cogumi`, the smoke run, the forecast of a step.

`importing`: a notebook's first cell, and every `cogumi status`. `smoke`: as a newcomer runs it, cold cache, with memory of the
whole process tree. `preflight`: seconds and memory of forecasting an 8B and a 20B mixture of experts from a config.json,
imports included; tests/test_memory.py says how near it comes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial

from benchmarks.harness import Row, interleave, last_line, python, row, run_process, values_row

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "polars", "pandas")
# Above a bare interpreter, so that a slow machine's start-up is not charged to us.
LIMIT_MS = 100.0
SMOKE_SECONDS, SMOKE_GIB = 120.0, 3.0
FORECAST_SECONDS, FORECAST_GIB = {"llama-3.1-8b": 20, "gpt-oss-20b": 60}, 4
FORECAST = """
import sys
from transformers import AutoConfig
from cogumi.config.schema import load_config
from cogumi.forecast.training_step import StepShape
from cogumi.rl.patching import patch
from cogumi.forecast.memory_forecast import find_target, forecast_step
patch(graph_break="off")
run = load_config({"model": {"name": "x"}, "lora": {"r": 16, "lora_alpha": 32}, "data": {"source": "cogumi:stdlib"},
    "train": {"max_steps": 1, "gradient_checkpointing": True}, "cogumi": {"method": "sft"}})
forecast_step(run, AutoConfig.from_pretrained(sys.argv[1]), StepShape("sft", 2, 2048), find_target("H100 SXM"))
"""


def importing(quick: bool = False) -> Iterator[Row]:
    contenders = {code: partial(run_process, python(code)) for code in ("pass", "import cogumi")}
    times = interleave(contenders, 5 if quick else 21)
    # The difference of adjacent pairs, as in harness.ratio: both felt the same load.
    extra = [1e3 * (ours - bare) for bare, ours in zip(*times.values(), strict=True)]
    case = "import cogumi, over python -c pass"
    yield values_row("importing", case, "time", extra, "ms", target=f"<= {LIMIT_MS:g}")
    names = f"import sys, cogumi; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    loaded = run_process(python(names)).output.split()
    note = f"{', '.join(loaded) or 'none'} of {', '.join(HEAVY)}"
    yield row("importing", "import cogumi", "heavy modules loaded", len(loaded), target="<= 0", note=note)


def smoke(quick: bool = False) -> Iterator[Row]:
    for case, flags in {"cold cache": [], "--quick, cold cache": ["--quick"]}.items():
        if quick and not flags:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "cogumi.smoke", "--run-dir", f"{folder}/run", *flags]
            # The limit is past the target, so that a miss is a number.
            cache = {"XDG_CACHE_HOME": f"{folder}/cache"}
            ran = run_process(command, env=os.environ | cache, timeout=5 * SMOKE_SECONDS, check=False)
        passed = ran.returncode == 0
        note = "" if passed else last_line(ran.output)[:200]
        yield row("smoke", case, "exit status", ran.returncode, ok=passed, note=note)
        # A run that failed was cut short: its time and memory would flatter it.
        if passed:
            target = "" if flags else f"<= {SMOKE_SECONDS:g}"
            yield row("smoke", case, "wall time", ran.seconds, "s", target=target)
            yield row("smoke", case, "peak RSS, process tree", ran.resident / 2**30, "GiB", target=f"<= {SMOKE_GIB:g}")


def preflight(quick: bool = False) -> Iterator[Row]:
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
            config.save_pretrained(place)
            ran = run_process(python(FORECAST, place))
        case, target = f"{name}, LoRA r=16, 2 x 2048 tokens, layers recomputed", f"<= {FORECAST_SECONDS[name]}"
        yield row("preflight", case, "forecast, imports included", ran.seconds, "s", target=target)
        yield row("preflight", case, "memory of the forecast", ran.resident / 2**30, "GiB", target=f"<= {FORECAST_GIB}")
