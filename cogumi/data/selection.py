"""Which rows are held out, trained on, or left alone: by what they hold, not by where they stand.

Every row has a hash of its used columns, keyed with the seed. The rows with the smallest hashes are held out, and those
with the next smallest are trained on where not all are wanted. So the order of the rows and their spread over files do
not matter. A row added to the source moves few others, and equal rows are never on both sides.

The hashes lie in a file (8 bytes a row), the choice in another (1 byte a row), and are sorted bucket by bucket.
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
"""What becomes of a row. LIKE_HELD_OUT: equal to one that is held out; COPY: to an earlier one, where those are dropped."""
NOTHING = 2**64 - 1
"""The hash of rows whose columns are all null. They are no copies of each other, and the last to be chosen."""
BLOCK = 2**20
"""Hashes sorted at a time."""
ONE_IN, MOST_HELD_OUT = 50, 64
"""Rows that are held out where the configuration does not say."""


@dataclass(frozen=True)
class Selection:
    """How many rows, and which."""

    eval_rows: int | None = 0
    """None: as many as `held_out_rows` says."""
    max_rows: int | None = None
    fraction: float = 1.0
    """Of the rows of each source that may be trained on."""
    deduplicate: bool = False
    seed: int = 0


def held_out_rows(rows: int, asked: int | None) -> int:
    """How many rows are held out: as many as were asked for, or one in ONE_IN, at most MOST_HELD_OUT."""
    return min(MOST_HELD_OUT, rows // ONE_IN) if asked is None else asked


def row_hashes(rows: pl.DataFrame, seed: int) -> Hashes:
    """blake2b of each row's columns by name and value, 8 bytes, keyed with the seed; NOTHING where all are null.

    Nested values count as their JSON with sorted keys, without keys whose value is null. A frame gives a key of one
    message to all others. Bytes count as the text that they spell.
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
            # With its length, so that no two rows of several columns read the same.
            state.update(b"-" if value is None else b"%d:" % len(value) + value)
        known = any(value is not None for value in values)
        digests.append(state.digest() if known else NOTHING.to_bytes(8, "little"))
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False)


def choose_rows(
    hashes: Hashes, states: States, bounds: Sequence[int], weights: Sequence[float], selection: Selection
) -> int:
    """Write into `states` what becomes of every row. Returns how many are equal to an earlier one, held-out rows apart.

    hashes: of all sources' rows, one source after the other; states: as long, all UNUSED. bounds: where sources begin,
    and the end. Source i gives the share weights[i] / sum(weights) of the examples and of the held-out rows. There are
    as many examples as the shares allow until one source is used up, at most `max_rows`.
    """
    weighed = [Fraction(str(weight)) for weight in weights]
    shares = [each / sum(weighed) for each in weighed]
    parts = [slice(start, stop) for start, stop in pairwise(bounds)]
    held_out = np.empty(0, np.uint64)
    wanted = divide_by_shares(held_out_rows(len(hashes), selection.eval_rows), shares)
    for part, count in zip(parts, wanted, strict=True):
        for rows in iter_ascending(hashes[part]):
            if not count:
                break
            here = hashes[part][rows]
            chosen = (is_first(here) & (here != NOTHING) & ~np.isin(here, held_out)).nonzero()[0][:count]
            states[part][rows[chosen]] = HELD_OUT
            held_out = np.union1d(held_out, here[chosen])
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
    """How many rows are UNUSED, TRAIN, HELD_OUT, LIKE_HELD_OUT and COPY."""
    return [int(np.count_nonzero(states == state)) for state in range(COPY + 1)]


def iter_ascending(hashes: Hashes) -> Iterator[npt.NDArray[np.int64]]:
    """The numbers of all rows in the order of their hashes, equal ones in theirs, about BLOCK of them at a time."""
    bits = max(0, (len(hashes) - 1) // BLOCK).bit_length()  # the first of a hash, which say its bucket
    if not bits:
        yield np.argsort(hashes, kind="stable")
        return
    shift = np.uint64(64 - bits)
    starts = range(0, len(hashes), BLOCK)
    for bucket in range(1 << bits):
        found = [start + np.flatnonzero(hashes[start : start + BLOCK] >> shift == bucket) for start in starts]
        rows = np.concatenate(found)
        yield rows[np.argsort(hashes[rows], kind="stable")]


def divide_by_shares(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers in these shares (which sum to 1) that add up to `total`: the largest remainders are rounded up."""
    exact = [total * share for share in shares]
    whole = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def is_first(hashes: Hashes) -> npt.NDArray[np.bool_]:
    """Of sorted hashes, which are not equal to the one before."""
    return np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)]
