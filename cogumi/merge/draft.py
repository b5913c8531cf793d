"""What one run of rows becomes: the nearest value of the output dtype to W + delta.

Of a sum that is rounded to 16 bits, float32 decides nearly every element. Let M be W + delta as computed, and e a bound
on its error. Rounding is monotone: where M - e and M + e round to one value, W + delta rounds to it too. The other
elements are computed in float64 and rounded once. So the output does not depend on how a machine adds up products.
float64 has its own limit, 2**-52 of |W| + |B| |A|: closer to a tie than that, the other neighbour may be chosen.

The bound holds for IEEE arithmetic. Row sums in float64 show that the products are that; else float64 computes them all,
as it does for an output in float32. What is no sum (DoRA) or was quantized is computed in float32, and each element is
checked in float64 afterwards.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from cogumi.core.errors import MergeError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span
from cogumi.merge.arithmetic import UNIT, Stored, Update, apply_update, block_rows, exact_sums, row_blocks, scratch
from cogumi.merge.plan import RowRange

# How many factors are picked out at once for elements that are computed in float64: memory is bounded, at any rank.
PICKED_FACTORS = 1 << 19


@dataclass
class DeltaStats:
    """What the updates of one tensor did, over all its runs. max_abs_delta: the largest change before rounding. The others
    come from a sample, the first block of each run. along_delta: the sum of rounding error times delta."""

    max_abs_delta: float = 0.0
    delta_squares: float = 0.0
    weight_squares: float = 0.0
    along_delta: float = 0.0

    def add(self, other: "DeltaStats") -> None:
        self.max_abs_delta = max(self.max_abs_delta, other.max_abs_delta)
        self.delta_squares += other.delta_squares
        self.weight_squares += other.weight_squares
        self.along_delta += other.along_delta

    @property
    def ratio(self) -> float | None:
        """Frobenius |delta| / |W| of the sample; None for a weight that is all zero."""
        return math.sqrt(self.delta_squares / self.weight_squares) if self.weight_squares else None

    @property
    def retained(self) -> float | None:
        """The share of delta that arrived, <out - W, delta> / <delta, delta>, of the sample; None where delta is zero."""
        return 1 + self.along_delta / self.delta_squares if self.delta_squares else None

    def add_largest(self, delta: torch.Tensor, run: RowRange) -> None:
        """Raises MergeError where a change is not finite."""
        values = delta.numpy()
        change = max(-float(values.min()), float(values.max()))
        if not math.isfinite(change):
            raise not_finite(run, "base weight or update is not finite; is the base damaged, or a factor too large?")
        self.max_abs_delta = max(self.max_abs_delta, change)

    def sample(self, weight: torch.Tensor, delta: torch.Tensor) -> None:
        self.weight_squares += torch.dot(weight.view(-1), weight.view(-1)).item()
        self.delta_squares += torch.dot(delta.view(-1), delta.view(-1)).item()

    def sample_rounding(self, merged: torch.Tensor, out: torch.Tensor, delta: torch.Tensor) -> None:
        self.along_delta += torch.dot(torch.sub(out, merged).view(-1), delta.view(-1)).item()


@dataclass
class Draft:
    """A run's output before it is written. bytes: uint8. nearest: whether every element is the nearest value, proven."""

    bytes: torch.Tensor
    stats: DeltaStats | None = None
    nearest: bool = False


def draft_run(run: RowRange, stored: Stored, update: Update, memory: torch.Tensor) -> Draft:
    """What the run becomes, in `memory`, uint8 of the run's size."""
    draft = Draft(memory)
    out = memory.view(FLOAT_DTYPES[run.tensor.target.dtype]).view(-1, stored.columns)
    plain = isinstance(run.tensor.source, Span) and update.plain
    if plain and not update.left.shape[1]:  # W in another dtype, exactly or rounded once
        out.copy_(stored.matrix())
        draft.nearest = math.isfinite(largest_magnitude(out))
        return draft
    if plain and out.element_size() == 2:
        draft_sum(run, stored, update, draft, out)
    if not draft.nearest:
        draft_blocks(run, stored, update, draft, out, torch.float64 if plain else torch.float32)
        draft.nearest = plain and math.isfinite(largest_magnitude(out))
    return draft


def draft_blocks(
    run: RowRange, stored: Stored, update: Update, draft: Draft, out: torch.Tensor, precision: torch.dtype
) -> None:
    """Any update, and any source, computed in float32, or in float64 and rounded once."""
    stats, columns = DeltaStats(), stored.columns
    exact = precision == torch.float64
    for first, last in row_blocks(run.first, run.last, columns):
        weight = stored.rows(first, last, precision)
        delta, merged = (scratch(name, last - first, columns, precision) for name in ("delta", "merged"))
        apply_update(weight, update if exact else update.single, run.piece, first, merged)
        rounded = out[first - run.first : last - run.first]
        rounded.copy_(round_to_odd(merged) if exact and out.element_size() == 2 else merged)
        if run.piece.change is None:
            continue
        stats.add_largest(torch.sub(merged, weight, out=delta), run)
        if first == run.first:
            stats.sample(weight, delta)
            stats.sample_rounding(merged, rounded, delta)
    draft.stats = stats if run.piece.change is not None else None


def draft_sum(run: RowRange, stored: Stored, update: Update, draft: Draft, out: torch.Tensor) -> None:
    """W + left @ right, rounded to 16 bits. Leaves draft.nearest False where float32 cannot be trusted.

    M is off by `error + u |M|`, with u = 2**-24: the product's error, and the addition's rounding. Adding e and -e moves
    it by `u (|M| + e)` and `u (|M| + 3 e)`, as the latter is computed from the former. So W + delta lies between the two
    for `e = 1.001 error + 4 u max|M|`. Products that underflow err by less than the smallest normal number.
    """
    start, count = run.first - run.piece.place.first, run.last - run.first
    single, signs = update.single, update.probe[0]
    weights, change = largest_magnitude(stored.matrix()), float(update.largest_change[start : start + count].amax())
    if not math.isfinite(weights):
        raise not_finite(run, "a base weight is NaN or infinite; is the base damaged?")
    # Beyond the largest number of the dtype, both are infinity, which is not what was trained.
    if not weights + change < torch.finfo(out.dtype).max:
        return
    error = float(update.product_errors[start : start + count].amax())
    margin = 1.001 * error + 4 * UNIT * (weights + change) + 2.0**-126
    stats, sums, position = DeltaStats(), torch.empty(count), 0
    unequal = scratch("unequal", 1, -(-out.numel() // 8) * 8, torch.bool)[0].numpy()
    unequal[-8:] = False
    rows = (stored.matrix(), single.left[start : start + count], sums, out)
    for source, left, total, above in zip(*(each.split(block_rows(stored.columns)) for each in rows), strict=True):
        weight, delta, below = block_memory(len(source), stored.columns, out.dtype)
        weight.copy_(source)
        torch.mm(left, single.right, out=delta)
        torch.mv(delta, signs, out=total)
        stats.add_largest(delta, run)
        if not position:
            stats.sample(weight, delta)
        merged = weight.add_(delta)
        if not position:
            stats.sample_rounding(merged, merged.to(out.dtype), delta)
        above.copy_(merged.add_(margin))
        below.copy_(merged.sub_(2 * margin))
        end = position + merged.numel()
        np.not_equal(bits_of(above), bits_of(below), out=unequal[position:end].reshape(merged.shape))
        position = end
    if not probed(update, run, sums):
        return
    for where in torch.from_numpy(sparse_nonzero(unequal)).split(PICKED_FACTORS // left.shape[1] + 1):
        out.view(-1)[where] = round_to_odd(exact_sums(update, stored, where, start)).to(out.dtype)
    draft.stats, draft.nearest = stats, True


def round_to_odd(values: torch.Tensor) -> torch.Tensor:
    """float64 -> float32 towards zero, with the last bit set where it is not exact. Rounding that to 16 bits gives what
    rounding `values` at once would. Rounding to the nearest twice does not (S. Boldo, G. Melquiond, When double
    rounding is odd, 2005)."""
    nearest = values.float()
    towards_zero = torch.where(nearest.double().abs() > values.abs(), nearest.nextafter(torch.zeros(())), nearest)
    return (towards_zero.view(torch.int32) | (towards_zero.double() != values)).view(torch.float32)


def block_memory(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Two float32 matrices and one of `dtype`, for one block of this thread."""
    singles = (scratch(name, rows, columns, torch.float32) for name in ("weight", "delta"))
    return *singles, scratch("below", rows, columns, dtype)


def sparse_nonzero(flags: np.ndarray) -> np.ndarray:
    """np.flatnonzero of booleans of which few are true, whose number is a multiple of eight. Three times as fast."""
    eights = np.flatnonzero(flags.view(np.uint64) != 0)
    found = np.flatnonzero(flags.reshape(-1, 8)[eights])
    return eights[found >> 3] * 8 + (found & 7)


def probed(update: Update, run: RowRange, sums: torch.Tensor) -> bool:
    """Whether the row sums of a run's float32 products, with the probe's signs, are those of float64.

    The errors of a row have no common sign, so the sum of n of them is about sqrt(n) times one. A sum beyond that does
    not prove anything: then every element of the run is computed in float64.
    """
    start, count = run.first - run.piece.place.first, run.last - run.first
    allowed = update.product_errors[start : start + count] * (2 * update.right.shape[1] ** 0.5)
    return bool(((sums.double() - update.probe[1][start : start + count]).abs() <= allowed).all())


def not_finite(run: RowRange, what: str) -> MergeError:
    return MergeError(f"{run.tensor.target.name}: {what}")


def bits_of(values: torch.Tensor) -> np.ndarray:
    """The bits of a float tensor as unsigned integers, in the same memory."""
    return values.view({2: torch.uint16, 4: torch.uint32}[values.element_size()]).numpy()


def largest_magnitude(values: torch.Tensor) -> float:
    """The largest |value|; not finite where one of them is not."""
    return magnitude_of(bits_of(values), values.dtype)


def magnitude_of(bits: np.ndarray, dtype: torch.dtype) -> float:
    """The largest magnitude of values with these bits, which are in the order of the magnitudes, but for the sign."""
    if not bits.size:
        return 0.0
    size = bits.itemsize
    # Signed, every negative value is below zero. Unsigned, it is above every other one.
    largest = max(int(bits.view(f"i{size}").max()), int(bits.max()) - (1 << (8 * size - 1)), 0)
    if dtype == torch.bfloat16:  # the upper half of a float32
        return float(np.uint32(largest << 16).view(np.float32))
    return float(bits.dtype.type(largest).view(f"f{size}"))
