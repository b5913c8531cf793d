"""Read columns of parquet, JSON-lines and CSV files as a stream, with errors that say what to change.

A batch is some 8 MiB, whatever the size of the file. pyarrow reads it page by page through a small buffer, and holds 60 MB
of any file. polars' own batches held 130 MB of a 260 MB file, and more of a larger one.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError
from cogumi.data.records import decode_bytes, encode_record, encode_table
from cogumi.data.source_files import CSV, JSON_LINES, kind_of

BATCH_BYTES = 8 * 2**20
"""Of a file's data at a time. Tokenizing a batch takes some 50 times its text."""
MOST_ROWS = 16_384
"""Rows of a batch at most: a parquet footer counts a repeated text once, so its size may say too little."""
BUFFER_BYTES = 2**20
MOST_NESTED = 256
"""Lists and objects in each other in a line. What goes through them takes two calls for each, and Python allows 1,000."""
ORIGINALS = "\0original"
"""The column of a batch that is its rows as text; no file has one of this name."""


def column_names(files: Sequence[Path]) -> list[str]:
    """The columns of these files, in the order in which they come up; of JSON lines those of the first batch."""
    names: dict[str, None] = {}
    for file in files:
        with _damage_refused(file):
            found: Iterable[str]
            if kind_of(file) == JSON_LINES:
                found = chain.from_iterable(next(_record_blocks(file), []))
            elif kind_of(file) == CSV:
                found = _csv_reader(file, None).schema.names
            else:
                found = pq.read_schema(file).names
            names.update(dict.fromkeys(found))
    return list(names)


def batches(files: Sequence[Path], columns: Sequence[str], originals: bool = False) -> Iterator[pl.DataFrame]:
    """The named `columns` of all files as frames of some `BATCH_BYTES`, in file order; other columns are never decoded.

    originals: with the whole rows as text (`cogumi.data.records`) in the column ORIGINALS, for which all columns are decoded.
    CSV columns are text, and text that is not UTF-8 is binary. A column of JSON lines that is not all text, all booleans,
    all integers or all floats holds Python objects. A frame's types would give every message the keys of all others.
    Raises UsageError, naming the file, for JSON lines the line, and the fix.
    """
    read = {JSON_LINES: _json_batches, CSV: _csv_batches}
    for file in files:
        with _damage_refused(file):
            yield from read.get(kind_of(file) or "", _parquet_batches)(file, columns, originals)


@contextmanager
def _damage_refused(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, pl.exceptions.PolarsError, OSError) as error:
        what = f"not a {kind_of(file)} file, or a damaged one ({_first_line(error)})"
        raise UsageError(what, place=file, fix="write or download it again") from error


def _refuse_missing(file: Path, columns: Sequence[str], names: Iterable[str]) -> None:
    names = list(names)
    for column in columns:
        if column not in names:
            near = nearest(column, names)
            hint = f"did you mean {near!r}? " if near else ""
            raise UsageError(f"no column {column!r}", place=file, fix=f"{hint}it has: {', '.join(names)}")


def _with_originals(frame: pl.DataFrame, texts: list[str]) -> pl.DataFrame:
    return frame.with_columns(pl.Series(ORIGINALS, texts, dtype=pl.String))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# -------------------------------------------------------------------------------------------------------------- parquet


def _parquet_batches(file: Path, columns: Sequence[str], originals: bool) -> Iterator[pl.DataFrame]:
    with pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as parquet:
        schema = pl.DataFrame(parquet.schema_arrow.empty_table()).schema
        _refuse_missing(file, columns, schema)
        dictionary_encoded = [name for name in columns if schema[name] in (pl.Categorical, pl.Enum)]
        read = list(schema) if originals else columns
        rows = _rows_at_a_time(parquet.metadata, read)
        for batch in parquet.iter_batches(rows, columns=read, use_threads=False):
            # Zero columns are no frame's rows; text is copied once, into polars' own layout.
            whole = pl.DataFrame(pa.Table.from_batches([batch]))
            frame = whole.select(columns).with_columns(pl.col(dictionary_encoded).cast(pl.String))
            yield _with_originals(frame, encode_table(whole)) if originals else frame


def _rows_at_a_time(metadata: pq.FileMetaData, columns: Sequence[str]) -> int:
    """Rows that decode to about BATCH_BYTES, by the footer; the row group with the longest rows decides."""
    longest = 1.0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        parts = [group.column(i) for i in range(group.num_columns)]
        size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)
        longest = max(longest, size / max(group.num_rows, 1))
    return max(1, min(MOST_ROWS, int(BATCH_BYTES / longest)))


# ----------------------------------------------------------------------------------------------------------- JSON lines


def _json_batches(file: Path, columns: Sequence[str], originals: bool) -> Iterator[pl.DataFrame]:
    seen: dict[str, None] = {}
    for block in _record_blocks(file):
        seen.update(dict.fromkeys(chain.from_iterable(block)))
        frame = pl.DataFrame([_series(column, [record.get(column) for record in block]) for column in columns])
        yield _with_originals(frame, list(map(encode_record, block))) if originals else frame
    if seen:
        _refuse_missing(file, columns, seen)


def _record_blocks(file: Path) -> Iterator[list[dict[str, Any]]]:
    """The objects of about BATCH_BYTES of lines at a time. Blank lines are no rows."""
    if file.stat().st_size == 0:
        raise UsageError("it is empty", place=file, fix="check what wrote it, or give another file")
    records: list[dict[str, Any]] = []
    size = 0
    with io.BufferedReader(pa.input_stream(str(file), compression="detect"), BUFFER_BYTES) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            # Bytes that are not UTF-8 become lone surrogates, which `_series` turns back into those bytes.
            text = line.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")
            records.append(_record(file, number, text))
            size += len(line)
            if size >= BATCH_BYTES or len(records) == MOST_ROWS:
                yield records
                records, size = [], 0
    if records:
        yield records


def _record(file: Path, number: int, text: str) -> dict[str, Any]:
    if number == 1 and text.lstrip().startswith("["):
        fix = f"convert it: jq -c '.[]' {file.name} > rows.jsonl"
        raise UsageError("one array, not one object a line", place=file, fix=fix)
    try:
        record, wrong = json.loads(text), "not an object, as a row is"
    except (ValueError, RecursionError) as error:
        record, wrong = None, f"not JSON, or cut short ({getattr(error, 'msg', None) or _first_line(error)})"
    if not isinstance(record, dict):
        raise UsageError(wrong, place=f"{file}:{number}", fix="write or download the file again")
    if text.count("[") + text.count("{") > MOST_NESTED and is_deeper(record, MOST_NESTED):
        what = f"nested more than {MOST_NESTED} deep"
        raise UsageError(what, place=f"{file}:{number}", fix="leave the line out, or keep that value as text")
    return record


def is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested in each other more than `most` times."""
    level = [value]
    for _ in range(most + 1):
        lists = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = list(chain.from_iterable(lists))
        if not lists:
            return False
    return True


def _series(name: str, values: list[Any]) -> pl.Series:
    """Text, booleans, whole numbers or floats where that is all there is, else the objects themselves."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {str}:
        try:
            return pl.Series(name, values, dtype=pl.String)
        except UnicodeEncodeError:
            encoded = [value if value is None else value.encode("utf-8", "surrogatepass") for value in values]
            return pl.Series(name, encoded, dtype=pl.Binary)
    if kinds in ({bool}, {float}):
        return pl.Series(name, values)
    if kinds == {int} and all(value is None or -(2**63) <= value < 2**63 for value in values):
        return pl.Series(name, values, dtype=pl.Int64)
    return pl.Series(name, list(map(_unicode, values)), dtype=pl.Object)


def _unicode(value: Any) -> Any:
    """The value; where something in it is no Unicode text, its JSON as bytes that are not UTF-8."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return value


# ------------------------------------------------------------------------------------------------------------------ CSV


def _csv_reader(file: Path, columns: Sequence[str] | None) -> pyarrow.csv.CSVStreamingReader:
    tabs = ".tsv" in file.suffixes[-2:]
    # Without types every column is guessed from the first block, and one of numbers turns text away later.
    types = {name: pa.binary() for name in columns or ()}
    return pyarrow.csv.open_csv(
        pa.input_stream(str(file), compression="detect"),
        pyarrow.csv.ReadOptions(block_size=BATCH_BYTES, use_threads=False),
        pyarrow.csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=True),
        pyarrow.csv.ConvertOptions(column_types=types, include_columns=columns, strings_can_be_null=False),
    )


def _csv_batches(file: Path, columns: Sequence[str], originals: bool) -> Iterator[pl.DataFrame]:
    names = _csv_reader(file, None).schema.names
    _refuse_missing(file, columns, names)
    for batch in _csv_reader(file, list(dict.fromkeys(names)) if originals else columns):
        whole = pl.DataFrame([_text(name, batch.column(name)) for name in batch.schema.names])
        frame = whole.select(columns)
        yield _with_originals(frame, encode_table(whole.with_columns(_cells(whole)))) if originals else frame


def _cells(rows: pl.DataFrame) -> list[pl.Series]:
    """The columns with text that is not UTF-8, cell by cell: text, or bytes where it is none."""
    cells = {column.name: [decode_bytes(value) for value in column] for column in rows if column.dtype == pl.Binary}
    return [pl.Series(name, values, dtype=pl.Object) for name, values in cells.items()]


def _text(name: str, values: pa.Array) -> pl.Series:
    try:
        return pl.Series(name, values.cast(pa.large_string()))
    except pa.ArrowInvalid:  # not UTF-8
        return pl.Series(name, values, dtype=pl.Binary)
