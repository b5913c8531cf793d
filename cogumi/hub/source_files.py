"""Which files a source of `data:` stands for. Imports nothing that reads them, so that a missing one is refused at once."""

import difflib
import glob
import re
from pathlib import Path

from cogumi.core.errors import UsageError

PARQUET, JSON_LINES, CSV = "parquet", "JSON lines", "CSV"
SUFFIXES = {PARQUET: (".parquet",), JSON_LINES: (".jsonl", ".ndjson", ".json"), CSV: (".csv", ".tsv")}
COMPRESSED = (".gz", ".zst")
"""Of JSON lines and CSV; a parquet file is compressed inside."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def refuse_missing(source: str) -> None:
    """Raise UsageError for a source that is no sample, spells no data set on the hub, and is not on this machine."""
    if not source.startswith("cogumi:") and not Path(source).exists() and not is_hub_id(source):
        find_files(source)


def find_files(path: str | Path) -> list[Path]:
    """The files `path` stands for, at least one: a file, a glob, or a directory's files of the first kind that it has.

    The kinds are parquet, then JSON lines, then CSV; files come in name order, however deep.
    """
    given = Path(path)
    if given.is_file():
        return [given]
    if given.is_dir():
        # A .json beside the data is more likely to describe it.
        below = sorted(file for file in given.rglob("*") if file.suffix != ".json" and file.is_file())
        for kind in SUFFIXES:
            if files := [file for file in below if kind_of(file) == kind]:
                return files
        raise UsageError(
            "this directory holds no .parquet or .jsonl file, nor a .csv", place=path, fix="give a file of its own"
        )
    if glob.has_magic(str(path)):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if files:
            return files
        raise UsageError("no file matches this pattern", place=path, fix="check it with ls")
    near = difflib.get_close_matches(given.name, [file.name for file in given.parent.glob("*")], n=1)
    hint = f"; did you mean {near[0]}?" if near else f" (looked from {Path.cwd()})"
    raise UsageError(f"no such file{hint}", place=path)


def kind_of(file: Path) -> str | None:
    """PARQUET, JSON_LINES or CSV, by the suffix; None for any other."""
    suffix = Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix
    return next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def is_hub_id(source: str) -> bool:
    """Whether this spells `org/name`; a name that ends like a data file is a file that is not there."""
    return HUB_ID.fullmatch(source) is not None and kind_of(Path(source)) is None
