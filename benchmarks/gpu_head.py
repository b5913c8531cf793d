"""The language-model head: log-probabilities of given tokens and their gradient to the hidden states, at real shapes.

Three ways, on the same bf16 tensors with a frozen head as under LoRA: `dense` builds the logits whole, `trl` is TRL's
Triton kernel, `cogumi` is the patch for machines where that cannot run, with its sums in fp32. The last two also return
the entropy, as GRPO asks for it; `dense` does not, which flatters it. Both errors are against fp32 on a slice of the
tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_device import first_run, memory_row, out_of_time, peak_memory, release
from benchmarks.harness import Budget, Row, attempt, interleave, missing, ratio, row, summary

# (tokens, hidden size, vocabulary)
LLAMA_8B = (8192, 4096, 128256)
LLAMA_8B_SHORT = (4096, 4096, 128256)
QWEN3_0_6B = (8192, 1024, 151936)
# Vocabulary columns per tile, TRL's default.
TILE = 32768
ORACLE_TOKENS = 64
NEEDS_SECONDS = 30.0

# (hidden [N, H], weight [V, H], targets [N]) -> log-probabilities [N]
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def dense(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def trl_kernel(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, TILE, None, 1.0, ("log_probs", "entropy"))[
        0
    ]


def cogumi_head(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from cogumi.patches.head_logps import FusedLogProbFunction

    return FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, TILE, None, 1.0, ("log_probs", "entropy"))[0]


def why_no_trl_kernel(device: str) -> str | None:
    """What TRL's kernel lacks here, or None when it can run."""
    for package in ("trl", "triton"):
        if importlib.util.find_spec(package) is None:
            return package
    return None if device.startswith("cuda") else "a GPU, which TRL's Triton kernel needs"


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

    heads: dict[str, Head] = {"cogumi": cogumi_head, "dense": dense}
    lacking = why_no_trl_kernel(device)
    if lacking is None:
        heads = {"cogumi": cogumi_head, "trl": trl_kernel, "dense": dense}
    else:
        yield missing("gpu_head", f"{case}: trl", lacking)

    work: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, head in heads.items():
        once = partial(_forward_backward, head, hidden, weight, targets, upstream)
        if problem := first_run("gpu_head", f"{case}: {name}", once):
            yield problem
        else:
            work[name] = once

    wanted, wanted_gradient = oracle(hidden, weight, targets, upstream)
    times = interleave(work, repeats)
    for name, measured in work.items():
        here = f"{case}: {name}"
        milliseconds = [1e3 * each for each in times[name]]
        middle, spread = summary(milliseconds)
        yield row("gpu_head", here, "forward and backward", middle, "ms", spread=spread)
        # 2 FLOP per weight and token forward, 2 for the gradient to the hidden states; recomputation not counted.
        rate = 4 * tokens * width * vocabulary / (middle / 1e3) / 1e12
        yield row("gpu_head", here, "useful rate", rate, "TFLOP/s")
        release()
        (logps, gradient), peak = peak_memory(device, measured)
        yield memory_row("gpu_head", here, "peak memory, inputs included", peak)
        count = len(wanted)
        error = (logps[:count].float() - wanted).abs().max().item()
        yield row("gpu_head", here, f"max |log-prob - fp32| of {count} tokens", error, "nat")
        error = ((gradient[:count].float() - wanted_gradient).norm() / wanted_gradient.norm()).item()
        yield row("gpu_head", here, f"gradient against fp32 of {count} tokens", error, "relative")
        del logps, gradient
    if "cogumi" in work:
        for peer in (name for name in work if name != "cogumi"):
            middle, *extremes = ratio(times, "cogumi", peer)
            spread = (extremes[0], extremes[1])
            yield row("gpu_head", case, f"time, cogumi / {peer}", middle, "ratio", spread=spread)


def _forward_backward(
    head: Head, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and the gradient of their weighted sum to `hidden`."""
    leaf = hidden.detach().requires_grad_()
    logps = head(leaf, weight, targets)
    (gradient,) = torch.autograd.grad(logps, leaf, upstream.to(logps.dtype))
    return logps.detach(), gradient


def oracle(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    upstream: torch.Tensor,
    tokens: int = ORACLE_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in fp32 for the first `tokens` rows, by the dense way (torch's default computes fp32 without tf32)."""
    return _forward_backward(dense, hidden[:tokens].float(), weight.float(), targets[:tokens], upstream[:tokens])


def run(quick: bool = False, device: str = "cuda", budget: Budget | None = None) -> Iterator[Row]:
    shapes = [QWEN3_0_6B] if quick else [QWEN3_0_6B, LLAMA_8B_SHORT, LLAMA_8B]
    for shape in shapes:
        case = " x ".join(map(str, shape))
        if budget is not None and budget.left() < NEEDS_SECONDS:
            yield out_of_time("gpu_head", case)
            continue
        work = partial(head_case, device, torch.bfloat16, shape, repeats=3 if quick else 9)
        yield from attempt("gpu_head", case, work)
        release()
