"""Rows of a source and what becomes of them: examples in an arrow file, or a count of the dropped rows by reason."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from cogumi.core.durability import sync_path
from cogumi.core.errors import UsageError

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
    thoughtless: int = 0
    """Examples of conversations whose last answer has no thought, or an empty one."""
    encoded: tuple[str, ...] = ()
    """Columns of the table that are text of `cogumi.data.records`; a data set of them has the values."""


Tokenize = Callable[[pl.DataFrame, int], Chunk]
"""Makes examples of rows, whose columns are the fields of the format and whose first has this index in the whole source.
What it makes of a row depends on the row, its index and what is in the cache key alone. An empty chunk is no error."""


class BadRow(Exception):
    """Why a row makes no example, in words that follow a number ("3 null"); `excerpt` where it says more than the row."""

    def __init__(self, reason: str, excerpt: str | None = None):
        super().__init__(reason)
        self.reason, self.excerpt = reason, excerpt


class KindsDiffer(UsageError):
    """A row is text and another one messages, given by their indices: those two are not tokenized alike."""

    def __init__(self, text: int, messages: int):
        super().__init__(
            f"row {text} is text and row {messages} is messages", key="data.source", fix="write them alike"
        )
        self.rows = (text, messages)


def count_dropped(dropped: dict[str, Dropped], reason: str, row: int, value: Any, count: int = 1) -> None:
    """Count rows, of which row number `row`, which holds `value`, is the first. Rows come in their order."""
    before = dropped.get(reason)
    dropped[reason] = replace(before, count=before.count + count) if before else Dropped(count, row, excerpt_of(value))


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


def iter_strings(value: Any) -> Iterator[str]:
    """Every text in a value of messages or tools, however deep, keys included; of a dataclass its values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from iter_strings(inner)
    elif isinstance(value, Mapping):
        yield from iter_strings(list(chain.from_iterable(value.items())))
    elif hasattr(value, "__dataclass_fields__"):
        yield from iter_strings(list(vars(value).values()))


def parse_rows(
    rows: pl.DataFrame,
    first_row: int,
    make: Callable[[dict[str, Any]], T],
    dropped: dict[str, Dropped],
    special: list[str],
) -> tuple[list[T], list[int]]:
    """What `make` makes of each row, given as {column: value}, and the index of the row.

    Rows that it refuses are counted, and so are those whose texts contain a control token of the tokenizer (`special`).
    """
    values = zip(*(column.to_list() for column in rows), strict=True)
    indices = range(first_row, first_row + rows.height)
    made, at = try_each(values, indices, lambda row: make(dict(zip(rows.columns, row, strict=True))), dropped)
    texts = pl.Series(["\0".join(iter_strings(each)) for each in made], dtype=pl.String)
    hits = texts.str.contains_any(special)

    def refuse_special(at: int) -> T:
        if hits[at]:
            raise BadRow("containing a special token")
        return made[at]

    return try_each(range(len(made)), at, refuse_special, dropped, texts.__getitem__)


# ---------------------------------------------------------------------------------------------------------- arrow file


class ExamplesWriter:
    """Takes the rows of one part (trained on, or held out) and writes the examples that they become to an arrow stream."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self.truncated = self.learned = self.thoughtless = 0
        self.dropped: dict[str, Dropped] = {}
        self.encoded: dict[str, bool] = {}  # by column of the table
        self.lengths = Lengths()
        self.file: Any = None
        self.schema: pa.Schema | None = None

    def add(self, tokenize: Tokenize, rows: pl.DataFrame, at: npt.NDArray[np.int64]) -> None:
        """Write the examples made of rows at these places of the source, and count what became of the others."""
        try:
            chunk = tokenize(rows, self.rows)
        except KindsDiffer as error:  # `tokenize` numbers the chosen rows; a report names the place in the source
            raise KindsDiffer(*(int(at[row - self.rows]) for row in error.rows)) from None
        table = chunk.table.replace_schema_metadata(None)
        lost = sum(dropped.count for dropped in chunk.dropped.values())
        if len(table) + lost != len(at):
            raise RuntimeError(f"{len(at)} rows became {len(table)} examples and {lost} dropped")
        for reason, dropped in chunk.dropped.items():
            place = int(at[dropped.row - self.rows])
            count_dropped(self.dropped, reason, place, dropped.excerpt, dropped.count)
        self.rows += len(at)
        self.truncated += chunk.truncated
        self.thoughtless += chunk.thoughtless
        if not len(table):
            return
        self.refuse_other_encoding(table.column_names, chunk.encoded, int(at[0]))
        self.lengths.update(token_lengths(table))
        if "completion_mask" in table.column_names:
            self.learned += sum(int(np.count_nonzero(part.flatten())) for part in table["completion_mask"].chunks)
        self.write(table)

    def refuse_other_encoding(self, names: Sequence[str], encoded: Sequence[str], first_row: int) -> None:
        """Raise UsageError for a column that earlier rows have as text, and these as values, or the other way round."""
        for name in names:
            if self.encoded.setdefault(name, name in encoded) != (name in encoded):
                kinds = ("text", "messages") if name == "prompt" else ("text", "another field")
                before, here = kinds if name in encoded else kinds[::-1]
                what = f"`{name}` is {before} before row {first_row} and {here} from there on"
                raise UsageError(what, key="data.source", fix="write them alike")

    def write(self, table: pa.Table) -> None:
        if self.schema is None:
            self.schema, self.file = table.schema, pa.ipc.new_stream(str(self.path), table.schema)
        elif table.schema != self.schema:
            try:
                schema = pa.unify_schemas([self.schema, table.schema], promote_options="permissive")
            except pa.ArrowException as error:
                raise UsageError(f"a column holds two kinds of values: {error}", fix="write them alike") from error
            if schema != self.schema:
                self.rewrite(schema)
            table = with_columns(table, schema)
        self.file.write_table(table.combine_chunks())

    def rewrite(self, schema: pa.Schema) -> None:
        """What is written so far, in the types that later rows need: a column may have begun with nulls alone."""
        self.file.close()
        before = self.path.rename(self.path.with_suffix(".before"))
        self.file, self.schema = pa.ipc.new_stream(str(self.path), schema), schema
        with pa.memory_map(str(before)) as mapped:
            for batch in pa.ipc.open_stream(mapped):
                self.file.write_table(with_columns(pa.Table.from_batches([batch]), schema))
        before.unlink()

    def close(self, name: str) -> dict[str, Any]:
        """The record of this part. Raises UsageError where no row was usable."""
        if self.file is None:
            longer = any(reason.startswith("longer than") for reason in self.dropped)
            allow = ", or allow longer examples (of gspo: lower train.max_completion_length)" if longer else ""
            raise UsageError(describe_counts(name, 0, self.dropped), fix=f"give other rows{allow}")
        self.file.close()
        sync_path(self.path)
        return {
            "name": name,
            "dropped": {reason: [each.count, each.row, each.excerpt] for reason, each in self.dropped.items()},
            "truncated": self.truncated,
            "thoughtless": self.thoughtless,
            "encoded": [name for name, encoded in self.encoded.items() if encoded],
            "lengths": sorted(self.lengths.items()),
            "learned": self.learned,
        }


def with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table in these types, with nulls in the columns that it has not."""
    missing = {name: pa.nulls(len(table)) for name in schema.names if name not in table.column_names}
    for name, nulls in missing.items():
        table = table.append_column(name, nulls)
    return table.select(schema.names).cast(schema)


def describe_counts(name: str, used: int, dropped: Mapping[str, Dropped]) -> str:
    """ "sample.parquet: 9,421 rows, 9,100 used; dropped 300 longer than 512 tokens, 21 null"."""
    total = used + sum(each.count for each in dropped.values())
    reasons = ", ".join(f"{each.count:,} {reason}" for reason, each in dropped.items())
    return f"{name}: {total:,} rows, {used:,} used" + (f"; dropped {reasons}" if reasons else "")


class Lengths(Counter[int]):
    """Examples by their number of tokens. Of a preference pair: the prompt with the longer answer."""

    @property
    def tokens(self) -> int:
        return sum(length * count for length, count in self.items())

    @property
    def mean(self) -> float:
        return self.tokens / max(1, self.total())

    def quantile(self, share: float) -> int:
        """The shortest length that at least this share of the examples does not exceed; 0 where there are none."""
        wanted, lengths = max(1, math.ceil(share * self.total())), sorted(self)
        reached = accumulate(self[length] for length in lengths)
        return next((length for length, count in zip(lengths, reached, strict=True) if count >= wanted), 0)

    def buckets(self, most: int) -> list[tuple[int, int, int]]:
        """(first length, last length, examples) of at most so many buckets of one width, up to the longest example."""
        if not self:
            return []
        width = max(1, math.ceil((max(self) + 1) / most))
        counts: Counter[int] = Counter()
        for length, count in self.items():
            counts[length // width] += count
        return [(at * width, (at + 1) * width - 1, counts[at]) for at in range(max(counts) + 1)]


def token_lengths(table: pa.Table) -> list[int]:
    """Tokens of each example of a chunk; none where the chunk holds text, which a trainer tokenizes."""
    ids = [name for name in table.column_names if name.endswith("_ids")]
    lengths = {name: pc.list_value_length(table[name]).to_numpy() for name in ids}
    found = lengths.get("input_ids", np.empty(0, np.int64))
    if "chosen_ids" in lengths:
        found = lengths["prompt_ids"] + np.maximum(lengths["chosen_ids"], lengths["rejected_ids"])
    return found.tolist()  # type: ignore[no-any-return]
