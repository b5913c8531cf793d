"""Numerics of a card that a run depends on: RoPE's angles under TF32, and torch's attention with and without cuDNN."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu import Setting
from benchmarks.harness import Row, row, values_row

THETA, HEAD_DIM = 500_000.0, 128  # Llama 3.1
NAME = "numerics"


def run(setting: Setting) -> Iterator[Row]:
    yield from rope_angles(setting)
    yield from masked_backward(setting)
    yield from attention_times(setting)


def rope_angles(setting: Setting) -> Iterator[Row]:
    """Angles as transformers computes them (a matrix product in float32) against float64, per float32 precision."""
    frequencies = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    inverse = frequencies.float().to(setting.device)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    for precision in ("ieee", "tf32"):
        matmul.fp32_precision = precision
        for length in (2048, 4096) if setting.on_card else (256,):
            positions = torch.arange(length, dtype=torch.float32, device=setting.device)
            for batch in (1, 8):
                angles = inverse[None, :, None].expand(batch, -1, 1) @ positions[None, None].expand(batch, 1, -1)
                error = (angles - (inverse[:, None] * positions)).abs().max().item()
                target = "<= 0" if precision == "ieee" else "expected 0.34 at 2,048 where cuBLAS takes TF32"
                case = f"RoPE, {batch} x {length}, {precision}"
                yield row(NAME, case, "largest error of an angle", error, "rad", target=target)
    matmul.fp32_precision = before


def masked_backward(setting: Setting) -> Iterator[Row]:
    """pytorch issue 196678: NaN in the query's gradient for 704 tokens, a mask, and a row whose logsumexp is below -88.7."""
    for enabled in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        length, shape = 704, (1, 8, 704, HEAD_DIM)
        query = torch.full(shape, 3.0, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
        key = torch.full(shape, -3.0, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
        value = torch.randn(shape, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.ones(length, length, dtype=torch.bool, device=setting.device).tril()[None, None]
        scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
        assert query.grad is not None
        broken = int(query.grad.isnan().sum().item())
        case = f"masked attention backward, cuDNN {'allowed' if enabled else 'off'}"
        expected = "expected > 0 on Hopper with cuDNN below 9.26" if enabled else "<= 0"
        yield row(NAME, case, "NaN in the query's gradient", broken, "elements", target=expected)


def attention_times(setting: Setting) -> Iterator[Row]:
    """New lengths cost cuDNN a plan each: first and second call of 12 lengths, and decode steps with a growing cache."""
    heads, lengths = (32, range(900, 1020, 10)) if setting.on_card else (2, range(20, 24))
    for enabled in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        name = f"cuDNN {'allowed' if enabled else 'off'}"
        first = [timed(setting, lambda n=n: masked_step(setting, 4, heads, n)) for n in lengths]
        second = [timed(setting, lambda n=n: masked_step(setting, 4, heads, n)) for n in lengths]
        yield values_row(NAME, f"masked, new length, {name}", "forward and backward", first, "ms")
        yield values_row(NAME, f"masked, known length, {name}", "forward and backward", second, "ms")
        steps = 40 if setting.on_card else 4
        decoded = [timed(setting, lambda n=n: decode_step(setting, 64 - n, heads, 200 + n)) for n in range(steps)]
        yield values_row(NAME, f"decode, growing cache, shrinking batch, {name}", "attention", decoded, "ms")


def masked_step(setting: Setting, batch: int, heads: int, length: int) -> None:
    query, key, value = (
        torch.randn(batch, heads, length, HEAD_DIM, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    mask = torch.ones(length, length, dtype=torch.bool, device=setting.device).tril()[None, None]
    scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()


def decode_step(setting: Setting, batch: int, heads: int, length: int) -> None:
    query = torch.randn(batch, heads, 1, HEAD_DIM, device=setting.device, dtype=torch.bfloat16)
    key, value = (
        torch.randn(batch, heads, length, HEAD_DIM, device=setting.device, dtype=torch.bfloat16) for _ in range(2)
    )
    mask = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=setting.device)
    scaled_dot_product_attention(query, key, value, attn_mask=mask)


def timed(setting: Setting, work: Any) -> float:
    """Milliseconds of one call, waiting for the card before and after."""
    if setting.on_card:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if setting.on_card:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)
