"""Proof that a merge did what it says: every element of the written files against base + adapter in float64."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from cogumi.core.errors import MergeError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, matrix_shape, read_into
from cogumi.merge.arithmetic import (
    COPY_BYTES,
    Update,
    Weights,
    apply_update,
    load_update,
    read_rows,
    row_blocks,
    scratch,
)
from cogumi.merge.plan import Piece, RowRange, ShardPlan, TensorPlan

# Stored mantissa bits and smallest normal exponent. (float64 is never an output dtype.)
MANTISSA = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float32: (23, -126)}
# Half a float32 ulp, relative: what one float32 operation can be off by.
UNIT = 2.0**-24


@dataclass
class ElementCheck:
    """The elements of one tensor, re-read from the written file and compared with W + delta in float64.
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


def verify_run(run: RowRange, directory: Path, weights: Weights) -> ElementCheck:
    """Re-read one run's rows and compare every element with base and adapter. Raises MergeError naming the first bad.

    Updated rows: |out - (W + delta)|, in float64, is within rounding_bound. Other rows: the same bytes as the source,
    or the nearest value where the dtype was converted.
    """
    tensor = run.tensor
    with (
        tensor.source.path.open("rb", buffering=0) as source,
        (directory / tensor.target.path).open("rb", buffering=0) as written,
        torch.inference_mode(),
    ):
        if run.piece.change is None and isinstance(tensor.source, Span) and tensor.source.dtype == tensor.target.dtype:
            check_copied(run, tensor.source, source, written)
            return ElementCheck()
        update = load_update(run.piece, tensor, weights, torch.float64, source)
        return check_rows(run, update, source, written)


def check_rows(run: RowRange, update: Update, source: BinaryIO, written: BinaryIO) -> ElementCheck:
    """Compare rows with W + delta. Those that are not the nearest value are set aside, and held to the bound at the end."""
    tensor, kind, width = run.tensor, FLOAT_DTYPES[run.tensor.target.dtype], run.tensor.row_bytes
    columns = matrix_shape(tensor.source.shape)[1]
    found = []
    for first, last in row_blocks(run.first, run.last, columns):
        weight = read_rows(tensor.source, first, last, source, torch.float64)
        out = scratch("out", last - first, columns, kind)
        read_into(written, tensor.target.start + first * width, out.view(-1))
        # DoRA's bound asks for W; elsewhere its place is taken.
        expected = scratch("expected", last - first, columns, torch.float64) if update.normed else weight
        apply_update(weight, update, run.piece, first, expected)
        # Nearest but for what float64 -> float32 -> dtype rounds twice, which the bound allows.
        nearest = scratch("nearest", last - first, columns, kind).copy_(expected)
        suspects = find_suspects(expected, weight, out, nearest, first * columns)
        if len(suspects.where):
            found.append(suspects)
    elements = (run.last - run.first) * columns
    if not found:
        return ElementCheck(elements)
    suspects = SuspectElements(*(torch.cat(each) for each in zip(*found, strict=True)))
    share = largest_error_share(tensor, suspects, rounding_bound(suspects, update, run.piece, columns, kind), columns)
    return ElementCheck(elements, len(suspects.where), share)


class SuspectElements(NamedTuple):
    """where: their positions in the stored tensor, int64 [n]. expected: W + delta in float64, and weight: W (for DoRA
    alone). out: what is in the file."""

    where: torch.Tensor
    expected: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor


def find_suspects(
    expected: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, nearest: torch.Tensor, position: int
) -> SuspectElements:
    """The elements of a block that differ from the nearest value or are not finite. The block begins at `position`.
    An overflow equals the nearest value, which is infinity, and still must be checked. Few elements differ, so this
    compares 8 bytes at a time."""
    group = 64 // out.element_size()
    # A sum is not finite where an element is not, and costs less than asking each.
    if out.numel() % group or not math.isfinite(out.sum(dtype=torch.float32).item()):
        where = torch.arange(out.numel())
    else:
        eights = nearest.view(-1).view(torch.int64) != out.view(-1).view(torch.int64)
        where = (eights.view(torch.int64).nonzero() * group + torch.arange(group)).view(-1)
    found = out.view(-1)[where]
    chosen = (nearest.view(-1)[where] != found) | ~found.isfinite()
    where, found = where[chosen], found[chosen]
    return SuspectElements(where + position, expected.view(-1)[where], weight.view(-1)[where], found)


def rounding_bound(
    found: SuspectElements, update: Update, piece: Piece, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """How far each of these elements may be from `expected`: one rounding to `dtype`, and float32 arithmetic before it.

    Let u = 2**-24, and let a and b be vectors of length r. Their dot product, in any order, errs by at most
    `r u sum |a_i||b_i|` (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). The scaling and its own
    rounding add 2 u of that sum, which is at most `|a||b|`. The addition of W adds `u (|W| + |delta|)`, with
    `|W| <= |W + delta| + |delta|`. So `(r + 8) u |a||b|` covers all but `2 u |expected|`. The factor on half an ulp is
    this error, because `|expected| < 2**(mantissa bits + 2)` half ulps.

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
        raise MergeError(
            f"{tensor.target.name}: element {divmod(int(found.where[worst]), columns)} is {out[worst].item():.9g} where "
            f"W + delta is {found.expected[worst].item():.9g} and {tensor.target.dtype} rounding allows "
            f"{bound[worst].item():.3g}; {int(bad.sum())} elements near it are off"
        )
    return (error / bound).nan_to_num(0.0).max().item()


def check_copied(run: RowRange, span: Span, source: BinaryIO, written: BinaryIO) -> None:
    width, shift = run.tensor.row_bytes, run.tensor.target.start - span.start
    begin, end = span.start + run.first * width, span.start + run.last * width
    for start in range(begin, end, COPY_BYTES):
        length = min(COPY_BYTES, end - start)
        ours, theirs = (scratch(name, 1, length, torch.uint8)[0] for name in ("out", "weight"))
        if not torch.equal(read_into(written, start + shift, ours), read_into(source, start, theirs)):
            raise MergeError(f"{run.tensor.target.name} should be the base's bytes and is not")
