"""The files of a data source, found without reading them, so that a missing one is refused without importing polars."""

import glob
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from cogumi.config.binding import nearest
from cogumi.core.errors import UsageError

PARQUET, JSON_LINES, CSV = "parquet", "JSON lines", "CSV"
SUFFIXES = {PARQUET: (".parquet",), JSON_LINES: (".jsonl", ".ndjson", ".json"), CSV: (".csv", ".tsv")}
COMPRESSED = (".gz", ".zst")  # of JSON lines and CSV; a parquet file is compressed inside
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def refuse_missing(source: str) -> None:
    """Raise UsageError for a source that is neither a sample nor a hub id, and does not exist on this machine."""
    if not source.startswith("cogumi:") and not Path(source).exists() and not is_hub_id(source):
        find_files(source)


def find_files(path: str | Path) -> list[Path]:
    """Return the files of a path, a glob or a directory tree in name order; raises UsageError if there are none.

    A directory gives the files of the first kind that it holds: parquet, JSON lines, CSV.
    """
    local = Path(path)
    if local.is_file():
        return [local]
    if local.is_dir():
        # A .json beside the data is more likely to describe it.
        below = sorted(file for file in local.rglob("*") if file.suffix != ".json" and file.is_file())
        for kind in SUFFIXES:
            if files := [file for file in below if kind_of(file) == kind]:
                return files
        message = "this directory holds no .parquet or .jsonl file, nor a .csv"
        raise UsageError(message, place=path, fix="give a file of its own")
    if glob.has_magic(str(path)):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if files:
            return files
        raise UsageError("no file matches this pattern", place=path, fix="check it with ls")
    near = nearest(local.name, [file.name for file in local.parent.glob("*")])
    hint = f"; did you mean {near}?" if near else f" (looked from {Path.cwd()})"
    raise UsageError(f"no such file{hint}", place=path)


def kind_of(file: Path) -> str | None:
    """Return PARQUET, JSON_LINES or CSV by the suffix, or None."""
    suffix = Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix
    return next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def is_hub_id(source: str) -> bool:
    """Tell whether a source spells `org/name`; a name with the suffix of a data file is a missing file."""
    return HUB_ID.fullmatch(source) is not None and kind_of(Path(source)) is None


def refuse_other_kinds(name: str, paths: Iterable[str | Path]) -> None:
    for path in paths:
        if kind_of(Path(path)) is None:
            message = f"{path} is of a kind that is not read ({', '.join(chain(*SUFFIXES.values()))} are)"
            raise UsageError(message, place=name, fix="convert it and give the file")


def locate(
    source: str, *, revision: str | None = None, split: str | None = None, subset: str | None = None
) -> tuple[str, Sequence[Path], Any]:
    """Find the files of a sample, a path or a hub id, which is downloaded: (name, files, identity).

    A local path wins over a hub id. `split` is of a hub data set ("train" by default), or of a directory laid out like one.
    The identity is JSON that changes whenever the rows may have changed.
    """
    from cogumi.data.stdlib_sample import SAMPLES, sample_path
    from cogumi.hub.downloads import dataset_files, fetch_dataset, split_of

    if source in SAMPLES:
        sample = [sample_path(source)]
        return source, sample, files_identity(sample)
    if source.startswith("cogumi:"):
        raise UsageError(f"{source} is not known", key="data.source", fix=f"there is {', '.join(SAMPLES)}")
    if not Path(source).exists() and is_hub_id(source):
        commit, paths = dataset_files(source, revision, split, subset)
        refuse_other_kinds(source, paths)
        return f"{source}@{commit[:7]}", fetch_dataset(source, commit, paths), [source, commit, paths]
    for key, value in (("revision", revision), ("subset", subset)):
        if value is not None:
            raise UsageError(f"data.{key} would be ignored: {source} is a local file, not a hub id", fix="drop it")
    if split is None:
        files = find_files(source)
    elif Path(source).is_dir():
        files = split_of(source, split)
        refuse_other_kinds(source, files)
    else:
        raise UsageError(f"data.split would be ignored: {source} is not a directory nor a hub id", fix="drop it")
    return source, files, files_identity(files)


def files_identity(files: Sequence[Path]) -> list[list[Any]]:
    """Return the real path, size and modification time of each file."""
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
