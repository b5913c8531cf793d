"""Read text columns from parquet and JSON-lines files, with errors that say what to change."""

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from polars.exceptions import PolarsError

from cogumi.errors import UsageError


def read_rows(path: str | Path, columns: Sequence[str], *, text_only: bool = True) -> pl.DataFrame:
    """The named `columns` of a parquet or .jsonl source, in file order; other columns are never read.

    `path` is a file, a glob, or a directory whose parquet shards (else whose .jsonl files) are read in name order,
    however deep. Nulls stay nulls and binary columns stay binary: who uses the rows drops them and says how many.
    `text_only` refuses columns that are neither text nor binary; turn it off for chat messages and other nested
    columns.

    Raises UsageError, naming the file and the fix: nothing there, not parquet or JSON lines, damaged, no rows, a
    missing column, a column of another type.
    """
    files = _files(path)
    frames = [_scan(file, columns, text_only) for file in files]
    try:
        rows = pl.concat(frames, how="vertical_relaxed").collect()
    except (PolarsError, OSError) as error:
        raise UsageError(f"{path}: its rows cannot be read ({_first_line(error)}); write the file again") from error
    if rows.is_empty():
        raise UsageError(f"{path}: it has no rows; check what wrote it, or give another file")
    return rows


def _files(path: str | Path) -> list[Path]:
    """The files `path` stands for, sorted; at least one."""
    given = Path(path)
    if given.is_file():
        return [given]
    if given.is_dir():
        for pattern in ("*.parquet", "*.jsonl"):
            files = sorted(file for file in given.rglob(pattern) if file.is_file())
            if files:
                return files
        raise UsageError(f"{path}: this directory holds no .parquet or .jsonl file; give the file or its directory")
    if glob.has_magic(str(path)):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if files:
            return files
        raise UsageError(f"{path}: no file matches this pattern; check it with ls")
    near = difflib.get_close_matches(given.name, [file.name for file in given.parent.glob("*")], n=1)
    hint = f"; did you mean {near[0]}?" if near else f" (looked from {Path.cwd()})"
    raise UsageError(f"{path}: no such file{hint}")


def _scan(file: Path, columns: Sequence[str], text_only: bool) -> pl.LazyFrame:
    """A lazy frame of `columns`, after checking this file's schema (for parquet: its footer only)."""
    try:
        if file.suffix in (".jsonl", ".ndjson"):
            if file.stat().st_size == 0:
                raise UsageError(f"{file}: it is empty; check what wrote it, or give another file")
            # infer_schema_length=None: a key that first appears in a late row must not be lost.
            frame = pl.read_ndjson(file, infer_schema_length=None).lazy()
        else:
            frame = pl.scan_parquet(file, hive_partitioning=False)
        schema = frame.collect_schema()
    except (PolarsError, OSError) as error:
        kind = "JSON lines" if file.suffix in (".jsonl", ".ndjson") else "parquet"
        raise UsageError(
            f"{file}: not a {kind} file, or a damaged one ({_first_line(error)}); write or download it again"
        ) from error
    for column in columns:
        if column not in schema:
            near = difflib.get_close_matches(column, schema.names(), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"{file}: no column {column!r}; {hint}it has: {', '.join(schema.names())}")
        if text_only and schema[column] not in (pl.String, pl.Binary, pl.Categorical, pl.Enum, pl.Null):
            raise UsageError(
                f"{file}: column {column!r} holds {schema[column]}, not text; name a text column of: "
                f"{', '.join(name for name, kind in schema.items() if kind == pl.String) or 'none there'}"
            )
    dictionary_encoded = [name for name in columns if schema[name] in (pl.Categorical, pl.Enum)]
    return frame.select(columns).with_columns(pl.col(dictionary_encoded).cast(pl.String))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
