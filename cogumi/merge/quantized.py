"""Quantized base models: what they are called, how bitsandbytes stores them, and their weights as floats again.

An update that is added to a quantized weight is lost when the sum is quantized again. So a merge needs the full-precision
model (full_precision_names, proven by bases.py) or, on request, the quantized weights as floats (dequantize_rows).

The 4-bit format is QLoRA's (https://arxiv.org/abs/2305.14314, section 3). Each block of 64 consecutive elements shares
one absmax. "Double quantization" stores these absmax values in 8 bits. The file layout is that of bitsandbytes'
QuantState.as_dict.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from huggingface_hub import constants

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import (
    FLOAT_DTYPES,
    Shard,
    Span,
    element_count,
    read_elements,
    read_into,
)

BNB_4BIT = "bnb-4bit"
QUANT_STATE = ".quant_state.bitsandbytes__"

# What publishers append to the name of a quantized copy, as seen in real names: Qwen2.5-7B-Instruct-GPTQ-Int4,
# Meta-Llama-3.1-8B-Instruct-AWQ-INT4, Llama-3.2-1B-Instruct-FP8-Dynamic, Qwen3-4B-Instruct-2507-FP8,
# Meta-Llama-3.1-8B-Instruct-quantized.w4a16, Qwen3-8B-unsloth-bnb-4bit.
QUANTIZED_SUFFIX = re.compile(
    r"((-unsloth)?-bnb-[48]bit|-bnb-nf4|-(gptq|awq|fp8|nvfp4|mxfp4)([-_.](int|w)?\d+(bit|a\d+)?|-block|-dynamic)*"
    r"|[-.](quantized\.)?w\d+a\d+|-int[48]|-[48]bit)+$",
    re.IGNORECASE,
)
# At most this many quantized tensors, spread over the model, are sampled for the proof of a base, each in this many places
# of this many elements.
SAMPLED_TENSORS = 512
SAMPLED_RUNS = 4
RUN_ELEMENTS = 2048
# The least relative error |dequantized - W| / |W| that 4 bits make; see compare_codes.
LEAST_ERROR = 0.05
# Share of sampled codes that may differ from the candidate's own.
CODES_DIFFERING = 0.001


class Mismatch(Exception):
    """What differs between a quantized checkpoint and a full-precision one, in words."""


def quantization(config: dict[str, Any]) -> str | None:
    """How the checkpoint with this config.json is quantized: "bnb-4bit" or its quant_method. None for full precision.
    The method is "bitsandbytes" (for 8 bits), "gptq", "awq", "fp8", "mxfp4" or another. Without one it is "unknown"."""
    for place in (config, config.get("text_config") or {}):
        # llm-compressor once wrote "compression_config".
        found = place.get("quantization_config") or place.get("compression_config")
        if found:
            is_4bit = found.get("load_in_4bit") or found.get("_load_in_4bit")
            return BNB_4BIT if is_4bit else str(found.get("quant_method") or "unknown")
    return None


def is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def full_precision_names(name: str, quant_method: str | None) -> tuple[str, ...]:
    """Likely names of the full-precision model of the quantized base `name` (a hub id or a directory), likeliest first.
    They follow the usual names of quantized copies, and include models of that name by any owner in the hub's cache.
    quant_method: what quantization() returned for the base."""
    path = PurePath(name)
    stem = QUANTIZED_SUFFIX.sub("", path.name)
    found: list[str] = []
    # Published in 4 or 8 bits only: the 16-bit weights are a conversion by others, by custom named -BF16.
    if stem.lower().startswith("gpt-oss") or (stem == path.name and quant_method in ("fp8", "mxfp4")):
        found += [f"unsloth/{stem}-BF16", str(path.with_name(f"{stem}-BF16"))]
    if stem != path.name:
        cached = sorted(Path(constants.HF_HUB_CACHE).glob(f"models--*--{stem}"))
        found += [str(path.with_name(stem)), *(each.name[len("models--") :].replace("--", "/", 1) for each in cached)]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, eq=False)
class Bnb4bit:
    """One weight in bitsandbytes' 4 bits. `shape`, `dtype`: of the weight that was quantized. `weight`: two elements a
    byte, the first in the high half. `levels`: what the 16 codes stand for. `absmax`: one value a block of `blocksize`
    elements; with double quantization 8-bit indices into `nested_levels`, scaled by `nested_absmax`. `auxiliary`: the
    names beside the weight's own that only the quantized checkpoint has."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    blocksize: int
    weight: Span
    levels: torch.Tensor
    absmax: Span
    nested_absmax: Span | None
    nested_levels: torch.Tensor
    nested_blocksize: int
    nested_offset: float
    auxiliary: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.weight.path


def quantized_tensors(shards: tuple[Shard, ...], config: dict[str, Any]) -> dict[str, Bnb4bit]:
    """The 4-bit weights of a bitsandbytes checkpoint by name; empty for any other kind. Raises UsageError for one that
    is incomplete or in a layout that is not known here."""
    if quantization(config) != BNB_4BIT:
        return {}
    spans = {span.name: span for shard in shards for span in shard.spans}
    found = [read_4bit(spans, name) for name in spans if QUANT_STATE in name]
    return {tensor.name: tensor for tensor in found}


def read_4bit(spans: dict[str, Span], state_name: str) -> Bnb4bit:
    """The weight that a quant state in the file describes."""
    state_span = spans[state_name]
    name, _, kind = state_name.partition(QUANT_STATE)
    auxiliary = [state_name]

    def refused(what: str) -> UsageError:
        fix = "download the quantized base again, or pass base=<the full-precision model>"
        return UsageError(what, place=state_span.path, fix=fix)

    def part(suffix: str, stored_as: str, elements: int) -> Span:
        span = spans.get(f"{name}.{suffix}")
        if span is None or (span.dtype, element_count(span.shape)) != (stored_as, elements):
            raise refused(f"{name}.{suffix} is missing, or is not {elements} x {stored_as}")
        auxiliary.append(span.name)
        return span

    try:
        state = json.loads(bytes(read_stored(state_span, torch.uint8, 0, state_span.end - state_span.start).tolist()))
        shape, dtype, blocksize = tuple(state["shape"]), state["dtype"], state["blocksize"]
        nested_blocksize, nested_offset = state.get("nested_blocksize", 1), float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refused(f"{state_name} is not a bitsandbytes quant state ({error})") from error
    dtypes = {str(known).removeprefix("torch."): known for known in FLOAT_DTYPES.values()}
    if dtype not in dtypes or blocksize % 2:
        raise refused(f"{state_name} has dtype {dtype} and blocksize {blocksize}, which is not known here")
    elements = element_count(shape)
    weight = spans.get(name)
    # The bytes may be stored under another dtype (bnb_4bit_quant_storage), so only their number counts.
    if weight is None or weight.end - weight.start != (elements + 1) // 2:
        raise refused(f"{name} is missing, or does not hold {elements} 4-bit elements")
    levels = read_stored(part("quant_map", "F32", 16), torch.float32, 0, 16)
    if kind == "fp4":
        levels[8] = -0.0  # sign bit alone: the kernels keep it, the stored map does not
    blocks = -(-elements // blocksize)
    nested_absmax, nested_levels = None, torch.empty(0)
    if f"{name}.nested_absmax" in spans:
        nested_absmax = part("nested_absmax", "F32", -(-blocks // nested_blocksize))
        nested_levels = read_stored(part("nested_quant_map", "F32", 256), torch.float32, 0, 256)
    absmax = part("absmax", "U8" if nested_absmax else "F32", blocks)
    return Bnb4bit(
        name, shape, dtypes[dtype], kind, blocksize, weight, levels, absmax,
        nested_absmax, nested_levels, nested_blocksize, nested_offset, tuple(auxiliary),
    )  # fmt: skip


def read_stored(span: Span, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
    """`count` elements from element `first` on, flat, with the tensor's bytes taken for `dtype`."""
    with span.path.open("rb", buffering=0) as file:  # opened anew: threads share nothing
        return read_into(file, span.start + first * dtype.itemsize, torch.empty(count, dtype=dtype))


def dequantize_rows(tensor: Bnb4bit, first_row: int, last_row: int) -> torch.Tensor:
    """Rows in the dtype that was quantized, [rows, columns]: bitsandbytes' dequantize_4bit, bit for bit."""
    columns = tensor.shape[-1]
    return dequantize_elements(tensor, first_row * columns, (last_row - first_row) * columns).view(-1, columns)


def dequantize_elements(tensor: Bnb4bit, first: int, count: int) -> torch.Tensor:
    """`count` elements from element `first` of the flattened tensor; see dequantize_rows."""
    if count == 0:
        return torch.empty(0, dtype=tensor.dtype)
    begin, end = first // tensor.blocksize, -(-(first + count) // tensor.blocksize)
    scale = block_absmax(tensor, begin, end)
    # Whole blocks, so that one broadcast multiplies them; the rest of the first and the last is cut off at the end.
    start, stop = begin * tensor.blocksize, min(end * tensor.blocksize, element_count(tensor.shape))
    values = stored_levels(tensor, start, stop - start)
    whole = (stop - start) // tensor.blocksize * tensor.blocksize
    values[:whole].view(-1, tensor.blocksize).mul_(scale[: whole // tensor.blocksize, None])
    values[whole:].mul_(scale[-1])
    return values[first - start : first - start + count].to(tensor.dtype)


def stored_levels(tensor: Bnb4bit, first: int, count: int) -> torch.Tensor:
    """`count` elements from `first` (even) on as fractions of their block's absmax: float32 in [-1, 1], flat."""
    packed = read_stored(tensor.weight, torch.uint8, first // 2, (count + 1) // 2)
    # Byte -> its two elements, carried as one 64-bit number: one gather, 20 times faster than by rows of two.
    pairs = torch.stack([tensor.levels.repeat_interleave(16), tensor.levels.repeat(16)], dim=1)
    return pairs.flatten().view(torch.int64).index_select(0, packed.int()).view(torch.float32)[:count]


def block_absmax(tensor: Bnb4bit, begin: int, end: int) -> torch.Tensor:
    """The absmax of blocks begin..end-1, float32."""
    if tensor.nested_absmax is None:
        return read_stored(tensor.absmax, torch.float32, begin, end - begin)
    size = tensor.nested_blocksize
    outer_begin, outer_end = begin // size, -(-end // size)
    outer = read_stored(tensor.nested_absmax, torch.float32, outer_begin, outer_end - outer_begin)
    outer = outer.repeat_interleave(size)[begin - outer_begin * size :][: end - begin]
    codes = read_stored(tensor.absmax, torch.uint8, begin, end - begin)
    return tensor.nested_levels[codes.int()] * outer + tensor.nested_offset


def compare_codes(packed: dict[str, Bnb4bit], full: dict[str, Span]) -> tuple[int, float, float]:
    """(tensors sampled, their |dequantized - W| / |W| in Frobenius norms, share of codes that are not what quantizing W
    gives). Raises Mismatch outside limits.

    Measured relative errors in bfloat16 (NF4 / FP4): Gaussian 0.092 / 0.122; with 8 columns of 1024 ten times larger
    0.141 / 0.225. An error near zero is the dequantized checkpoint itself, whose codes are the same.

    The codes tell all others. For the right model none differ. Weights that are 0.1 % away (relative rms) change 0.15 %
    of the NF4 codes, 1 % change 3 %. A sibling closer than that passes, as does one that differs in a few tensors only.
    """
    names = sorted(packed)
    sampled = [packed[names[index]] for index in spread_indices(len(names), SAMPLED_TENSORS)]
    off = norm = 0.0
    codes = differing = 0
    for tensor in sampled:
        total = element_count(tensor.shape)
        run = max(1, RUN_ELEMENTS // tensor.blocksize) * tensor.blocksize
        for index in spread_indices(-(-total // run), SAMPLED_RUNS):
            first, count = index * run, min(run, total - index * run)
            weight = read_elements(full[tensor.name], first, count)
            restored = dequantize_elements(tensor, first, count)
            off += (restored.double() - weight.double()).square_().sum().item()
            norm += weight.double().square_().sum().item()
            codes += count
            differing += differing_codes(tensor, weight, first)
    error = math.sqrt(off / norm) if norm else 0.0
    if error < LEAST_ERROR:
        what = f"the quantized weights are {error:.3g} from its weights, relative, and quantizing makes more"
        raise Mismatch(f"{what} (is it the dequantized checkpoint?)")
    if differing > CODES_DIFFERING * codes:
        share = f"{differing / codes:.2%} of a sample of {codes}"
        raise Mismatch(f"quantizing its weights gives other codes for {share} (a fine-tuned sibling?)")
    return len(sampled), error, differing / codes


def spread_indices(total: int, wanted: int) -> list[int]:
    """Up to `wanted` of range(total), evenly spread, the first and the last among them."""
    return sorted({int(index) for index in np.linspace(0, total - 1, min(total, wanted)).round()})


def differing_codes(tensor: Bnb4bit, weight: torch.Tensor, first: int) -> int:
    """How many stored codes are not what quantizing `weight`, the elements from `first` on, gives. `first` begins a
    block. A code is right when no other is nearer: where two are equally near, kernels choose differently."""
    values = weight.to(tensor.dtype).float()
    blocks = torch.nn.functional.pad(values, (0, -len(values) % tensor.blocksize)).view(-1, tensor.blocksize)
    absmax = blocks.abs().amax(dim=1, keepdim=True).expand_as(blocks).flatten()[: len(values)]
    values = values / absmax.clamp(min=1e-38)
    levels = tensor.levels.sort().values
    nearest = levels[torch.bucketize(values, (levels[:-1] + levels[1:]) / 2)]
    right = (values - stored_levels(tensor, first, len(values))).abs() <= (values - nearest).abs() + 1e-5
    return int((~right & (absmax > 0)).sum())
