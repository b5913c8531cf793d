"""Proof that a merge did what it says: every element of the written files against base + adapter.

An element that float32 decides must be in the file as it was computed (cogumi/merge/draft.py says why that suffices).
Every other one is computed again in float64, and may be off by what float32 arithmetic and one rounding can be.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cogumi.core.errors import MergeError
from cogumi.core.safetensors_file import FLOAT_DTYPES
from cogumi.merge.arithmetic import UNIT, Stored, Update, apply_update, row_blocks, scratch
from cogumi.merge.draft import bits_of, largest_magnitude
from cogumi.merge.plan import Piece, RowRange, ShardPlan, TensorPlan

# Stored mantissa bits and smallest normal exponent. (float64 is never an output dtype.)
MANTISSA = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float32: (23, -126)}


@dataclass
class ElementCheck:
    """The elements of one tensor, re-read from the written file and compared with W + delta.
    not_nearest: how many are not the nearest value of the output dtype, but within the error of float32 arithmetic.
    largest_error: the largest |out - (W + delta)| of these over the allowed error. More than 1 raises MergeError."""

    elements: int = 0
    not_nearest: int = 0
    largest_error: float = 0.0

    def add(self, other: "ElementCheck") -> None:
        self.elements += other.elements
        self.not_nearest += other.not_nearest
        self.largest_error = max(self.largest_error, other.largest_error)


def half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the spacing of `dtype` at each of `values` (float64, any shape): the most one rounding can move them.
    Exact, subnormals included: the exponent bits of a float64, alone, are the power of two below it."""
    bits, smallest = MANTISSA[dtype]
    binade = (values.contiguous().view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return binade.clamp_(min=2.0**smallest).mul_(2.0 ** (-bits - 1))


def verify_header(plan: ShardPlan, directory: Path) -> None:
    """Raise MergeError unless the written shard has the planned size and header."""
    path = directory / plan.name
    size = path.stat().st_size
    if size != plan.bytes:
        raise MergeError(f"{path} has {size} bytes on disk where {plan.bytes} were written")
    with path.open("rb") as file:
        if file.read(len(plan.header)) != plan.header:
            raise MergeError(f"{path}: the header on disk is not the one written")


def check_rows(run: RowRange, update: Update, stored: Stored, written: torch.Tensor) -> ElementCheck:
    """Compare every element of a run with W + delta in float64. written: the run's bytes, uint8. Raises MergeError naming
    the first that is not within rounding_bound."""
    tensor, columns = run.tensor, stored.columns
    kind = FLOAT_DTYPES[tensor.target.dtype]
    rows, found = written.view(kind).view(-1, columns), []
    for first, last in row_blocks(run.first, run.last, columns):
        weight = stored.rows(first, last, torch.float64)
        out = rows[first - run.first : last - run.first]
        # DoRA's bound asks for W; elsewhere its place is taken.
        expected = scratch("expected", last - first, columns, torch.float64) if update.normed else weight
        apply_update(weight, update, run.piece, first, expected)
        # Nearest but for what float64 -> float32 -> dtype rounds twice, which the bound allows.
        nearest = scratch("nearest", last - first, columns, kind).copy_(expected)
        unequal = bits_of(nearest) != bits_of(out)
        if not math.isfinite(largest_magnitude(out)):  # an overflow may be the nearest value, and still is wrong
            unequal |= ~out.isfinite().numpy()
        if len(where := torch.from_numpy(np.flatnonzero(unequal))):
            picked = (each.view(-1)[where] for each in (expected, weight, out))
            found.append(SuspectElements(where + first * columns, *picked))
    elements = (run.last - run.first) * columns
    if not found:
        return ElementCheck(elements)
    suspects = SuspectElements(*(torch.cat(each) for each in zip(*found, strict=True)))
    bound = rounding_bound(suspects, update, run.piece, columns, kind)
    return ElementCheck(elements, len(suspects.where), largest_error_share(tensor, suspects, bound, columns))


class SuspectElements(NamedTuple):
    """where: their positions in the stored tensor, int64 [n]. expected: W + delta in float64, and weight: W (for DoRA
    alone). out: what is in the file."""

    where: torch.Tensor
    expected: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor


def rounding_bound(
    found: SuspectElements, update: Update, piece: Piece, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """How far each of these elements may be from `expected`: one rounding to `dtype`, and float32 arithmetic before it.

    The product errs by at most `(r + 4) u |a||b|` (Update.product_errors). The addition of W adds `u (|W| + |delta|)`,
    with `|W| <= |W + delta| + |delta|`. So `(r + 8) u |a||b|` covers all but `2 u |expected|`. The factor on half an ulp
    is this error, because `|expected| < 2**(mantissa bits + 2)` half ulps.

    DoRA multiplies V = W + delta by s = m / |V|. This multiplies V's error by s and adds two roundings. The norm of n
    elements errs by at most sqrt(n) times an element's error. This error counts `|expected| / |V|` times, at most s.
    """
    left, right = update.left[found.where // columns - piece.place.first], update.right[:, found.where % columns]
    error = (left.shape[1] + 8) * UNIT * left.norm(dim=1) * right.norm(dim=0)
    relative = 2.0 ** (MANTISSA[dtype][0] - 21)
    if update.normed:
        normed = columns if update.magnitude is not None else len(update.left)
        scale = found.expected.abs() / (found.weight + (left * right.T).sum(dim=1)).abs().clamp_(min=2.0**-126)
        error = scale * (error * (1 + normed**0.5) + 2 * UNIT * found.weight.abs())
        relative *= 3
    return half_ulp(found.expected, dtype).mul_(1 + relative) + error


def largest_error_share(tensor: TensorPlan, found: SuspectElements, bound: torch.Tensor, columns: int) -> float:
    """The largest |out - expected| / bound of these elements. Raises MergeError where it is above 1."""
    out = found.out.double()
    error = (out - found.expected).abs()
    bad = ~((error <= bound) | (out == found.expected))  # NaN is not <= anything; equal infinities have no difference
    if bool(bad.any()):
        worst = int(bad.nonzero()[0])
        largest = torch.finfo(found.out.dtype).max
        if out[worst].isinf() and largest < found.expected[worst].abs() < math.inf:
            place = f"{tensor.target.name}: element {divmod(int(found.where[worst]), columns)}"
            what = f"{found.expected[worst].item():.9g}, beyond the largest {tensor.target.dtype}, {largest:.6g}"
            raise MergeError(f"{place} becomes {what}; merge with another dtype")
        raise MergeError(
            f"{tensor.target.name}: element {divmod(int(found.where[worst]), columns)} is {out[worst].item():.9g} where "
            f"W + delta is {found.expected[worst].item():.9g} and {tensor.target.dtype} rounding allows "
            f"{bound[worst].item():.3g}; {int(bad.sum())} elements near it are off"
        )
    return (error / bound).nan_to_num(0.0).max().item()
