"""Stream columns of parquet, JSON-lines and CSV files, and text files as one row each.

A batch is about 8 MiB, whatever the size of the file. pyarrow reads parquet page by page through a small buffer.
JSON lines are parsed line by line: pyarrow, polars and `datasets` are faster, but give every record the keys of all others,
turn integers into floats, and name no line of a broken file (`cogumi.data.rows` says why records must be exact). So is CSV:
where a quote is not closed, pyarrow makes one cell of the lines that follow.
"""

import csv
import hashlib
import io
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import platformdirs
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError, best_effort
from cogumi.core.formatting import first_line
from cogumi.core.run_directory import write_atomic
from cogumi.data.rows import JSON, NO_OBJECT, Repeated, encode_table
from cogumi.data.source_files import CSV, JSON_LINES, PARQUET, TEXT, files_identity, kind_of, refuse_other_kinds

BATCH_BYTES = 8 * 2**20
"""File data per batch. Tokenizing a batch takes about 50 times the memory of its text."""
MOST_ROWS = 16_384
"""Upper bound of rows per batch: a parquet footer counts a repeated text once, so its size may be too small."""
BUFFER_BYTES = 2**20
MOST_NESTED = 256
"""Nesting limit of a JSON line. Code that walks it makes two calls per level, and Python allows 1,000."""
OTHER_DELIMITER = re.compile(r"[;|\t]|^sep=")
MOST_VALUE = 2**26
"""Characters of one value of an array, or of an object over several lines."""
SEPARATORS = re.compile(r"[\s,]*")
ORIGINALS = "\0original"
"""The column of a batch that holds its rows as text; no file has a column of this name."""

Batch = tuple[pl.DataFrame, list[str] | None]
"""The named columns of some rows, and the encoded rows if these are asked for."""


def column_names(files: Sequence[Path]) -> list[str]:
    """Return the columns of all files in order of appearance; of JSON lines the keys of all."""
    names: dict[str, None] = {}
    for file in files:
        with _report_damage(file):
            columns: Iterable[str]
            if kind_of(file) == JSON_LINES:
                columns = _keys_of_all(file)
            elif kind_of(file) == CSV:
                columns = _keys(next(_record_blocks(file), []))
            elif kind_of(file) == TEXT:
                columns = ["text"]
            else:
                columns = pq.read_schema(file).names
            names.update((name, None) for name in columns)
    if not names:
        raise UsageError("it has no rows", place=files[0], fix="check what wrote it, or give another file")
    return list(names)


def rows_below(file: Path) -> str:
    """Return the key below which a file of one JSON object has its rows, as {"data": [{...}]}; "" if there is none."""
    records = next(_record_blocks(file), []) if kind_of(file) == JSON_LINES else []
    for key, value in (records[0] if len(records) == 1 else {}).items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and not {"role", "from"} & value[0].keys():
            return key
    return ""


def batches(
    files: Sequence[Path], columns: Sequence[str], originals: bool = False, optional: Sequence[str] = ()
) -> Iterator[pl.DataFrame]:
    """Stream the named `columns` of all files as frames of about `BATCH_BYTES`, in file order.

    CSV columns are text, or binary where they are not UTF-8. A JSON-lines column that is not all text, booleans, integers
    or floats holds Python objects: the types of a frame would give every message the keys of all others. `originals` adds
    the column ORIGINALS with the whole rows, encoded, for which all columns are decoded. A file without one of the columns
    `optional` has nulls. Raises UsageError that names the file, and the line of a JSON-lines or CSV file.
    """
    for file in files:
        with _report_damage(file):
            if kind_of(file) in (JSON_LINES, CSV):
                frames = _record_batches(file, columns, originals, optional)
            else:
                absent = set(optional).difference(column_names([file]) if optional else ())
                read = _text_batches if kind_of(file) == TEXT else _parquet_batches
                frames = read(file, [name for name in columns if name not in absent], originals)
            for rows, texts in frames:
                if texts is not None:
                    rows = rows.with_columns(pl.Series(ORIGINALS, texts, dtype=pl.String))
                yield rows.with_columns(pl.lit(None).alias(name) for name in columns if name not in rows.columns)


@contextmanager
def _report_damage(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, pl.exceptions.PolarsError, OSError, UnicodeError) as error:
        refuse_other_kinds(str(file), [file.name])
        message = f"not a {kind_of(file) or PARQUET} file, or a damaged one ({first_line(error)[:200]})"
        raise UsageError(message, place=file, fix="write or download it again") from error


def _refuse_missing_columns(file: Path, columns: Sequence[str], names: Iterable[str]) -> None:
    names = list(names)
    for column in columns:
        if column not in names:
            near = nearest(column, names)
            hint = f"did you mean {near!r}? " if near else ""
            raise UsageError(f"no column {column!r}", place=file, fix=f"{hint}it has: {', '.join(names)}")


def _parquet_batches(file: Path, columns: Sequence[str], originals: bool) -> Iterator[Batch]:
    with pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as parquet:
        schema = pl.DataFrame(parquet.schema_arrow.empty_table()).schema
        _refuse_missing_columns(file, columns, schema)
        dictionary_encoded = [name for name in columns if schema[name] in (pl.Categorical, pl.Enum)]
        read = list(schema) if originals else columns
        # Rows that decode to about BATCH_BYTES by the footer; the row group with the longest rows decides.
        row_bytes = 1.0
        for group in map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups)):
            parts = [group.column(index) for index in range(group.num_columns)]
            size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in read)
            row_bytes = max(row_bytes, size / max(group.num_rows, 1))
        batch_rows = max(1, min(MOST_ROWS, int(BATCH_BYTES / row_bytes)))
        for batch in parquet.iter_batches(batch_rows, columns=read, use_threads=False):
            rows = pl.DataFrame(pa.Table.from_batches([batch]))
            short = [name for name, kind in rows.schema.items() if kind in (pl.Float16, pl.Float32)]
            if short:  # 0.1, not 0.10000000149
                rows = rows.with_columns(pl.col(short).cast(pl.Float32).cast(pl.String).cast(pl.Float64))
            frame = rows.select(columns).with_columns(pl.col(dictionary_encoded).cast(pl.String))
            yield frame, encode_table(rows.iter_rows(named=True)) if originals else None


def _record_batches(file: Path, columns: Sequence[str], originals: bool, optional: Sequence[str]) -> Iterator[Batch]:
    seen: dict[str, None] = {}
    for block in _record_blocks(file):
        seen.update(dict.fromkeys(_keys(block)))
        frame = pl.DataFrame([_series(column, [_cell(record, column) for record in block]) for column in columns])
        if kind_of(file) == CSV and originals:
            cells = ({name: _text_or_bytes(_as_bytes(cell)) for name, cell in record.items()} for record in block)
            yield frame, encode_table(cells)
        else:
            yield frame, list(map(json.dumps, block)) if originals else None
    if seen:
        _refuse_missing_columns(file, [name for name in columns if name not in optional], seen)


def _keys_of_all(file: Path) -> list[str]:
    """Return the keys of all records of a JSON-lines file, those of a long one also from the cache."""
    identity = hashlib.sha256(json.dumps(files_identity([file])).encode()).hexdigest()
    cached = Path(platformdirs.user_cache_dir("cogumi"), "columns", f"{identity}.json")
    with suppress(OSError, ValueError):
        return list(json.loads(cached.read_text(encoding="utf-8")))
    keys = list(dict.fromkeys(chain.from_iterable(map(_keys, _record_blocks(file)))))
    if file.stat().st_size > BATCH_BYTES:
        with best_effort("keep the names of the columns"):
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(cached, json.dumps(keys))
    return keys


def _keys(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    return (key for record in records for key in record if key != NO_OBJECT)


def _cell(record: dict[str, Any], column: str) -> Any:
    """Return a cell; of a record that is no row each cell is the whole record, which `decode_cell` refuses."""
    return record if NO_OBJECT in record or isinstance(record, Repeated) else record.get(column)


def _record_blocks(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Iterate over the objects of about BATCH_BYTES of a file: one a line, the items of an array, or over several lines.

    Blank lines are skipped. Another JSON value than an object is {NO_OBJECT: value}. A row of a CSV file is {name: cell}.
    """
    if file.stat().st_size == 0:
        raise UsageError("it is empty", place=file, fix="check what wrote it, or give another file")
    records: list[dict[str, Any]] = []
    size = 0
    with io.BufferedReader(pa.input_stream(str(file), compression="detect"), BUFFER_BYTES) as raw:
        # Bytes that are not UTF-8 become lone surrogates, which `_series` turns back into those bytes.
        encoding = json.detect_encoding(raw.peek(4)[:4])
        read, newline = (_csv_records, "") if kind_of(file) == CSV else (_records, "\n")
        for record, length in read(file, io.TextIOWrapper(raw, encoding, "surrogateescape", newline=newline)):
            records.append(record)
            size += length
            if size >= BATCH_BYTES or len(records) == MOST_ROWS:
                yield records
                records, size = [], 0
    if records:
        yield records


def _records(file: Path, lines: io.TextIOWrapper) -> Iterator[tuple[dict[str, Any], int]]:
    """Iterate over (record, characters)."""
    is_first = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = None if is_first and line.lstrip().startswith("[") else JSON.decode(line)
        except (ValueError, RecursionError) as error:
            if not is_first:
                raise _not_json(file, number, error) from None
            value = None
        if is_first and value is None:
            yield from _records_over_lines(file, line, lines, number)
            return
        is_first = False
        yield _record(file, number, line, value), len(line)


def _records_over_lines(
    file: Path, text: str, lines: io.TextIOWrapper, number: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """Iterate over the items of arrays, and over values that follow one another, from `text` on; it begins line `number`."""
    decode, is_inside, at = JSON.raw_decode, False, 0
    while True:
        start, at = at, SEPARATORS.match(text, at).end()  # type: ignore[union-attr]
        number += text.count("\n", start, at)
        if text[at : at + 1] == ("]" if is_inside else "["):
            is_inside, at = not is_inside, at + 1
            continue
        try:
            value, end = decode(text, at)
        except (ValueError, RecursionError) as error:
            more = lines.read(BUFFER_BYTES) if isinstance(error, ValueError) and len(text) - at < MOST_VALUE else ""
            if not more and at == len(text) and not is_inside:
                return
            if not more:
                number += text.count("\n", at, getattr(error, "pos", at))
                raise _not_json(file, number, error) from None
            text, at = text[at:] + more, 0
            continue
        yield _record(file, number, text[at:end], value), end - at
        number += text.count("\n", at, end)
        at = end


def _not_json(file: Path, number: int, error: Exception) -> UsageError:
    problem = f"not JSON, or cut short ({getattr(error, 'msg', None) or first_line(error)[:200]})"
    return UsageError(problem, place=f"{file}:{number}", fix="write or download the file again")


def _record(file: Path, number: int, text: str, value: Any) -> dict[str, Any]:
    record = value if isinstance(value, dict) else {NO_OBJECT: value}
    if text.count("[") + text.count("{") > MOST_NESTED and _is_deeper(record, MOST_NESTED):
        message = f"nested more than {MOST_NESTED} deep"
        raise UsageError(message, place=f"{file}:{number}", fix="leave the line out, or keep that value as text")
    return record


def _is_deeper(value: Any, limit: int) -> bool:
    """Tell whether lists and objects are nested in each other more than `limit` times."""
    level = [value]
    for _ in range(limit + 1):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        if not inner:
            return False
        level = list(chain.from_iterable(inner))
    return True


def _series(name: str, values: list[Any]) -> pl.Series:
    """Build a column of text, booleans, integers or floats if all values are of that type, else of Python objects."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {str}:
        try:
            return pl.Series(name, values, dtype=pl.String)
        except UnicodeEncodeError:
            encoded = [value if value is None else _as_bytes(value) for value in values]
            return pl.Series(name, encoded, dtype=pl.Binary)
    if kinds in ({bool}, {float}):
        return pl.Series(name, values)
    if kinds == {int} and all(value is None or -(2**63) <= value < 2**63 for value in values):
        return pl.Series(name, values, dtype=pl.Int64)

    def without_surrogates(value: Any) -> Any:
        """Return the value, or its JSON as bytes that are not UTF-8 if a text in it is no Unicode."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            return _as_bytes(text)
        return value

    return pl.Series(name, list(map(without_surrogates, values)), dtype=pl.Object)


def _csv_records(file: Path, lines: io.TextIOWrapper) -> Iterator[tuple[dict[str, Any], int]]:
    """Iterate over (record, characters) of the rows below the header."""
    names: list[str] = []
    number = 1
    csv.field_size_limit(MOST_VALUE)
    rows = csv.reader(lines, delimiter="\t" if ".tsv" in file.name.lower() else ",", strict=True)
    try:
        for cells in filter(None, rows):
            if names and len(cells) != len(names):
                raise csv.Error(f"a row of {len(cells)} cells below {len(names)} columns")
            if cells == names and len(names) > 1:
                raise csv.Error("the names of the columns once more, as where files were joined")
            if names:
                yield dict(zip(names, cells, strict=True)), sum(map(len, cells))
            elif len(cells) == 1 and OTHER_DELIMITER.search(cells[0]):
                raise csv.Error(f"one column {cells[0]!r:.60}: cells are separated by commas, in .tsv by tabs")
            elif twice := [name for name in cells if name and cells.count(name) > 1]:
                raise csv.Error(f"two columns {twice[0]!r}")
            names, number = names or cells, rows.line_num + 1
    except csv.Error as error:
        fix = "close all quotes, double those inside of others, and name the columns once; or write JSON lines"
        raise UsageError(f"not CSV ({error})", place=f"{file}:{number}", fix=fix) from None


def _text_batches(file: Path, columns: Sequence[str], originals: bool) -> Iterator[Batch]:
    """Read a file as one row with the column `text`; bytes that are not UTF-8 stay bytes."""
    _refuse_missing_columns(file, columns, ["text"])
    with pa.input_stream(str(file), compression="detect") as stream:
        content = stream.read(MOST_VALUE + 1)
    if len(content) > MOST_VALUE:
        message = f"a document of more than {MOST_VALUE:,} bytes"
        raise UsageError(message, place=file, fix="split it, or write JSON lines with a document in each")
    if (encoding := json.detect_encoding(content)).startswith("utf-16"):  # also without a mark
        content = content.decode(encoding).encode()
    rows = pl.DataFrame({"text": [_text_or_bytes(content.removeprefix(BOM_UTF8))]})
    yield rows.select(columns), encode_table(rows.iter_rows(named=True)) if originals else None


def _as_bytes(text: str) -> bytes:
    """Return the bytes that were read as this text, or those of half a surrogate pair: neither is UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
