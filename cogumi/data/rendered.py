"""Rendered conversations to token ids, each distinct word of a batch tokenized once, and where the ids lie in the text.

A tokenizer finds its added tokens (the controls that a chat template writes) before it cuts anything else, so the text
between two of them is a text of its own, for which `encode_by_words` is exact. A byte-level token stands for as many
bytes as its spelling has letters; where the bytes of a text's tokens add up to the text's own, they say where each token
lies, without the tokenizer's offsets, which cost several times the ids.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cogumi.data.encode import cuts_at_spaces, encode_by_words, encodings, gather

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
