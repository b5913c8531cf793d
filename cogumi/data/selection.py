"""Choose which rows are held out, trained on, or unused, by their content and not by their position.

Every row has a hash of its used columns, keyed with the seed. The rows with the smallest hashes are held out; those with
the next smallest are trained on if not all are. The order of rows and their distribution over files do not matter, a row
added to the source moves few others, and equal rows are never on both sides.

The hashes are a file (8 bytes a row), the choice another one (1 byte a row); they are sorted bucket by bucket.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from cogumi.data.chat import without_nulls

Hashes = npt.NDArray[np.uint64]
States = npt.NDArray[np.uint8]

UNUSED, TRAIN, HELD_OUT, LIKE_HELD_OUT, COPY = range(5)
"""States of a row. LIKE_HELD_OUT: equal to a held-out one; COPY: equal to an earlier one, with deduplication."""
NOTHING = 2**64 - 1
"""Hash of rows whose columns are all null. They are no copies of each other, and the last to be chosen."""
BLOCK = 2**20  # hashes sorted at a time
ROWS_PER_HELD_OUT, MOST_HELD_OUT = 50, 64  # defaults


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

    Nested values are hashed as JSON with sorted keys and without nulls, since a frame gives a key of one message to all
    others. Bytes are hashed as the text that they spell.
    """

    def as_bytes(value: Any) -> bytes | None:
        if value is None or isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            value = without_nulls(value)
            value = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        return value.encode("utf-8", "surrogatepass")  # type: ignore[no-any-return]

    names = sorted(rows.columns)
    start = hashlib.blake2b(json.dumps(names).encode(), digest_size=8, key=str(seed).encode())
    text = rows.select(pl.col(name).cast(pl.Binary) if rows[name].dtype == pl.String else name for name in names)
    digests = []
    for values in zip(*(map(as_bytes, text[name].to_list()) for name in names), strict=True):
        state = start.copy()
        for value in values:
            # The length keeps the boundaries of columns distinct.
            state.update(b"-" if value is None else b"%d:" % len(value) + value)
        has_value = any(value is not None for value in values)
        digests.append(state.digest() if has_value else NOTHING.to_bytes(8, "little"))
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False)


def choose_rows(
    hashes: Hashes, states: States, bounds: Sequence[int], weights: Sequence[float], selection: Selection
) -> int:
    """Write the state of every row into `states`, which are all UNUSED.

    Rows are those of one source after the other, with the start of each and the end in `bounds`. Source i gives the share
    weights[i] / sum(weights) of the examples and of the held-out rows. There are as many examples as the shares allow
    until one source is used up, at most `max_rows`. Returns the number of rows equal to an earlier one, held-out rows apart.
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    shares = [fraction / sum(fractions) for fraction in fractions]
    parts = [slice(start, stop) for start, stop in pairwise(bounds)]
    held_out = np.empty(0, np.uint64)
    quotas = divide_by_shares(held_out_rows(len(hashes), selection.eval_rows), shares)
    for part, count in zip(parts, quotas, strict=True):
        for rows in iter_ascending(hashes[part]):
            if not count:
                break
            block = hashes[part][rows]
            chosen = (is_first(block) & (block != NOTHING) & ~np.isin(block, held_out)).nonzero()[0][:count]
            states[part][rows[chosen]] = HELD_OUT
            held_out = np.union1d(held_out, block[chosen])
            count -= len(chosen)
    duplicates = 0
    for rows in iter_ascending(hashes):
        states[rows[np.isin(hashes[rows], held_out) & (states[rows] == UNUSED)]] = LIKE_HELD_OUT
        rows = rows[(states[rows] == UNUSED) & (hashes[rows] != NOTHING)]
        copies = rows[~is_first(hashes[rows])]
        duplicates += len(copies)
        if selection.deduplicate:
            states[copies] = COPY

    totals = [] if selection.max_rows is None else [selection.max_rows]
    for part, share in zip(parts, shares, strict=True):
        unused = count_states(states[part])[UNUSED]
        limit = min(unused, max(1, round(unused * Fraction(str(selection.fraction)))))
        totals.append(int(limit / share))
    for part, count in zip(parts, divide_by_shares(min(totals), shares), strict=True):
        for rows in iter_ascending(hashes[part]):
            chosen = rows[states[part][rows] == UNUSED][:count]
            states[part][chosen] = TRAIN
            count -= len(chosen)
    return duplicates


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
