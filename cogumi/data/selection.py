"""Choose which rows are held out, trained on, or unused, by their content and not by their position.

Every row has two hashes, keyed with the seed: of its example and of its question, both as they are read from any of the
spellings. The rows of the questions with the smallest hashes are held out; of the others those with the smallest hashes are
trained on if not all are. The order of rows and their distribution over files do not matter, a row added to the source moves
few others, and a held-out question is never trained on.

The hashes are files (8 bytes a row each), the choice another one (1 byte a row); they are sorted bucket by bucket.
"""

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from cogumi.data.rows import BadRow, cells_of, row_dicts

Hashes = npt.NDArray[np.uint64]
States = npt.NDArray[np.uint8]
Read = Callable[[dict[str, Any]], tuple[str, Any]]
"""Read the (question, example) of a row, the second as JSON. Raises BadRow."""

UNUSED, TRAIN, HELD_OUT, LIKE_HELD_OUT, SAME_QUESTION, COPY = range(6)
"""States of a row. LIKE_HELD_OUT: equal to a held-out one; SAME_QUESTION: it shares the question of a held-out one; COPY:
equal to an earlier one, with deduplication."""
NOTHING = 2**64 - 1
"""Hash of rows that cannot be read, or whose columns are all null. They are no copies of each other, and the last to be
chosen."""
BLOCK = 2**20  # hashes sorted at a time
ROWS_PER_HELD_OUT, MOST_HELD_OUT = 50, 64  # defaults
QUESTION_COLUMNS = ("source", "prefix", "suffix")  # of code, which has no `Read`


class RowHashes(NamedTuple):
    """Hashes of all rows. `questions` is the same object as `examples` where they do not differ."""

    examples: Hashes
    questions: Hashes


@dataclass(frozen=True)
class Selection:
    """Selection of the rows to use and to hold out."""

    eval_rows: int | None = 0
    """None: the default of `held_out_rows`."""
    max_rows: int | None = None
    fraction: float = 1.0
    """Of the rows of each source that may be trained on."""
    deduplicate: bool = False
    seed: int = 0


def held_out_rows(rows: int, requested: int | None) -> int:
    """Return the number of held-out rows: as asked, or one in ROWS_PER_HELD_OUT, at most MOST_HELD_OUT."""
    return min(MOST_HELD_OUT, rows // ROWS_PER_HELD_OUT) if requested is None else requested


def row_hashes(rows: pl.DataFrame, seed: int) -> Hashes:
    """Hash each row's columns by name and value (blake2b, 8 bytes, keyed with the seed); NOTHING if all are null.

    Nested values are hashed as JSON with sorted keys. Bytes are hashed as the text that they spell.
    """

    def as_bytes(value: Any) -> bytes | None:
        if value is None or isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            value = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        return value.encode("utf-8", "surrogatepass")  # type: ignore[no-any-return]

    names = sorted(rows.columns)
    start = hashlib.blake2b(json.dumps(names).encode(), digest_size=8, key=str(seed).encode())
    text = rows.select(pl.col(name).cast(pl.Binary) if rows[name].dtype == pl.String else name for name in names)
    digests = []
    for values in zip(*(map(as_bytes, cells_of(text[name])) for name in names), strict=True):
        state = start.copy()
        for value in values:
            # The length keeps the boundaries of columns distinct.
            state.update(b"-" if value is None else b"%d:" % len(value) + value)
        has_value = any(value is not None for value in values)
        digests.append(state.digest() if has_value else NOTHING.to_bytes(8, "little"))
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False)


def hash_text(text: str, seed: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=str(seed).encode()).digest()


def question_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return what is asked first: the text, or what precedes the first answer, system messages apart.

    Spaces count as one space, and Unicode is normalized, as many tokenizers do.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    texts: list[str] = []
    for message in messages:
        if message["role"] == "assistant" and texts:
            break
        if message["role"] in ("user", "tool"):
            texts.append(message["content"])
    texts = texts or [message["content"] for message in messages]
    return " ".join(unicodedata.normalize("NFC", "\n".join(texts)).split())


def example_hashes(rows: pl.DataFrame, read: Read | None, seed: int) -> RowHashes:
    """Hash the example and the question of each row; of code its columns."""
    if read is None:
        examples, columns = row_hashes(rows, seed), [name for name in rows.columns if name in QUESTION_COLUMNS]
        is_same = not columns or columns == rows.columns
        return RowHashes(examples, examples if is_same else row_hashes(rows.select(columns), seed))
    hashes: list[list[bytes]] = [[], []]
    bad = []
    for index, row in enumerate(row_dicts(rows)):
        try:
            question, example = read(row)
        except BadRow:
            bad.append(index)
            question = example = ""
        hashes[0].append(hash_text(json.dumps(example, sort_keys=True, default=str), seed))
        hashes[1].append(hash_text(question, seed))
    examples, questions = (np.frombuffer(b"".join(part), "<u8").astype(np.uint64) for part in hashes)
    if bad:
        examples[bad] = questions[bad] = NOTHING
    return RowHashes(examples, questions)


def replace_common_questions(hashes: RowHashes) -> int:
    """Give rows whose question is that of a large share of all rows the hash of their example as their question's.

    Such a question is an instruction that all rows begin with, which cannot be held out. Returns the number of these rows.
    """
    examples, questions = hashes
    rows, replaced = len(questions), 0
    sample = questions[:: max(1, rows // BLOCK)]
    values, counts = np.unique(sample, return_counts=True)
    common = values[counts * (rows / len(sample)) > max(1, min(rows // 2, max(MOST_HELD_OUT, rows // 10)))]
    for start in range(0, rows, BLOCK) if len(common) else ():
        block = slice(start, start + BLOCK)
        is_common = np.isin(questions[block], common) & (questions[block] != examples[block])
        questions[block] = np.where(is_common, examples[block], questions[block])
        replaced += int(np.count_nonzero(is_common))
    return replaced


def iter_by_question(hashes: RowHashes) -> Iterator[tuple[npt.NDArray[np.int64], Hashes, npt.NDArray[np.bool_]]]:
    """Iterate over (rows by question and example, their questions, mask of the first of equal rows), NOTHING left out."""
    for rows in iter_ascending(hashes.questions):
        rows = rows[np.lexsort((hashes.examples[rows], hashes.questions[rows]))]
        rows = rows[hashes.examples[rows] != NOTHING]
        questions = hashes.questions[rows]
        yield rows, questions, is_first(questions) | is_first(hashes.examples[rows])


def choose_rows(
    hashes: RowHashes, states: States, bounds: Sequence[int], weights: Sequence[float], selection: Selection
) -> tuple[int, int]:
    """Write the state of every row into `states`, which are all UNUSED.

    Rows are those of one source after the other, with the start of each and the end in `bounds`. Source i gives the share
    weights[i] / sum(weights) of the examples and of the held-out rows. There are as many examples as the shares allow
    until one source is used up, at most `max_rows`. A source of weight 0 is held out whole (at most `eval_rows`), and
    nothing of the others. Rows of one question are held out together; `hashes.questions` may be changed.

    Returns:
        The number of rows equal to an earlier one, held-out rows apart, and of those with the question of another example.
    """
    examples, questions = hashes
    fractions = [Fraction(str(weight)) for weight in weights]
    shares = [fraction / sum(fractions) for fraction in fractions]
    parts = [slice(start, stop) for start, stop in pairwise(bounds)]
    sharing = 0
    if questions is not examples:
        sharing = replace_common_questions(hashes)
        for _, of_rows, is_new in iter_by_question(hashes):
            _, counts = np.unique(of_rows[is_new], return_counts=True)
            sharing += int(counts[counts > 1].sum())
    readable = int(np.count_nonzero(examples != NOTHING))
    quotas = divide_by_shares(held_out_rows(readable, selection.eval_rows), shares)
    if not all(shares):
        most = len(examples) if selection.eval_rows is None else selection.eval_rows
        quotas = [0 if share else most for share in shares]
    held_out = RowHashes(np.empty(0, np.uint64), np.empty(0, np.uint64))
    for part, count in zip(parts, quotas, strict=True):
        for rows, of_rows, is_new in iter_by_question(RowHashes(examples[part], questions[part])) if count else ():
            chosen = (is_new & ~np.isin(of_rows, held_out.questions)).nonzero()[0][:count]
            states[part][rows[chosen]] = HELD_OUT
            pairs = zip(held_out, (examples[part][rows[chosen]], of_rows[chosen]), strict=True)
            held_out = RowHashes(*(np.union1d(before, new) for before, new in pairs))
            count -= len(chosen)
            if not count:
                break
        if count and not all(shares):  # rows of nulls are dropped with their reason
            states[part][np.flatnonzero(examples[part] == NOTHING)[:count]] = HELD_OUT
    duplicates, trained = 0, bounds[sum(map(bool, shares))]  # what only evaluates comes last
    for rows in iter_ascending(examples):
        for state, before, of_all in zip((LIKE_HELD_OUT, SAME_QUESTION), held_out, hashes, strict=True):
            states[rows[np.isin(of_all[rows], before) & (states[rows] == UNUSED)]] = state
        rows = rows[(states[rows] == UNUSED) & (examples[rows] != NOTHING) & (rows < trained)]
        copies = rows[~is_first(examples[rows])]
        duplicates += len(copies)
        if selection.deduplicate:
            states[copies] = COPY

    totals = [] if selection.max_rows is None else [selection.max_rows]
    for part, share in ((part, share) for part, share in zip(parts, shares, strict=True) if share):
        unused = count_states(states[part])[UNUSED]
        limit = min(unused, max(1, round(unused * Fraction(str(selection.fraction)))))
        totals.append(int(limit / share))
    for part, count in zip(parts, divide_by_shares(min(totals), shares), strict=True):
        for rows in iter_ascending(examples[part]):
            chosen = rows[states[part][rows] == UNUSED][:count]
            states[part][chosen] = TRAIN
            count -= len(chosen)
    return duplicates, sharing


def count_states(states: States) -> list[int]:
    """Count the rows of each state, in the order of the constants."""
    return [int(np.count_nonzero(states == state)) for state in range(COPY + 1)]


def iter_ascending(hashes: Hashes) -> Iterator[npt.NDArray[np.int64]]:
    """Iterate over row numbers in the order of their hashes (stable), about BLOCK at a time."""
    bits = max(0, (len(hashes) - 1) // BLOCK).bit_length()  # leading bits of a hash, its bucket
    if not bits:
        yield np.argsort(hashes, kind="stable")
        return
    shift = np.uint64(64 - bits)
    starts = range(0, len(hashes), BLOCK)
    for bucket in range(1 << bits):
        rows = np.concatenate(
            [start + np.flatnonzero(hashes[start : start + BLOCK] >> shift == bucket) for start in starts]
        )
        yield rows[np.argsort(hashes[rows], kind="stable")]


def divide_by_shares(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide `total` into integers by these shares (which sum to 1); the largest remainders are rounded up."""
    exact = [total * share for share in shares]
    counts = list(map(int, exact))
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def is_first(hashes: Hashes) -> npt.NDArray[np.bool_]:
    """Mark which of these sorted hashes differ from the one before."""
    return np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)]
