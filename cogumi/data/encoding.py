"""Texts as token ids, and which of them are learned.

*The last turn, or a completion*: what follows the prompt's own tokens in prompt and completion, as TRL's SFTTrainer finds
it (trl 1.15, sft_trainer.py, tokenize_fn). *Every turn*: the tokens of the spans that `ChatTemplate.turns` gives. A token
that only begins before a span, or ends behind it, is learned.
"""

import json
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cogumi.config.schema import FimConfig
from cogumi.core.errors import UsageError
from cogumi.data.chat_templates import ChatTemplate, Spans, read_template
from cogumi.data.rows import BadRow, Chunk, Dropped, try_each

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.int8]
CHUNK_CHARACTERS = 2 * 2**20
"""Text tokenized at a time: the tokenizer's own objects take some 50 times the text."""


def encode(tokenizer: Any, texts: Sequence[str], special_tokens: bool = False) -> list[Ids]:
    """The ids of each text. special_tokens: with those that the tokenizer puts around every text by itself."""
    if not tokenizer.is_fast:
        return [np.array(ids, np.int32) for ids in tokenizer(texts, add_special_tokens=special_tokens)["input_ids"]]
    # Straight to the Rust tokenizer: the Python layer would build an attention mask and a list copy per text.
    encode_batch = reset_backend(tokenizer).encode_batch_fast
    parts = (encode_batch(part, add_special_tokens=special_tokens) for part in batches(texts))
    return [np.array(each.ids, np.int32) for part in parts for each in part]


def keep_end(tokenizer: Any, text: str, most: int) -> str:
    """The end of a text that is at most so many tokens, those included that the tokenizer puts around every text.

    It is cut where a token begins. What is left is tokenized again, as a cut text is not always the tokens that it was.
    Raises UsageError for a tokenizer that does not say where its tokens lie, and BadRow where nothing fits.
    """
    refuse_slow(tokenizer)
    starts = [first for first, _ in reset_backend(tokenizer).encode(text, add_special_tokens=True).offsets]
    for start in starts[len(starts) - most :]:
        if text[start:].strip() and len(encode(tokenizer, [text[start:]], special_tokens=True)[0]) <= most:
            return text[start:]
    raise BadRow(f"of which no end fits into {most} tokens")


def refuse_slow(tokenizer: Any) -> None:
    """Raise UsageError for a tokenizer that does not say where its tokens lie."""
    if not tokenizer.is_fast:
        what = f"{type(tokenizer).__name__} is not a fast tokenizer and cannot say which characters a token stands for"
        raise UsageError(what, fix="use a model that has a tokenizer.json")


def batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts with about CHUNK_CHARACTERS at a time."""
    start = size = 0
    for at, text in enumerate(texts):
        size += len(text)
        if size >= CHUNK_CHARACTERS or at == len(texts) - 1:
            yield list(texts[start : at + 1])
            start, size = at + 1, 0


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
WORD_PATTERNS = [
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}")
]


def cuts_at_spaces(tokenizer: Any) -> bool:
    """Whether this tokenizer is one of those for which `encode_by_words` is exact; others are tokenized whole."""
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if not backend or not backend.pre_tokenizer or type(backend.normalizer).__name__ not in ("NoneType", "NFC"):
        return False
    # An added token that holds or swallows spaces is found before any cutting.
    added = backend.get_added_tokens_decoder().values()
    step = json.loads(backend.pre_tokenizer.__getstate__())
    *before, last = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if any(" " in token.content or token.lstrip or token.rstrip for token in added):
        return False
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last["use_regex"]:
        return all(each["type"] == "Digits" for each in before)
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return before in [[split | {"pattern": {"Regex": pattern}}] for pattern in WORD_PATTERNS]


def encode_by_words(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    r"""`encode`, but every distinct word is tokenized once: code repeats its words, and it takes a third of the time.

    Cuts lie only where no alternative of these tokenizers' expressions continues. One place is after a letter or a digit,
    before an ASCII character of another kind. Others are between punctuation and a space, and before a space that a letter
    or punctuation follows. `\s+(?!\S)` leaves such a space to the word. A digit does not count there, because some
    tokenizers split digits off first. Characters beyond ASCII never take part.
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
    encode_batch, which = reset_backend(tokenizer).encode_batch_fast, dictionary.indices.to_numpy()
    # Some hundred at a time: of many thousands of objects alive, Python's garbage collector goes through each again.
    distinct = dictionary.dictionary.to_pylist()
    parts = (distinct[at : at + 512] for at in range(0, len(distinct), 512))
    found = [np.array(each.ids, np.int32) for part in parts for each in encode_batch(part, add_special_tokens=False)]
    pool, lengths = np.concatenate(found), np.array([*map(len, found)])
    starts, lengths = (np.cumsum(lengths) - lengths)[which], lengths[which]
    before = np.concatenate([[0], np.cumsum(lengths)])  # ids before each word
    ids = pool[np.arange(before[-1]) + np.repeat(starts - before[:-1], lengths)]
    # By the bounds, not by the words: empty texts have none, and several may share one edge.
    return [ids[start:stop] for start, stop in pairwise(before[np.searchsorted(edges, bounds)].tolist())]


def shared_prefix(first: Ids, second: Ids) -> int:
    """The number of ids with which both begin."""
    length = min(len(first), len(second))
    unlike = np.flatnonzero(first[:length] != second[:length])
    return int(unlike[0]) if len(unlike) else length


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
    tools: Sequence[dict[str, Any]] = ()
    """gspo: the JSON schemas of the run's own tools, which every prompt is rendered with."""
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
    tokenizer: Any
    special: list[str]
    """What the tokenizer reads as control tokens."""

    @cached_property
    def template(self) -> ChatTemplate:
        """Read for the first row that holds messages: text needs none."""
        return read_template(self.tokenizer, self.options.thinking, self.options.today)

    def refuse_thinking(self) -> None:
        """Raise UsageError for a flag that a row of text would ignore."""
        if self.options.thinking is not None:
            reason = f"text in data.format: {self.options.format} is not rendered with a chat template"
            raise UsageError(f"cogumi.thinking would be ignored: {reason}", fix="drop it, or give messages")


def learn_spans(tokenizer: Any, texts: Sequence[str], spans: Sequence[Spans]) -> list[tuple[Ids, Mask]]:
    """Each text with its spans learned. Raises UsageError for a tokenizer that does not say where its tokens lie."""
    refuse_slow(tokenizer)
    encode_batch = reset_backend(tokenizer).encode_batch
    encodings = chain.from_iterable(encode_batch(part, add_special_tokens=False) for part in batches(texts))
    examples = []
    for encoding, text, its_spans in zip(encodings, texts, spans, strict=True):
        mask = np.zeros(len(encoding.ids), np.int8)
        for first, behind in its_spans:
            if first < behind:
                # Where several tokens hold one character, all of them do.
                last = encoding.char_to_token(behind - 1)
                stop = max(_token_at(encoding, behind, len(text)), 0 if last is None else last + 1)
                mask[_token_at(encoding, first, len(text)) : stop] = 1
        examples.append((np.array(encoding.ids, np.int32), mask))
    return examples


def _token_at(encoding: Any, character: int, length: int) -> int:
    """The first token of this character, or of the next one that has any (some tokenizers drop spaces)."""
    found = (encoding.char_to_token(at) for at in range(character, length))
    return next((int(token) for token in found if token is not None), len(encoding.ids))


def learn_completions(
    tokenizer: Any, prompts: Sequence[str], wholes: Sequence[str], special_tokens: bool, everything: bool = False
) -> list[tuple[Ids, Mask]]:
    """Each whole text, of which all is learned behind the tokens it shares with its prompt's, or `everything`.

    `special_tokens`: the tokenizer adds its own (a beginning of sequence), which a chat template does by itself.
    """
    found = encode(tokenizer, wholes, special_tokens)
    shared = [0] * len(found)
    if not everything:
        shared = list(map(shared_prefix, encode(tokenizer, prompts, special_tokens), found))
    return [(ids, (np.arange(len(ids)) >= start).astype(np.int8)) for ids, start in zip(found, shared, strict=True)]


def masked_chunk(
    examples: Sequence[tuple[Ids, Mask]],
    options: FormatOptions,
    rows: Sequence[int],
    values: Sequence[str],
    dropped: dict[str, Dropped],
    thoughtless: Collection[int] = (),
) -> Chunk:
    """The examples that fit and have something to learn; `rows` and `values` name those that are dropped.

    thoughtless: of these rows are counted those that make an example.
    """
    most = options.max_length

    def fit(example: tuple[tuple[Ids, Mask], str]) -> tuple[Ids, Mask, bool]:
        ids, mask = example[0]
        over = most is not None and len(ids) > most
        if over and options.overlong == "drop":
            raise BadRow(options.too_long)
        if most is not None and over:
            kept = slice(-most, None) if options.truncation_mode == "keep_end" else slice(most)
            ids, mask = ids[kept], mask[kept]
        if not mask.any():
            raise BadRow(f"with nothing to learn within {most} tokens" if over else "with nothing to learn")
        return ids, mask, over

    fitting, at = try_each(zip(examples, values, strict=True), rows, fit, dropped, lambda example: example[1])
    lengths = [len(ids) for ids, _, _ in fitting]
    table = {
        "input_ids": list_array([ids for ids, _, _ in fitting], lengths, pa.int32()),
        "completion_mask": list_array([mask for _, mask, _ in fitting], lengths, pa.int8()),
    }
    truncated = sum(over for _, _, over in fitting)
    return Chunk(pa.table(table), dropped, truncated, sum(row in thoughtless for row in at))


def list_array(parts: Sequence[npt.NDArray[Any]], lengths: Iterable[int], values: pa.DataType) -> pa.ListArray:
    """Lists of these lengths over the parts one after the other."""
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    return pa.ListArray.from_arrays(
        offsets, pa.array(np.concatenate([np.empty(0, values.to_pandas_dtype()), *parts]), values)
    )
