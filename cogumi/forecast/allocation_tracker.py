"""What a piece of PyTorch code holds in memory, counted as it runs: bytes by kind, and the fullest moment of each stage.

Works on fake tensors, which have shapes and no memory, and on real ones. What is counted is storages, each once however
many tensors look at it, from the operation that makes it until nobody holds it any more; a CUDA allocator gives out
blocks of 512 bytes (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize), and so does this.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cogumi.patches.torch_internals import TorchDispatchMode, storage_key, tree_iter

BLOCK = 512
ACTIVATIONS, LOGITS = "activations", "logits"
aten = torch.ops.aten
DEVICE, ITEM = torch.ops.prim.device.default, aten._local_scalar_dense.default


@dataclass(frozen=True)
class Moment:
    """The fullest moment of a stage: bytes in all, and by kind."""

    stage: str
    total: int
    by_kind: dict[str, int]


class Live(TorchDispatchMode):
    """Counts storages while it is active. logits: numbers of columns by which a matrix is one of logits.

    Fake tensors have no data to ask: a mask that selects rows is taken to select `selected` of them, and a test gives
    false.
    """

    def __init__(self, logits: tuple[int, ...] = (), selected: float = 1.0) -> None:
        super().__init__()
        self.kind, self.stage = ACTIVATIONS, ""
        self.logits, self.selected = logits, selected
        self.moments: dict[str, Moment] = {}
        self.total = 0
        self.by_kind: Counter[str] = Counter()
        self._storages: dict[int, tuple[str, int]] = {}

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        before, self.stage = self.stage, stage
        try:
            self.note()
            yield
        finally:
            self.stage = before

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """What comes up in here is of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def are(self, kind: str, tensors: Any) -> None:
        """These tensors are of this kind, whatever they were taken for."""
        for tensor in tree_iter(tensors):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, kind)

    def note(self) -> None:
        known = self.moments.get(self.stage)
        if known is None or self.total > known.total:
            self.moments[self.stage] = Moment(self.stage, self.total, {k: n for k, n in self.by_kind.items() if n})

    def _see(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if (known := self._storages.get(key)) is not None:
            if kind is not None and kind != known[0]:
                self.by_kind[known[0]] -= known[1]
                self.by_kind[kind] += known[1]
                self._storages[key] = (kind, known[1])
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        kind = kind or self._kind_of(tensor)
        self._storages[key] = (kind, size)
        self.by_kind[kind] += size
        self.total += size
        weakref.finalize(storage, self._gone, key)

    def _kind_of(self, tensor: torch.Tensor) -> str:
        if self.kind == ACTIVATIONS and tensor.dim() > 1 and tensor.shape[-1] in self.logits:
            return LOGITS
        return self.kind

    def _gone(self, key: int) -> None:
        kind, size = self._storages.pop(key)
        self.by_kind[kind] -= size
        self.total -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device if hasattr(args[0], "fake_device") else func(*args)
        made = self._answer(func, args) if is_fake(args) else None
        if made is None:
            made = func(*args, **(kwargs or {}))
        before = self.total
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        if self.total > before:
            self.note()
        return made

    def _answer(self, func: Any, args: Any) -> Any:
        """What an operation would give that depends on data; None for any other."""
        if func is ITEM:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            return args[0].new_empty((self._of(args[0]), args[0].dim()), dtype=torch.long)
        if func is aten.masked_select.default:
            return args[0].new_empty((self._of(args[1]),))
        if func is aten._grouped_mm.default:
            return grouped(*args)
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            mask = args[1][0]
            return args[0].new_empty((self._of(mask), *args[0].shape[mask.dim() :]))
        return None

    def _of(self, mask: torch.Tensor) -> int:
        return math.ceil(self.selected * mask.numel())


def is_fake(args: Any) -> bool:
    return bool(args) and hasattr(args[0], "fake_device")


def grouped(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, *_: Any) -> torch.Tensor:
    """The shape of a product of groups, each in its rows or columns; PyTorch's own rule takes bfloat16 alone.

    (tokens, K) and (groups, K, N) make (tokens, N); (M, tokens) and (tokens, N) make (groups, M, N).
    """
    if left.dim() == 2 and right.dim() == 2:
        return left.new_empty((offsets.numel(), left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))
