"""Quantized base models: what they are called, how bitsandbytes stores them, and their weights as floats again.

An update that is added to a quantized weight is lost when the sum is quantized again, so a merge needs either the
full-precision model (full_precision_names, and base_proof.py for the proof that it is the one) or, on request, the
quantized weights turned back into floats (dequantize_rows).

The 4-bit format is QLoRA's (https://arxiv.org/abs/2305.14314, section 3): blocks of 64 consecutive elements share one
absmax, and "double quantization" stores the absmax values in 8 bits themselves. The 8-bit one is LLM.int8()'s
(https://arxiv.org/abs/2208.07339): one absmax a row. File layout: bitsandbytes' QuantState.as_dict and Linear8bitLt.
"""

import json
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Shard, Span, element_count, read_into

DEQUANTIZED_KINDS = ("bnb-4bit", "bnb-8bit")

# What publishers append to the name of a quantized copy, as seen in real names: Qwen2.5-7B-Instruct-GPTQ-Int4,
# Meta-Llama-3.1-8B-Instruct-AWQ-INT4, Llama-3.2-1B-Instruct-FP8-Dynamic, Qwen3-4B-Instruct-2507-FP8,
# Meta-Llama-3.1-8B-Instruct-quantized.w4a16, Qwen3-8B-unsloth-bnb-4bit.
QUANTIZED_SUFFIX = re.compile(
    r"(-unsloth)?-bnb-[48]bit$|-bnb-nf4$|-(gptq|awq|fp8|nvfp4|mxfp4)([-_.](int|w)?\d+(bit|a\d+)?|-block|-dynamic)*$"
    r"|[-.](quantized\.)?w\d+a\d+$|-int[48]$|-[48]bit$",
    re.IGNORECASE,
)
# Who published the model that a quantizer's copy (unsloth/Qwen3-8B, TheBloke/Llama-2-7B) has the name of.
PUBLISHERS = (
    ("qwen", "Qwen"),
    ("qwq", "Qwen"),
    ("llama-2", "meta-llama"),
    ("llama-3", "meta-llama"),
    ("meta-llama", "meta-llama"),
    ("codellama", "codellama"),
    ("gemma", "google"),
    ("codegemma", "google"),
    ("medgemma", "google"),
    ("mistral", "mistralai"),
    ("mixtral", "mistralai"),
    ("ministral", "mistralai"),
    ("devstral", "mistralai"),
    ("magistral", "mistralai"),
    ("pixtral", "mistralai"),
    ("phi", "microsoft"),
    ("smollm", "HuggingFaceTB"),
    ("deepseek", "deepseek-ai"),
    ("granite", "ibm-granite"),
    ("olmo", "allenai"),
    ("lfm2", "LiquidAI"),
)


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


def full_precision_names(name: str, quant_method: str | None) -> tuple[str, ...]:
    """Where the full-precision model of the quantized base `name` may be, likeliest first.

    name: a hub id, or a directory (then its siblings come before hub ids). quant_method: what quantization() said of
    it. These are guesses from how publishers name things: a candidate may not exist, may be quantized itself
    (unsloth/gpt-oss-20b is MXFP4), or another model, so each one is for prove_base to judge.
    """
    path = PurePath(name.rstrip("/"))
    owner, model = str(path.parent), path.name
    stem = model
    while (shorter := QUANTIZED_SUFFIX.sub("", stem)) != stem and shorter:
        stem = shorter
    hub_id = name.count("/") == 1 and not name.startswith((".", "~", "/"))
    found: list[str] = []
    # Published in 4 or 8 bits only: the 16-bit weights are somebody's conversion, by custom named -BF16.
    if stem.lower().startswith("gpt-oss") or (stem == model and quant_method in ("fp8", "mxfp4")):
        found += [f"unsloth/{stem}-BF16", str(path.with_name(f"{stem}-BF16"))]
    if stem != model:
        found.append(str(path.with_name(stem)))
        found += [f"{publisher}/{stem}" for start, publisher in PUBLISHERS if stem.lower().startswith(start)]
    if not hub_id:
        found.sort(key=lambda candidate: not candidate.startswith(owner))
    return tuple(dict.fromkeys(candidate for candidate in found if candidate != name))


def refuse_dequantize(name: str, kind: str) -> None:
    """Raise UsageError unless dequantize_rows reads checkpoints of this kind (see quantization)."""
    if kind not in DEQUANTIZED_KINDS:
        raise UsageError(
            f"base {name} is quantized ({kind}), and base_mode='dequant' reads only bitsandbytes' 4 and 8 bits",
            fix="pass base=<the full-precision model>",
        )


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


def quantized_tensors(shards: tuple[Shard, ...], config: dict[str, Any]) -> dict[str, Bnb4bit | Bnb8bit]:
    """The quantized weights of a bitsandbytes checkpoint by name; the names are those of the full-precision one.

    What is neither here nor in an `auxiliary` is stored unquantized. Empty for any other kind of checkpoint. Raises
    UsageError for a checkpoint that is incomplete or in a layout of bitsandbytes that this module does not know.
    """
    kind = quantization(config)
    spans = {span.name: span for shard in shards for span in shard.spans}
    text = config.get("text_config") or {}
    loaded = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES.values()}
    found: dict[str, Bnb4bit | Bnb8bit] = {}
    for name in spans:
        if kind == "bnb-4bit" and ".quant_state.bitsandbytes__" in name:
            four = read_4bit(spans, name)
            found[four.name] = four
        elif kind == "bnb-8bit" and name.endswith(".SCB"):
            eight = read_8bit(spans, name.removesuffix(".SCB"), dtypes.get(str(loaded), torch.float16))
            found[eight.name] = eight
    return found


def part_of(spans: dict[str, Span], name: str, dtype: str, elements: int, beside: Span) -> Span:
    """The span called `name`, with the dtype and number of elements that the format wants; UsageError otherwise."""
    span = spans.get(name)
    if span is None:
        raise UsageError(
            f"{beside.name} has no {name} beside it", place=beside.path, fix="download the quantized base again"
        )
    if span.dtype != dtype or element_count(span.shape) != elements:
        raise UsageError(
            f"{name} is {span.dtype} {list(span.shape)} and not {elements} x {dtype}: a layout of "
            "bitsandbytes that is not known here",
            place=span.path,
            fix="pass base=<the full-precision model>",
        )
    return span


def read_4bit(spans: dict[str, Span], state_name: str) -> Bnb4bit:
    state_span = spans[state_name]
    name, _, kind = state_name.partition(".quant_state.bitsandbytes__")
    try:
        text = bytes(read_stored(state_span, torch.uint8, 0, state_span.end - state_span.start).tolist())
        state = json.loads(text)
        shape, dtype, blocksize = tuple(state["shape"]), getattr(torch, state["dtype"]), state["blocksize"]
        nested_dtype, nested_blocksize = state.get("nested_dtype", "float32"), state.get("nested_blocksize", 1)
        nested_offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{state_name} is not a bitsandbytes quant state ({error})", place=state_span.path, fix="download it again"
        ) from error
    if dtype not in FLOAT_DTYPES.values() or nested_dtype != "float32" or blocksize % 2:
        raise UsageError(
            f"{state_name} has dtype {state['dtype']}, nested_dtype {nested_dtype} and blocksize "
            f"{blocksize}: a layout of bitsandbytes that is not known here",
            place=state_span.path,
            fix="pass base=<the full-precision model>",
        )
    elements = element_count(shape)
    blocks = -(-elements // blocksize)
    weight = spans.get(name)
    # The bytes may be stored under another dtype (bnb_4bit_quant_storage), so only their number counts.
    if weight is None or weight.end - weight.start != (elements + 1) // 2:
        raise UsageError(f"{name} is missing or does not hold {elements} 4-bit elements", place=state_span.path)
    nested = f"{name}.nested_absmax" in spans
    nested_absmax = nested_map = None
    if nested:
        nested_blocks = -(-blocks // nested_blocksize)
        nested_absmax = part_of(spans, f"{name}.nested_absmax", "F32", nested_blocks, weight)
        nested_map = part_of(spans, f"{name}.nested_quant_map", "F32", 256, weight)
    absmax = part_of(spans, f"{name}.absmax", "U8" if nested else "F32", blocks, weight)
    quant_map = part_of(spans, f"{name}.quant_map", "F32", 16, weight)
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
    row_absmax = part_of(spans, f"{module}.SCB", "F32", weight.shape[0], weight)
    auxiliary = [row_absmax.name]
    layout = spans.get(f"{module}.weight_format")
    if layout is not None:
        auxiliary.append(layout.name)
        # 0 is row-major. The others are GPU tile orders of old releases, which bitsandbytes itself reads no more.
        if read_stored(layout, torch.uint8, 0, layout.end - layout.start).any():
            raise UsageError(
                f"{module}.weight is in a tiled order of an old bitsandbytes",
                place=layout.path,
                fix="pass base=<the full-precision model>",
            )
    return Bnb8bit(weight.name, weight.shape, dtype, weight, row_absmax, tuple(auxiliary))


def read_stored(span: Span, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
    """`count` elements from element `first` on, flat, with the tensor's bytes taken for `dtype`."""
    with span.path.open("rb", buffering=0) as file:  # opened anew: threads share nothing
        return read_into(file, span.start + first * dtype.itemsize, torch.empty(count, dtype=dtype))


def row_size(tensor: Bnb4bit | Bnb8bit) -> int:
    return tensor.shape[-1] if tensor.shape else 1


def dequantize_rows(tensor: Bnb4bit | Bnb8bit, first_row: int, last_row: int) -> torch.Tensor:
    """Rows first_row..last_row-1 as floats, [rows, columns]: what the quantized model computes with, bit for bit.

    4 bits: in the dtype that was quantized, as bitsandbytes.functional.dequantize_4bit returns it. 8 bits: float32, as
    int8_vectorwise_dequant (PEFT's and transformers' way) does. Of a tensor with more than two axes, rows are counted
    over all but the last. Reads only these rows' bytes; any thread may call it.
    """
    columns = row_size(tensor)
    return dequantize_elements(tensor, first_row * columns, (last_row - first_row) * columns).view(-1, columns)


def dequantize_elements(tensor: Bnb4bit | Bnb8bit, first: int, count: int) -> torch.Tensor:
    """`count` elements from element `first` of the flattened tensor; see dequantize_rows. 8 bits: whole rows only."""
    if count == 0:
        return torch.empty(0, dtype=tensor.dtype if isinstance(tensor, Bnb4bit) else torch.float32)
    if isinstance(tensor, Bnb8bit):
        columns = row_size(tensor)
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
    tensor. For some rows of one, double quantization centres the block scales on the mean over these rows instead of
    the tensor, and blocks begin with the first row: where 64 does not divide the columns, or to the bit, pass it whole.
    Slow on a CPU (some 20 million elements a second and core), so meant for samples.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    # As one row: where rows end inside blocks, bitsandbytes 0.50.2 misreads them on CPUs with AVX512.
    flat = weight.reshape(1, -1)
    packed, state = quantize_4bit(flat, blocksize=64, compress_statistics=True, quant_type="nf4")
    restored: torch.Tensor = dequantize_4bit(packed, state)
    return restored.view(weight.shape)
