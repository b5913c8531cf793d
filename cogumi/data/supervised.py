"""Examples for supervised training: token ids, and which of them are learned.

Two ways lead to a mask. *The last turn, or a completion*: what follows the prompt's own tokens in prompt and completion,
as TRL's SFTTrainer finds it (trl 1.15, sft_trainer.py, tokenize_fn). *Every turn*: the tokens of the spans that
`ChatTemplate.turns` gives; a token that only begins before a span, or ends behind it, is learned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cogumi.data.chat_templates import Spans
from cogumi.data.dropped_rows import drop
from cogumi.data.encoding import encode_rendered, encodings, gather, shared_prefixes, token_ends
from cogumi.data.example_kinds import Chunk, Dropped

CHUNK_CHARACTERS = 8 * 2**20
"""Text tokenized at a time: bounds what is held in the tokenizer's own objects (some 50 times the text)."""


@dataclass(frozen=True)
class Budget:
    """How long an example may be, in tokens, and what becomes of longer ones."""

    max_length: int | None = None
    overlong: Literal["drop", "truncate"] = "drop"
    keep: Literal["keep_start", "keep_end"] = "keep_start"
    """The part that truncation leaves, in TRL's words (`train.truncation_mode`)."""

    @property
    def too_long(self) -> str:
        return f"longer than {self.max_length} tokens"


@dataclass(frozen=True)
class Masked:
    """Tokenized examples one after the other."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.int8]
    lengths: npt.NDArray[np.int64]


def learn_spans(tokenizer: Any, texts: Sequence[str], spans: Sequence[Spans]) -> Masked:
    """Each text with its spans learned."""
    parts = [_learn_spans(tokenizer, texts[start:end], spans[start:end]) for start, end in batches(texts)]
    return _joined(parts)


def _learn_spans(tokenizer: Any, texts: Sequence[str], spans: Sequence[Spans]) -> Masked:
    ids, lengths = encode_rendered(tokenizer, texts)
    ends, known = token_ends(tokenizer, ids, lengths, texts)
    if not known.all():
        return _learn_spans_by_offsets(tokenizer, texts, spans)
    base = np.cumsum(lengths) - lengths
    change = np.zeros(len(ids) + 1, np.int8)
    for text, its_spans, start, length in zip(texts, spans, base.tolist(), lengths.tolist(), strict=True):
        its_ends = ends[start : start + length]
        bounds = np.array([_byte_at(text, at) for span in its_spans for at in span if span[0] < span[1]], np.int64)
        # From the first token that ends behind the span's start to the first one that ends at or behind its end.
        np.add.at(change, start + np.searchsorted(its_ends, bounds[::2], side="right"), 1)
        np.add.at(change, start + np.searchsorted(its_ends, bounds[1::2], side="left") + 1, -1)
    # Two spans may share a token: it is learned once.
    return Masked(ids, (np.cumsum(change[:-1]) > 0).astype(np.int8), lengths)


def _byte_at(text: str, character: int) -> int:
    return character if text.isascii() else len(text[:character].encode())


def _learn_spans_by_offsets(tokenizer: Any, texts: Sequence[str], spans: Sequence[Spans]) -> Masked:
    """The same for any fast tokenizer, from its own offsets."""
    ids: list[list[int]] = []
    masks: list[npt.NDArray[np.int8]] = []
    for encoding, text, its_spans in zip(encodings(tokenizer, texts), texts, spans, strict=True):
        mask = np.zeros(len(encoding.ids), np.int8)
        for span in its_spans:
            first, last = _tokens_of(encoding, span, len(text))
            mask[first:last] = 1
        ids.append(encoding.ids)
        masks.append(mask)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return Masked(np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum())), np.concatenate(masks), lengths)


def learn_completions(
    tokenizer: Any, prompts: Sequence[str], wholes: Sequence[str], special_tokens: bool, everything: bool = False
) -> Masked:
    """Each whole text, of which all is learned behind the tokens it shares with its prompt's, or `everything`.

    `special_tokens`: the tokenizer adds its own (a beginning of sequence), which a chat template does by itself.
    """
    parts = []
    for start, end in batches(wholes):
        ids, lengths = encode_rendered(tokenizer, wholes[start:end], special_tokens)
        shared = np.zeros(end - start, np.int64)
        if not everything:
            asked = encode_rendered(tokenizer, prompts[start:end], special_tokens)
            shared = shared_prefixes(*asked, ids, lengths)
        within = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        parts.append(Masked(ids, (within >= np.repeat(shared, lengths)).astype(np.int8), lengths))
    return _joined(parts)


def batches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Ranges of texts with about CHUNK_CHARACTERS in them."""
    start = size = 0
    for at, text in enumerate(texts):
        size += len(text)
        if size >= CHUNK_CHARACTERS:
            yield start, at + 1
            start, size = at + 1, 0
    if start < len(texts):
        yield start, len(texts)


def _joined(parts: Sequence[Masked]) -> Masked:
    if not parts:
        return Masked(np.zeros(0, np.int32), np.zeros(0, np.int8), np.zeros(0, np.int64))
    return Masked(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "mask", "lengths")))


def masked_chunk(
    examples: Masked, budget: Budget, rows: Sequence[int], values: Sequence[Any], dropped: dict[str, Dropped]
) -> Chunk:
    """The examples that fit and have something to learn; `rows` and `values` name those that are dropped."""
    starts = np.cumsum(examples.lengths) - examples.lengths
    learned_before = np.concatenate([[0], np.cumsum(examples.mask, dtype=np.int64)])
    lengths = examples.lengths
    over = np.zeros(len(lengths), bool)
    if budget.max_length is not None:
        over = lengths > budget.max_length
        if budget.overlong == "truncate":
            cut = np.minimum(lengths, budget.max_length)
            starts = starts + (lengths - cut if budget.keep == "keep_end" else 0)
            lengths = cut
    learned = learned_before[starts + lengths] - learned_before[starts]
    too_long = over & (budget.overlong == "drop")
    for at in np.flatnonzero(too_long | (learned == 0)):
        if too_long[at]:
            reason = budget.too_long
        elif over[at]:
            reason = f"with nothing to learn within {budget.max_length} tokens"
        else:
            reason = "with nothing to learn"
        drop(dropped, reason, rows[at], values[at])
    kept = ~too_long & (learned > 0)
    starts, lengths = starts[kept], lengths[kept]
    columns = {
        "input_ids": lists(gather(examples.ids, starts, lengths), lengths),
        "completion_mask": lists(gather(examples.mask, starts, lengths), lengths),
    }
    return Chunk(pa.table(columns), dropped, int((over & kept).sum()))


def lists(flat: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> pa.ListArray:
    """Lists of these lengths over a flat array."""
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), pa.array(flat))


def _tokens_of(encoding: Any, span: tuple[int, int], length: int) -> tuple[int, int]:
    """The range of tokens that hold a character of this span. Where several hold one character, all of them do."""
    start, end = span
    if start == end:
        return 0, 0
    last = encoding.char_to_token(end - 1)
    return _token_at(encoding, start, length), max(_token_at(encoding, end, length), 0 if last is None else last + 1)


def _token_at(encoding: Any, character: int, length: int) -> int:
    """The first token of this character, or of the next one that has any (some tokenizers drop spaces)."""
    found = (encoding.char_to_token(at) for at in range(character, length))
    return next((int(token) for token in found if token is not None), len(encoding.ids))
