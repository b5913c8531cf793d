"""The older measurements of a card: TRL's Triton head beside cogumi's and dense logits, and forecasts of memory.

`forecasts` compares the preflight's forecast with torch.cuda.max_memory_allocated() of real runs, each in its own process,
and gives their speed: random weights of a 1.2B Llama's shapes, the small base's tokenizer, the standard library's functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import Setting, write_model
from benchmarks.gpu_checks import shapes
from benchmarks.harness import Row, attempt, interleave, python, ratio_row, row, run_process, values_row
from cogumi.core.run_directory import read_jsonl

HEADS = [(8192, 1024, 151936), (4096, 4096, 128256), (8192, 4096, 128256)]  # Qwen3-0.6B, Llama-3.1-8B
SMALL_HEADS = [(128, 32, 1000)]
TRAIN = "import sys, json, cogumi; cogumi.train(json.loads(sys.argv[1]))"
SFT = {"method": "sft"}
GSPO = {"method": "gspo", "rewards": ["parses"]}
ROLLOUT = {
    "num_generations": 8, "max_completion_length": 256, "steps_per_generation": 1, "per_device_train_batch_size": 16,
    "max_steps": 3, "logging_steps": 1,
}  # fmt: skip
STEPS = {
    "max_steps": 10, "logging_steps": 5, "per_device_train_batch_size": 8, "learning_rate": 1e-5, "save_strategy": "no",
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sft, layers kept": (SFT, {"gradient_checkpointing": False}, {}),
    "sft, layers recomputed": (SFT, {"gradient_checkpointing": True}, {}),
    "sft, 4-bit": (SFT, {"gradient_checkpointing": True}, {"quantization_config": {"load_in_4bit": True}}),
    "gspo, rollout by transformers": (GSPO, {"gradient_checkpointing": True, **ROLLOUT}, {}),
}


def heads(setting: Setting) -> Iterator[Row]:
    for shape in HEADS if setting.on_card else SMALL_HEADS:
        yield from head_rows(shape, setting.device, 5 if setting.on_card else 2)


def head_rows(shape: tuple[int, int, int], device: str, repeats: int) -> Iterator[Row]:
    """Forward and backward in bfloat16 of (tokens, hidden size, vocabulary): time, peak memory, error against float32."""
    from benchmarks.fused_head import dense, fused, inputs, step

    tensors = tuple(each.to(device) for each in inputs(shape, torch.bfloat16))
    ways: dict[str, Any] = {"cogumi": fused, "dense": dense}
    if find_spec("triton") and device != "cpu":
        from trl.kernels import ChunkedLogProbFunction

        ways["trl"] = partial(fused, kernel=ChunkedLogProbFunction)
    case = " x ".join(map(str, shape))

    def once(way: Any) -> None:
        step(way, *tensors)
        if device != "cpu":
            torch.cuda.synchronize()

    times = interleave({name: partial(once, way) for name, way in ways.items()}, repeats)
    exact = step(dense, tensors[0][:64].float(), tensors[1].float(), tensors[2][:64])
    for name, way in ways.items():
        yield values_row(
            "gpu_head", f"{case}: {name}", "forward and backward", [1e3 * each for each in times[name]], "ms"
        )
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        found = step(way, *tensors)
        if device != "cpu":
            peak = torch.cuda.max_memory_allocated() / 2**30
            yield row("gpu_head", f"{case}: {name}", "peak memory, inputs included", peak, "GiB")
        for what, mine, theirs in zip(("log-prob", "gradient"), found, exact, strict=True):
            error = ((mine[:64].float() - theirs).norm() / theirs.norm()).item()
            yield row("gpu_head", f"{case}: {name}", f"{what} against float32 of 64 tokens", error, "relative")
    for peer in ways.keys() - {"cogumi"}:
        yield ratio_row("gpu_head", case, f"time, cogumi / {peer}", times, "cogumi", peer)


def forecasts(setting: Setting) -> Iterator[Row]:
    model = write_model(setting.scratch / "llama", shapes(setting), setting.device)
    for case in list(CASES)[: None if setting.on_card else 1]:
        place = setting.scratch / case.replace(" ", "-").replace(",", "")
        yield from attempt("gpu_forecast", case, partial(compared, case, model, place))


def step(setting: Setting) -> Iterator[Row]:
    from benchmarks import gspo_step

    if setting.on_card:
        yield from gspo_step.run(quick=True, device=setting.device)
    else:
        yield from gspo_step.step_rows(shapes(setting), gspo_step.Batch(4, 8, 8), "cpu", torch.float32, repeats=2)


def compared(case: str, model: Path, run_dir: Path) -> Iterator[Row]:
    options, train, of_model = CASES[case]
    config = {
        "model": {"name": str(model), **of_model},
        "lora": {"r": 16, "lora_alpha": 32},
        "data": {"source": "cogumi:stdlib", "max_rows": 500, "eval_rows": 0, "fim": {"max_length": 512}},
        "train": STEPS | train,
        "cogumi": {"run_dir": str(run_dir), "merge": False, "compile": "off", "preflight": "on", **options},
    }
    run_process(python(TRAIN, json.dumps(config)))
    metrics = json.loads((run_dir / "metrics.json").read_text())
    memory = metrics["memory"]
    forecast, peak = memory["gpu_peak_forecast"], memory.get("gpu_peak_allocated")
    if peak is None:
        note = "no GPU: nothing to compare with"
        yield row("gpu_forecast", case, "forecast of the peak", forecast / 2**30, "GiB", note=note)
        return
    sizes = {"forecast": forecast, "peak": peak, "reserved": memory["gpu_peak_reserved"]}
    note = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.items())
    away = 100 * abs(forecast / peak - 1)
    yield row("gpu_forecast", case, "forecast away from the peak", away, "%", target="<= 5", note=note)
    logged = [each for each in read_jsonl(run_dir / "metrics.jsonl") if each.get("perf/tokens_per_second")]
    last, case = logged[-1], f"{case}, without the first steps"
    yield row("gpu_forecast", case, "throughput", last["perf/tokens_per_second"], "token/s")
    yield row("gpu_forecast", case, "MFU", last.get("perf/mfu"), "of the peak", note=metrics.get("no_mfu", ""))
