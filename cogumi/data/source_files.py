"""The files of a data source, found without reading them, so that a missing one is refused without importing polars."""

import glob
import logging
import os
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
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in names of files and directories that the hub reads as a split (`datasets.data_files`)."""
SPLIT_WORD = re.compile(rf"(?:^|[\W_\d])({'|'.join(SPLITS)})(?=[\W_\d]|$)")
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
log = logging.getLogger("cogumi")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def refuse_missing(source: str) -> None:
    """Raise UsageError for a source that is neither a sample nor a hub id, and does not exist on this machine."""
    source = os.path.expanduser(source)
    if not source.startswith("cogumi:") and not Path(source).exists() and not is_hub_id(source):
        find_files(source)


def find_files(path: str | Path) -> list[Path]:
    """Return the files of a path, a glob or a directory tree in name order; raises UsageError if there are none.

    A directory gives the files of the first kind that it holds: parquet, JSON lines, CSV. Of files whose names spell
    splits it gives those of train, or of the only split.
    """
    path = os.path.expanduser(path)
    local = Path(path)
    if local.is_file():
        return [local]
    if local.is_dir():
        # A .json beside the data is more likely to describe it.
        data = sorted(file for file in local.rglob("*") if kind_of(file) and file.is_file())
        below = [file for file in data if file.suffix != ".json"] or [f for f in data if f.name not in DESCRIPTIONS]
        for kind in SUFFIXES:
            if files := [file for file in below if kind_of(file) == kind]:
                others = [file for file in below if file not in files]
                _log_left_out(path, others, f"only {kind} is read of a directory")
                return _training_files(local, files)
        message = "this directory holds no .parquet or .jsonl file, nor a .csv"
        raise UsageError(message, place=path, fix="give a file of its own")
    if glob.has_magic(str(path)):
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if files := [file for file in matches if kind_of(file)] or matches:
            _log_left_out(path, [file for file in matches if file not in files], "they hold no rows")
            if len(splits := {split for file in files for split in _splits_of(Path(file.name))}) > 1:
                log.warning(
                    "%s matches files of several splits, which are all used: %s", path, ", ".join(sorted(splits))
                )
            return files
        raise UsageError("no file matches this pattern", place=path, fix="check it with ls")
    if "{" in local.name and "," in local.name:
        raise UsageError(
            "braces are expanded by a shell only", place=path, fix="use * or [ab], or data.mix with each file"
        )
    near = nearest(local.name, [file.name for file in local.parent.glob("*")])
    hint = f"; did you mean {near}?" if near else f" (looked from {Path.cwd()})"
    raise UsageError(f"no such file{hint}", place=path)


def _splits_of(path: Path) -> set[str]:
    return {SPLITS[word] for word in SPLIT_WORD.findall(str(path).lower())}


def _training_files(directory: Path, files: list[Path]) -> list[Path]:
    """Choose the files to train on as the hub does for a data set of this layout, and refuse layouts it would guess at."""
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(" or ".join(sorted(_splits_of(file.relative_to(directory)))), []).append(file)
    if len(by_split) == 1:
        return files
    if not by_split.keys() <= set(SPLITS.values()) or "train" not in by_split:
        parts = ", ".join(f"{paths[0].name} ({name or 'no split'})" for name, paths in by_split.items())
        fix = "name the files to train on (data.source: a file or a pattern), or set data.split"
        raise UsageError(f"by their names it is not clear what to train on: {parts}", place=directory, fix=fix)
    others = [file for file in files if file not in by_split["train"]]
    _log_left_out(
        directory, others, "the split train is used; data.split, or a file as data.eval_source, names another"
    )
    return by_split["train"]


def _log_left_out(place: str | Path, files: Sequence[Path], reason: str) -> None:
    if files:
        names = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
        log.warning("%s: %d files are left out (%s): %s", place, len(files), reason, names)


def _has_card(directory: Path) -> bool:
    """Tell whether a directory's README.md says which files are of which split, as a data set's card on the hub."""
    card = directory / "README.md"
    front = card.read_text("utf-8", "replace").split("---", 2) if card.is_file() else []
    return len(front) == 3 and not front[0].strip() and "data_files:" in front[1]


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

    source = os.path.expanduser(source)
    has_card = _has_card(Path(source))
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
        if value is not None and not (key == "subset" and has_card):
            raise UsageError(f"data.{key} would be ignored: {source} is a local file, not a hub id", fix="drop it")
    if has_card or (split and Path(source).is_dir()):
        files = split_of(source, split, subset)
        refuse_other_kinds(source, files)
    elif split is None:
        files = find_files(source)
    else:
        raise UsageError(f"data.split would be ignored: {source} is not a directory nor a hub id", fix="drop it")
    return source, files, files_identity(files)


def files_identity(files: Sequence[Path]) -> list[list[Any]]:
    """Return the real path, size and modification time of each file."""
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
