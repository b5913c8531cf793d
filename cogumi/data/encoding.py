"""Texts as token ids, and the options that decide what is learned of them."""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cogumi.config.schema import FimConfig
from cogumi.core.errors import UsageError
from cogumi.data.rows import BadRow

Ids = npt.NDArray[np.int32]
ID_LISTS, MASK_LISTS = pa.list_(pa.int32()), pa.list_(pa.int8())
CHUNK_CHARACTERS = 2 * 2**20
"""Text tokenized at a time: the tokenizer's own objects take about 50 times the memory of the text."""


@dataclass(frozen=True)
class FormatOptions:
    """Everything that shapes examples besides the rows and the tokenizer; `as_json` is for a cache key."""

    method: Literal["sft", "dpo", "gspo"]
    format: Literal["fim", "chat", "prompt_completion", "text", "preference"]
    columns: Mapping[str, str] = field(default_factory=dict)
    """{field: column of the file}, where the names differ."""
    column: str = "source"
    """fim: the column of code."""
    learn: Literal["turns", "completion", "all"] = "turns"
    """sft: every turn of the assistant (or of a completion), the last turn or the completion, or everything."""
    max_length: int | None = None
    """In tokens; gspo: of a prompt, where its completion is to have room as well."""
    overlong: Literal["drop", "truncate"] = "drop"
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    repeats_prompt: bool = False
    """Answers of text begin with their whole prompt, which is learned once."""
    thinking: bool | None = None
    today: str | None = None
    """The date (2025-12-31) for templates that print it; None is the clock's."""
    tools: Sequence[dict[str, Any]] = ()
    """gspo: the JSON schemas of the run's own tools, which every prompt is rendered with."""
    fim: FimConfig = field(default_factory=FimConfig)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"columns": dict(self.columns), "fim": self.fim.model_dump(mode="json")}

    @property
    def too_long(self) -> str:
        return f"longer than {self.max_length} tokens"


def encode(tokenizer: Any, texts: Sequence[str], special_tokens: bool = False) -> list[Ids]:
    """Tokenize each text; `special_tokens` adds those that the tokenizer puts around every text."""
    if not tokenizer.is_fast:
        return [np.array(ids, np.int32) for ids in tokenizer(texts, add_special_tokens=special_tokens)["input_ids"]]
    # Straight to the Rust tokenizer: the Python layer would build an attention mask and a list copy per text.
    encode_batch = reset_backend(tokenizer).encode_batch_fast
    parts = (encode_batch(part, add_special_tokens=special_tokens) for part in batches(texts))
    return [np.array(encoding.ids, np.int32) for part in parts for encoding in part]


def keep_end(tokenizer: Any, text: str, most: int) -> str:
    """Return the end of a text that has at most `most` tokens, including those the tokenizer adds.

    It is cut where a token begins and tokenized again, since a cut text may have other tokens. Raises UsageError for a
    tokenizer without offsets, and BadRow if nothing fits.
    """
    refuse_slow(tokenizer)
    starts = [first for first, _ in reset_backend(tokenizer).encode(text, add_special_tokens=True).offsets]
    for start in starts[len(starts) - most :]:
        if text[start:].strip() and len(encode(tokenizer, [text[start:]], special_tokens=True)[0]) <= most:
            return text[start:]
    raise BadRow(f"of which no end fits into {most} tokens")


def refuse_slow(tokenizer: Any) -> None:
    """Raise UsageError for a tokenizer without the character offsets of its tokens."""
    if not tokenizer.is_fast:
        problem = "is not a fast tokenizer and cannot say which characters a token stands for"
        raise UsageError(f"{type(tokenizer).__name__} {problem}", fix="use a model that has a tokenizer.json")


def batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Iterate over the texts with about CHUNK_CHARACTERS at a time."""
    start = size = 0
    for index, text in enumerate(texts):
        size += len(text)
        if size >= CHUNK_CHARACTERS or index == len(texts) - 1:
            yield list(texts[start : index + 1])
            start, size = index + 1, 0


def reset_backend(tokenizer: Any) -> Any:
    """Return the Rust tokenizer without the padding and truncation of earlier calls."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend


def special_texts(tokenizer: Any) -> list[str]:
    """Return the texts that this tokenizer reads as control tokens, also inside the text of a row."""
    added = tokenizer.added_tokens_decoder.values()
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]))


def shared_prefix(first: Ids, second: Ids) -> int:
    """Return the number of ids with which both begin."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


# -------------------------------------------------------------------------------------------------------- word by word


OTHER, LETTER, DIGIT, MARK, SPACE, NOT_ASCII = range(6)
BYTE_KINDS = np.full(256, OTHER, np.uint8)
"""The kind of each UTF-8 byte; control characters, tab and newlines included, are OTHER."""
BYTE_KINDS[0x21:0x7F] = MARK
BYTE_KINDS[0x20] = SPACE
BYTE_KINDS[0x80:] = NOT_ASCII
BYTE_KINDS[list(string.ascii_letters.encode())] = LETTER
BYTE_KINDS[list(string.digits.encode())] = DIGIT

# Regular expressions whose first step cuts text as `encode_by_words` does: Qwen 2 and 2.5, and Llama 3, as in their
# tokenizer.json. GPT-2's, which the StarCoder family has too, is built into ByteLevel.
WORD_PATTERNS = [
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}")
]


def cuts_at_spaces(tokenizer: Any) -> bool:
    """Tell whether `encode_by_words` is exact for this tokenizer."""
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if not backend or not backend.pre_tokenizer or type(backend.normalizer).__name__ not in ("NoneType", "NFC"):
        return False
    # An added token that holds or swallows spaces is matched before any cutting.
    added = backend.get_added_tokens_decoder().values()
    if any(" " in token.content or token.lstrip or token.rstrip for token in added):
        return False
    step = json.loads(backend.pre_tokenizer.__getstate__())
    *before, last = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last["use_regex"]:
        return all(earlier["type"] == "Digits" for earlier in before)
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return before in [[split | {"pattern": {"Regex": pattern}}] for pattern in WORD_PATTERNS]


def encode_by_words(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    r"""Tokenize each distinct word once, as `encode` would: code repeats its words, which saves two thirds of the time.

    Text is cut only where no alternative of these tokenizers' expressions continues: after a letter or digit before an
    ASCII character of another kind, between punctuation and a space, and before a space that a letter or punctuation
    follows (`\s+(?!\S)` leaves such a space to the word; some tokenizers split digits off first). Characters beyond ASCII
    never take part.
    """
    if not any(texts):
        return encode(tokenizer, texts)
    _, offsets, content = pa.array(texts, pa.large_string()).buffers()
    bounds = np.frombuffer(offsets, np.int64)[: len(texts) + 1]
    kind = BYTE_KINDS[np.frombuffer(content, np.uint8)[: bounds[-1]]]
    left, right = kind[:-1], kind[1:]
    is_bound = np.zeros(len(kind) + 1, bool)
    is_bound[bounds] = True
    cuts = is_bound.copy()
    cuts[1:-1] |= ((left == LETTER) | (left == DIGIT)) & (right != left) & (right != NOT_ASCII)
    cuts[1:-1] |= (left == MARK) & (right == SPACE)
    cuts[:-2] |= (left == SPACE) & ((right == LETTER) | (right == MARK)) & ~is_bound[1:-1]
    edges = np.flatnonzero(cuts)

    words = pa.LargeStringArray.from_buffers(len(edges) - 1, pa.py_buffer(edges.astype(np.int64)), content)
    dictionary = words.dictionary_encode()
    encode_batch, word_index = reset_backend(tokenizer).encode_batch_fast, dictionary.indices.to_numpy()
    # A few hundred at a time: Python's garbage collector visits every object alive.
    distinct = dictionary.dictionary.to_pylist()
    parts = (distinct[start : start + 512] for start in range(0, len(distinct), 512))
    encoded = [np.array(word.ids, np.int32) for part in parts for word in encode_batch(part, add_special_tokens=False)]
    pool, lengths = np.concatenate(encoded), np.array([*map(len, encoded)])
    starts, lengths = (np.cumsum(lengths) - lengths)[word_index], lengths[word_index]
    before = np.concatenate([[0], np.cumsum(lengths)])  # ids before each word
    ids = pool[np.arange(before[-1]) + np.repeat(starts - before[:-1], lengths)]
    # By the bounds, not by the words: empty texts have none, and several may share one edge.
    return [ids[start:stop] for start, stop in pairwise(before[np.searchsorted(edges, bounds)].tolist())]
