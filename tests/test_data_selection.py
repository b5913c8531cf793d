"""Which rows are chosen: by what they hold, exactly as many as asked for, in blocks as at once."""

import itertools

import numpy as np
import polars as pl
import pytest

from cogumi.data import selection as module
from cogumi.data.selection import (
    HELD_OUT,
    NOTHING,
    TRAIN,
    UNUSED,
    RowHashes,
    Selection,
    choose_rows,
    count_states,
    divide_by_shares,
    row_hashes,
)


def hashes_of(rows: list[dict[str, object]], seed: int = 0) -> list[int]:
    return row_hashes(pl.DataFrame(rows, strict=False), seed).tolist()


def test_equal_rows_have_equal_hashes_and_others_do_not():
    rows = [
        {"a": "x", "b": "yz"}, {"a": "xy", "b": "z"}, {"a": "x", "b": None}, {"a": None, "b": "x"},
        {"a": "", "b": ""},
    ]  # fmt: skip
    hashes = hashes_of(rows)
    assert len(set(hashes)) == len(rows)
    assert hashes_of(rows[::-1]) == hashes[::-1]
    assert hashes_of([{"b": row["b"], "a": row["a"]} for row in rows]) == hashes  # the order of columns is no matter
    assert not set(hashes_of(rows, seed=1)) & set(hashes)
    assert hashes_of([{"c": "x"}]) != hashes_of([{"d": "x"}])
    assert hashes_of([{"a": None, "b": None}]) == [NOTHING]


def test_the_same_content_in_another_type_of_column_has_the_same_hash():
    objects = pl.DataFrame({"m": pl.Series([[{"role": "u", "content": "x"}], "text"], dtype=pl.Object)})
    structs = pl.DataFrame({"m": [[{"role": "u", "content": "x", "tools": None}]]})
    text = pl.DataFrame({"m": ["text"]})
    assert row_hashes(objects, 0).tolist() == [*row_hashes(structs, 0), *row_hashes(text, 0)]
    assert row_hashes(pl.DataFrame({"m": [b"text"]}), 0)[0] == row_hashes(text, 0)[0]


@pytest.mark.parametrize("block", [7, 2**20])
def test_any_choice_is_what_sorting_all_rows_gives(monkeypatch, block):
    """Against sets and sorted lists of the whole, over sources with copies, nulls and every setting."""
    monkeypatch.setattr(module, "BLOCK", block)
    rng = np.random.default_rng(0)
    for _ in range(200):
        heights = rng.integers(1, 60, rng.integers(1, 4))
        pool = rng.integers(0, 2**64, max(1, heights.sum() // 2), dtype=np.uint64)
        hashes = rng.choice(pool, heights.sum())
        hashes[rng.random(len(hashes)) < 0.1] = NOTHING
        bounds = [0, *np.cumsum(heights).tolist()]
        weights = [float(weight) for weight in rng.integers(1, 5, len(heights))]
        asked = Selection(
            eval_rows=int(rng.integers(0, 6)),
            max_rows=int(rng.integers(1, 20)) if rng.random() < 0.5 else None,
            fraction=0.5 if rng.random() < 0.5 else 1.0,
            deduplicate=bool(rng.random() < 0.5),
        )
        states = np.zeros(len(hashes), np.uint8)
        duplicates, sharing = choose_rows(RowHashes(hashes, hashes), states, bounds, weights, asked)
        assert sharing == 0

        held_out, trained = (hashes[states == state].tolist() for state in (HELD_OUT, TRAIN))
        assert len(set(held_out)) == len(held_out) <= asked.eval_rows
        assert NOTHING not in held_out
        assert not set(held_out) & set(trained)
        left = [h for h in hashes.tolist() if h not in set(held_out)]
        real = [h for h in left if h != NOTHING]
        assert duplicates == len(real) - len(set(real))
        if asked.deduplicate:
            real = [h for h in trained if h != NOTHING]
            assert len(real) == len(set(real))
        for part in itertools.pairwise(bounds):
            mine, its = hashes[slice(*part)], states[slice(*part)]
            chosen = np.sort(mine[its == TRAIN])
            assert (chosen == np.sort(mine[(its == TRAIN) | (its == UNUSED)])[: len(chosen)]).all()
            assert sum(count_states(its)) == len(its)
            assert count_states(its)[TRAIN] == len(chosen)
        if len(heights) == 1 and not asked.deduplicate:
            expected = min(len(left), max(1, round(len(left) * asked.fraction)))
            assert len(trained) == min(expected, asked.max_rows or expected)


def test_more_rows_move_few_others():
    rng = np.random.default_rng(1)
    before = rng.integers(0, 2**64, 1000, dtype=np.uint64)
    after = np.concatenate([before, rng.integers(0, 2**64, 10, dtype=np.uint64)])
    chosen = []
    for hashes in (before, after):
        states = np.zeros(len(hashes), np.uint8)
        choose_rows(RowHashes(hashes, hashes), states, [0, len(hashes)], [1.0], Selection(eval_rows=50, max_rows=300))
        chosen.append(set(hashes[states == TRAIN].tolist()))
    assert len(chosen[0] & chosen[1]) >= 285


def test_shares_are_exact_in_decimals():
    shares = [module.Fraction("0.9"), module.Fraction("0.1")]
    assert divide_by_shares(10_000, shares) == [9_000, 1_000]
    assert divide_by_shares(11, shares) == [10, 1]
    states = np.zeros(10_100, np.uint8)
    hashes = np.arange(10_100, dtype=np.uint64)
    choose_rows(RowHashes(hashes, hashes), states, [0, 9_000, 10_100], [0.9, 0.1], Selection())
    assert [count_states(part)[TRAIN] for part in (states[:9_000], states[9_000:])] == [9_000, 1_000]
