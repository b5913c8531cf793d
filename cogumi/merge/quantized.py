"""Quantized base models: what they are called, how bitsandbytes stores them, and their weights as floats again.

An update that is added to a quantized weight is lost when the sum is quantized again. So a merge needs the full-precision
model (full_precision_names, proven by bases.py) or, on request, the quantized weights as floats (dequantize_rows).

The 4-bit format is QLoRA's (https://arxiv.org/abs/2305.14314, section 3): blocks of 64 consecutive elements share one
absmax, and "double quantization" stores the absmax values in 8 bits themselves. The 8-bit one is LLM.int8()'s
(https://arxiv.org/abs/2208.07339): one absmax a row. File layout: bitsandbytes' QuantState.as_dict and Linear8bitLt.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import constants

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import (
    FLOAT_DTYPES,
    Shard,
    Span,
    element_count,
    matrix_shape,
    read_elements,
    read_into,
)

DEQUANTIZED_KINDS = ("bnb-4bit", "bnb-8bit")
OTHER_MODEL = "pass base=<the full-precision model>"

# What publishers append to the name of a quantized copy, as seen in real names: Qwen2.5-7B-Instruct-GPTQ-Int4,
# Meta-Llama-3.1-8B-Instruct-AWQ-INT4, Llama-3.2-1B-Instruct-FP8-Dynamic, Qwen3-4B-Instruct-2507-FP8,
# Meta-Llama-3.1-8B-Instruct-quantized.w4a16, Qwen3-8B-unsloth-bnb-4bit.
QUANTIZED_SUFFIX = re.compile(
    r"(-unsloth)?-bnb-[48]bit$|-bnb-nf4$|-(gptq|awq|fp8|nvfp4|mxfp4)([-_.](int|w)?\d+(bit|a\d+)?|-block|-dynamic)*$"
    r"|[-.](quantized\.)?w\d+a\d+$|-int[48]$|-[48]bit$",
    re.IGNORECASE,
)
# At most this many quantized tensors, spread over the model, are sampled for the proof of a base, each in this many places
# of this many elements (8 bits: the whole rows that they touch).
SAMPLED_TENSORS = 512
SAMPLED_RUNS = 4
RUN_ELEMENTS = 2048
# Rows of a tensor whose error is measured: as many runs of this many elements give NF4's rms to about 1 %.
ERROR_ELEMENTS = 1 << 16
# Relative error |dequantized - W| / |W| that the format makes: see sampled_error for the measurements.
ERROR_RANGE = {"nf4": (0.05, 0.35), "fp4": (0.06, 0.5), "int8": (0.002, 0.1)}
# Share of sampled codes that may differ from the candidate's own.
CODES_DIFFERING = 0.001


class Mismatch(Exception):
    """What differs between a quantized checkpoint and a full-precision one, in words."""


def quantization(config: dict[str, Any]) -> str | None:
    """How the checkpoint with this config.json is quantized: "bnb-4bit", "bnb-8bit", else its quant_method as it stands
    ("gptq", "awq", "fp8", "mxfp4", "compressed-tensors", ...; "unknown" without one); None for full precision."""
    for place in (config, config.get("text_config") or {}):
        # llm-compressor once wrote "compression_config".
        found = place.get("quantization_config") or place.get("compression_config")
        if found:
            for bits in ("4", "8"):
                if found.get(f"load_in_{bits}bit") or found.get(f"_load_in_{bits}bit"):
                    return f"bnb-{bits}bit"
            return str(found.get("quant_method") or "unknown")
    return None


def is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def full_precision_names(name: str, quant_method: str | None) -> tuple[str, ...]:
    """Where the full-precision model of the quantized base `name` (a hub id or a directory) may be, likeliest first.

    quant_method: what quantization() said of it. These are guesses from how publishers name things, and what the hub's
    cache holds under the same name. A candidate may be quantized itself or another model, so each one is for the proof to
    judge.
    """
    path = PurePath(name.rstrip("/"))
    stem = path.name
    while (shorter := QUANTIZED_SUFFIX.sub("", stem)) != stem and shorter:
        stem = shorter
    found: list[str] = []
    # Published in 4 or 8 bits only: the 16-bit weights are a conversion by others, by custom named -BF16.
    if stem.lower().startswith("gpt-oss") or (stem == path.name and quant_method in ("fp8", "mxfp4")):
        found += [f"unsloth/{stem}-BF16", str(path.with_name(f"{stem}-BF16"))]
    if stem != path.name:
        cached = sorted(Path(constants.HF_HUB_CACHE).glob(f"models--*--{stem}"))
        found += [str(path.with_name(stem)), *(each.name[len("models--") :].replace("--", "/", 1) for each in cached)]
    if not is_hub_id(name):
        found.sort(key=lambda candidate: not candidate.startswith(str(path.parent)))
    return tuple(dict.fromkeys(candidate for candidate in found if candidate != name))


@dataclass(frozen=True)
class Bnb4bit:
    """One weight in bitsandbytes' 4 bits. `shape`, `dtype`: of the weight that was quantized. `weight`: two elements a
    byte, the first in the high half. `absmax`: one value a block of `blocksize` elements; 8-bit indices into
    `nested_map` where `nested_absmax` is set. `quant_map`: the 16 levels. `auxiliary`: the names beside the weight's own
    that only the quantized checkpoint has."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    blocksize: int
    weight: Span
    absmax: Span
    quant_map: Span
    nested_absmax: Span | None
    nested_map: Span | None
    nested_blocksize: int
    nested_offset: float
    auxiliary: tuple[str, ...]


@dataclass(frozen=True)
class Bnb8bit:
    """One weight in bitsandbytes' 8 bits: int8 [rows, columns], and the rows' largest magnitudes as float32 [rows].
    `dtype`: what the model was loaded in, as the config has it; the file does not say."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: Span
    row_absmax: Span
    auxiliary: tuple[str, ...]


Quantized = Bnb4bit | Bnb8bit


def quantized_tensors(shards: tuple[Shard, ...], config: dict[str, Any]) -> dict[str, Quantized]:
    """The quantized weights of a bitsandbytes checkpoint by name; the names are those of the full-precision one.

    Empty for any other kind of checkpoint. Raises UsageError for one that is incomplete or in a layout that is not known
    here.
    """
    kind = quantization(config)
    spans = {span.name: span for shard in shards for span in shard.spans}
    text = config.get("text_config") or {}
    loaded = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES.values()}
    found: dict[str, Quantized] = {}
    for name in spans:
        if kind == "bnb-4bit" and ".quant_state.bitsandbytes__" in name:
            four = read_4bit(spans, name)
            found[four.name] = four
        elif kind == "bnb-8bit" and name.endswith(".SCB"):
            eight = read_8bit(spans, name.removesuffix(".SCB"), dtypes.get(str(loaded), torch.float16))
            found[eight.name] = eight
    return found


def unknown_layout(what: str, path: Path) -> UsageError:
    return UsageError(f"{what}: a layout of bitsandbytes that is not known here", place=path, fix=OTHER_MODEL)


def quantized_part(spans: dict[str, Span], name: str, dtype: str, elements: int, beside: Span) -> Span:
    """The span called `name`, with the dtype and number of elements that the format wants; UsageError otherwise."""
    span = spans.get(name)
    if span is None:
        fix = "download the quantized base again"
        raise UsageError(f"{beside.name} has no {name} beside it", place=beside.path, fix=fix)
    if span.dtype != dtype or element_count(span.shape) != elements:
        raise unknown_layout(f"{name} is {span.dtype} {list(span.shape)} and not {elements} x {dtype}", span.path)
    return span


def read_4bit(spans: dict[str, Span], state_name: str) -> Bnb4bit:
    state_span = spans[state_name]
    name, _, kind = state_name.partition(".quant_state.bitsandbytes__")
    try:
        text = bytes(read_stored(state_span, torch.uint8, 0, state_span.end - state_span.start).tolist())
        state = json.loads(text)
        shape, dtype = tuple(state["shape"]), getattr(torch, state["dtype"])
        blocksize, nested_blocksize = state["blocksize"], state.get("nested_blocksize", 1)
        nested_dtype = state.get("nested_dtype", "float32")
        nested_offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{state_name} is not a bitsandbytes quant state ({error})"
        raise UsageError(what, place=state_span.path, fix="download it again") from error
    if dtype not in FLOAT_DTYPES.values() or nested_dtype != "float32" or blocksize % 2:
        what = f"{state_name} has dtype {state['dtype']}, nested_dtype {nested_dtype} and blocksize {blocksize}"
        raise unknown_layout(what, state_span.path)
    elements = element_count(shape)
    blocks = -(-elements // blocksize)
    weight = spans.get(name)
    # The bytes may be stored under another dtype (bnb_4bit_quant_storage), so only their number counts.
    if weight is None or weight.end - weight.start != (elements + 1) // 2:
        raise UsageError(f"{name} is missing or does not hold {elements} 4-bit elements", place=state_span.path)
    nested_absmax = nested_map = None
    if f"{name}.nested_absmax" in spans:
        nested_absmax = quantized_part(spans, f"{name}.nested_absmax", "F32", -(-blocks // nested_blocksize), weight)
        nested_map = quantized_part(spans, f"{name}.nested_quant_map", "F32", 256, weight)
    absmax = quantized_part(spans, f"{name}.absmax", "U8" if nested_absmax else "F32", blocks, weight)
    quant_map = quantized_part(spans, f"{name}.quant_map", "F32", 16, weight)
    parts = [absmax, quant_map, nested_absmax, nested_map, state_span]
    auxiliary = tuple(span.name for span in parts if span is not None)
    return Bnb4bit(
        name, shape, dtype, kind, blocksize, weight, absmax, quant_map, nested_absmax, nested_map,
        nested_blocksize, nested_offset, auxiliary,
    )  # fmt: skip


def read_8bit(spans: dict[str, Span], module: str, dtype: torch.dtype) -> Bnb8bit:
    weight = spans.get(f"{module}.weight")
    if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
        raise UsageError(f"{module}.SCB stands without an int8 {module}.weight", place=spans[f"{module}.SCB"].path)
    row_absmax = quantized_part(spans, f"{module}.SCB", "F32", weight.shape[0], weight)
    layout = spans.get(f"{module}.weight_format")
    # 0 is row-major. The others are GPU tile orders of old releases, which bitsandbytes itself reads no more.
    if layout is not None and read_stored(layout, torch.uint8, 0, layout.end - layout.start).any():
        raise unknown_layout(f"{module}.weight is in a tiled order", layout.path)
    auxiliary = tuple(span.name for span in (row_absmax, layout) if span is not None)
    return Bnb8bit(weight.name, weight.shape, dtype, weight, row_absmax, auxiliary)


def read_stored(span: Span, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
    """`count` elements from element `first` on, flat, with the tensor's bytes taken for `dtype`."""
    with span.path.open("rb", buffering=0) as file:  # opened anew: threads share nothing
        return read_into(file, span.start + first * dtype.itemsize, torch.empty(count, dtype=dtype))


def dequantize_rows(tensor: Quantized, first_row: int, last_row: int) -> torch.Tensor:
    """Rows first_row..last_row-1 as floats, [rows, columns]: what the quantized model computes with, bit for bit.

    4 bits: in the dtype that was quantized, as bitsandbytes.functional.dequantize_4bit returns it. 8 bits: float32, as
    int8_vectorwise_dequant does. Of a tensor with more than two axes, rows are counted over all but the last.
    """
    columns = tensor.shape[-1] if tensor.shape else 1
    return dequantize_elements(tensor, first_row * columns, (last_row - first_row) * columns).view(-1, columns)


def dequantize_elements(tensor: Quantized, first: int, count: int) -> torch.Tensor:
    """`count` elements from element `first` of the flattened tensor; see dequantize_rows. 8 bits: whole rows only."""
    if count == 0:
        return torch.empty(0, dtype=tensor.dtype if isinstance(tensor, Bnb4bit) else torch.float32)
    if isinstance(tensor, Bnb8bit):
        columns = tensor.shape[-1]
        values = read_stored(tensor.weight, torch.int8, first, count).view(-1, columns)
        scale = read_stored(tensor.row_absmax, torch.float32, first // columns, len(values))
        # bitsandbytes multiplies by its own decimal for 1/127, in this order.
        return (values * scale[:, None] * 7.874015718698502e-3).flatten()
    begin, end = first // tensor.blocksize, -(-(first + count) // tensor.blocksize)
    scale = block_absmax(tensor, begin, end)
    # Whole blocks, so that one broadcast multiplies them; the rest of the first and the last is cut off at the end.
    elements = element_count(tensor.shape)
    start, stop = begin * tensor.blocksize, min(end * tensor.blocksize, elements)
    values = stored_levels(tensor, start, stop - start)
    whole = (stop - start) // tensor.blocksize * tensor.blocksize
    values[:whole].view(-1, tensor.blocksize).mul_(scale[: whole // tensor.blocksize, None])
    values[whole:].mul_(scale[-1])
    return values[first - start : first - start + count].to(tensor.dtype)


def stored_levels(tensor: Bnb4bit, first: int, count: int) -> torch.Tensor:
    """`count` elements from `first` (even) on as fractions of their block's absmax: float32 in [-1, 1], flat."""
    packed = read_stored(tensor.weight, torch.uint8, first // 2, (count + 1) // 2)
    levels = read_stored(tensor.quant_map, torch.float32, 0, 16)
    if tensor.kind == "fp4":
        levels[8] = -0.0  # sign bit alone: the kernels keep it, the stored map does not
    # Byte -> its two elements, carried as one 64-bit number: one gather, 20 times faster than by rows of two.
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1).flatten().view(torch.int64)
    return pairs.index_select(0, packed.int()).view(torch.float32)[:count]


def block_absmax(tensor: Bnb4bit, begin: int, end: int) -> torch.Tensor:
    """The absmax of blocks begin..end-1, float32."""
    if tensor.nested_absmax is None or tensor.nested_map is None:
        return read_stored(tensor.absmax, torch.float32, begin, end - begin)
    size = tensor.nested_blocksize
    outer_begin, outer_end = begin // size, -(-end // size)
    outer = read_stored(tensor.nested_absmax, torch.float32, outer_begin, outer_end - outer_begin)
    outer = outer.repeat_interleave(size)[begin - outer_begin * size :][: end - begin]
    levels = read_stored(tensor.nested_map, torch.float32, 0, 256)
    codes = read_stored(tensor.absmax, torch.uint8, begin, end - begin)
    return levels[codes.int()] * outer + tensor.nested_offset


def nf4_round_trip(weight: torch.Tensor) -> torch.Tensor:
    """What load_in_4bit (NF4, blocks of 64, double quantization) makes of full-precision rows: same shape and dtype.

    weight: float, [rows, columns], on the CPU. Computed by bitsandbytes, which is imported here. Exact for a whole
    tensor; of some rows, double quantization centres the block scales on these rows, and blocks begin with the first one.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    # As one row: where rows end inside blocks, bitsandbytes 0.50.2 misreads them on CPUs with AVX512.
    flat = weight.reshape(1, -1)
    packed, state = quantize_4bit(flat, blocksize=64, compress_statistics=True, quant_type="nf4")
    restored: torch.Tensor = dequantize_4bit(packed, state)
    return restored.view(weight.shape)


def rms_error(source: Span, quantized: Quantized | None) -> float:
    """The rms of quantized - W, sampled in a few runs of rows. quantized None: what NF4 makes of these rows by themselves."""
    rows, columns = matrix_shape(source.shape)
    length = min(rows, max(1, ERROR_ELEMENTS // columns))
    squares, count = 0.0, 0
    for first in sorted({(rows - length) * run // (SAMPLED_RUNS - 1) for run in range(SAMPLED_RUNS)}):
        weight = read_elements(source, first * columns, length * columns).view(length, columns)
        seen = nf4_round_trip(weight) if quantized is None else dequantize_rows(quantized, first, first + length)
        squares += (weight.double() - seen.double()).square().sum().item()
        count += weight.numel()
    return math.sqrt(squares / count)


def sampled_error(packed: dict[str, Quantized], full: dict[str, Span]) -> tuple[int, float, float]:
    """(tensors sampled, their error, share of codes that differ); Mismatch outside limits.

    Measured relative errors in bfloat16 (NF4 / FP4 / INT8): Gaussian 0.092 / 0.122 / 0.008; with 8 columns of 1024 ten
    times larger 0.141 / 0.225 / 0.032, at blocksize 512 0.284 / 0.454; another model of the same shapes 1.41. An error
    near zero is the dequantized checkpoint itself. A fine-tuned sibling has nearly the right error.

    The codes tell it. For the right model none differ. Weights that are 0.1 % away (relative rms) change 0.15 % of the
    NF4 codes, 1 % change 3 %; 8 bits change more. A sibling closer than that passes, as does one that differs in a few
    tensors only.
    """
    names = sorted(packed)
    sampled = [packed[names[index]] for index in spread_indices(len(names), SAMPLED_TENSORS)]
    sums = [sum(column) for column in zip(*(sample_tensor(each, full[each.name]) for each in sampled), strict=True)]
    off, norm, codes, differing = sums
    error = math.sqrt(off / norm) if norm else 0.0
    kind = sampled[0].kind if isinstance(sampled[0], Bnb4bit) else "int8"
    low, high = ERROR_RANGE[kind]
    if not low <= error <= high:
        raise Mismatch(
            f"the quantized weights are {error:.3g} from its weights, relative, where {kind} makes {low} to {high}"
            + (" (is it the dequantized checkpoint?)" if error < low else "")
        )
    if differing > CODES_DIFFERING * codes:
        share = f"{differing / codes:.2%} of a sample of {codes}"
        raise Mismatch(f"quantizing its weights gives other codes for {share} (a fine-tuned sibling?)")
    return len(sampled), error, differing / codes


def spread_indices(total: int, wanted: int) -> list[int]:
    """Up to `wanted` of range(total), evenly spread, the first and the last among them."""
    if total <= wanted:
        return list(range(total))
    return sorted({round(index * (total - 1) / (wanted - 1)) for index in range(wanted)})


def sample_tensor(tensor: Quantized, full: Span) -> tuple[float, float, int, int]:
    """(sum (dequantized - W)^2, sum W^2, codes compared, codes that differ) over the sampled runs, W in float64."""
    total = element_count(tensor.shape)
    unit = tensor.blocksize if isinstance(tensor, Bnb4bit) else tensor.shape[-1]
    units, each = -(-total // unit), max(1, RUN_ELEMENTS // unit)
    off = norm = 0.0
    codes = differing = 0
    for run in spread_indices(-(-units // each), SAMPLED_RUNS):
        first = run * each * unit
        count = min(each * unit, total - first)
        weight = read_elements(full, first, count)
        restored = dequantize_elements(tensor, first, count)
        off += (restored.double() - weight.double()).square_().sum().item()
        norm += weight.double().square_().sum().item()
        codes += count
        differing += differing_codes(tensor, weight, first)
    return off, norm, codes, differing


def differing_codes(tensor: Quantized, weight: torch.Tensor, first: int) -> int:
    """How many stored codes are not what quantizing `weight`, the elements from `first` on, gives.

    `first` begins a block (4 bits) or a row (8 bits). A code is right when no other is nearer: where two are equally
    near, as for FP4's simple fractions, kernels choose differently. In blocks and rows that are all zero all codes count
    as right.
    """
    if isinstance(tensor, Bnb8bit):
        columns = tensor.shape[-1]
        # bitsandbytes converts to float16 before it quantizes to 8 bits, whatever the dtype the model was loaded in.
        values = weight.to(tensor.dtype).to(torch.float16).float().view(-1, columns)
        stored = read_stored(tensor.weight, torch.int8, first, weight.numel()).view(-1, columns)
        scale = read_stored(tensor.row_absmax, torch.float32, first // columns, len(values))[:, None]
        right = (values * (127.0 / scale) - stored).abs() <= 0.5 + 1e-3
        return int((~right & (scale > 0)).sum())
    values = weight.to(tensor.dtype).float()
    blocks = torch.nn.functional.pad(values, (0, -len(values) % tensor.blocksize)).view(-1, tensor.blocksize)
    absmax = blocks.abs().amax(dim=1, keepdim=True).expand_as(blocks).flatten()[: len(values)]
    values = values / absmax.clamp(min=1e-38)
    levels = read_stored(tensor.quant_map, torch.float32, 0, 16).sort().values
    nearest = levels[torch.bucketize(values, (levels[:-1] + levels[1:]) / 2)]
    right = (values - stored_levels(tensor, first, len(values))).abs() <= (values - nearest).abs() + 1e-5
    return int((~right & (absmax > 0)).sum())
