"""From rows of a source to values of one kind, the rows that make none counted."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import polars as pl

from cogumi.data.chat import Conversation, strings_in
from cogumi.data.dropped_rows import BadRow, drop
from cogumi.data.example_kinds import Dropped

T = TypeVar("T")


def parsed(
    rows: pl.DataFrame,
    first_row: int,
    columns: Mapping[str, str],
    make: Callable[[dict[str, Any]], T],
    dropped: dict[str, Dropped],
) -> tuple[list[T], list[int]]:
    """What `make` makes of each row, given as {field: value}, and the index of the row; rows it refuses are counted."""
    made: list[T] = []
    at: list[int] = []
    fields = list(columns)
    values = zip(*(rows[column].to_list() for column in columns.values()), strict=True)
    for index, row in enumerate(values, first_row):
        try:
            made.append(make(dict(zip(fields, row, strict=True))))
            at.append(index)
        except BadRow as error:
            drop(dropped, error.reason, index, error.excerpt or row)
    return made, at


def without_special_texts(
    made: list[T], at: list[int], special: list[str], dropped: dict[str, Dropped]
) -> tuple[list[T], list[int]]:
    """Those in whose texts no control token of the tokenizer stands: it would become one in the middle of them."""
    texts = pl.Series(["\0".join(strings_in(_spoken(each))) for each in made], dtype=pl.String)
    bad = texts.str.contains_any(special).to_list() if special else [False] * len(made)
    for row, value, text in zip(bad, at, texts, strict=True):
        if row:
            drop(dropped, "containing a special token", value, text)
    kept = [(each, row) for each, row, hit in zip(made, at, bad, strict=True) if not hit]
    return [each for each, _ in kept], [row for _, row in kept]


def _spoken(value: Any) -> Any:
    return (value.messages, value.tools) if isinstance(value, Conversation) else value
