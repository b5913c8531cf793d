"""The language-model head on a CPU: cogumi's FusedLogProbFunction against dense logits.

`dense` is `log_softmax(hidden @ weight.T).gather(targets)` with autograd's backward. Peak memory is what is allocated
beyond the inputs, counted tensor by tensor: exact, and the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.harness import Row, interleave, ratio_row, row
from cogumi.patches.torch_internals import TorchDispatchMode, storage_key

# (tokens, hidden size, vocabulary)
Shape = tuple[int, int, int]
FULL: Shape = (2048, 512, 32000)
QUICK: Shape = (1024, 128, 16000)
TILE = 32768  # vocabulary columns per tile, TRL's default


class Allocations(TorchDispatchMode):
    """What torch allocates while this is active, storages that existed before left out.

    `peak` and `live` in bytes, `largest` in elements of one tensor, `flops` of matrix products (2 per multiply-add).
    Workspace that an operator takes and gives back inside is not seen.
    """

    def __init__(self, *before: Tensor | None) -> None:
        super().__init__()
        self.before = {storage_key(each) for each in before if each is not None}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = self.flops = 0

    @property
    def live(self) -> int:
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm"):
            left, right = [argument for argument in args if isinstance(argument, Tensor)][-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and storage_key(each) not in self.before:
                storage = each.untyped_storage()
                self.storages[storage_key(each)] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, each.numel(), storage.nbytes() // each.element_size())
        self.peak = max(self.peak, self.live)
        return result


def inputs(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, targets) with logits of a standard deviation of about 4, as a trained model's."""
    tokens, width, vocabulary = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).mul_(4 * width**-0.5).to(dtype)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator)


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def fused(
    hidden: Tensor, weight: Tensor, targets: Tensor, outputs: tuple[str, ...] = ("log_probs",), kernel: Any = None
) -> Tensor:
    """cogumi's head, or TRL's kernel in its place."""
    from cogumi.patches.fused_head import FusedLogProbFunction

    arguments = (hidden, weight, None, targets, 1.0, TILE, None, 1.0, outputs)
    return (kernel or FusedLogProbFunction).apply(*arguments)[0]  # type: ignore[no-any-return]


def step(head: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward under a frozen head: (log_probs [N], gradient to hidden)."""
    leaf = hidden.detach().requires_grad_()
    log_probs = head(leaf, weight, targets)
    (gradient,) = torch.autograd.grad(log_probs.sum(), leaf)
    return log_probs.detach(), gradient


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def against_dense(shape: Shape, repeats: int) -> Iterator[Row]:
    tensors, size, logits = inputs(shape), "x".join(map(str, shape)), 4 * shape[0] * shape[2]
    cases: dict[str, Callable[..., Tensor]] = {
        f"frozen head {size}": fused,
        f"frozen head, entropy logged {size}": partial(fused, outputs=("log_probs", "entropy")),
    }
    judged = shape == FULL  # a quick run is too short to hold a time against it
    for case, head in cases.items():
        contenders = {"fused": partial(step, head, *tensors), "dense": partial(step, dense, *tensors)}
        # One thread too: on a crowded machine threads wait for each other at every operator, which is a cost of the crowd
        # and not of the head.
        for threads in sorted({1, torch.get_num_threads()}):
            with thread_count(threads):
                times = interleave(contenders, repeats)
            metric, target = f"time vs dense, {threads} thread{'s'[: threads > 1]}", "<= 1.0" if judged else ""
            yield ratio_row("fused_head", case, metric, times, "fused", "dense", target=target)
        with Allocations(*tensors) as allocations:
            step(head, *tensors)
        share, target = allocations.peak / logits, "<= 0.125" if judged else ""
        yield row("fused_head", case, "peak memory vs the logits", share, "ratio", target=target)


def run(quick: bool = False) -> Iterator[Row]:
    shape = QUICK if quick else FULL
    yield from against_dense(shape, repeats=3 if quick else 7)
