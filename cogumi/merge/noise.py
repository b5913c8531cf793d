"""q/delta: how large the quantization error that training saw is beside what training learned.

An adapter that was trained on a quantized base W + q learned to work with q. Merged into W it loses q; merged into the
dequantized base it keeps it. q/delta says how much that matters: the root mean square of q over that of the update.
"""

import math
import statistics
from dataclasses import dataclass

from cogumi.merge.plan import MergePlan, TensorPlan
from cogumi.merge.quantized import Bnb4bit, Bnb8bit, dequantize_rows, nf4_round_trip, quantization, quantized_tensors
from cogumi.merge.resolve import Base
from cogumi.merge.stream import DeltaStats
from cogumi.merge.tensorfile import Span, matrix_shape, read_elements

# Rows are sampled in runs, spread over the tensor: this many, of about this many elements. A run of 64 k elements gives
# the rms of NF4's error to about 1 %.
SAMPLED_RUNS = 4
RUN_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Noise:
    """q of the sampled rows of one tensor: its root mean square, and that of the full-precision weight."""

    q: float
    weight: float


def quantization_noise(plan: MergePlan) -> dict[str, Noise]:
    """q by updated tensor; empty where training saw no quantized weights, or they are not at hand.

    Three cases: the base that the adapter was trained on is a quantized checkpoint beside the full one; the full one was
    quantized in memory (NF4 only, done again here); or the merge goes into the dequantized base, and q is not known.
    """
    base = plan.base
    decoded = decodable(base.trained_on)
    if not decoded and base.trained_in != "nf4":
        return {}
    found = {}
    for tensor in plan.tensors:
        name = tensor.target.name
        if not (tensor.updated and isinstance(tensor.source, Span) and len(tensor.source.shape) == 2):
            continue
        if decoded and name not in decoded:
            continue  # left unquantized: no error
        found[name] = sampled(tensor, tensor.source, decoded.get(name))
    return found


def decodable(trained_on: Base | None) -> dict[str, Bnb4bit | Bnb8bit]:
    if trained_on is None or quantization(trained_on.config) not in ("bnb-4bit", "bnb-8bit"):
        return {}
    return quantized_tensors(trained_on.shards, trained_on.config)


def sampled(tensor: TensorPlan, source: Span, quantized: Bnb4bit | Bnb8bit | None) -> Noise:
    """q over a few runs of rows. quantized None: what NF4 makes of these rows by themselves."""
    rows, columns = matrix_shape(source.shape)
    length = min(rows, max(1, RUN_ELEMENTS // columns))
    squares, weights, count = 0.0, 0.0, 0
    for first in sorted({(rows - length) * run // max(1, SAMPLED_RUNS - 1) for run in range(SAMPLED_RUNS)}):
        weight = read_elements(source, first * columns, length * columns).view(length, columns)
        seen = nf4_round_trip(weight) if quantized is None else dequantize_rows(quantized, first, first + length)
        squares += (weight.double() - seen.double()).square().sum().item()
        weights += weight.double().square().sum().item()
        count += weight.numel()
    return Noise(math.sqrt(squares / count), math.sqrt(weights / count))


def q_over_delta(noise: dict[str, Noise], stats: dict[str, DeltaStats]) -> dict[str, float]:
    """rms of q over rms of the update, by tensor; infinite where the update is zero."""
    found = {}
    for name, entry in noise.items():
        delta = stats[name].delta_rms
        found[name] = entry.q / delta if delta else math.inf
    return found


def median(ratios: dict[str, float]) -> float | None:
    """The median over tensors, or None without any."""
    return statistics.median(ratios.values()) if ratios else None
