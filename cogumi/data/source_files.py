"""The files of a data source, found without reading them, so that a missing one is refused without importing polars."""

import glob
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from cogumi.config.binding import nearest
from cogumi.config.schema import package_of
from cogumi.core.errors import UsageError
from cogumi.core.formatting import install_command

PARQUET, JSON_LINES, CSV, TEXT = "parquet", "JSON lines", "CSV", "text"
SUFFIXES = {PARQUET: (".parquet",), JSON_LINES: (".jsonl", ".ndjson", ".json"), CSV: (".csv", ".tsv")}
SUFFIXES[TEXT] = (".txt", ".md")  # one document each
COMPRESSED = (".gz", ".zst", ".bz2")  # of all others; a parquet file is compressed inside
UNREAD = (".arrow", ".feather", ".xlsx", ".xls", ".db", ".sqlite", ".pkl", ".xz", ".lz4", ".zip", ".tar", ".tgz")
"""Suffixes of files that may hold rows, which are not read and not left out in silence."""
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "holdout", "heldout", "held_out", "held-out"), "test"),
}
"""Words in names of files and directories that the hub reads as a split (`datasets.data_files`), and those of held-out rows."""
SPLIT_WORD = re.compile(rf"(?:^|[\W_\d])({'|'.join(SPLITS)})(?:set)?(?=[\W_\d]|$)")
SHARD = re.compile(r"[-_]?\d+(-of-\d+.*)?$")
OF_SEVERAL = re.compile(r"(.*?)(\d+)-of-(\d+)")  # a name's start, its number, and how many there are
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
log = logging.getLogger("cogumi")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def refuse_missing(source: str) -> None:
    """Raise UsageError for a file that does not exist on this machine, or a package of tasks that is not installed."""
    source = os.path.expanduser(source)
    if (package := package_of(source)) and find_spec(package) is None:
        fix = f"run: {install_command(package.replace('_', '-'))}"
        raise UsageError(f"{package} is not installed", place=source, fix=fix)
    if not package and not source.startswith("cogumi:") and not Path(source).exists() and not is_hub_id(source):
        find_files(source)


def find_files(path: str | Path) -> list[Path]:
    """Return the files of a path, a glob or a directory tree in name order; raises UsageError if there are none.

    A directory gives the files of the first kind that it holds: parquet, JSON lines, CSV, text; hidden ones are left out.
    Of files whose names spell splits it gives those of train, or of the only split; names of documents are only names.
    """
    path = os.path.expanduser(path)
    local = Path(path)
    if local.is_file():
        return [local]
    if local.is_dir():
        # A .json beside the data is more likely to describe it.
        data = [file for file in _matches(path) if not _is_hidden(file.relative_to(local))]
        below = [file for file in data if file.suffix != ".json"] or [f for f in data if f.name not in DESCRIPTIONS]
        for kind in SUFFIXES:
            if files := [file for file in below if kind_of(file) == kind]:
                return files if kind == TEXT else _training_files(local, files)
        message = "this directory holds no .parquet or .jsonl file, nor a .csv, .txt or .md"
        convert = "write it as parquet (load_from_disk and to_parquet of datasets read what save_to_disk wrote)"
        unread, fix = (f", but {below[0].name}", convert) if below else ("", "give a file of its own")
        raise UsageError(message + unread, place=path, fix=fix)
    if glob.has_magic(path):
        matches = _matches(path)
        tables = [file for file in matches if kind_of(file) not in (None, TEXT)]
        files = tables or [file for file in matches if kind_of(file)] or matches
        if not files:
            raise UsageError("no file matches this pattern", place=path, fix="check it with ls")
        splits = {split for file in files if kind_of(file) != TEXT for split in _splits_of(Path(file.name))}
        if len(splits) > 1:
            log.warning("%s matches files of several splits, which are all used: %s", path, ", ".join(sorted(splits)))
        return files
    if "{" in local.name and "," in local.name:
        fix = "use * or [ab], or data.mix with each file"
        raise UsageError("braces are expanded by a shell only", place=path, fix=fix)
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
    train = by_split.get("train", [])
    variants, others = ({_variant_of(file) for file in part} for part in (train, set(files).difference(train)))
    # train_sft-00000-of-00001 and train_gen-00000-of-00001 are two splits, as are train_sft and train_gen beside test_sft.
    is_several = len(variants) > 1 and (variants & others or any("-of-" in file.name for file in train))
    if len(by_split) == 1 and not is_several:
        return files
    if not by_split.keys() <= set(SPLITS.values()) or not train or is_several:
        groups = {_variant_of(file) or "train": [file] for file in reversed(train)} if is_several else by_split
        parts = ", ".join(f"{group[0].name} ({name or 'no split'})" for name, group in sorted(groups.items()))
        pattern = f"a file or a pattern, such as {next(iter(groups.values()))[0].parent}/NAME*"
        fix = f"name the files to train on (data.source: {pattern}), or set data.split"
        raise UsageError(f"by their names it is not clear what to train on: {parts}", place=directory, fix=fix)
    return train


def _variant_of(file: Path) -> str:
    """Return what the name of a file says besides its split and its number: "sft" of train_sft-00000-of-00001.parquet."""
    return SPLIT_WORD.sub("", SHARD.sub("", file.name.partition(".")[0].lower())).strip("-_")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)


def _files_below(directory: Path) -> Iterator[Path]:
    """Iterate over the files below a directory, also those behind links to other directories, each directory once."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(directory, followlinks=True):
        folders[:] = [name for name in folders if os.path.realpath(Path(folder, name)) not in seen]
        seen.update(os.path.realpath(Path(folder, name)) for name in folders)
        yield from (file for name in names if (file := Path(folder, name)).is_file())


def _matches(source: str) -> list[Path]:
    """Return the data files below a directory, read or not, or the files that a pattern matches, in name order."""
    if Path(source).is_dir():
        return sorted(file for file in _files_below(Path(source)) if kind_of(file) or file.suffix.lower() in UNREAD)
    names = glob.glob(source, recursive=True) if glob.has_magic(source) else []
    return sorted(Path(name) for name in names if Path(name).is_file())


def describe_left_out(source: str, files: Sequence[Path]) -> list[str]:
    """Return a line that names the files of a directory or a pattern that are not among `files`; [] if there are none."""
    source = os.path.expanduser(source)
    used, kind = {file.resolve() for file in files}, kind_of(files[0])
    reasons = []
    for file in _matches(source):
        if file.resolve() in used or file.name in DESCRIPTIONS or kind_of(file) == TEXT != kind:  # a README
            continue
        name = file.relative_to(source) if Path(source).is_dir() else file
        is_other = kind_of(file) != kind or file.suffix == ".json" != files[0].suffix
        reason = "hidden" if _is_hidden(name) else f"only {files[0].suffix} is read" if is_other else "another split"
        reasons.append(f"{name} ({reason})")
    if not reasons:
        return []
    count = "1 file is" if len(reasons) == 1 else f"{len(reasons)} files are"
    fix = "data.split, a pattern, or a file as data.eval_source names others"
    return [f"{source}: {count} left out: {', '.join(reasons[:5])}{', ...' * (len(reasons) > 5)}; {fix}"]


def _has_card(directory: Path) -> bool:
    """Tell whether a directory's README.md says which files are of which split, as a data set's card on the hub."""
    card = directory / "README.md"
    front = card.read_text("utf-8", "replace").split("---", 2) if card.is_file() else []
    return len(front) == 3 and not front[0].strip() and re.search("data_(files|dir):", front[1]) is not None


def kind_of(file: Path) -> str | None:
    """Return PARQUET, JSON_LINES, CSV or TEXT by the suffix, or None."""
    suffix = Path(file.stem).suffix if file.suffix.lower() in COMPRESSED else file.suffix
    return next((kind for kind, suffixes in SUFFIXES.items() if suffix.lower() in suffixes), None)


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
        try:
            sample = [sample_path(source)]
        except OSError as error:
            raise UsageError(f"cannot be written ({error})", place=source, fix="set XDG_CACHE_HOME") from error
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
    if Path(source).is_dir():
        _refuse_missing_shards(files)
    return source, files, files_identity(files)


def _refuse_missing_shards(files: Iterable[Path]) -> None:
    """Raise UsageError unless there is every file of a table whose files' names number them, as train-00000-of-00002."""
    numbers: dict[tuple[Path, str, str], set[str]] = {}
    for file in files:
        if match := OF_SEVERAL.match(file.name):
            numbers.setdefault((file.parent, match[1], match[3]), set()).add(match[2])
    for (directory, start, most), present in numbers.items():
        if len(present) < int(most):
            message = f"only {len(present)} of {int(most)} files {start}*-of-{most} are here"
            raise UsageError(message, place=directory, fix="download the others, or name these by a pattern")


def files_identity(files: Sequence[Path]) -> list[list[Any]]:
    """Return the real path, size and modification time of each file."""
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
