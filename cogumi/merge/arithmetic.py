"""Arithmetic of a merge: stored rows with their update, computed in float64 and rounded once.

LoRA: `W + scaling * B @ A` (https://arxiv.org/abs/2106.09685, section 4.1). scaling is alpha / r, or alpha / sqrt(r) for
rsLoRA (https://arxiv.org/abs/2312.03732). DoRA: `m * V / |V|` with `V = W + scaling * B @ A`
(https://arxiv.org/abs/2402.09353, equation 5), where |V| is the norm over the inputs of each output.

Every element is the nearest value of the output dtype. Only float64's own error of about 2**-52 of |W| + |B| |A| limits
this: closer to a tie than that, the other neighbour may be chosen.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from cogumi.core.errors import MergeError
from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, matrix_shape, read_into
from cogumi.merge.parameter_map import Change, LowRank, Place
from cogumi.merge.plan import Piece, RowRange, Source, TensorPlan, source_row_bytes
from cogumi.merge.quantized import dequantize_rows

# Rows are merged in blocks of about this many elements, 1 MiB in float64: few enough to stay in a core's cache, and enough
# that threads seldom wait for Python's lock. Fixed, because a block's shape can change the last bit of a product.
BLOCK_ELEMENTS = 1 << 17
# Bits of a float32 that are zero where it is a 16-bit number or lies in the middle of two, also among the subnormals.
LOW_BITS = {torch.bfloat16: 0x7FFF, torch.float16: 0x0FFF}

# Adapter file -> its open tensors: views of the file that take no memory until they are used.
Weights = Mapping[Path, Any]


@dataclass(frozen=True)
class Update:
    """A piece's change, loaded in float64: left [rows, r] (scaled) and right [r, columns], in the stored layout.

    magnitude: DoRA's, [rows, 1], where its outputs are rows. factor: the magnitude divided by the norms, [1, columns], where
    they are columns. rows, values: stored rows that are replaced, int64 [n] and [n, columns].
    """

    left: torch.Tensor
    right: torch.Tensor
    magnitude: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    values: torch.Tensor | None = None


@dataclass
class DeltaStats:
    """Effect of the updates of one tensor, over all its runs.

    max_abs_delta: the largest change before rounding. The other fields come from a sample, the first block of each run.
    along_delta: the sum of rounding error times delta.
    """

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
        """Share of delta that rounding kept, <out - W, delta> / <delta, delta>, of the sample; None where delta is zero."""
        return 1 + self.along_delta / self.delta_squares if self.delta_squares else None


@contextmanager
def restore_matmul_precision() -> Iterator[None]:
    """Restore, after the block, the precision of float32 matrix products that the process had set."""
    backends: Any = torch.backends
    products = backends.cuda.matmul, backends.mkldnn.matmul
    general, before = backends.fp32_precision, [product.fp32_precision for product in products]

    def restore() -> None:
        torch.set_float32_matmul_precision(legacy)
        backends.fp32_precision = general
        for product, value in zip(products, before, strict=True):
            product.fp32_precision = "none"  # it reads as the global one; set to the same, it would hide later changes
            if product.fp32_precision != value:
                product.fp32_precision = value

    for product in products:  # while they disagree with the legacy setting, torch refuses to tell that one
        product.fp32_precision = "ieee"
    legacy = torch.get_float32_matmul_precision()
    restore()
    try:
        yield
    finally:
        restore()


@contextmanager
def ieee_matmul() -> Iterator[None]:
    """Compute float32 matrix products in float32, whatever precision the process has set.

    With torch.set_float32_matmul_precision("medium"), usual in training, CUDA multiplies float32 in TF32. On CPUs with
    bfloat16 instructions, oneDNN multiplies float32 in bfloat16. Both errors exceed the rounding of the merge.
    """
    with restore_matmul_precision():
        torch.set_float32_matmul_precision("highest")
        yield


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Run each matrix product on the thread that calls it: faster for small blocks, with bits that depend on no count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def block_rows(columns: int) -> int:
    """Return how many rows of a matrix are merged at once."""
    return max(1, BLOCK_ELEMENTS // max(1, columns))


def row_blocks(first: int, last: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield (first, past last) row of each block of rows `first` to `last`."""
    step = block_rows(columns)
    for start in range(first, last, step):
        yield start, min(start + step, last)


thread_scratch = threading.local()


def scratch(name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor that this thread reuses: allocating one for each block would cost as much as the sums."""
    buffer = getattr(thread_scratch, f"{name} {dtype}", None)
    if buffer is None or buffer.numel() < rows * columns:
        buffer = torch.empty(rows * columns, dtype=dtype)
        setattr(thread_scratch, f"{name} {dtype}", buffer)
    return buffer[: rows * columns].view(rows, columns)


class Stored:
    """Stored rows of one run from row `first` on. bytes: flat uint8, empty for a quantized tensor, decoded on demand."""

    def __init__(self, source: Source, first: int, bytes: torch.Tensor) -> None:
        self.source, self.first, self.bytes = source, first, bytes
        self.columns = matrix_shape(source.shape)[1]

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows of the tensor as a matrix, in the dtype that they are stored in or decode to."""
        if not isinstance(self.source, Span):
            return dequantize_rows(self.source, first, last)
        values = self.bytes.view(FLOAT_DTYPES[self.source.dtype]).view(-1, self.columns)
        return values[first - self.first : last - self.first]


def read_stored_rows(source: Source, first: int, last: int, file: BinaryIO, buffer: torch.Tensor) -> Stored:
    """Read rows `first` to `last` of a tensor from its open file into the beginning of a uint8 buffer."""
    if not isinstance(source, Span):
        return Stored(source, first, buffer[:0])
    width = source_row_bytes(source)
    return Stored(source, first, read_into(file, source.start + first * width, buffer[: (last - first) * width]))


class Updates:
    """Loaded updates of the pieces in work, for any number of threads. Runs share a piece, so the last few are kept."""

    MAX_LOADED = 2

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.lock = threading.Lock()
        self.loaded: dict[int, tuple[Piece, Update]] = {}

    def load(self, piece: Piece, tensor: TensorPlan) -> Update:
        with self.lock:
            if id(piece) not in self.loaded:
                while len(self.loaded) >= self.MAX_LOADED:
                    del self.loaded[next(iter(self.loaded))]
                # The piece is kept too, so that no other one gets its identity.
                self.loaded[id(piece)] = piece, load_update(piece, tensor, self.weights)
            return self.loaded[id(piece)][1]


def load_update(piece: Piece, tensor: TensorPlan, weights: Weights) -> Update:
    """Load a piece's factors in float64, cut and turned to its rows of the stored tensor; none where unchanged."""
    change, place = piece.change or Change(), piece.place
    columns = matrix_shape(tensor.source.shape)[1]
    sides = [factors(term, place, weights[term.file]) for term in change.terms]
    left = torch.zeros(place.last - place.first, 0, dtype=torch.float64)
    right = torch.zeros(0, columns, dtype=torch.float64)
    if sides:
        left = torch.cat([side[0] for side in sides], dim=1)
        right = torch.cat([side[1] for side in sides], dim=0)
    rows = values = magnitude = factor = None
    if change.rows is not None:
        rows = torch.tensor(change.rows.indices, dtype=torch.int64)
        values = weights[change.rows.file].get_tensor(change.rows.key).double()
    if change.magnitude is not None:
        magnitude = weights[change.magnitude[0]].get_tensor(change.magnitude[1]).double()
        if change.terms[0].transposed:
            factor = (magnitude / column_norms(piece, tensor, left, right))[None, :]
            magnitude = None
        else:
            magnitude = magnitude[place.offset :][: place.last - place.first, None]
    return Update(left, right, magnitude, factor, rows, values)


def factors(term: LowRank, place: Place, weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return left [rows, r], scaled, and right [r, columns] of one term for the stored rows of a place, in float64."""
    b = weights.get_tensor(term.key_b)
    if term.key_a is None:
        left, right = b[:, None], torch.ones(1, 1)
    else:
        a = weights.get_tensor(term.key_a)
        if term.count > 1:
            a = a.view(term.count, term.rank, -1)[place.matrix]
            b = b.view(b.shape[0], term.rank, term.count)[:, :, place.matrix]
        left, right = (a.T, b.T) if term.transposed else (b, a)
        if place.transposed:
            left, right = right.T, left.T
        left = left[place.offset :][: place.last - place.first]
    return left.double().contiguous() * term.scaling, right.double().contiguous()


def column_norms(piece: Piece, tensor: TensorPlan, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the norms of V = W + left @ right over the rows of each column, float64 [columns]."""
    place, width = piece.place, source_row_bytes(tensor.source)
    squares = torch.zeros(right.shape[1], dtype=torch.float64)
    with tensor.source.path.open("rb", buffering=0) as file:
        for first, last in row_blocks(place.first, place.last, len(squares)):
            buffer = torch.empty((last - first) * width, dtype=torch.uint8)
            block = read_stored_rows(tensor.source, first, last, file, buffer).rows(first, last).double()
            squares += block.addmm_(left[first - place.first : last - place.first], right).square().sum(dim=0)
    return squares.sqrt()


def merge_rows(run: RowRange, stored: Stored, update: Update, out: torch.Tensor) -> DeltaStats | None:
    """Merge one run into `out`, a matrix of the output dtype. Raises MergeError where an element is not finite."""
    unchanged = run.piece.change is None
    stats, columns = DeltaStats(), stored.columns
    for first, last in row_blocks(run.first, run.last, columns):
        rounded = out[first - run.first : last - run.first]
        if unchanged:  # W in another dtype, exactly or rounded once
            rounded.copy_(stored.rows(first, last))
            if not all_finite(rounded):
                refuse_overflow(run, first, stored.rows(first, last).double(), rounded)
            continue
        weight, delta, merged = (scratch(name, last - first, columns, torch.float64) for name in ("W", "delta", "V"))
        apply_update(weight.copy_(stored.rows(first, last)), update, run.piece, first, merged)
        low, high = torch.aminmax(torch.sub(merged, weight, out=delta))
        change = max(-low.item(), high.item())
        if not math.isfinite(change):
            problem = "base weight or update is not finite; is the base damaged, or a factor too large?"
            raise MergeError(f"{run.tensor.target.name}: {problem}")
        round_once(merged, rounded)
        if not all_finite(rounded):
            refuse_overflow(run, first, merged, rounded)
        stats.max_abs_delta = max(stats.max_abs_delta, change)
        if first == run.first:
            stats.weight_squares += weight.square().sum().item()
            stats.delta_squares += delta.square().sum().item()
            stats.along_delta += ((rounded - merged) * delta).sum().item()
    return None if unchanged else stats


def apply_update(weight: torch.Tensor, update: Update, piece: Piece, first: int, out: torch.Tensor) -> torch.Tensor:
    """Compute the stored rows from `first` on with their update. weight, out: float64 [rows, columns]."""
    count, start = len(weight), first - piece.place.first
    merged = torch.addmm(weight, update.left[start : start + count], update.right, out=out)
    if update.magnitude is not None:
        merged *= update.magnitude[start : start + count] / torch.linalg.vector_norm(merged, dim=1, keepdim=True)
    if update.factor is not None:
        merged *= update.factor
    if update.rows is not None and update.values is not None:
        here = (update.rows >= first) & (update.rows < first + count)
        merged[update.rows[here] - first] = update.values[here]
    return merged


def round_once(values: torch.Tensor, out: torch.Tensor) -> None:
    """Round a float64 matrix to the dtype of `out`, each element once, to the nearest value.

    Rounding by way of float32 rounds twice, which is wrong only where the float32 lies in the middle of two 16-bit
    numbers. LOW_BITS finds these few elements, and they are rounded to odd first.
    """
    if out.dtype not in LOW_BITS:
        out.copy_(values)
        return
    rows, columns = values.shape
    nearest = scratch("nearest", rows, columns, torch.float32).copy_(values)
    bits = scratch("bits", rows, columns, torch.int32)
    torch.bitwise_and(nearest.view(torch.int32), LOW_BITS[out.dtype], out=bits)
    where = torch.from_numpy(np.flatnonzero(bits.numpy() == 0))
    nearest.view(-1)[where] = round_to_odd(values.view(-1)[where])
    out.copy_(nearest)


def round_to_odd(values: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32 towards zero, and set the last bit where that is not exact.

    Rounding the result to 16 bits gives what rounding `values` at once would (S. Boldo, G. Melquiond, When double
    rounding is odd, 2005).
    """
    nearest = values.float()
    towards_zero = torch.where(nearest.double().abs() > values.abs(), nearest.nextafter(torch.zeros(())), nearest)
    return (towards_zero.view(torch.int32) | (towards_zero.double() != values)).view(torch.float32)


def all_finite(values: torch.Tensor) -> bool:
    return not values.numel() or all(math.isfinite(end.item()) for end in torch.aminmax(values))


def refuse_overflow(run: RowRange, first: int, exact: torch.Tensor, rounded: torch.Tensor) -> None:
    """Raise MergeError for the first element that is NaN or became infinite: nearest, and still not what was trained."""
    bad = rounded.isnan() | (rounded.isinf() & exact.isfinite())
    if not bool(bad.any()):
        return  # the base's own infinities, in another dtype
    row, column = bad.nonzero()[0].tolist()
    dtype = run.tensor.target.dtype
    place = f"{run.tensor.target.name}: element {(first + row, column)}"
    if rounded[row, column].isnan():
        raise MergeError(f"{place} is NaN; is the base damaged?")
    limit = f"beyond the largest {dtype}, {torch.finfo(rounded.dtype).max:.6g}; merge with another dtype"
    raise MergeError(f"{place} becomes {exact[row, column].item():.9g}, {limit}")
