"""Rows of a source and what becomes of them: examples, or a count of the dropped rows by reason with the first of each."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import polars as pl
import pyarrow as pa

T = TypeVar("T")
V = TypeVar("V")
EXCERPT = 80  # characters
SPOKEN = {"role", "content"}


@dataclass(frozen=True)
class Dropped:
    """Rows that made no example for one reason: how many, and the first of them."""

    count: int
    row: int
    """Its index in the whole source, from 0."""
    excerpt: str
    """What it holds, in at most 80 characters."""


@dataclass(frozen=True)
class Chunk:
    """The examples of consecutive rows, in their order: len(rows) = len(table) + the counts of `dropped`."""

    table: pa.Table
    """sft: `input_ids` (list of int32), `completion_mask` (list of int8). dpo: `prompt_ids`, `chosen_ids`,
    `rejected_ids` (lists of int32). gspo: `prompt` (text, or a list of messages) and what the rewards are given."""
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """By reason, such as "null" or "longer than 512 tokens"."""
    truncated: int = 0
    """Examples in the table of which something was cut away."""


Tokenize = Callable[[pl.DataFrame, int], Chunk]
"""Makes examples of rows, of which the first has this index in the whole source. What it makes of a row depends on the row,
its index and what is in the cache key alone. A chunk of which nothing is usable is no error."""


class BadRow(Exception):
    """Why a row makes no example, in words that follow a number ("3 null"); `excerpt` where it says more than the row."""

    def __init__(self, reason: str, excerpt: str | None = None):
        super().__init__(reason)
        self.reason, self.excerpt = reason, excerpt


def count_dropped(dropped: dict[str, Dropped], reason: str, row: int, value: Any, count: int = 1) -> None:
    """Count rows, of which row number `row`, which holds `value`, is the first. Rows come in their order."""
    if reason in dropped:
        dropped[reason] = replace(dropped[reason], count=dropped[reason].count + count)
    else:
        dropped[reason] = Dropped(count, row, excerpt_of(value))


def excerpt_of(value: Any) -> str:
    """The start of a value on one line, in at most 80 characters."""
    text = " ".join(describe_value(value)[: 4 * EXCERPT].split())
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"


def describe_value(value: Any) -> str:
    """A value of a row for people: text as it stands, the fields of a row apart, messages by their roles, the rest as JSON."""
    if isinstance(value, str):
        return value or "(empty)"
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, tuple):
        return " | ".join(map(describe_value, value))
    if isinstance(value, list) and value and all(isinstance(each, dict) and set(each) == SPOKEN for each in value):
        return " ".join(f"{each['role']}: {describe_value(each['content'])}" for each in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def decode_value(value: Any) -> Any:
    """Bytes as text, everything else as it is. Raises BadRow for null and for bytes that are no UTF-8."""
    if value is None:
        raise BadRow("null")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise BadRow("not UTF-8") from None
    return value


def try_each(
    values: Iterable[V],
    at: Iterable[int],
    make: Callable[[V], T],
    dropped: dict[str, Dropped],
    show: Callable[[V], Any] = lambda value: value,
) -> tuple[list[T], list[int]]:
    """(what `make` makes of each value, the index of its row). Rows that it refuses are counted, the first as `show` has it."""
    made: list[T] = []
    kept: list[int] = []
    for value, row in zip(values, at, strict=True):
        try:
            made.append(make(value))
            kept.append(row)
        except BadRow as error:
            count_dropped(dropped, error.reason, row, error.excerpt or show(value))
    return made, kept


def parse_rows(
    rows: pl.DataFrame,
    first_row: int,
    columns: Mapping[str, str],
    make: Callable[[dict[str, Any]], T],
    dropped: dict[str, Dropped],
    special: list[str],
) -> tuple[list[T], list[int]]:
    """What `make` makes of each row, given as {field: value}, and the index of the row.

    Rows that it refuses are counted. So are rows whose texts contain one of the tokenizer's control tokens (`special`).
    The tokenizer would read that text as the token itself.
    """
    values = zip(*(rows[column].to_list() for column in columns.values()), strict=True)
    indices = range(first_row, first_row + rows.height)
    made, at = try_each(values, indices, lambda row: make(dict(zip(columns, row, strict=True))), dropped)
    texts = pl.Series(["\0".join(iter_strings(each)) for each in made], dtype=pl.String)
    bad = texts.str.contains_any(special).to_list() if special else [False] * len(made)
    for hit, row_number, text in zip(bad, at, texts, strict=True):
        if hit:
            count_dropped(dropped, "containing a special token", row_number, text)
    kept = [place for place, hit in enumerate(bad) if not hit]
    return [made[place] for place in kept], [at[place] for place in kept]


def iter_strings(value: Any) -> Iterator[str]:
    """Every text in a value of messages or tools, however deep, keys included; of a dataclass its values."""
    if isinstance(value, str):
        yield value
        return
    if isinstance(value, Mapping):
        value = chain.from_iterable(value.items())
    elif is_dataclass(value):
        value = vars(value).values()
    elif not isinstance(value, list | tuple):
        return
    for inner in value:
        yield from iter_strings(inner)
