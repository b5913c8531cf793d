"""Rows of a source: their original records carried as text, the examples they become, and counts of dropped rows.

Arrow has one type per column: a key that one record lacks would come back as None, and integers as floats. The original
record, the columns that `data.columns` names for the rewards, and messages are therefore JSON in the prepared data (ASCII,
as an unpaired surrogate cannot be UTF-8), and `decode_rows` decodes them when a row is read. The source file may be gone.

A record of a JSON-lines file equals `json.loads` of its line. One of a parquet or CSV file holds its cells by column, as
Python values. Values without a JSON type (bytes, dates, decimals) are written with their type and read back unchanged.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from cogumi.core.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")
V = TypeVar("V")
EXCERPT = 80  # characters
MESSAGE_KEYS = {"role", "content"}
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
OPTIONAL_FIELDS = ("system", "input", "history", "tools", "answer", *MEDIA)  # a file without such a column has nulls
NO_OBJECT = "(JSON that is no object)"
"""The only key of the record of a JSON value that is no object, and of each of its cells."""


@dataclass(frozen=True)
class Dropped:
    """Rows that made no example for one reason: their count, and the index (in `Data`: from 1) and start of the first."""

    count: int
    row: int
    excerpt: str
    source: str = ""  # the name, if there are several

    @property
    def place(self) -> str:
        return f"row {self.row:,}" + (f" of {self.source}" if self.source else "")


@dataclass(frozen=True)
class Chunk:
    """The examples of consecutive rows, in order: len(rows) = len(table) - `extra_examples` + the counts of `dropped`.

    The table has, for sft, `input_ids` (list of int32) and `completion_mask` (list of int8); for dpo `prompt_ids`,
    `chosen_ids` and `rejected_ids` (lists of int32); for gspo `prompt` and the columns of the rewards.
    """

    table: pa.Table
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """By reason, such as "null" or "longer than 512 tokens"."""
    truncated: int = 0
    """Examples in the table that were shortened."""
    rows_without_reasoning: int = 0
    """Examples of conversations whose last answer has no thought, or an empty one."""
    extra_examples: int = 0
    """Examples beyond one a row: turns that a later turn's rendering shows differently, and pieces of a document."""
    encoded: tuple[str, ...] = ()
    """Columns of the table that hold encoded values, which `decode_rows` decodes."""
    text_rows: int = 0
    """Examples of text, not of messages nor code."""


Tokenize = Callable[[pl.DataFrame, int], Chunk]
"""Make examples of rows: a frame of the format's fields, and the index of its first row. The result depends on the row, its
index and the contents of the cache key alone. An empty chunk is no error."""


class BadRow(Exception):
    """A row makes no example; `reason` completes "3 rows ..." ("null"), `excerpt` replaces the row's own text."""

    def __init__(self, reason: str, excerpt: str | None = None):
        super().__init__(reason)
        self.reason, self.excerpt = reason, excerpt


class KindsDiffer(UsageError):
    """One row is text and another one messages, which are tokenized differently."""

    def __init__(self, text: int, messages: int, source: str = ""):
        place = f" of {source}" if source else ""
        message = f"row {text}{place} is text and row {messages} is messages"
        super().__init__(message, key="data.source", fix="write them alike")
        self.rows = (text, messages)


class Repeated(dict[str, Any]):
    """A JSON object with two values of one key, of which Python's json takes the last."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    is_repeated = len(made) < len(pairs) and any(made[key] != value for key, value in pairs)
    return Repeated(made) if is_repeated else made


JSON = json.JSONDecoder(object_pairs_hook=_object_of)


def count_dropped(dropped: dict[str, Dropped], reason: str, row: int, value: Any, count: int = 1) -> None:
    """Count `count` dropped rows, the first of which has the index `row` and the value `value`."""
    before = dropped.get(reason)
    dropped[reason] = replace(before, count=before.count + count) if before else Dropped(count, row, excerpt_of(value))


def excerpt_of(value: Any) -> str:
    """Return the start of a value on one line of at most 80 characters."""
    text = " ".join(describe_value(value)[: 4 * EXCERPT].split())
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"


def describe_value(value: Any) -> str:
    """Format a value for people: text unchanged, fields separated by bars, messages by role, the rest as JSON."""
    if isinstance(value, str):
        return value or "(empty)"
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, tuple):
        return " | ".join(map(describe_value, value))
    is_message_list = isinstance(value, list) and all(
        isinstance(item, dict) and set(item) == MESSAGE_KEYS for item in value
    )
    if value and is_message_list:
        return " ".join(f"{message['role']}: {describe_value(message['content'])}" for message in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def without_nulls(value: Any) -> Any:
    """Remove the keys of nested mappings whose value is null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def cells_of(column: pl.Series) -> list[Any]:
    """Return the cells of a column as Python values.

    Arrow gives a struct every key that any row has, with null where a row lacks it: such nulls are removed. A column of
    Python objects holds JSON, whose nulls were written by the user.
    """
    return without_nulls(column.to_list()) if column.dtype.is_nested() else column.to_list()  # type: ignore[no-any-return]


def row_dicts(rows: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Iterate over the rows as {column: cell}."""
    for values in zip(*map(cells_of, rows), strict=True):
        yield dict(zip(rows.columns, values, strict=True))


def decode_cell(value: Any) -> Any:
    """Return bytes as text and anything else unchanged. Raises BadRow for null, bytes that are not UTF-8, and what is no row."""
    if value is None:
        raise BadRow("null")
    if isinstance(value, dict) and NO_OBJECT in value:
        raise BadRow("of JSON that is no object", json.dumps(value[NO_OBJECT]))
    if isinstance(value, Repeated):
        raise BadRow("with two values of one key in a JSON object", json.dumps(value))
    if isinstance(value, dict) and {"0", "1"} <= value.keys():
        raise BadRow("of a table by columns (pandas writes rows with to_json(FILE, orient='records', lines=True))")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise BadRow("not UTF-8") from None
    return value


def try_each(
    values: Iterable[V],
    indices: Iterable[int],
    make: Callable[[V], T],
    dropped: dict[str, Dropped],
    show: Callable[[V], Any] = lambda value: value,
) -> tuple[list[T], list[int]]:
    """Apply `make` to each value and count rows that raise BadRow, with an excerpt of `show(value)`: (results, rows)."""
    results: list[T] = []
    result_rows: list[int] = []
    for value, row in zip(values, indices, strict=True):
        try:
            results.append(make(value))
            result_rows.append(row)
        except BadRow as error:
            count_dropped(dropped, error.reason, row, error.excerpt or show(value))
    return results, result_rows


def iter_strings(value: Any) -> Iterator[str]:
    """Iterate over every string in nested lists, mappings (with their keys) and dataclasses."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iter_strings(item)
    elif isinstance(value, Mapping):
        yield from iter_strings(list(chain.from_iterable(value.items())))
    elif hasattr(value, "__dataclass_fields__"):
        yield from iter_strings(list(vars(value).values()))


class Lengths(Counter[int]):
    """Number of examples by length in tokens. A preference pair counts its prompt and its longer answer."""

    @property
    def tokens(self) -> int:
        return sum(length * count for length, count in self.items())

    @property
    def mean(self) -> float:
        return self.tokens / max(1, self.total())

    def quantile(self, share: float) -> int:
        """Return the shortest length that at least this share of the examples does not exceed; 0 without examples."""
        rank, lengths = max(1, math.ceil(share * self.total())), sorted(self)
        cumulative = accumulate(self[length] for length in lengths)
        return next((length for length, count in zip(lengths, cumulative, strict=True) if count >= rank), 0)

    def longest_of(self, count: int) -> float:
        """Return the mean length of the longest of `count` examples that are drawn at random."""
        lengths, total = sorted(self), self.total()
        shares = [(cumulative / total) ** count for cumulative in accumulate(self[length] for length in lengths)]
        return sum(length * (b - a) for length, a, b in zip(lengths, [0.0, *shares[:-1]], shares, strict=True))

    def buckets(self, most: int) -> list[tuple[int, int, int]]:
        """Return (first length, last length, examples) of at most `most` buckets of equal width, from 0."""
        if not self:
            return []
        width = max(1, math.ceil((max(self) + 1) / most))
        counts: Counter[int] = Counter()
        for length, count in self.items():
            counts[length // width] += count
        return [(index * width, (index + 1) * width - 1, counts[index]) for index in range(max(counts) + 1)]


def token_lengths(table: pa.Table) -> list[int]:
    """Return the tokens of each example of a chunk; nothing for text, which a trainer tokenizes."""

    def lengths(name: str) -> Any:
        return pc.list_value_length(table[name]).to_numpy()

    if "chosen_ids" in table.column_names:
        return (lengths("prompt_ids") + np.maximum(lengths("chosen_ids"), lengths("rejected_ids"))).tolist()  # type: ignore[no-any-return]
    return lengths("input_ids").tolist() if "input_ids" in table.column_names else []


# ------------------------------------------------------------------------------------------------------------- records


RECORD_COLUMN = "record"
"""The column of prepared prompts, and the argument of a reward, that is the original record."""
TABLE_PREFIX = "table "
"""Start of the text of a value from a parquet or CSV file, which may contain TYPES. No JSON starts like this."""
MICROSECOND = timedelta(microseconds=1)
TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "\0bytes": (bytes, bytes.hex, bytes.fromhex),
    "\0decimal": (Decimal, str, Decimal),
    "\0datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "\0date": (date, date.isoformat, date.fromisoformat),  # after datetime, its subclass
    "\0time": (time, time.isoformat, time.fromisoformat),
    "\0timedelta": (timedelta, lambda length: length // MICROSECOND, lambda count: count * MICROSECOND),
}
"""Types that JSON lacks: {marker key: (type, to JSON, from JSON)}."""


def encode_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Encode each row of a table, {column: cell}, as text."""

    def with_type(value: Any) -> dict[str, Any]:
        for key, (kind, write, _) in TYPES.items():
            if isinstance(value, kind):
                return {key: write(value)}
        raise TypeError(f"{type(value).__name__} is no type of a cell")

    return [TABLE_PREFIX + json.dumps(row, default=with_type) for row in rows]


def decode_value(text: str) -> Any:
    """Decode an encoded value with its original types."""

    def without_type(value: dict[str, Any]) -> Any:
        key = next(iter(value), "")
        return TYPES[key][2](value[key]) if key in TYPES else value

    if text.startswith(TABLE_PREFIX):
        return json.loads(text.removeprefix(TABLE_PREFIX), object_hook=without_type)
    return json.loads(text)


def record_columns(records: list[str], named: Mapping[str, str]) -> dict[str, pa.Array]:
    """Return the columns {name: column} of the encoded records, and the records, as encoded text; missing keys are null."""
    texts: dict[str, list[str]] = {name: [] for name in named}
    for record in records:
        prefix = TABLE_PREFIX if record.startswith(TABLE_PREFIX) else ""
        cells = json.loads(record.removeprefix(prefix))  # types stay as they are written
        for name, column in named.items():
            texts[name].append(prefix + json.dumps(cells.get(column)))
    return {name: pa.array(column, pa.string()) for name, column in {**texts, RECORD_COLUMN: records}.items()}


def decode_rows(dataset: "Dataset", encoded: Iterable[str]) -> "Dataset":
    """Return the data set with these columns decoded whenever a row is read; on disk they stay text."""
    names = frozenset(encoded)
    return dataset.with_transform(partial(_decode_batch, names=names)) if names else dataset


def _decode_batch(batch: dict[str, list[Any]], names: frozenset[str]) -> dict[str, list[Any]]:
    return {
        name: [value if value is None else decode_value(value) for value in values] if name in names else values
        for name, values in batch.items()
    }
