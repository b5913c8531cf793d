"""Texts as token ids, and which of them are learned.

Two ways lead to a mask. *The last turn, or a completion*: what follows the prompt's own tokens in prompt and completion,
as TRL's SFTTrainer finds it (trl 1.15, sft_trainer.py, tokenize_fn). *Every turn*: the tokens of the spans that
`ChatTemplate.turns` gives; a token that only begins before a span, or ends behind it, is learned.
"""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cogumi.config.subsections import FimConfig
from cogumi.core.errors import UsageError
from cogumi.data.chat_templates import ChatTemplate, Spans
from cogumi.data.rows import Chunk, Dropped, count_dropped

Ids = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]
Integer = TypeVar("Integer", bound=np.integer[Any])
CHUNK_CHARACTERS = 2 * 2**20
"""Text tokenized at a time: the tokenizer's own objects take some 50 times the text."""


def encode(tokenizer: Any, texts: Sequence[str], special_tokens: bool = False) -> tuple[Ids, Places]:
    """(all ids one after the other, ids per text). special_tokens: with those that it puts around every text by itself."""
    if tokenizer.is_fast:
        # Straight to the Rust tokenizer: the Python layer would build an attention mask and a list copy per text.
        found = reset_backend(tokenizer).encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        encoded = [each.ids for each in found]
    else:
        encoded = tokenizer(texts, add_special_tokens=special_tokens)["input_ids"]
    return concatenate_lists(encoded, np.int32)


def concatenate_lists(rows: Sequence[Sequence[int]], dtype: type[Integer]) -> tuple[npt.NDArray[Integer], Places]:
    """(the rows one after the other, their lengths)."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), dtype, int(lengths.sum())), lengths


def reset_backend(tokenizer: Any) -> Any:
    """The Rust tokenizer without what an earlier padded call left set; transformers sets it anew on every call."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend


OTHER, LETTER, DIGIT, MARK, SPACE, NOT_ASCII = range(6)
BYTE_KINDS = np.full(256, OTHER, np.uint8)
"""The kind of each UTF-8 byte; OTHER is what control characters are, tab and newlines among them."""
BYTE_KINDS[0x21:0x7F] = MARK
BYTE_KINDS[0x20] = SPACE
BYTE_KINDS[0x80:] = NOT_ASCII
BYTE_KINDS[list(string.ascii_letters.encode())] = LETTER
BYTE_KINDS[list(string.digits.encode())] = DIGIT

# Regular expressions whose first step cuts text as `encode_by_words` does: Qwen 2 and 2.5, and Llama 3, as they stand
# in their tokenizer.json. GPT-2's, which the StarCoder family has too, is the one built into ByteLevel.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_OTHER}",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHER}",
)


def cuts_at_spaces(tokenizer: Any) -> bool:
    """Whether this tokenizer is one of those for which `encode_by_words` is exact; others are tokenized whole."""
    if not tokenizer.is_fast:
        return False
    backend = tokenizer.backend_tokenizer
    if type(backend.normalizer).__name__ not in ("NoneType", "NFC") or backend.pre_tokenizer is None:
        return False
    # An added token that holds or swallows spaces is found before any cutting.
    added = backend.get_added_tokens_decoder().values()
    if any(" " in token.content or token.lstrip or token.rstrip for token in added):
        return False
    step = json.loads(backend.pre_tokenizer.__getstate__())
    *before, last = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last["use_regex"]:
        return all(each["type"] == "Digits" for each in before)
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return before in [[split | {"pattern": {"Regex": pattern}}] for pattern in WORD_PATTERNS]


def encode_by_words(tokenizer: Any, texts: Sequence[str]) -> tuple[Ids, Places]:
    """`encode`, but every distinct word is tokenized once: code repeats its words many times over.

    Cuts lie only where these tokenizers cut whatever is around, because no alternative of their expressions continues.
    One place is after a letter or a digit, before an ASCII character of another kind. One is between punctuation and a
    space. One is before a space that a letter or punctuation follows, which `\\s+(?!\\S)` leaves to the word. A digit
    does not count there, because some tokenizers split digits off first. Characters beyond ASCII never take part, so no
    cut depends on what Unicode calls a letter or a space.
    """
    if not any(texts):
        return encode(tokenizer, texts)
    array = pa.array(texts, pa.large_string())
    _, offsets, content = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[: len(texts) + 1]
    data = np.frombuffer(content, np.uint8)[: bounds[-1]]
    is_bound = np.zeros(len(data) + 1, bool)
    is_bound[bounds] = True
    kind = BYTE_KINDS[data]
    left, right = kind[:-1], kind[1:]
    cuts = is_bound.copy()
    cuts[1:-1] |= ((left == LETTER) | (left == DIGIT)) & (right != left) & (right != NOT_ASCII)
    cuts[1:-1] |= (left == MARK) & (right == SPACE)
    cuts[:-2] |= (left == SPACE) & ((right == LETTER) | (right == MARK)) & ~is_bound[1:-1]
    edges = np.flatnonzero(cuts)

    words = pa.LargeStringArray.from_buffers(len(edges) - 1, pa.py_buffer(edges.astype(np.int64)), content)
    dictionary = words.dictionary_encode()
    word_ids, word_lengths = encode(tokenizer, dictionary.dictionary.to_pylist())
    which = dictionary.indices.to_numpy()
    ids = gather_runs(word_ids, (np.cumsum(word_lengths) - word_lengths)[which], word_lengths[which])
    # Ids before each bound, not per text's words: empty texts have none, several may share one edge.
    ids_before = np.concatenate([[0], np.cumsum(word_lengths[which])])
    return ids, np.diff(ids_before[np.searchsorted(edges, bounds)])


def gather_runs(
    pool: npt.NDArray[Integer], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[Integer]:
    """The runs pool[start : start + length] one after the other."""
    shift = starts - (np.cumsum(lengths) - lengths)
    return pool[np.arange(lengths.sum()) + np.repeat(shift, lengths)]


def shared_prefixes(first: Ids, first_lengths: Places, second: Ids, second_lengths: Places) -> Places:
    """Of every pair of runs, the number of ids with which both begin."""
    lengths = np.minimum(first_lengths, second_lengths)
    begin = np.cumsum(lengths) - lengths
    left = gather_runs(first, np.cumsum(first_lengths) - first_lengths, lengths)
    right = gather_runs(second, np.cumsum(second_lengths) - second_lengths, lengths)
    unlike = np.append(np.flatnonzero(left != right), len(left))
    return np.minimum(unlike[np.searchsorted(unlike, begin)] - begin, lengths)


def special_texts(tokenizer: Any) -> list[str]:
    """The texts that this tokenizer reads as control tokens: in a text of the data they would become some."""
    added = tokenizer.added_tokens_decoder.values()
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]))


# --------------------------------------------------------------------------------------------------------------- masks


@dataclass(frozen=True)
class FormatOptions:
    """All that shapes examples besides the rows and the tokenizer; `as_json` is for a cache key."""

    method: Literal["sft", "dpo", "gspo"]
    format: Literal["fim", "chat", "prompt_completion", "preference"]
    columns: Mapping[str, str] = field(default_factory=dict)
    """{field: column of the file}, where they are called otherwise."""
    column: str = "source"
    """fim: the column of code."""
    learn: Literal["turns", "completion", "all"] = "turns"
    """sft: every turn of the assistant (of a completion: its turns), the last turn or the completion, or everything."""
    max_length: int | None = None
    """In tokens; gspo: of a prompt, where its completion is to have room as well."""
    overlong: Literal["drop", "truncate"] = "drop"
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    thinking: bool | None = None
    today: str | None = None
    """The date (2025-12-31) that templates which print one are told; None is the clock's."""
    fim: FimConfig = field(default_factory=FimConfig)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"columns": dict(self.columns), "fim": self.fim.model_dump(mode="json")}

    @property
    def too_long(self) -> str:
        return f"longer than {self.max_length} tokens"


@dataclass(frozen=True)
class Rendering:
    """What rows of conversations, prompts or pairs become token ids with."""

    options: FormatOptions
    columns: Mapping[str, str]
    """Field -> column of the rows."""
    tokenizer: Any
    template: ChatTemplate | None
    """None where no row holds messages."""
    special: list[str]
    """What the tokenizer reads as control tokens."""


class Masked(NamedTuple):
    """Tokenized examples one after the other."""

    ids: Ids
    mask: npt.NDArray[np.int8]
    lengths: Places


def learn_spans(tokenizer: Any, texts: Sequence[str], spans: Sequence[Spans]) -> Masked:
    """Each text with its spans learned. Raises UsageError for a tokenizer that does not say where its tokens lie."""
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} is not a fast tokenizer and cannot say which characters a token stands for",
            fix="use a model that has a tokenizer.json",
        )
    ids: list[list[int]] = []
    masks = [np.zeros(0, np.int8)]
    for start, end in batches(texts):
        found = reset_backend(tokenizer).encode_batch(list(texts[start:end]), add_special_tokens=False)
        for encoding, text, its_spans in zip(found, texts[start:end], spans[start:end], strict=True):
            mask = np.zeros(len(encoding.ids), np.int8)
            for first, behind in its_spans:
                if first < behind:
                    # Where several tokens hold one character, all of them do.
                    last = encoding.char_to_token(behind - 1)
                    stop = max(_token_at(encoding, behind, len(text)), 0 if last is None else last + 1)
                    mask[_token_at(encoding, first, len(text)) : stop] = 1
            ids.append(encoding.ids)
            masks.append(mask)
    flat, lengths = concatenate_lists(ids, np.int32)
    return Masked(flat, np.concatenate(masks), lengths)


def _token_at(encoding: Any, character: int, length: int) -> int:
    """The first token of this character, or of the next one that has any (some tokenizers drop spaces)."""
    found = (encoding.char_to_token(at) for at in range(character, length))
    return next((int(token) for token in found if token is not None), len(encoding.ids))


def learn_completions(
    tokenizer: Any, prompts: Sequence[str], wholes: Sequence[str], special_tokens: bool, everything: bool = False
) -> Masked:
    """Each whole text, of which all is learned behind the tokens it shares with its prompt's, or `everything`.

    `special_tokens`: the tokenizer adds its own (a beginning of sequence), which a chat template does by itself.
    """
    parts = [Masked(np.zeros(0, np.int32), np.zeros(0, np.int8), np.zeros(0, np.int64))]
    for start, end in batches(wholes):
        ids, lengths = encode(tokenizer, wholes[start:end], special_tokens)
        shared = np.zeros(end - start, np.int64)
        if not everything:
            shared = shared_prefixes(*encode(tokenizer, prompts[start:end], special_tokens), ids, lengths)
        within = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        parts.append(Masked(ids, (within >= np.repeat(shared, lengths)).astype(np.int8), lengths))
    return Masked(*map(np.concatenate, zip(*parts, strict=True)))


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


def masked_chunk(
    examples: Masked, options: FormatOptions, rows: Sequence[int], values: Sequence[Any], dropped: dict[str, Dropped]
) -> Chunk:
    """The examples that fit and have something to learn; `rows` and `values` name those that are dropped."""
    lengths = examples.lengths
    starts = np.cumsum(lengths) - lengths
    learned_before = np.concatenate([[0], np.cumsum(examples.mask, dtype=np.int64)])
    over = np.zeros(len(lengths), bool) if options.max_length is None else lengths > options.max_length
    if options.overlong == "truncate" and options.max_length is not None:
        cut = np.minimum(lengths, options.max_length)
        if options.truncation_mode == "keep_end":
            starts = starts + lengths - cut
        lengths = cut
    learned = learned_before[starts + lengths] - learned_before[starts]
    too_long = over & (options.overlong == "drop")
    for at in np.flatnonzero(too_long | (learned == 0)):
        within = f" within {options.max_length} tokens" if over[at] else ""
        reason = options.too_long if too_long[at] else f"with nothing to learn{within}"
        count_dropped(dropped, reason, rows[at], values[at])
    kept = ~too_long & (learned > 0)
    starts, lengths = starts[kept], lengths[kept]
    columns = {
        "input_ids": list_array(gather_runs(examples.ids, starts, lengths), lengths),
        "completion_mask": list_array(gather_runs(examples.mask, starts, lengths), lengths),
    }
    return Chunk(pa.table(columns), dropped, int((over & kept).sum()))


def list_array(flat: npt.NDArray[Any], lengths: Places) -> pa.ListArray:
    """Lists of these lengths over a flat array."""
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), pa.array(flat))
