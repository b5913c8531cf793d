"""q/delta: how large the quantization error that training saw is beside what training learned.

An adapter that was trained on a quantized base W + q learned to work with q. Merged into W it loses q; merged into the
dequantized base it keeps it. q/delta says how much that matters: the root mean square of q over that of the update.
"""

import math
import statistics
from dataclasses import dataclass

import torch

from cogumi.core.safetensors_file import Span, matrix_shape, read_elements
from cogumi.merge.adapter_files import Base
from cogumi.merge.parameter_map import meta_model, parameter_places
from cogumi.merge.plan import MergePlan
from cogumi.merge.quantized import Bnb4bit, Bnb8bit, dequantize_rows, nf4_round_trip, quantization, quantized_tensors
from cogumi.merge.stream import DeltaStats

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

    Three cases: the base that the adapter was trained on is a quantized checkpoint beside the full one; the merge goes
    into such a checkpoint, decoded, and the full one is at hand; or the full one was quantized in memory (NF4 only, done
    again here).
    """
    base = plan.base
    if base.original is not None:
        full = base.original.tensors
        return {
            tensor.target.name: sampled(full[tensor.target.name], tensor.source)
            for tensor in plan.tensors
            if tensor.updated and not isinstance(tensor.source, Span)
        }
    decoded = decodable(base.trained_on)
    if decoded:
        names = set(decoded)
    elif base.trained_in == "nf4":
        names = quantized_on_load(base)
    else:
        return {}
    return {
        tensor.target.name: sampled(tensor.source, decoded.get(tensor.target.name))
        for tensor in plan.tensors
        # What was left unquantized (embeddings, heads, fused experts) has no error.
        if tensor.target.name in names and tensor.updated and not tensor.replaced and isinstance(tensor.source, Span)
    }


def quantized_on_load(base: Base) -> set[str]:
    """The stored tensors that transformers' load_in_4bit quantizes, by its own rule: weights of linear layers, less the
    head and what is tied. What the training was told to leave out besides (llm_int8_skip_modules) is not recorded."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = meta_model(base)
    places = parameter_places(model, base.tensors)
    kept = get_keys_to_not_convert(model)
    return {
        place.tensor
        for name, module in model.named_modules()
        if (type(module) is torch.nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
        for place in places.get(f"{name}.weight", ())
    }


def decodable(trained_on: Base | None) -> dict[str, Bnb4bit | Bnb8bit]:
    if trained_on is None or quantization(trained_on.config) not in ("bnb-4bit", "bnb-8bit"):
        return {}
    return quantized_tensors(trained_on.shards, trained_on.config)


def sampled(source: Span, quantized: Bnb4bit | Bnb8bit | None) -> Noise:
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
    """rms of q over rms of the update, by tensor; without those whose update is zero."""
    return {name: entry.q / stats[name].delta_rms for name, entry in noise.items() if stats[name].delta_rms}


def median(ratios: dict[str, float]) -> float | None:
    """The median over tensors, or None without any."""
    return statistics.median(ratios.values()) if ratios else None
