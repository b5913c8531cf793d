"""Everything there is to measure on a card, under one time budget: what comes too late is reported as skipped.

`probe_rows` asks whether the installed stack works there (`cogumi.stack.probes`): a package that is not installed is a
"missing" row, one that does not work a failed one. `head_rows` measures the language-model head at real shapes: bf16
tensors and a frozen head, as under LoRA, in three ways. `dense` builds the logits whole, `trl` is TRL's Triton kernel, and
`cogumi` is the patch for machines where that cannot run. The last two also return the entropy, as GRPO asks for it; `dense`
does not, which flatters it. Both errors are against fp32 on a slice of the tokens.

`forecast_rows` compares the preflight's forecast of memory with torch.cuda.max_memory_allocated() of real runs of a few steps,
each in its own process: random weights of a 1.2B Llama's shapes, the small base's tokenizer, the standard library's
functions (metrics.json, `gpu_peak_forecast`).
"""

from __future__ import annotations

import gc
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.harness import (
    Budget,
    Row,
    attempt,
    interleave,
    missing,
    one_line,
    python,
    ratio_row,
    row,
    run_process,
    synchronize,
    values_row,
)
from cogumi.stack.probes import PROBES, TIMEOUT, run_probe

# A rented or lent card is often given in slices of ten minutes; this leaves one for start-up and copying.
SECONDS = 540.0
# (tokens, hidden size, vocabulary)
LLAMA_8B, LLAMA_8B_SHORT, QWEN3_0_6B = (8192, 4096, 128256), (4096, 4096, 128256), (8192, 1024, 151936)
TILE = 32768  # vocabulary columns per tile, TRL's default
ORACLE_TOKENS = 64
NEEDS_SECONDS = 30.0
Result = TypeVar("Result")
# (hidden [N, H], weight [V, H], targets [N]) -> log-probabilities [N]
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(quick: bool = False, device: str = "cuda", budget: Budget | None = None) -> Iterator[Row]:
    from benchmarks import gpu_steps, gspo_step

    budget = budget or Budget(SECONDS)
    parts = {
        "gpu_probes": probe_rows,
        "gpu_head": head_rows,
        "gpu_steps": gpu_steps.run,
        "gpu_forecast": forecast_rows,
        "gspo_step": gspo_step.run,
    }
    for name, part in parts.items():
        yield from attempt(name, "-", partial(part, quick, device, budget))


def no_cuda() -> str | None:
    """Why there is no CUDA device to measure, or None when there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no usable device"
    return None


def peak_memory(device: str, work: Callable[[], Result]) -> tuple[Result, int | None]:
    """What `work()` returns, and the bytes the CUDA allocator held at most meanwhile; None for these off CUDA."""
    if not device.startswith("cuda"):
        return work(), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated()


def memory_row(benchmark: str, case: str, metric: str, peak: int | None) -> Row:
    if peak is None:
        return missing(benchmark, case, "the CUDA allocator's statistics") | {"metric": metric}
    return row(benchmark, case, metric, peak / 2**30, "GiB")


def release() -> None:
    """Give cached blocks back, so that the next case does not run out of memory that nothing uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_run(benchmark: str, case: str, work: Callable[[], object]) -> Row | None:
    """Run `work()` once. None when it ran, else the row that says why it is not measured; the others still are."""
    try:
        work()
        synchronize()
        return None
    except torch.cuda.OutOfMemoryError:
        # Not ok=False: a small card that cannot hold a big shape is a finding, not a defect.
        problem = row(benchmark, case, "-", None, note="out of memory on this card")
    except Exception as error:  # noqa: BLE001 - shown in the table and in the exit status
        problem = row(benchmark, case, "-", None, ok=False, note=f"failed: {one_line(error)}")
    # Outside of the handlers: inside, the traceback would keep the very tensors that did not fit.
    release()
    return problem


def probe_rows(quick: bool = False, device: str = "cuda", budget: Budget | None = None) -> Iterator[Row]:
    for name in PROBES:
        timeout = TIMEOUT if budget is None else min(TIMEOUT, budget.left())
        # It takes 15 seconds to import torch and open the device on a slow disk.
        yield from attempt("gpu_probes", name, partial(probe, name, device, timeout), budget, 15)


def probe(name: str, device: str, timeout: float = TIMEOUT) -> list[Row]:
    done = run_probe(name, device, timeout)
    if done.missing:
        return [missing("gpu_probes", name, done.missing)]
    if done.error:
        return [row("gpu_probes", name, "-", None, ok=False, note=f"failed: {done.error}")]
    return [row("gpu_probes", name, metric, value, unit, note=note) for metric, value, unit, note in done.readings]


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def trl_kernel(
    hidden: Tensor, weight: Tensor, targets: Tensor, outputs: tuple[str, ...] = ("log_probs", "entropy")
) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, TILE, None, 1.0, outputs)[0]


def cogumi_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, outputs: tuple[str, ...] = ("log_probs", "entropy")
) -> Tensor:
    from cogumi.patches.head_logps import FusedLogProbFunction

    return FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, TILE, None, 1.0, outputs)[0]


def why_no_trl_kernel(device: str) -> str | None:
    """What TRL's kernel lacks here, or None when it can run."""
    if importlib.util.find_spec("triton") is None:
        return "triton"
    return None if device.startswith("cuda") else "a GPU, which TRL's Triton kernel needs"


def head_rows(quick: bool = False, device: str = "cuda", budget: Budget | None = None) -> Iterator[Row]:
    for shape in [QWEN3_0_6B] if quick else [QWEN3_0_6B, LLAMA_8B_SHORT, LLAMA_8B]:
        work = partial(head_case, device, torch.bfloat16, shape, repeats=3 if quick else 9)
        yield from attempt("gpu_head", " x ".join(map(str, shape)), work, budget, NEEDS_SECONDS)
        release()


def head_case(device: str, dtype: torch.dtype, shape: tuple[int, int, int], repeats: int = 7) -> Iterator[Row]:
    """Time, peak memory and errors of the ways that can run on `device`, for (tokens, hidden size, vocabulary)."""
    tokens, width, vocabulary = shape
    case = f"{tokens} x {width} x {vocabulary} {str(dtype).removeprefix('torch.')}"
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, generator=generator)
    # Logits of a standard deviation of about 4, as a trained model's: a flat distribution would hide rounding.
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype, generator=generator).mul_(4 * width**-0.5)
    targets = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
    upstream = torch.randn(tokens, device=device, generator=generator)

    heads: dict[str, Head] = {"cogumi": cogumi_head, "trl": trl_kernel, "dense": dense}
    if lacking := why_no_trl_kernel(device):
        del heads["trl"]
        yield missing("gpu_head", f"{case}: trl", lacking)
    work: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
    for name, head in heads.items():
        once = partial(_forward_backward, head, hidden, weight, targets, upstream)
        if problem := first_run("gpu_head", f"{case}: {name}", once):
            yield problem
        else:
            work[name] = once

    # The same in fp32 for a few rows, by the dense way (torch's default computes fp32 without tf32).
    few = slice(ORACLE_TOKENS)
    oracle = _forward_backward(dense, hidden[few].float(), weight.float(), targets[few], upstream[few])
    count = len(oracle[0])
    times = interleave(work, repeats)
    for name, measured in work.items():
        here = f"{case}: {name}"
        yield values_row("gpu_head", here, "forward and backward", [1e3 * each for each in times[name]], "ms")
        # 2 FLOP per weight and token forward, 2 for the gradient to the hidden states; recomputation not counted.
        rate = 4 * tokens * width * vocabulary / statistics.median(times[name]) / 1e12
        yield row("gpu_head", here, "useful rate", rate, "TFLOP/s")
        release()
        (logps, gradient), peak = peak_memory(device, measured)
        yield memory_row("gpu_head", here, "peak memory, inputs included", peak)
        error = (logps[:count].float() - oracle[0]).abs().max().item()
        yield row("gpu_head", here, f"max |log-prob - fp32| of {count} tokens", error, "nat")
        error = ((gradient[:count].float() - oracle[1]).norm() / oracle[1].norm()).item()
        yield row("gpu_head", here, f"gradient against fp32 of {count} tokens", error, "relative")
        del logps, gradient
    for peer in (name for name in work if "cogumi" in work and name != "cogumi"):
        yield ratio_row("gpu_head", case, f"time, cogumi / {peer}", times, "cogumi", peer)


def _forward_backward(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and the gradient of their weighted sum to `hidden`."""
    leaf = hidden.detach().requires_grad_()
    logps = head(leaf, weight, targets)
    (gradient,) = torch.autograd.grad(logps, leaf, upstream.to(logps.dtype))
    return logps.detach(), gradient


FORECAST_SECONDS = 60.0
LLAMA: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
TRAIN = "import sys, json, cogumi; cogumi.train(json.loads(sys.argv[1]))"
SFT = {"method": "sft"}
GSPO = {"method": "gspo", "rewards": ["parses"]}
ROLLOUT = {
    "num_generations": 8, "max_completion_length": 256, "steps_per_generation": 1, "per_device_train_batch_size": 16,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sft, layers kept": (SFT, {"gradient_checkpointing": False}, {}),
    "sft, layers recomputed": (SFT, {"gradient_checkpointing": True}, {}),
    "sft, 4-bit": (SFT, {"gradient_checkpointing": True}, {"quantization_config": {"load_in_4bit": True}}),
    "gspo, rollout by transformers": (GSPO, {"gradient_checkpointing": True, **ROLLOUT}, {}),
}


def forecast_rows(quick: bool = False, device: str = "cuda", budget: Budget | None = None) -> Iterator[Row]:
    """`quick`: the first case alone."""
    budget = budget or Budget(300.0)
    with tempfile.TemporaryDirectory(prefix="cogumi-benchmark-") as scratch:
        model = Path(scratch) / "model"
        if budget.left() >= FORECAST_SECONDS:
            random_model(model, LLAMA)
        for case in list(CASES)[: 1 if quick else None]:
            place = Path(scratch) / case.replace(" ", "-").replace(",", "")
            yield from attempt("gpu_forecast", case, partial(compared, case, model, place), budget, FORECAST_SECONDS)


def random_model(path: Path, shape: dict[str, Any]) -> Path:
    """Weights of these shapes, which are made on the CPU and saved in bfloat16."""
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
