"""What a run takes of a card, from the fullest moment of its step, and the largest batch, length and rank that fit.

To what tensors take come, on a card: CUDA's context, which whoever plans takes off the card's memory; cuBLAS' workspaces,
one for the thread that computes forward and one for autograd's (aten/src/ATen/cuda/CUDABlas.cpp,
getChosenWorkspaceSize: 32 MiB each on Hopper, 8.1 MiB before); and what the caching allocator holds in blocks that are cut
too large. That part depends on the order of sizes, and is allowed for as a share of what comes and goes. None of the three
has been compared with a card here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cogumi.forecast.allocation_tracker import Moment
from cogumi.forecast.training_step import Work

FRAGMENTS = 0.05  # of activations, logits and gradients
WORKSPACE, HOPPERS_WORKSPACE = 2 * (4096 * 1024 * 2 + 16 * 8 * 1024), 2 * 4096 * 8 * 1024
# From so many tokens on the tiles of logits grow no more, TRL's (trl/kernels/chunked_logprob.py, TOKEN_CHUNK_SIZE) and ours.
FULL_TILE = 4096
MOST_ROWS, LONGEST, HIGHEST_RANK = 2**16, 2**17, 1024  # where looking for the largest ends
STAYING = ("weights", "adapter", "optimizer")
Measure = Callable[[Work, int, int | None], tuple[Moment, ...]]
"""Of a step: (work, rank, layers or None for all) -> the fullest moments of its stages."""


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes. moments: the fullest of each stage. workspace: of cuBLAS, 0 without a card. vllm: what it takes beside the step."""

    moments: tuple[Moment, ...]
    workspace: int = 0
    vllm: int = 0

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def breakdown(self) -> dict[str, int]:
        """The fullest moment by kind, largest first."""
        return dict(sorted(self.parts_of(self.fullest).items(), key=lambda item: -item[1]))

    def parts_of(self, moment: Moment) -> dict[str, int]:
        passing = sum(size for kind, size in moment.by_kind.items() if kind not in STAYING)
        parts = {**moment.by_kind, "vLLM": self.vllm, "cuBLAS workspaces": self.workspace}
        parts["allocator"] = round(FRAGMENTS * passing) if self.workspace else 0
        return {kind: size for kind, size in parts.items() if size}

    @property
    def tensors(self) -> int:
        """What torch.cuda.max_memory_allocated() is to say, but for the workspaces."""
        return self.fullest.total

    @property
    def peak(self) -> int:
        return sum(self.breakdown.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "peak": self.peak,
            "tensors": self.tensors,
            "workspace": self.workspace,
            "stage": self.fullest.stage,
            "breakdown": self.breakdown,
            "stages": {moment.stage: moment.total for moment in self.moments},
        }


@dataclass(frozen=True)
class Largest:
    """How far each can go alone, with the others as they are; None where not even the smallest fits."""

    rows: int | None
    length: int | None
    rank: int | None


class Steps:
    """The peaks of steps of one run, each from two models of a few layers.

    A stage's fullest moment grows by the same amount with every layer that is like those before it, with every row and
    every rank, and with the length by a polynomial of the second degree (masks, and the scores of eager attention). period:
    after how many layers they repeat; None runs the whole model, where they do not repeat, or where gradients come up while
    activations go (every weight trained, one micro-batch a step), so that which moment is the fullest depends on the depth.
    """

    def __init__(self, measure: Measure, layers: int, period: int | None) -> None:
        self.measure, self.layers = measure, layers
        self.few = (period, 2 * period) if period is not None and 2 * period < layers else ()
        self.known: dict[tuple[Work, int], tuple[Moment, ...]] = {}

    def moments(self, work: Work, rank: int) -> tuple[Moment, ...]:
        if (work, rank) not in self.known:
            if not self.few:
                self.known[work, rank] = self.measure(work, rank, None)
            else:
                less, more = (self.measure(work, rank, layers) for layers in self.few)
                share = (self.layers - self.few[0]) / (self.few[1] - self.few[0])
                self.known[work, rank] = tuple(continued(*pair, share) for pair in zip(less, more, strict=True))
        return self.known[work, rank]

    def largest(self, forecast: MemoryForecast, work: Work, rank: int, room: int) -> Largest:
        """Rows up to MOST_ROWS, tokens in steps of 64 up to LONGEST, ranks of powers of two up to HIGHEST_RANK."""

        def peaks(values: Sequence[int], changed: Callable[[int], tuple[Work, int]]) -> Callable[[int], int]:
            """The peak as a function of a number, from the stages at a few of its values (Lagrange)."""
            points = [self.moments(*changed(value)) for value in values]

            def peak(number: int) -> int:
                weights = [math.prod((number - b) / (a - b) for b in values if b != a) for a in values]
                stages = [sum_of(moments, weights) for moments in zip(*points, strict=True)]
                return replace(forecast, moments=tuple(stages)).peak

            return peak

        def most(
            now: int, full: int, degree: int, candidates: Sequence[int], changed: Callable[[int], tuple[Work, int]]
        ) -> int | None:
            """full: from where on the peak is one polynomial. What does not fit there is looked for from `now` up to it."""
            peak = peaks([full * (1 + step) for step in range(degree + 1)], changed)
            if peak(full) > room and full >= now + degree:
                peak = peaks([now + (full - now) * step // degree for step in range(degree + 1)], changed)
            return last_that_fits(peak, candidates, room)

        rows, length = work.rows, work.length
        times = max(1, -(-FULL_TILE // (rows * length)))
        ranks = [2**n for n in range(HIGHEST_RANK.bit_length())]
        return Largest(
            most(rows, times * rows, 1, range(1, MOST_ROWS + 1), lambda n: (replace(work, rows=n), rank)),
            most(length, times * length, 2, range(64, LONGEST + 1, 64), lambda n: (lengthened(work, n), rank)),
            most(rank, rank, 1, ranks, lambda n: (work, n)) if rank else None,
        )


def continued(less: Moment, more: Moment, share: float) -> Moment:
    """The moment of a model with more layers: `share` times the difference of two of few layers beyond the first."""
    return sum_of((less, more), [1 - share, share])


def sum_of(moments: Sequence[Moment], weights: Sequence[float]) -> Moment:
    kinds = {kind for moment in moments for kind in moment.by_kind}
    by_kind = {k: round(sum(w * m.by_kind.get(k, 0) for m, w in zip(moments, weights, strict=True))) for k in kinds}
    return Moment(moments[0].stage, sum(by_kind.values()), by_kind)


def last_that_fits(peak: Callable[[int], int], candidates: Any, room: int) -> int | None:
    """The largest of ascending candidates whose peak is within `room`, by bisection; None where the first is not."""
    low, high = -1, len(candidates)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(candidates[middle]) <= room else (low, middle)
    return None if low < 0 else candidates[low]


def lengthened(work: Work, length: int) -> Work:
    """The same work with examples of this many tokens; of a rollout the completions grow, as far as there are any."""
    if not work.completion:
        return replace(work, prompt=length)
    return replace(work, completion=max(1, length - work.prompt), prompt=min(work.prompt, length - 1))
