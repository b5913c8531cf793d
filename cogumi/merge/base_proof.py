"""Proof that a full-precision model is the one that a quantized checkpoint was made from.

A name proves nothing: unsloth/X and X differ now and then, hub repositories change, and base and instruct models have
the same shapes. Two things do prove it. What the quantizer left alone (embeddings, norms, heads, router weights) must
be the candidate's, bit for bit. And quantization is deterministic: quantizing the candidate's weights must give the
codes that are stored, which a fine-tuned sibling's do not.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from cogumi.core.errors import UsageError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Shard, Span, element_count, read_elements
from cogumi.merge.quantized import (
    DEQUANTIZED_KINDS,
    Bnb4bit,
    Bnb8bit,
    dequantize_elements,
    quantization,
    quantized_tensors,
    read_stored,
    stored_levels,
)

BLOCK_BYTES = 1 << 22
# At most this many quantized tensors, spread over the model, are sampled, each in this many places of this many
# elements (8 bits: the whole rows that they touch).
SAMPLED_TENSORS = 512
SAMPLED_RUNS = 4
RUN_ELEMENTS = 2048
# Relative error |dequantized - W| / |W| that the format makes: see sampled_error for the measurements.
ERROR_RANGE = {"nf4": (0.05, 0.35), "fp4": (0.06, 0.5), "int8": (0.002, 0.1)}
# Share of sampled codes that may differ from the candidate's own.
CODES_DIFFERING = 0.001
# Methods that may move a scale from a quantized weight into the norm before it (AWQ: scale_ln_fcs, and llm-compressor's
# AWQ and SmoothQuant modifiers), so that vectors of the right base need not be equal. Matrices must be.
SCALES_FOLDED = ("awq", "compressed-tensors", "modelopt")
# Fields that decide how equal shapes are used. Sizes are compared where they matter: in the tensors.
IDENTITY = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class BaseProof:
    """Why the full-precision base is the right one.

    tensors_equal, bytes_equal: tensors that the quantized checkpoint holds unquantized, all equal to the full ones, and
    their bytes in the quantized file. tensors_unmatched: tensors of the full model in modules that the quantized
    checkpoint lacks altogether (a tied head, multi-token prediction), about which nothing is proven.

    sampled_tensors: quantized tensors sampled (bitsandbytes only, else 0). nf4_error: |dequantized - W| / |W| in
    Frobenius norms over the sample, for whichever of NF4, FP4 and INT8 it is; None where nothing was sampled.
    largest_tensor_error: that of the worst single tensor. codes_differing: share of the sampled codes that are not what
    quantizing W gives.
    """

    tensors_equal: int
    bytes_equal: int
    tensors_unmatched: int
    sampled_tensors: int
    nf4_error: float | None
    largest_tensor_error: float | None
    codes_differing: float | None


class Mismatch(Exception):
    """What differs, in words; prove_base adds the names of the two checkpoints and what to pass."""


def prove_base(
    quantized_shards: tuple[Shard, ...],
    quantized_config: dict[str, Any],
    full_shards: tuple[Shard, ...],
    full_config: dict[str, Any],
) -> BaseProof:
    """Prove that the quantized checkpoint was made from the full-precision one; raise UsageError, in one line, if not.

    Checked: the identity fields of the configs; every tensor that the quantized checkpoint holds in a plain float dtype
    under a name that the full one has too (equal bytes, after rounding the full one to the quantized file's dtype);
    and, for bitsandbytes, names and shapes of all tensors, and a fixed sample of the quantized ones as in
    sampled_error. Reads every unquantized tensor of both, in blocks of a few megabytes.

    GPTQ, AWQ, FP8, MXFP4 and others: the quantized weights themselves are not looked at, so only embeddings, heads,
    norms and biases speak. A sibling that was trained with all of those frozen would pass.
    """
    quantized_path, full_path = quantized_shards[0].path.parent, full_shards[0].path.parent
    kind = quantization(quantized_config)
    if kind is None:
        raise UsageError(f"base {quantized_path} is not quantized", fix="merge into it as it is")
    if quantization(full_config) is not None:
        raise UsageError(
            f"base {full_path} is quantized itself ({quantization(full_config)})", fix="pass the 16-bit model"
        )
    try:
        compare_configs(quantized_config, full_config)
        return compare_tensors(
            kind, quantized_tensors(quantized_shards, quantized_config), quantized_shards, full_shards
        )
    except Mismatch as mismatch:
        instead = " or base_mode='dequant'" if kind in DEQUANTIZED_KINDS else ""
        raise UsageError(
            f"base {full_path} is not what {quantized_path} ({kind}) was quantized from: {mismatch}",
            fix=f"pass base=<the full-precision model that it was>{instead}",
        ) from mismatch


def compare_configs(quantized: dict[str, Any], full: dict[str, Any]) -> None:
    left, right = quantized.get("text_config") or quantized, full.get("text_config") or full
    for field in IDENTITY:
        if None not in (left.get(field), right.get(field)) and left[field] != right[field]:
            raise Mismatch(f"its config says {field}={right[field]!r} where the quantized one says {left[field]!r}")


def compare_tensors(
    kind: str,
    packed: dict[str, Bnb4bit | Bnb8bit],
    quantized_shards: tuple[Shard, ...],
    full_shards: tuple[Shard, ...],
) -> BaseProof:
    quantized = {span.name: span for shard in quantized_shards for span in shard.spans}
    full = {span.name: span for shard in full_shards for span in shard.spans}
    unmatched = 0
    if kind in DEQUANTIZED_KINDS:
        unmatched = match_names(packed, quantized, full)
    equal = [
        span
        for name, span in quantized.items()
        if name in full and name not in packed and carries_proof(kind, span, full[name])
    ]
    # Small ones first: a norm that differs is found before gigabytes of embeddings are read.
    for span in sorted(equal, key=lambda span: span.end - span.start):
        compare_span(span, full[span.name])
    if not equal:
        raise Mismatch("no tensor is stored unquantized in both, so nothing can be compared")
    proof = sampled_error(packed, full) if packed else (0, None, None, None)
    return BaseProof(len(equal), sum(span.end - span.start for span in equal), unmatched, *proof)


def match_names(packed: dict[str, Bnb4bit | Bnb8bit], quantized: dict[str, Span], full: dict[str, Span]) -> int:
    """Compare names and shapes of a bitsandbytes checkpoint; return how many full tensors lie in modules it lacks."""
    auxiliary = {name for tensor in packed.values() for name in tensor.auxiliary}
    for name in sorted(quantized.keys() - auxiliary):
        if name not in full:
            raise Mismatch(f"it has no {name}")
        shape = packed[name].shape if name in packed else quantized[name].shape
        if name in packed and full[name].dtype not in FLOAT_DTYPES:
            raise Mismatch(f"{name} is stored as {full[name].dtype} in it")
        if full[name].shape != shape:
            raise Mismatch(f"{name} is {list(full[name].shape)} where the quantized one has {list(shape)}")
    modules = {name.rpartition(".")[0] for name in quantized}
    extra = full.keys() - quantized.keys()
    for name in sorted(extra):
        if name.rpartition(".")[0] in modules:  # e.g. a bias: the quantized model would not have computed with it
            raise Mismatch(f"it has {name}, which the quantized one lacks")
    return len(extra)


def carries_proof(kind: str, quantized: Span, full: Span) -> bool:
    """Whether two tensors of one name must be equal. Raises Mismatch where their shapes or kinds of dtype rule it out."""
    if kind in DEQUANTIZED_KINDS:
        plain = quantized.dtype in FLOAT_DTYPES and full.dtype in FLOAT_DTYPES
        if not plain and quantized.dtype != full.dtype:
            raise Mismatch(f"{full.name} is {full.dtype} where the quantized one has {quantized.dtype}")
        return True
    if quantized.dtype not in FLOAT_DTYPES or full.dtype not in FLOAT_DTYPES:
        return False
    if quantized.shape != full.shape:
        raise Mismatch(f"{full.name} is {list(full.shape)} where the quantized one has {list(quantized.shape)}")
    return not (kind in SCALES_FOLDED and len(full.shape) < 2)


def compare_span(quantized: Span, full: Span) -> None:
    """Raise Mismatch unless the tensors are equal, the full one rounded to the quantized one's dtype."""
    if quantized.dtype == full.dtype:
        for start in range(0, quantized.end - quantized.start, BLOCK_BYTES):
            length = min(BLOCK_BYTES, quantized.end - quantized.start - start)
            if not torch.equal(
                read_stored(quantized, torch.uint8, start, length), read_stored(full, torch.uint8, start, length)
            ):
                raise Mismatch(f"{full.name}, which is stored unquantized, has other bytes in it")
        return
    dtype = FLOAT_DTYPES[quantized.dtype]
    total, step = element_count(full.shape), BLOCK_BYTES // 4
    for first in range(0, total, step):
        count = min(step, total - first)
        rounded, stored = read_elements(full, first, count).to(dtype), read_elements(quantized, first, count)
        if not torch.equal(rounded.view(torch.uint8), stored.view(torch.uint8)):
            raise Mismatch(f"{full.name}, which is stored unquantized, differs after rounding to {quantized.dtype}")


def sampled_error(packed: dict[str, Bnb4bit | Bnb8bit], full: dict[str, Span]) -> tuple[int, float, float, float]:
    """(tensors sampled, overall error, largest error of a tensor, share of codes that differ); Mismatch outside limits.

    Measured relative errors at blocksize 64, double quantization, 1024 x 1024 in bfloat16 (NF4 / FP4 / INT8): Gaussian
    0.092 / 0.122 / 0.008, uniform 0.091 / 0.111 / 0.004, Laplace 0.104 / 0.151 / 0.012, Student's t with 3 degrees of
    freedom 0.124 / 0.189 / 0.026, Gaussian with 8 columns of 1024 ten times larger 0.141 / 0.225 / 0.032; the last at
    blocksize 512, 0.284 / 0.454. Another model of the same shapes: 1.41. So the error tells other models and wrong
    orders of rows, and one near zero says that the candidate is the dequantized checkpoint itself. It cannot tell a
    fine-tuned sibling: with weights 1 % away it is 0.0925 in place of 0.0920.

    The codes can. Blocks are quantized by themselves, from the weights alone, so for the right model all codes are what
    quantizing its weights gives (measured: 0 differ). Weights that are 0.1 % away (relative root mean square) change
    0.15 % of the NF4 codes, 0.3 % change 0.8 %, 1 % change 3 %; 8 bits, being finer, change more. What this leaves: a
    sibling less than about 0.1 % away, or one that differs in few tensors only that the sample missed.
    """
    names = sorted(packed)
    sampled = [names[index] for index in spread(len(names), SAMPLED_TENSORS)]
    errors: dict[str, float] = {}
    off_squares = squares = 0.0
    codes = differing = 0
    for name in sampled:
        off, norm, count, other = sample_tensor(packed[name], full[name])
        errors[name] = math.sqrt(off / norm) if norm else 0.0
        off_squares, squares, codes, differing = off_squares + off, squares + norm, codes + count, differing + other
    error = math.sqrt(off_squares / squares) if squares else 0.0
    worst = max(errors, key=lambda name: errors[name])
    first = packed[sampled[0]]
    kind = first.kind if isinstance(first, Bnb4bit) else "int8"
    low, high = ERROR_RANGE[kind]
    if not low <= error <= high:
        raise Mismatch(
            f"the quantized weights are {error:.3g} from its weights, relative, where {kind} makes {low} to {high}"
            + (" (is it the dequantized checkpoint?)" if error < low else f" (worst: {worst})")
        )
    if differing > CODES_DIFFERING * codes:
        raise Mismatch(
            f"quantizing its weights gives other codes for {differing / codes:.2%} of a sample of {codes} (a "
            "fine-tuned sibling?)"
        )
    return len(sampled), error, errors[worst], differing / codes


def spread(total: int, wanted: int) -> list[int]:
    """Up to `wanted` of range(total), evenly spread, the first and the last among them."""
    if total <= wanted:
        return list(range(total))
    return sorted({round(index * (total - 1) / (wanted - 1)) for index in range(wanted)})


def sample_tensor(tensor: Bnb4bit | Bnb8bit, full: Span) -> tuple[float, float, int, int]:
    """(sum (dequantized - W)^2, sum W^2, codes compared, codes that differ) over the sampled runs, W in float64."""
    total = element_count(tensor.shape)
    unit = tensor.blocksize if isinstance(tensor, Bnb4bit) else tensor.shape[-1]
    units, each = -(-total // unit), max(1, RUN_ELEMENTS // unit)
    off = norm = 0.0
    codes = differing = 0
    for run in spread(-(-units // each), SAMPLED_RUNS):
        first = run * each * unit
        count = min(each * unit, total - first)
        weight = read_elements(full, first, count)
        restored = dequantize_elements(tensor, first, count)
        off += (restored.double() - weight.double()).square_().sum().item()
        norm += weight.double().square_().sum().item()
        codes += count
        differing += differing_codes(tensor, weight, first)
    return off, norm, codes, differing


def differing_codes(tensor: Bnb4bit | Bnb8bit, weight: torch.Tensor, first: int) -> int:
    """How many stored codes are not what quantizing `weight`, the elements from `first` on, gives.

    `first` begins a block (4 bits) or a row (8 bits). A code counts as right when no other is nearer: where two are
    equally near, as many are for FP4's simple fractions, kernels choose differently. In blocks and rows that are all
    zero no code is defined, and all count as right.
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
