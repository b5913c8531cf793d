"""Texts with spans that are learned, and their tokens.

A tokenizer finds its added tokens (the controls that a chat template writes) before it cuts anything else, so the text
between two of them is a text of its own, for which `encode_by_words` is exact. A byte-level token stands for as many
bytes as its spelling has letters; where the bytes of a text's tokens add up to the text's own, they say where each token
lies, without the tokenizer's offsets, which cost several times the ids.
"""

import json
import re
import string
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cogumi.core.errors import UsageError

Ids = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]


def encode_rendered(tokenizer: Any, texts: Sequence[str], special_tokens: bool = False) -> tuple[Ids, Places]:
    """(all ids one after the other, ids per text), exactly as the tokenizer gives them.

    `special_tokens`: with those it puts around every text by itself.
    """
    added = _added_tokens(tokenizer)
    around = _around(tokenizer) if special_tokens else ([], [])
    if added is None or around is None:
        encoded = [each.ids for each in encodings(tokenizer, texts, special_tokens, offsets=False)]
        lengths = np.fromiter(map(len, encoded), np.int64, len(texts))
        flat = [token for ids in encoded for token in ids]
        return np.array(flat, np.int32), lengths
    pattern, ids_of = added
    pieces: list[str] = []
    controls: list[int] = []
    runs_of_text = np.empty(len(texts), np.int64)
    for at, text in enumerate(texts):
        parts = pattern.split(text)  # text, control, text, ..., text
        pieces += parts[::2]
        controls += [ids_of[each] for each in parts[1::2]]
        controls.append(-1)  # nothing behind the last piece
        runs_of_text[at] = len(parts) // 2 + 1
    ids, lengths = encode_by_words(tokenizer, pieces)
    # Runs of one pool: around, pieces and controls in turn.
    followed = np.array(controls, np.int32)
    pool = np.concatenate([ids, np.maximum(followed, 0)])
    starts = np.column_stack([np.cumsum(lengths) - lengths, len(ids) + np.arange(len(followed))])
    run_lengths = np.column_stack([lengths, followed >= 0])
    inner = gather(pool, starts.ravel(), run_lengths.ravel())
    per_text = np.add.reduceat(run_lengths.sum(axis=1), np.cumsum(runs_of_text) - runs_of_text)
    before, after = around
    if not before and not after:
        return inner, per_text
    pool = np.concatenate([inner, np.array(before, np.int32), np.array(after, np.int32)])
    n = len(texts)
    starts = np.column_stack(
        [np.full(n, len(inner)), np.cumsum(per_text) - per_text, np.full(n, len(inner) + len(before))]
    )
    run_lengths = np.column_stack([np.full(n, len(before)), per_text, np.full(n, len(after))])
    return gather(pool, starts.ravel(), run_lengths.ravel()), run_lengths.sum(axis=1)


def token_ends(tokenizer: Any, ids: Ids, lengths: Places, texts: Sequence[str]) -> tuple[Places, npt.NDArray[np.bool_]]:
    """(the end of every token in its text, in bytes; per text whether that is known).

    It is not known where the tokenizer is no byte-level one, or changed the text before it cut it.
    """
    in_bytes = np.array([len(text) if text.isascii() else len(text.encode()) for text in texts], np.int64)
    if _added_tokens(tokenizer) is None:
        return np.zeros(len(ids), np.int64), np.zeros(len(texts), bool)
    ends = np.cumsum(_byte_lengths(tokenizer, len(tokenizer))[ids])
    last = np.cumsum(lengths)
    before = np.concatenate([[0], ends])[last - lengths]
    own = np.concatenate([[0], ends])[last] - before
    return ends - np.repeat(before, lengths), own == in_bytes


def shared_prefixes(first: Ids, first_lengths: Places, second: Ids, second_lengths: Places) -> Places:
    """Of every pair of runs, the number of ids with which both begin."""
    lengths = np.minimum(first_lengths, second_lengths)
    begin = np.cumsum(lengths) - lengths
    left = gather(first, np.cumsum(first_lengths) - first_lengths, lengths)
    right = gather(second, np.cumsum(second_lengths) - second_lengths, lengths)
    unlike = np.append(np.flatnonzero(left != right), len(left))
    return np.minimum(unlike[np.searchsorted(unlike, begin)] - begin, lengths)


def _added_tokens(tokenizer: Any) -> tuple[re.Pattern[str], dict[str, int]] | None:
    return _added_tokens_of(tokenizer, len(tokenizer)) if tokenizer.is_fast else None


@lru_cache(maxsize=4)
def _added_tokens_of(tokenizer: Any, size: int) -> tuple[re.Pattern[str], dict[str, int]] | None:
    """A pattern that finds this tokenizer's added tokens as it does, and their ids; None where words are no way.

    `size`: the tokenizer's, so that one to which tokens were added is looked at again.
    """
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    normalizes = tokenizer.backend_tokenizer.normalizer is not None
    if not cuts_at_spaces(tokenizer) or any(
        each.single_word or (each.normalized and normalizes) for each in added.values()
    ):
        return None
    ids = {token.content: number for number, token in added.items()}
    longest_first = sorted(ids, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if ids else "((?!))"), ids


@lru_cache(maxsize=4)
def _byte_lengths(tokenizer: Any, size: int) -> Places:
    """By id: how many bytes of text it stands for. A byte-level vocabulary spells each byte as one letter."""
    vocabulary = tokenizer.get_vocab()
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, number in vocabulary.items():
        lengths[number] = len(token)
    for number, added in tokenizer.backend_tokenizer.get_added_tokens_decoder().items():
        lengths[number] = len(added.content.encode())
    return lengths


def _around(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """The ids the tokenizer puts before and after every text."""
    bare, dressed = (tokenizer("a", add_special_tokens=each)["input_ids"] for each in (False, True))
    found = [at for at in range(len(dressed)) if dressed[at : at + len(bare)] == bare]
    return (dressed[: found[0]], dressed[found[0] + len(bare) :]) if found else None


# ------------------------------------------------------------------------------------------------------------- encoding


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
