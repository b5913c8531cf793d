"""Quantized base models: their names, the layout of bitsandbytes' 4 bits, and their weights as floats again.

An update that is added to a quantized weight is lost when the sum is quantized again. So a merge needs the full-precision
model (full_precision_names, proven by bases.py) or, on request, the quantized weights as floats (dequantize_rows).

The file layout is that of bitsandbytes' QuantState.as_dict; bitsandbytes itself decodes the weights, on the CPU.
"""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cogumi.core.errors import UsageError
from cogumi.core.formatting import install_command
from cogumi.core.safetensors_file import FLOAT_DTYPES, Shard, Span, element_count, read_elements, read_into

BNB_4BIT = "bnb-4bit"
QUANT_STATE = ".quant_state.bitsandbytes__"

# The proof of a base samples at most this many quantized tensors, each in this many places of this many elements.
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
    """Return the quantization that a config.json names: "bnb-4bit", its quant_method or "unknown"; None without one."""
    for section in (config, config.get("text_config") or {}):
        # llm-compressor once wrote "compression_config".
        entries = section.get("quantization_config") or section.get("compression_config")
        if entries:
            is_4bit = entries.get("load_in_4bit") or entries.get("_load_in_4bit")
            return BNB_4BIT if is_4bit else str(entries.get("quant_method") or "unknown")
    return None


@dataclass(frozen=True, eq=False)
class Bnb4bit:
    """One weight in bitsandbytes' 4 bits.

    shape, dtype: of the weight that was quantized. weight: two elements a byte, the first in the high half. levels: the
    values of the 16 codes. absmax: one value for each `blocksize` elements. nested: with double quantization, (absmax,
    levels, block size, offset) of the 8-bit indices in `absmax`. auxiliary: names beside the weight's own that only the
    quantized checkpoint has.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    blocksize: int
    weight: Span
    levels: torch.Tensor
    absmax: Span
    nested: tuple[Span, Span, int, float] | None
    auxiliary: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.weight.path


def quantized_tensors(shards: tuple[Shard, ...], config: dict[str, Any]) -> dict[str, Bnb4bit]:
    """Return a bitsandbytes checkpoint's 4-bit weights, {} for other kinds. Raises UsageError for an unknown layout."""
    if quantization(config) != BNB_4BIT:
        return {}
    spans = {span.name: span for shard in shards for span in shard.spans}
    tensors = [read_4bit(spans, name) for name in spans if QUANT_STATE in name]
    return {tensor.name: tensor for tensor in tensors}


def read_4bit(spans: dict[str, Span], state_name: str) -> Bnb4bit:
    """Read the description of the weight that a quant state belongs to."""
    state_span = spans[state_name]
    name, _, kind = state_name.partition(QUANT_STATE)
    auxiliary = [state_name]

    def refused(problem: str) -> UsageError:
        fix = "download the quantized base again, or name its full-precision model"
        return UsageError(problem, place=state_span.path, fix=fix)

    def part(suffix: str, dtype: str, elements: int) -> Span:
        span = spans.get(f"{name}.{suffix}")
        if span is None or (span.dtype, element_count(span.shape)) != (dtype, elements):
            raise refused(f"{name}.{suffix} is missing, or is not {elements} x {dtype}")
        auxiliary.append(span.name)
        return span

    try:
        state = json.loads(bytes(read_stored(state_span, torch.uint8).tolist()))
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
    levels = read_stored(part("quant_map", "F32", 16), torch.float32)
    blocks, nested = -(-elements // blocksize), None
    if f"{name}.nested_absmax" in spans:
        scales = part("nested_absmax", "F32", -(-blocks // nested_blocksize))
        nested = scales, part("nested_quant_map", "F32", 256), nested_blocksize, nested_offset
    absmax = part("absmax", "U8" if nested else "F32", blocks)
    return Bnb4bit(name, shape, dtypes[dtype], kind, blocksize, weight, levels, absmax, nested, tuple(auxiliary))


def read_stored(span: Span, dtype: torch.dtype, first: int = 0, count: int | None = None) -> torch.Tensor:
    """Read `count` elements from element `first` on, flat, with the tensor's bytes taken for `dtype`."""
    if count is None:
        count = (span.end - span.start) // dtype.itemsize
    with span.path.open("rb", buffering=0) as file:  # opened anew: threads share nothing
        return read_into(file, span.start + first * dtype.itemsize, torch.empty(count, dtype=dtype))


def dequantize_rows(tensor: Bnb4bit, first_row: int, last_row: int) -> torch.Tensor:
    """Decode rows, [rows, columns] in the dtype that was quantized."""
    columns = tensor.shape[-1]
    return dequantize_elements(tensor, first_row * columns, (last_row - first_row) * columns).view(-1, columns)


def dequantize_elements(tensor: Bnb4bit, first: int, count: int) -> torch.Tensor:
    """Decode `count` elements from element `first` of the flattened tensor."""
    return decode(tensor, first, count, block_absmax(tensor), tensor.dtype)


def decode(tensor: Bnb4bit, first: int, count: int, absmax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode elements with bitsandbytes. absmax: one float32 for each block of the tensor."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    try:
        from bitsandbytes.functional import QuantState, dequantize_4bit
    except ImportError as error:
        message = "reading bitsandbytes' 4-bit weights needs bitsandbytes, which is not installed"
        raise UsageError(message, fix=f"run: {install_command('quantization')}") from error
    begin, end = first // tensor.blocksize, -(-(first + count) // tensor.blocksize)
    start = begin * tensor.blocksize
    packed = read_stored(tensor.weight, torch.uint8, start // 2, (first + count - start + 1) // 2)
    # As one row: bitsandbytes 0.50.2 misreads rows that end inside a block on CPUs with AVX512.
    shape = torch.Size((1, 2 * len(packed)))
    state = QuantState(absmax[begin:end], shape, blocksize=tensor.blocksize, quant_type=tensor.kind, dtype=dtype)
    return dequantize_4bit(packed[:, None], state).view(-1)[first - start : first - start + count]


@lru_cache(maxsize=4)
def block_absmax(tensor: Bnb4bit) -> torch.Tensor:
    """Return the absmax of every block, float32."""
    if tensor.nested is None:
        return read_stored(tensor.absmax, torch.float32)
    scales, levels, size, offset = tensor.nested
    indices = read_stored(tensor.absmax, torch.uint8).int()
    values = read_stored(levels, torch.float32)[indices]
    return values * read_stored(scales, torch.float32).repeat_interleave(size)[: len(values)] + offset


def compare_codes(packed: dict[str, Bnb4bit], full: dict[str, Span]) -> tuple[int, float, float]:
    """Compare a sample of 4-bit codes with the full-precision weights. Raises Mismatch outside limits.

    Returns the number of tensors sampled, their |dequantized - W| / |W| in Frobenius norms, and the share of codes that
    quantizing W does not give.

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
        message = f"the quantized weights are {error:.3g} from its weights, relative, and quantizing makes more"
        raise Mismatch(f"{message} (is it the dequantized checkpoint?)")
    if differing > CODES_DIFFERING * codes:
        share = f"{differing / codes:.2%} of a sample of {codes}"
        raise Mismatch(f"quantizing its weights gives other codes for {share} (a fine-tuned sibling?)")
    return len(sampled), error, differing / codes


def spread_indices(total: int, limit: int) -> list[int]:
    """Return up to `limit` of range(total), evenly spread, the first and the last among them."""
    return sorted({int(index) for index in np.linspace(0, total - 1, min(total, limit)).round()})


def differing_codes(tensor: Bnb4bit, weight: torch.Tensor, first: int) -> int:
    """Count stored codes that quantizing `weight`, the elements from `first` on, does not give.

    `first` begins a block. A code is right when no other is nearer: where two are equally near, kernels choose differently.
    """
    values = weight.to(tensor.dtype).float()
    blocks = torch.nn.functional.pad(values, (0, -len(values) % tensor.blocksize)).view(-1, tensor.blocksize)
    absmax = blocks.abs().amax(dim=1, keepdim=True).expand_as(blocks).flatten()[: len(values)]
    values = values / absmax.clamp(min=1e-38)
    levels = tensor.levels.sort().values
    nearest = levels[torch.bucketize(values, (levels[:-1] + levels[1:]) / 2)]
    scales = torch.ones(-(-(first + len(values)) // tensor.blocksize))
    stored = decode(tensor, first, len(values), scales, torch.float32)
    right = (values - stored).abs() <= (values - nearest).abs() + 1e-5
    return int((~right & (absmax > 0)).sum())
