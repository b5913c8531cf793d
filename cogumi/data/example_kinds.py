"""Examples made of some rows of a source, and what became of the rows that made none."""

from dataclasses import dataclass, field
from typing import Protocol

import polars as pl
import pyarrow as pa


@dataclass(frozen=True)
class Dropped:
    """Rows that made no example for one reason: how many, and the first of them."""

    count: int
    row: int
    """Its index in the whole source, from 0."""
    excerpt: str
    """What it holds, in at most 80 characters."""

    def __add__(self, later: "Dropped") -> "Dropped":
        return Dropped(self.count + later.count, self.row, self.excerpt)


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


class Tokenize(Protocol):
    """Makes examples of rows. What it makes of a row depends on the row, its index and what is in the cache key alone."""

    def __call__(self, rows: pl.DataFrame, first_row: int) -> Chunk:
        """`first_row`: the index of rows[0] in the whole source. A chunk of which nothing is usable is no error."""
        ...
