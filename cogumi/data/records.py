"""The row of a file as it was read, carried beside each prompt as text: rewards and environments get it back unchanged.

Arrow has one type for a column. A key that one record lacks would come back as None, whole numbers as floats. So the
original record, the columns that `data.columns` names for the rewards, and messages are JSON in the prepared data.
`decode_rows` reads it whenever a row is taken from the data set. The file may then be gone.

A record of JSON lines equals `json.loads` of its line. One of a parquet or CSV file has its cells by column, as Python
values. What JSON has no type for (bytes, dates, decimals) is written with its type, and read back as it was.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

if TYPE_CHECKING:
    from datasets import Dataset

RECORD_COLUMN = "record"
"""The column of prepared prompts, and the argument of a reward, that is the original record."""
OF_TABLE = "table "
"""How the text of a value begins that comes from a parquet or CSV file, and may have TYPES in it. No JSON begins so."""
TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "\0bytes": (bytes, bytes.hex, bytes.fromhex),
    "\0decimal": (Decimal, str, Decimal),
    "\0datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "\0date": (date, date.isoformat, date.fromisoformat),  # below datetime, which is one
    "\0time": (time, time.isoformat, time.fromisoformat),
    "\0timedelta": (
        timedelta,
        lambda length: length // timedelta(microseconds=1),
        lambda count: timedelta(microseconds=count),
    ),
}
"""What JSON has no type for: {the key that says so: (type, to JSON, back)}."""


def encode_record(record: Any) -> str:
    """A value of JSON as text that `decode_value` makes the same value of; ASCII, as half a surrogate pair is no UTF-8."""
    return json.dumps(record)


def encode_table(rows: pl.DataFrame) -> list[str]:
    """Each row of a table as the text of {column: cell}."""
    return [OF_TABLE + json.dumps(row, default=_with_type) for row in rows.iter_rows(named=True)]


def decode_bytes(value: bytes) -> str | bytes:
    """The text that these bytes are in UTF-8; the bytes themselves where they are none."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def decode_value(text: str) -> Any:
    """The value that was encoded, of the same types."""
    if text.startswith(OF_TABLE):
        return json.loads(text.removeprefix(OF_TABLE), object_hook=_without_type)
    return json.loads(text)


def record_columns(records: Sequence[str], named: Mapping[str, str]) -> dict[str, pa.Array]:
    """`record` and these columns of it, {name: column}, as encoded text. What a record has no key for is null."""
    texts: dict[str, list[str]] = {name: [] for name in named}
    for record in records:
        kind = OF_TABLE if record.startswith(OF_TABLE) else ""
        cells = json.loads(record.removeprefix(kind))  # types stay as they are written
        for name, column in named.items():
            texts[name].append(kind + json.dumps(cells.get(column)))
    return {name: pa.array(each, pa.string()) for name, each in {**texts, RECORD_COLUMN: list(records)}.items()}


def decode_rows(dataset: "Dataset", encoded: Iterable[str]) -> "Dataset":
    """The data set whose rows have these columns decoded whenever one is read; what is on the disk stays text."""
    names = frozenset(encoded)
    return dataset.with_transform(partial(_decode_batch, names=names)) if names else dataset


def _decode_batch(batch: dict[str, list[Any]], names: frozenset[str]) -> dict[str, list[Any]]:
    return {
        name: [value if value is None else decode_value(value) for value in values] if name in names else values
        for name, values in batch.items()
    }


def _with_type(value: Any) -> dict[str, Any]:
    for key, (kind, write, _) in TYPES.items():
        if isinstance(value, kind):
            return {key: write(value)}
    raise TypeError(f"{type(value).__name__} is no type of a cell")


def _without_type(value: dict[str, Any]) -> Any:
    key = next(iter(value), "")
    return TYPES[key][2](value[key]) if key in TYPES else value
