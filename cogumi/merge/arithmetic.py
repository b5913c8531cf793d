"""The update itself: what one piece of a stored tensor becomes, in the precision it is asked for.

The merge writes in float32. The check computes in float64 what float32 does not decide. LoRA: `W + scaling * B @ A`
(https://arxiv.org/abs/2106.09685, section 4.1). scaling is alpha / r, or alpha / sqrt(r) for rsLoRA
(https://arxiv.org/abs/2312.03732). DoRA: `m * V / |V|` with `V = W + scaling * B @ A`
(https://arxiv.org/abs/2402.09353, equation 5). |V| is the norm over the inputs of each output.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, matrix_shape, read_into
from cogumi.merge.parameter_map import Change, LowRank, Place
from cogumi.merge.plan import MergePlan, Piece, Source, TensorPlan, source_row_bytes
from cogumi.merge.quantized import dequantize_rows

# Rows are merged in blocks of about this many elements, 512 KiB in float32: few enough to stay in a core's cache, and
# enough that threads seldom wait for Python's lock. Fixed, because a block's shape can change the last bit of a product.
BLOCK_ELEMENTS = 1 << 17
# Half a float32 ulp, relative: what one float32 operation can be off by.
UNIT = 2.0**-24

# Adapter file -> its open tensors, as safe_open gives them: views of the file, in no memory of ours until they are used.
Weights = Mapping[Path, Any]


@dataclass(frozen=True)
class Update:
    """A piece's change, loaded: left [rows, r] (scaled) and right [r, columns], in the layout of the stored tensor.

    magnitude: DoRA's, float64 [rows, 1], where its outputs are rows; where they are columns, factor: the magnitude
    divided by the norms already, [1, columns]. rows, values: stored rows that are replaced, int64 [n] and [n,
    columns].
    """

    left: torch.Tensor
    right: torch.Tensor
    magnitude: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    values: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a sum, W + left @ right, and nothing is scaled by its norms (DoRA) or replaced."""
        return self.magnitude is None and self.factor is None and self.rows is None

    @property
    def normed(self) -> bool:
        """Whether W + delta is scaled by its norms (DoRA)."""
        return self.magnitude is not None or self.factor is not None

    @cached_property
    def single(self) -> "Update":
        """The same in float32, but for the magnitude and the row numbers."""
        rounded = (None if part is None else part.float() for part in (self.factor, self.values))
        factor, values = rounded
        return Update(self.left.float(), self.right.float(), self.magnitude, factor, self.rows, values)

    @cached_property
    def right_by_column(self) -> torch.Tensor:
        """right transposed in memory, from which columns are picked in one piece each."""
        return self.right.T.contiguous()

    @cached_property
    def largest_change(self) -> torch.Tensor:
        """At least the largest |left @ right| of each row: |a||b|, with the longest column b. float64 [rows]."""
        return self.left.norm(dim=1) * (self.right.norm(dim=0).amax() if self.right.numel() else 0.0)

    @property
    def product_errors(self) -> torch.Tensor:
        """At most how far each row of left @ right in float32 is from the exact product: float64 [rows].

        The dot product of vectors a and b of length r errs by at most `r u sum |a_i||b_i|`, in any order. This is section
        3.1 of Higham, Accuracy and Stability of Numerical Algorithms. Rounding the factors adds 2 u of that sum, which is
        at most `|a||b|`. u is 2**-24.
        """
        return self.largest_change * ((self.left.shape[1] + 4) * UNIT)

    @cached_property
    def probe(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(signs, sums): a float32 vector [columns] of 1 and -1, and left @ right @ signs in float64 [rows]."""
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (self.right.shape[1],), generator=generator).mul_(2).sub_(1).double()
        return signs.float(), self.left @ (self.right @ signs)


@contextmanager
def open_weights(plan: MergePlan) -> Iterator[Weights]:
    with ExitStack() as stack:
        yield {
            adapter.weights: stack.enter_context(safe_open(adapter.weights, framework="pt"))
            for adapter, _ in plan.adapters
        }


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
    """Run each matrix product on the thread that calls it.
    This is faster for small blocks on many threads. The result's bits do not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def block_rows(columns: int) -> int:
    """How many rows of a matrix are merged at once."""
    return max(1, BLOCK_ELEMENTS // max(1, columns))


def row_blocks(first: int, last: int, columns: int) -> Iterator[tuple[int, int]]:
    """(first, past last) row of each block of rows `first` to `last`."""
    step = block_rows(columns)
    for start in range(first, last, step):
        yield start, min(start + step, last)


thread_scratch = threading.local()


def scratch(name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised [rows, columns] tensor, valid until this thread asks for the same name and dtype again.
    Allocating memory for each block would take as long as the arithmetic."""
    kept = getattr(thread_scratch, f"{name} {dtype}", None)
    if kept is None or kept.numel() < rows * columns:
        kept = torch.empty(rows * columns, dtype=dtype)
        setattr(thread_scratch, f"{name} {dtype}", kept)
    return kept[: rows * columns].view(rows, columns)


class Stored:
    """The stored rows of one run in memory, from row `first` on, or where they are quantized the means to decode them.
    bytes: a flat uint8 tensor, empty for a quantized tensor."""

    def __init__(self, source: Source, first: int, bytes: torch.Tensor) -> None:
        self.source, self.first, self.bytes = source, first, bytes
        self.columns = matrix_shape(source.shape)[1]

    def rows(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the tensor as a matrix in `dtype`, in scratch memory."""
        values = scratch("weight", last - first, self.columns, dtype)
        if not isinstance(self.source, Span):
            return values.copy_(dequantize_rows(self.source, first, last))
        return values.copy_(self.matrix()[first - self.first : last - self.first])

    def matrix(self) -> torch.Tensor:
        """All rows in the dtype that they are stored in. Not for a quantized tensor."""
        assert isinstance(self.source, Span)
        return self.bytes.view(FLOAT_DTYPES[self.source.dtype]).view(-1, self.columns)


def read_stored_rows(source: Source, first: int, last: int, file: BinaryIO, buffer: torch.Tensor) -> Stored:
    """Rows `first` to `last` of a tensor, read from its open file into the beginning of a uint8 buffer."""
    if not isinstance(source, Span):
        return Stored(source, first, buffer[:0])
    width = source_row_bytes(source)
    return Stored(source, first, read_into(file, source.start + first * width, buffer[: (last - first) * width]))


class Updates:
    """The loaded updates of the pieces that are in work, for any number of threads. Several runs share a piece, so the
    last few are kept."""

    KEPT = 2

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.lock = threading.Lock()
        self.loaded: dict[int, tuple[Piece, Update]] = {}

    def load(self, piece: Piece, tensor: TensorPlan) -> Update:
        """A piece's update in float64."""
        with self.lock:
            if id(piece) not in self.loaded:
                while len(self.loaded) >= self.KEPT:
                    del self.loaded[next(iter(self.loaded))]
                # The piece is kept too, so that no other one gets its identity.
                self.loaded[id(piece)] = piece, load_update(piece, tensor, self.weights)
            return self.loaded[id(piece)][1]


def load_update(piece: Piece, tensor: TensorPlan, weights: Weights) -> Update:
    """Load a piece's factors in float64, cut and turned to the piece's rows of the stored tensor; none where unchanged."""
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
        rows = torch.tensor(change.rows.indices)
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
    """(left [rows, r], scaled, right [r, columns]) of one term for the stored rows of a place, in float64."""
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
    """The norms of V = W + left @ right over the rows of each column, float64 [columns]."""
    place, width = piece.place, source_row_bytes(tensor.source)
    squares = torch.zeros(right.shape[1], dtype=torch.float64)
    with tensor.source.path.open("rb", buffering=0) as file:
        for first, last in row_blocks(place.first, place.last, len(squares)):
            buffer = torch.empty((last - first) * width, dtype=torch.uint8)
            block = read_stored_rows(tensor.source, first, last, file, buffer).rows(first, last, torch.float64)
            squares += block.addmm_(left[first - place.first : last - place.first], right).square().sum(dim=0)
    return squares.sqrt()


def exact_sums(update: Update, stored: Stored, where: torch.Tensor, start: int) -> torch.Tensor:
    """W + left @ right in float64 at flat positions of the stored rows, whose first is row `start` of the update."""
    weight = stored.matrix().view(-1).index_select(0, where).double()
    left = update.left.index_select(0, where // stored.columns + start)
    right = update.right_by_column.index_select(0, where % stored.columns)
    return weight + torch.linalg.vecdot(left, right)


def apply_update(weight: torch.Tensor, update: Update, piece: Piece, first: int, out: torch.Tensor) -> torch.Tensor:
    """What the stored rows from `first` on become, in `out`. weight, out: [rows, columns] in the update's dtype."""
    count, start = len(weight), first - piece.place.first
    merged = torch.addmm(weight, update.left[start : start + count], update.right, out=out)
    if update.magnitude is not None:
        norms = torch.linalg.vector_norm(merged, dim=1, keepdim=True, dtype=torch.float64)
        merged *= (update.magnitude[start : start + count] / norms).to(merged.dtype)
    if update.factor is not None:
        merged *= update.factor
    if update.rows is not None and update.values is not None:
        here = (update.rows >= first) & (update.rows < first + count)
        merged[update.rows[here] - first] = update.values[here]
    return merged
