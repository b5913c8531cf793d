"""The update itself: what one piece of a stored tensor becomes, in the precision it is asked for.

The merge writes in float32 and verifies in float64, with the same formula. LoRA: `W + scaling * B @ A`
(https://arxiv.org/abs/2106.09685, section 4.1). scaling is alpha / r, or alpha / sqrt(r) for rsLoRA
(https://arxiv.org/abs/2312.03732). DoRA: `m * V / |V|` with `V = W + scaling * B @ A`
(https://arxiv.org/abs/2402.09353, equation 5). |V| is the norm over the inputs of each output.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cogumi.core.safetensors_file import FLOAT_DTYPES, Span, matrix_shape, read_into
from cogumi.merge.parameter_map import Change, LowRank, Place
from cogumi.merge.plan import MergePlan, Piece, Source, TensorPlan
from cogumi.merge.quantized import dequantize_rows

# Rows are merged in blocks of about this many elements: 1 MiB in float32, so that temporaries stay in the cache and
# memory does not grow with the tensor. Fixed, because the block's shape can change the last bit of a matrix product.
BLOCK_ELEMENTS = 1 << 18
COPY_BYTES = 1 << 22

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
    def normed(self) -> bool:
        """Whether W + delta is scaled by its norms (DoRA)."""
        return self.magnitude is not None or self.factor is not None


@contextmanager
def open_weights(plan: MergePlan) -> Iterator[Weights]:
    with ExitStack() as stack:
        yield {
            adapter.weights: stack.enter_context(safe_open(adapter.weights, framework="pt"))
            for adapter, _ in plan.adapters
        }


@contextmanager
def ieee_matmul() -> Iterator[None]:
    """Compute float32 matrix products in float32, whatever precision the process has set.

    With torch.set_float32_matmul_precision("medium"), usual in training, CUDA multiplies float32 in TF32. On CPUs with
    bfloat16 instructions, oneDNN multiplies float32 in bfloat16. Both errors exceed the rounding of the merge.
    """
    settings: list[Any] = [
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.cuda.matmul,
    ]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


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


def row_blocks(first: int, last: int, columns: int) -> Iterator[tuple[int, int]]:
    """(first, past last) row of each block of rows `first` to `last`."""
    step = max(1, BLOCK_ELEMENTS // max(1, columns))
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


def read_rows(source: Source, first: int, last: int, file: Any, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a tensor as a matrix in `dtype`, in scratch memory. file: the open file of a plain source."""
    columns = matrix_shape(source.shape)[1]
    values = scratch("weight", last - first, columns, dtype)
    if not isinstance(source, Span):
        return values.copy_(dequantize_rows(source, first, last))
    kind = FLOAT_DTYPES[source.dtype]
    stored = values if kind == dtype else scratch("weight as stored", last - first, columns, kind)
    read_into(file, source.start + first * columns * kind.itemsize, stored.view(-1))
    return values if stored is values else values.copy_(stored)


def load_update(piece: Piece, tensor: TensorPlan, weights: Weights, dtype: torch.dtype, file: Any) -> Update:
    """Load a piece's factors in `dtype`, cut and turned to the piece's rows of the stored tensor; none where unchanged."""
    change, place = piece.change or Change(), piece.place
    columns = matrix_shape(tensor.source.shape)[1]
    sides = [factors(term, place, weights[term.file], dtype) for term in change.terms]
    left, right = torch.zeros(place.last - place.first, 0, dtype=dtype), torch.zeros(0, columns, dtype=dtype)
    if sides:
        left = torch.cat([side[0] for side in sides], dim=1)
        right = torch.cat([side[1] for side in sides], dim=0)
    rows = values = magnitude = factor = None
    if change.rows is not None:
        rows = torch.tensor(change.rows.indices)
        values = weights[change.rows.file].get_tensor(change.rows.key).to(dtype)
    if change.magnitude is not None:
        magnitude = weights[change.magnitude[0]].get_tensor(change.magnitude[1]).double()
        if change.terms[0].transposed:
            factor = (magnitude / column_norms(piece, tensor, weights, file)).to(dtype)[None, :]
            magnitude = None
        else:
            magnitude = magnitude[place.offset :][: place.last - place.first, None]
    return Update(left, right, magnitude, factor, rows, values)


def factors(term: LowRank, place: Place, weights: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(left [rows, r], scaled, right [r, columns]) of one term for the stored rows of a place."""
    b = weights.get_tensor(term.key_b)
    if term.key_a is None:
        left, right = b[:, None].double(), torch.ones(1, 1)
    else:
        a = weights.get_tensor(term.key_a)
        if term.count > 1:
            a = a.view(term.count, term.rank, -1)[place.matrix]
            b = b.view(b.shape[0], term.rank, term.count)[:, :, place.matrix]
        left, right = (a.T, b.T) if term.transposed else (b, a)
        if place.transposed:
            left, right = right.T, left.T
        left = left[place.offset :][: place.last - place.first].double()
    return (left * term.scaling).to(dtype), right.to(dtype)


def column_norms(piece: Piece, tensor: TensorPlan, weights: Weights, file: Any) -> torch.Tensor:
    """The norms of V = W + delta over the rows of each column, float64 [columns]."""
    assert piece.change is not None
    sides = [factors(term, piece.place, weights[term.file], torch.float64) for term in piece.change.terms]
    squares = torch.zeros(matrix_shape(tensor.source.shape)[1], dtype=torch.float64)
    for first, last in row_blocks(piece.place.first, piece.place.last, len(squares)):
        block = read_rows(tensor.source, first, last, file, torch.float64)
        for left, right in sides:
            block.addmm_(left[first - piece.place.first : last - piece.place.first], right)
        squares += block.square().sum(dim=0)
    return squares.sqrt()


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
