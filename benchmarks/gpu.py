"""Everything there is to measure on a card, under one time budget: what comes too late is reported as skipped.

`probe_rows` asks whether the installed stack works there (`cogumi.stack.probes`): a package that is not installed is a
"missing" row, one that does not work a failed one. `head_rows` compares cogumi's head with TRL's Triton kernel, which cogumi
leaves in place where it runs, and with dense logits. `forecast_rows` compares the preflight's forecast of memory with
torch.cuda.max_memory_allocated() of real runs, each in its own process, and says how fast they were: random weights of a
1.2B Llama's shapes, the small base's tokenizer, the standard library's functions.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, attempt, interleave, missing, python, ratio_row, row, run_process, values_row
from cogumi.core.run_directory import read_jsonl
from cogumi.stack.probes import PROBES, TIMEOUT, run_probe

# A rented or lent card is often given in slices of ten minutes; this leaves one for start-up and copying.
SECONDS = 540.0
FORECAST_SECONDS = 60.0
HEAD_SECONDS = 15.0
HEADS = [(8192, 1024, 151936), (4096, 4096, 128256), (8192, 4096, 128256)]  # Qwen3-0.6B, Llama-3.1-8B
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


def run(quick: bool = False, device: str = "cuda", seconds: float = SECONDS) -> Iterator[Row]:
    deadline = time.monotonic() + seconds
    for name, part in {
        "gpu_probes": probe_rows,
        "gpu_head": head_rows,
        "gpu_forecast": forecast_rows,
        "gspo_step": step_rows,
    }.items():
        yield from attempt(name, "-", partial(part, quick, device, deadline))


def step_rows(quick: bool, device: str, deadline: float) -> Iterator[Row]:
    from benchmarks import gspo_step  # not above: probes run where transformers and TRL cannot be imported

    yield from gspo_step.run(quick, device, deadline)


def no_cuda() -> str | None:
    """Why there is no CUDA device to measure, or None when there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no usable device"
    return None


def probe_rows(quick: bool = False, device: str = "cuda", deadline: float = math.inf) -> Iterator[Row]:
    for name in PROBES:
        timeout = min(TIMEOUT, deadline - time.monotonic())
        # It takes 15 seconds to import torch and open the device on a slow disk.
        yield from attempt("gpu_probes", name, partial(probe, name, device, timeout), deadline, 15)


def probe(name: str, device: str, timeout: float = TIMEOUT) -> list[Row]:
    try:
        readings = run_probe(name, device, timeout)
    except ModuleNotFoundError as error:
        return [missing("gpu_probes", name, str(error).removesuffix(" is not installed"))]
    except RuntimeError as error:
        return [row("gpu_probes", name, "-", None, ok=False, note=f"failed: {error}")]
    return [row("gpu_probes", name, metric, value, unit, note=note) for metric, value, unit, note in readings]


def head_rows(quick: bool = False, device: str = "cuda", deadline: float = math.inf) -> Iterator[Row]:
    for shape in HEADS[: 1 if quick else None]:
        case = partial(heads, shape, device, 3 if quick else 9)
        yield from attempt("gpu_head", " x ".join(map(str, shape)), case, deadline, HEAD_SECONDS)


def heads(shape: tuple[int, int, int], device: str, repeats: int) -> Iterator[Row]:
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


def forecast_rows(quick: bool = False, device: str = "cuda", deadline: float = math.inf) -> Iterator[Row]:
    """`quick`: the first case alone."""
    with tempfile.TemporaryDirectory(prefix="cogumi-benchmark-") as scratch:
        model = Path(scratch) / "model"
        if deadline - time.monotonic() >= FORECAST_SECONDS:
            write_model(model)
        for case in list(CASES)[: 1 if quick else None]:
            place = Path(scratch) / case.replace(" ", "-").replace(",", "")
            yield from attempt("gpu_forecast", case, partial(compared, case, model, place), deadline, FORECAST_SECONDS)


def write_model(path: Path, shape: Any = None) -> Path:
    """A random model, by default a Llama of 1.2 billion weights, with the small base's tokenizer."""
    from transformers import AutoTokenizer

    from benchmarks.models import LLAMA_1B, random_model
    from cogumi.models.small_base import small_base_path

    tokenizer = AutoTokenizer.from_pretrained(small_base_path())
    tokenizer.save_pretrained(path)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    random_model(shape or LLAMA_1B, **ends).save_pretrained(path)
    return path


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
