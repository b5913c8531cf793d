"""Packing several examples into a row: is it safe with this model, how full are the rows, how many rows are a step?

TRL's `bfd` packing lays the rows of a micro-batch end to end in one sequence without an attention mask, for flash
attention. Any other attention computes the whole square of the sequence, so it gets the rows beside each other
(`collate_rows_apart`). transformers 5.17 makes a block-diagonal mask of the position ids. A model with a state along
the sequence, or with its own mask, still lets examples read each other: `probe_packing` measures this.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset

from cogumi.patches.trl_internals import attention_of

log = logging.getLogger("cogumi")
DOCUMENT = 48  # tokens of a document in the probe
PAIRS = 3  # of documents: a leak is in each of them, a router that rounding tips over is chance
# Logits of the same document apart, in two batch shapes, already differ by what other kernels and sums round differently.
TIMES_MEASURED = 4
TIMES_EPSILON = 4  # of the dtype, times the largest logit: where the two shapes happened to agree bit for bit


def wants_one_sequence(model: Any) -> bool:
    """Whether the model's attention takes packed rows end to end without computing what lies between them."""
    return "flash" in attention_of(model.config)


def collate_rows_apart(collate: Any, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """A micro-batch of packed rows, a row each: `input_ids`, `labels`, `position_ids`, (rows, longest row).

    collate: TRL's DataCollatorForLanguageModeling, which pads on the right. Padding has position 0, as if each of its tokens
    were an example. An attention mask, which would let the examples of a row read each other, is not sent.
    """
    batch: dict[str, Any] = replace(collate, padding_free=False, return_position_ids=True)(examples)
    del batch["attention_mask"]
    batch["labels"][batch["position_ids"] == 0] = -100
    return batch


def padding_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Where `collate_rows_apart` padded: what begins anew at the token after its beginning. No example is one token long."""
    begins = position_ids == 0
    return begins & torch.nn.functional.pad(begins[:, 1:], (0, 1), value=True)


@torch.no_grad()
def probe_packing(model: Any, documents: Sequence[Sequence[int]], pad_token_id: int) -> tuple[float, float]:
    """(distance, bound) of logits of two documents packed and apart: the largest difference, what rounding explains of it.

    Of several pairs it is the one that differs least beyond rounding.

    model: in evaluation mode. documents: token ids of at least two examples, of which the last DOCUMENT tokens are used
    (chats begin alike). Packed as the training packs them: a row of the pair and, but for flash attention, one of its first
    document beside it.
    """
    ends = [list(document[-DOCUMENT:]) for document in documents if len(document) > 1]
    pairs = list(zip(ends[::2], ends[1::2], strict=False))[:PAIRS]
    if not pairs:
        raise ValueError("packing is probed with two documents of at least two tokens")
    found = [probe_pair(model, *pair, pad_token_id) for pair in pairs]
    return min(found, key=lambda pair: pair[0] / (pair[1] or 1))


def probe_pair(model: Any, one: list[int], other: list[int], pad_token_id: int) -> tuple[float, float]:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    flat = DataCollatorForLanguageModeling(pad_token_id, padding_free=True)
    padding = DataCollatorForLanguageModeling(pad_token_id)

    def logits_of(collate: Callable[[list[dict[str, Any]]], dict[str, Any]], *rows: dict[str, Any]) -> torch.Tensor:
        batch = collate(list(rows))
        batch.pop("labels")
        device = next(model.parameters()).device
        found = model(**{key: value.to(device) for key, value in batch.items()}, use_cache=False).logits
        return found.float()  # type: ignore[no-any-return]

    both = {"input_ids": one + other, "seq_lengths": [len(one), len(other)]}
    if wants_one_sequence(model):
        packed = logits_of(flat, both)[0]
    else:
        packed = logits_of(partial(collate_rows_apart, flat), both, {"input_ids": one, "seq_lengths": [len(one)]})[0]
    alone = torch.cat([logits_of(flat, {"input_ids": ids})[0] for ids in (one, other)])
    padded = logits_of(padding, {"input_ids": one}, {"input_ids": other})
    together = torch.cat([row[: len(ids)] for row, ids in zip(padded, (one, other), strict=True)])
    measured = (alone - together).abs().max().item()
    dtypes = {each.dtype for each in model.parameters() if each.is_floating_point() and each.dtype.itemsize > 1}
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes) * alone.abs().max().item()  # of the coarsest
    return (packed - alone).abs().max().item(), max(TIMES_MEASURED * measured, TIMES_EPSILON * epsilon)


def with_labels(examples: Dataset) -> Dataset:
    """`input_ids` and `labels` of examples with a `completion_mask`: -100 where it is 0, as TRL's build_labels makes them."""

    def label(table: pa.Table) -> pa.Table:
        ids, mask = (table[name].combine_chunks() for name in ("input_ids", "completion_mask"))
        flat = pc.if_else(pc.equal(mask.flatten(), 1), ids.flatten(), pa.scalar(-100, ids.type.value_type))
        lengths = pc.cumulative_sum(pc.list_value_length(ids)).cast(ids.offsets.type)
        offsets = pa.concat_arrays([pa.array([0], ids.offsets.type), lengths])
        return pa.table({"input_ids": table["input_ids"], "labels": type(ids).from_arrays(offsets, flat)})

    labelled = examples.with_format("arrow").map(label, batched=True, remove_columns=examples.column_names)
    return labelled.with_format(None)


def rows_per_step(examples_per_row: float, micro_batch: int, accumulation: int) -> tuple[int, int]:
    """(rows of a micro-batch, micro-batches accumulated), which hold about the examples that were asked for.

    The number of rows is the one nearest to micro_batch x accumulation examples, in micro-batches that are no larger.
    """
    rows = max(1, round(micro_batch * accumulation / examples_per_row))
    at_once = max(size for size in range(1, min(micro_batch, rows) + 1) if rows % size == 0)
    return at_once, rows // at_once
