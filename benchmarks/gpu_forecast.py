"""The preflight's forecast of a run's memory beside what the run took: real runs of a few steps, each in its own process.

The model has random weights of a 1.2B Llama's shapes and the small base's tokenizer; the data are the standard library's
functions. What is compared is torch.cuda.max_memory_allocated() over the whole run with the peak of tensors and workspaces
that `preflight.json` has (metrics.json, `gpu_peak_forecast`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Budget, Row, attempt, out_of_time, python, row, run_process

NEEDS_SECONDS = 60.0
LLAMA: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
TRAIN = "import sys, json, cogumi; cogumi.train(json.loads(sys.argv[1]))"
SFT = {"method": "sft"}
GSPO = {"method": "gspo", "rewards": ["parses"]}
ROLLOUT = {
    "num_generations": 8,
    "max_completion_length": 256,
    "steps_per_generation": 1,
    "per_device_train_batch_size": 16,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sft, layers kept": (SFT, {"gradient_checkpointing": False}, {}),
    "sft, layers recomputed": (SFT, {"gradient_checkpointing": True}, {}),
    "sft, 4-bit": (SFT, {"gradient_checkpointing": True}, {"quantization_config": {"load_in_4bit": True}}),
    "gspo, rollout by transformers": (GSPO, {"gradient_checkpointing": True, **ROLLOUT}, {}),
}


def run(quick: bool = False, device: str = "cuda", budget: Budget | None = None) -> Iterator[Row]:
    """`quick`: the first case alone."""
    budget = budget or Budget(300.0)
    with tempfile.TemporaryDirectory(prefix="cogumi-benchmark-") as scratch:
        model = Path(scratch) / "model"
        for case in list(CASES)[: 1 if quick else None]:
            if budget.left() < NEEDS_SECONDS:
                yield out_of_time("gpu_forecast", case)
                continue
            if not model.exists():
                random_model(model, LLAMA)
            place = Path(scratch) / case.replace(" ", "-").replace(",", "")
            yield from attempt("gpu_forecast", case, lambda case=case, place=place: compared(case, model, place))  # type: ignore[misc]


def random_model(path: Path, shape: dict[str, Any]) -> Path:
    """Weights of these shapes, which are made on the CPU and saved in bfloat16."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from cogumi.models.loading import SMALL_BASE, resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(SMALL_BASE))
    tokenizer.save_pretrained(path)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=tokenizer.eos_token_id))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(path)
    return path


def compared(case: str, model: Path, run_dir: Path) -> Iterator[Row]:
    options, train, of_model = CASES[case]
    config = {
        "model": {"name": str(model), **of_model},
        "lora": {"r": 16, "lora_alpha": 32},
        "data": {"source": "cogumi:stdlib", "max_rows": 500, "eval_rows": 0, "fim": {"max_length": 512}},
        "train": {"max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-5, "save_strategy": "no"}
        | train,
        "cogumi": {"run_dir": str(run_dir), "merge": False, "compile": "off", "preflight": "on", **options},
    }
    run_process(python(TRAIN, json.dumps(config)))
    memory = json.loads((run_dir / "metrics.json").read_text())["memory"]
    forecast, peak = memory["gpu_peak_forecast"], memory.get("gpu_peak_allocated")
    if peak is None:
        note = "no GPU: nothing to compare with"
        yield row("gpu_forecast", case, "forecast of the peak", forecast / 2**30, "GiB", note=note)
        return
    sizes = {"forecast": forecast, "peak": peak, "reserved": memory["gpu_peak_reserved"]}
    note = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.items())
    away = 100 * abs(forecast / peak - 1)
    yield row("gpu_forecast", case, "forecast away from the peak", away, "%", target="<= 5", note=note)
