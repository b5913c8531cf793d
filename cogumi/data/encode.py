"""Many texts to token ids at once: flat arrays, and each distinct word tokenized only once where that is exact."""

import json
import string
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cogumi.errors import UsageError

Integer = TypeVar("Integer", bound=np.integer[Any])


def encode(tokenizer: Any, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(all ids one after the other, ids per text), without special tokens."""
    if tokenizer.is_fast:
        # Straight to the Rust tokenizer: the Python layer would build an attention mask and a list copy per text.
        backend = tokenizer.backend_tokenizer
        backend.no_padding()  # an earlier padded call leaves these set; transformers sets them anew on every call
        backend.no_truncation()
        encoded: Iterator[list[int]] | list[list[int]] = [
            each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)
        ]
    else:
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    lengths = np.fromiter(map(len, encoded), np.int64, len(texts))
    return np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths


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
    return (
        len(before) == 1
        and before[0]["type"] == "Split"
        and before[0]["pattern"].get("Regex") in WORD_PATTERNS
        and before[0]["behavior"] == "Isolated"
        and not before[0]["invert"]
    )


def encode_by_words(tokenizer: Any, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """`encode`, but every distinct word is tokenized once: code repeats its words many times over.

    Cuts lie only where these tokenizers cut in any case, whatever is around:

    - after a letter before anything else, and after a digit before anything else: no alternative of their expressions
      continues from one to the other, and none looks back;
    - between any visible character and a space, for the same reason;
    - before a space that a visible character follows: `\\s+(?!\\S)` leaves that last space to the word, and at the end
      of the left part it takes the same run. Not before a digit, which some split off first, so that the run keeps it.

    Characters beyond ASCII never take part, so no cut falls into one or depends on what Unicode calls a
    letter or a space.
    """
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
    ids = gather(word_ids, (np.cumsum(word_lengths) - word_lengths)[which], word_lengths[which])
    # Ids before each bound, not per text's words: empty texts have none, several may share one edge.
    ids_before = np.concatenate([[0], np.cumsum(word_lengths[which])])
    return ids, np.diff(ids_before[np.searchsorted(edges, bounds)])


def gather(
    pool: npt.NDArray[Integer], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[Integer]:
    """The runs pool[start : start + length] one after the other."""
    shift = starts - (np.cumsum(lengths) - lengths)
    return pool[np.arange(lengths.sum()) + np.repeat(shift, lengths)]


def encodings(tokenizer: Any, texts: Sequence[str], special_tokens: bool = False, offsets: bool = True) -> list[Any]:
    """The Rust tokenizer's own values (`ids`; with offsets `char_to_token`), one per text.

    `special_tokens`: with those that the tokenizer puts around every text. Raises UsageError for a tokenizer that is not
    a fast one: it has no offsets.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} is not a fast tokenizer and cannot say which characters a token stands for",
            fix="use a model that has a tokenizer.json",
        )
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    encode_them = backend.encode_batch if offsets else backend.encode_batch_fast
    return list(encode_them(list(texts), add_special_tokens=special_tokens))


def special_texts(tokenizer: Any) -> list[str]:
    """The texts that this tokenizer reads as control tokens: as part of somebody's text they would become some."""
    added = tokenizer.added_tokens_decoder.values()
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]))
