"""Which rows are held out, trained on, or left alone: by what they hold, not by where they stand.

Every row has a hash of its used columns, keyed with the seed. The rows with the smallest hashes are held out, those with the
next smallest are trained on where not all are wanted. So the choice does not depend on the order of the rows or on how they
are spread over files, a row added to the source moves few others, and rows that are equal are never on both sides.

The hashes lie in a file (8 bytes a row), the choice in another (1 byte a row); both are read in blocks, and sorted bucket by
bucket, so that memory does not grow with the rows.
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

Hashes = npt.NDArray[np.uint64]
States = npt.NDArray[np.uint8]

UNUSED, TRAIN, HELD_OUT, LIKE_HELD_OUT, COPY = range(5)
"""What becomes of a row. LIKE_HELD_OUT: equal to one that is held out; COPY: to an earlier one, where those are dropped."""
NOTHING = 2**64 - 1
"""The hash of rows whose columns are all null. They are no copies of each other, and the last to be chosen."""
BLOCK = 2**20
"""Hashes looked at, or sorted, at a time."""
ONE_IN, MOST_HELD_OUT = 50, 64
"""Rows that are held out where the configuration does not say."""


@dataclass(frozen=True)
class Selection:
    """How many rows, and which."""

    eval_rows: int | None = 0
    """None: as many as `held_out_of` says."""
    max_rows: int | None = None
    fraction: float = 1.0
    """Of the rows of each source that may be trained on."""
    deduplicate: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Counts:
    """What becomes of the rows of one source."""

    rows: int
    train: int
    held_out: int
    like_held_out: int
    duplicates: int
    """Rows equal to an earlier one (of any source), beyond those equal to a held-out row. Dropped or not."""


def held_out_of(rows: int, asked: int | None) -> int:
    """How many rows are held out: as many as were asked for, or one in ONE_IN, at most MOST_HELD_OUT."""
    return min(MOST_HELD_OUT, rows // ONE_IN) if asked is None else asked


def row_hashes(rows: pl.DataFrame, seed: int) -> Hashes:
    """blake2b of each row's columns by name and value, 8 bytes, keyed with the seed; NOTHING where all are null.

    Nested values count as their JSON with sorted keys, without keys whose value is null: a frame gives a key that one
    message has to all others. Bytes count as the text that they spell.
    """
    names = sorted(rows.columns)
    start = hashlib.blake2b(json.dumps(names).encode(), digest_size=8, key=str(seed).encode())
    nothing = NOTHING.to_bytes(8, "little")
    digests = []
    for values in zip(*(_as_bytes(rows[name]) for name in names), strict=True):
        if all(value is None for value in values):
            digests.append(nothing)
            continue
        state = start.copy()
        for value in values:
            # With its length, so that no two rows of several columns read the same.
            state.update(b"-" if value is None else b"%d:" % len(value) + value)
        digests.append(state.digest())
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False)


def _as_bytes(series: pl.Series) -> list[bytes | None]:
    if series.dtype in (pl.String, pl.Binary):
        found: list[bytes | None] = series.cast(pl.Binary).to_list()
        return found
    return [_canonical(value) for value in series.to_list()]


def _canonical(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    text = json.dumps(_without_nulls(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "surrogatepass")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def choose(
    hashes: Hashes, states: States, bounds: Sequence[int], weights: Sequence[float], selection: Selection
) -> list[Counts]:
    """Write into `states` what becomes of every row, and count it by source.

    hashes: of all sources' rows, one source after the other; states: as long, all UNUSED. bounds: where sources begin,
    and the end. Source i gives weights[i] / sum(weights) of the examples: as many as there are until one is used up, none
    twice, at most `max_rows`; and that share of the held-out rows.

    None is trained on where a source has none left.
    """
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    parts = [slice(start, stop) for start, stop in pairwise(bounds)]
    if held_out := held_out_of(len(hashes), selection.eval_rows):
        wanted = divided(held_out, shares)
        taken = np.empty(0, np.uint64)
        for part, count in zip(parts, wanted, strict=True):
            mine = np.setdiff1d(smallest_distinct(hashes[part], count + len(taken)), taken)[:count]
            mark_first(hashes[part], states[part], mine)
            taken = np.union1d(taken, mine)
        mark_others(hashes, states, taken)
    duplicates = find_copies(hashes, states, bounds, drop=selection.deduplicate)

    free = [count_state(states[part], UNUSED) for part in parts]
    limits = [_share_of(count, selection.fraction) for count in free]
    total = min(int(limit / share) for limit, share in zip(limits, shares, strict=True))
    if selection.max_rows is not None:
        total = min(total, selection.max_rows)
    for part, count in zip(parts, divided(total, shares), strict=True):
        take_smallest(hashes[part], states[part], count)
    return [
        Counts(
            part.stop - part.start,
            count_state(states[part], TRAIN),
            count_state(states[part], HELD_OUT),
            count_state(states[part], LIKE_HELD_OUT),
            copies,
        )
        for part, copies in zip(parts, duplicates, strict=True)
    ]


def divided(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers in these shares (which sum to 1) that add up to `total`: the largest remainders are rounded up."""
    exact = [total * share for share in shares]
    whole = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def _share_of(count: int, fraction: float) -> int:
    return min(count, max(1, round(count * Fraction(str(fraction)))))


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))


def count_state(states: States, state: int) -> int:
    return sum(int(np.count_nonzero(states[block] == state)) for block in _blocks(len(states)))


def smallest_distinct(hashes: Hashes, count: int) -> Hashes:
    """The `count` smallest of the distinct hashes (fewer where there are no more), sorted."""
    found = np.empty(0, np.uint64)
    for block in _blocks(len(hashes)):
        here = hashes[block]
        here = here[here < (found[-1] if len(found) == count and count else np.uint64(NOTHING))]
        found = np.unique(np.concatenate([found, here]))[:count]
    return found


def mark_first(hashes: Hashes, states: States, chosen: Hashes) -> None:
    """HELD_OUT for the first row with each of the `chosen` (sorted) hashes."""
    left = np.asarray(chosen)
    for block in _blocks(len(hashes)):
        distinct, first = np.unique(hashes[block], return_index=True)
        here = np.isin(distinct, left, assume_unique=True)
        states[block.start + first[here]] = HELD_OUT
        left = np.setdiff1d(left, distinct[here], assume_unique=True)
        if not len(left):
            return


def mark_others(hashes: Hashes, states: States, held_out: Hashes) -> None:
    """LIKE_HELD_OUT for all rows with one of the `held_out` (sorted) hashes that are not held out themselves."""
    if not len(held_out):
        return
    for block in _blocks(len(hashes)):
        at = np.minimum(np.searchsorted(held_out, hashes[block]), len(held_out) - 1)
        like = (held_out[at] == hashes[block]) & (states[block] == UNUSED)
        states[block][like] = LIKE_HELD_OUT


def find_copies(hashes: Hashes, states: States, bounds: Sequence[int], *, drop: bool) -> list[int]:
    """By source, how many UNUSED rows are equal to an earlier one of any source; marked as COPY where they are dropped.

    One bucket of the hashes' range after the other, whose distinct hashes fit in a block on average.
    """
    bits = max(0, (len(hashes) - 1) // BLOCK).bit_length()
    found = np.zeros(len(bounds) - 1, np.int64)
    for bucket in range(2**bits):
        seen = np.empty(0, np.uint64)
        for block in _blocks(len(hashes)):
            here = hashes[block]
            wanted = (states[block] == UNUSED) & (here != NOTHING)
            if bits:
                wanted &= here >> np.uint64(64 - bits) == bucket
            rows = np.flatnonzero(wanted)
            distinct, first = np.unique(here[rows], return_index=True)
            new = ~np.isin(distinct, seen, assume_unique=True)
            copy = np.ones(len(rows), bool)
            copy[first[new]] = False
            copies = rows[copy] + block.start
            found += np.histogram(copies, np.asarray(bounds))[0]
            if drop:
                states[copies] = COPY
            seen = np.sort(np.concatenate([seen, distinct[new]]), kind="stable")  # two sorted runs are merged
    return [int(count) for count in found]


def take_smallest(hashes: Hashes, states: States, count: int) -> None:
    """TRAIN for the `count` UNUSED rows with the smallest hashes; of equal ones, those that come first."""
    if count == 0:
        return
    threshold, ties = _kth_smallest(hashes, states, count)
    for block in _blocks(len(hashes)):
        here, free = hashes[block], states[block] == UNUSED
        states[block][free & (here < threshold)] = TRAIN
        equal = np.flatnonzero(free & (here == threshold))[:ties]
        states[block.start + equal] = TRAIN
        ties -= len(equal)


def _kth_smallest(hashes: Hashes, states: States, k: int) -> tuple[np.uint64, int]:
    """(the k-th smallest hash of the UNUSED rows, how many of those equal to it are among the k): 16 bits at a time."""
    prefix = 0
    for shift in (48, 32, 16, 0):
        counts = np.zeros(2**16, np.int64)
        for block in _blocks(len(hashes)):
            here = hashes[block][states[block] == UNUSED]
            if shift < 48:
                here = here[here >> np.uint64(shift + 16) == prefix]
            digits = (here >> np.uint64(shift)) & np.uint64(0xFFFF)
            counts += np.bincount(digits.astype(np.int64), minlength=2**16)
        up_to = np.cumsum(counts)
        digit = int(np.searchsorted(up_to, k))
        k -= int(up_to[digit] - counts[digit])
        prefix = prefix << 16 | digit
    return np.uint64(prefix), k
