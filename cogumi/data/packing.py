"""Pack several examples into a row: collation, labels, rows per step, and a probe of leaks between examples.

TRL's `bfd` packing concatenates the rows of a micro-batch without an attention mask, for flash attention. Any other
attention computes the whole square of the sequence, so it gets the rows as a batch (`collate_rows_apart`). transformers
5.17 makes a block-diagonal mask of the position ids. Recurrent layers get `seq_idx` (`cogumi.patches.recurrent_kernels`). A
model that ignores it, or has its own mask, still lets examples read each other: `probe_packing` measures this.
"""

import logging
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, islice, permutations, repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset

from cogumi.data.rows import Lengths
from cogumi.patches import recurrent_kernels
from cogumi.patches.trl_internals import attention_of

log = logging.getLogger("cogumi")
# Of the documents of a probed row, in every order: unlike and odd, for blocks and chunks hide a leak that ends with them,
# three, for the second of two has nothing behind it, one shorter than a convolution and one longer than a chunk of 64.
DOCUMENT_TOKENS = (3, 83, 37)
EXPERT_DRAWS = 8  # with experts: a leak shows in each, a router that rounding tips over only by chance
PROBED_DOCUMENTS = EXPERT_DRAWS * len(DOCUMENT_TOKENS) ** 2
# Bounds of rounding: multiples of the distance between two batch shapes of the same documents, and of the epsilon of the
# dtype times the largest logit, in case the two shapes agree bit for bit.
MEASURED_MULTIPLE, EPSILON_MULTIPLE = 4, 4
PACKED_AT_ONCE = 1000  # examples that `trl.pack_dataset` sorts by length: the batch of `Dataset.map`


def wants_one_sequence(model: Any) -> bool:
    """Tell whether the model's attention takes concatenated rows without computing attention between them."""
    return "flash" in attention_of(model.config)


def collate_rows_apart(collate: Any, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate packed rows as a batch: `input_ids`, `labels`, `position_ids`, each (rows, longest row).

    collate: TRL's DataCollatorForLanguageModeling, which pads on the right. Padding has position 0, like examples of one
    token. No attention mask is returned: it would let the examples of a row read each other.
    """
    batch: dict[str, Any] = replace(collate, padding_free=False, return_position_ids=True)(examples)
    del batch["attention_mask"]
    batch["labels"][batch["position_ids"] == 0] = -100
    return batch


def add_document_index(collate: Any, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Add `seq_idx` (rows, tokens) to a batch of `collate`: the number of a token's document, -1 for padding."""
    batch: dict[str, Any] = collate(examples)
    index = (batch["position_ids"] == 0).cumsum(-1, dtype=torch.int32)
    if len(index) == len(examples):  # else end to end, without padding
        for row, example in zip(index, examples, strict=True):
            row[len(example["input_ids"]) :] = -1
    return batch | {"seq_idx": index}


def row_collator(model: Any, collate: Any) -> Any:
    """Return the collator of packed rows whose batches the model's layers take. collate: TRL's, which is padding-free."""
    collate = collate if wants_one_sequence(model) else partial(collate_rows_apart, collate)
    return partial(add_document_index, collate) if recurrent_kernels.apply(model) else collate


def padding_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Return where `collate_rows_apart` padded: a position 0 followed by another. No example is one token long."""
    is_start = position_ids == 0
    return is_start & torch.nn.functional.pad(is_start[:, 1:], (0, 1), value=True)


@torch.no_grad()
def probe_packing(model: Any, documents: Sequence[Sequence[int]], pad_token_id: int) -> tuple[float, float]:
    """Compare logits of documents packed, three in a row, and apart.

    The model is in evaluation mode. Of each document the last tokens are used (chats begin alike), after those of others
    where it is short. They are packed as in training: beside each row, or for flash attention behind it, is a shorter one.
    Without experts, a document must also keep its logits when others get other tokens: that shows what rounding would hide.
    Returns (largest difference, bound of rounding) of the order of lengths that differs most.
    """
    text = [token for document in documents for token in document[-max(DOCUMENT_TOKENS) :]]
    if not text:
        raise ValueError("packing is probed with documents, and these have no token")
    text *= -(-max(DOCUMENT_TOKENS) // len(text))
    count, measured = len(DOCUMENT_TOKENS), []
    draws = EXPERT_DRAWS if _has_experts(model) else 1
    for turn, lengths in enumerate(permutations(DOCUMENT_TOKENS)):
        for draw in range(draws):
            first = count * turn + (count**2 + 1) * draw
            chosen = (documents[(first + i) % len(documents)] for i in range(count))
            row = [[*text, *document][-length:] for document, length in zip(chosen, lengths, strict=True)]
            distance, bound = _probe_row(model, row, pad_token_id)
            if distance <= bound:
                break
        else:  # in each draw, or NaN
            return distance, bound
        measured.append((distance, bound))
    return max(measured, key=lambda pair: pair[0] - pair[1])


def _has_experts(model: Any) -> bool:
    return any("expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules())


def _probe_row(model: Any, documents: list[list[int]], pad_token_id: int) -> tuple[float, float]:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    flat = DataCollatorForLanguageModeling(pad_token_id, padding_free=True)
    padding = DataCollatorForLanguageModeling(pad_token_id)

    def logits_of(collate: Callable[[list[dict[str, Any]]], dict[str, Any]], *rows: list[list[int]]) -> torch.Tensor:
        batch = collate([{"input_ids": list(chain(*row)), "seq_lengths": list(map(len, row))} for row in rows])
        batch.pop("labels")
        device = next(model.parameters()).device
        tensors = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
        logits = model(**tensors, use_cache=False).logits.float()
        row_logits = logits if len(logits) == len(rows) else logits[0].split([sum(map(len, row)) for row in rows])
        return torch.cat([one[: sum(map(len, row))] for one, row in zip(row_logits, rows, strict=True)])

    collate = row_collator(model, flat)
    packed = logits_of(collate, documents, documents[:1])
    weight_dtypes = {weight.dtype for weight in model.parameters()}
    # Experts, and activations that are quantized in 8 bits, compute a token differently beside other tokens.
    if not _has_experts(model) and all(dtype.itemsize > 1 or dtype == torch.uint8 for dtype in weight_dtypes):
        low, high = min(chain(*documents)), max(chain(*documents))
        bound = MEASURED_MULTIPLE * (logits_of(collate, documents, documents[:1]) - packed).abs().max().item()
        ends = list(accumulate(map(len, documents)))
        for place, ids in enumerate(documents):
            others = [*documents[:place], [low if token == high else high for token in ids], *documents[place + 1 :]]
            difference = (logits_of(collate, others, documents[:1]) - packed).abs()
            difference[ends[place] - len(ids) : ends[place]] = 0
            if difference.max().item() > bound:
                return difference.max().item(), bound
    alone = torch.cat([logits_of(flat, [ids]) for ids in documents])
    measured = (alone - logits_of(padding, *([ids] for ids in documents))).abs().max().item()
    expected = torch.cat([alone, alone[: len(documents[0])]])
    dtypes = [dtype for dtype in weight_dtypes if dtype.is_floating_point and dtype.itemsize > 1]
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes) * alone.abs().max().item()  # of the coarsest
    return (packed - expected).abs().max().item(), max(MEASURED_MULTIPLE * measured, EPSILON_MULTIPLE * epsilon)


def with_labels(examples: Dataset) -> Dataset:
    """Replace `completion_mask` by `labels`: -100 where it is 0, as TRL's build_labels makes them."""

    def label(table: pa.Table) -> pa.Table:
        ids, mask = (table[name].combine_chunks() for name in ("input_ids", "completion_mask"))
        flat = pc.if_else(pc.equal(mask.flatten(), 1), ids.flatten(), pa.scalar(-100, ids.type.value_type))
        lengths = pc.cumulative_sum(pc.list_value_length(ids)).cast(ids.offsets.type)
        offsets = pa.concat_arrays([pa.array([0], ids.offsets.type), lengths])
        return pa.table({"input_ids": table["input_ids"], "labels": type(ids).from_arrays(offsets, flat)})

    labelled = examples.with_format("arrow").map(label, batched=True, remove_columns=examples.column_names)
    return labelled.with_format(None)


def count_per_row(lengths: Lengths, row: int) -> float:
    """Return how many examples TRL's `bfd` puts into a row of `row` tokens: by as many as it packs at once, of all lengths."""
    step = math.ceil(lengths.total() / PACKED_AT_ONCE)
    in_order = chain.from_iterable(repeat(length, lengths[length]) for length in sorted(lengths))
    sample = list(islice(in_order, step // 2, None, step))
    rooms: list[int] = []  # what is left of each row, in order
    for length in reversed(sample):
        at = bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else row
        insort(rooms, room - length)
    return len(sample) / len(rooms)


def rows_per_step(examples_per_row: float, micro_batch: int, accumulation: int) -> tuple[int, int]:
    """Return (rows of a micro-batch, micro-batches) that hold about micro_batch x accumulation examples.

    The micro-batches are no larger than `micro_batch`.
    """
    rows = max(1, round(micro_batch * accumulation / examples_per_row))
    at_once = max(size for size in range(1, min(micro_batch, rows) + 1) if rows % size == 0)
    return at_once, rows // at_once
