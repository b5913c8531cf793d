"""From `data:` of a config to the rows that a run trains and evaluates on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from cogumi.core.errors import UsageError
from cogumi.data.cache_files import files_identity
from cogumi.data.selection import Selection, held_out_of
from cogumi.data.sources import batches
from cogumi.data.stdlib_sample import sample_path
from cogumi.data.stdlib_tasks import CHAT, PAIRS, chat_path, pairs_path
from cogumi.hub.dataset_files import find_on_hub, split_of
from cogumi.hub.source_files import find_files, is_hub_id

if TYPE_CHECKING:
    from cogumi.config.schema import DataSection, Format

STDLIB = "cogumi:stdlib"
SAMPLES = {STDLIB: sample_path, CHAT: chat_path, PAIRS: pairs_path}


@dataclass(frozen=True)
class Located:
    """The files of one source, all on this machine."""

    name: str
    files: tuple[Path, ...]
    identity: Any
    """JSON that is another one where the rows may be others: the commit on the hub, or of each file what `files_identity`
    says."""


def locate(source: str, *, revision: str | None = None, split: str | None = None, subset: str | None = None) -> Located:
    """The files that `source` stands for, downloaded where they are on the hub.

    A local file or directory wins over a hub id of the same spelling. split: of a hub data set ("train" by default), or of
    a directory laid out like one. Raises UsageError as `find_files` and `find_on_hub` do.
    """
    if source in SAMPLES:
        files = [SAMPLES[source]()]
        return Located(source, tuple(files), files_identity(files))
    if source.startswith("cogumi:"):
        raise UsageError(f"{source} is not known", key="data.source", fix=f"there is {', '.join(SAMPLES)}")
    if not Path(source).exists() and is_hub_id(source):
        found = find_on_hub(source, revision, split, subset)
        return Located(found.name, found.files, found.identity)
    for key, value in (("revision", revision), ("subset", subset)):
        if value is not None:
            raise UsageError(f"data.{key} would be ignored: {source} is a local file, not a hub id", fix="drop it")
    if split is not None and not Path(source).is_dir():
        raise UsageError(f"data.split would be ignored: {source} is not a directory nor a hub id", fix="drop it")
    files = find_files(source) if split is None else split_of(source, split)
    return Located(source, tuple(files), files_identity(files))


# ------------------------------------------------------------------------------------------------------------- pipeline


__all__ = ["STDLIB", "Entry", "entries_of", "load_rows", "selection_of"]


@dataclass(frozen=True)
class Entry:
    """One source of a run: its files, and what its rows are."""

    located: Located
    format: "Format"
    columns: Mapping[str, str]
    column: str
    weight: float


def entries_of(data: "DataSection") -> list[Entry]:
    """The sources of a config's `data:`, downloaded where they are on the hub: `source` alone, or those of `mix`.

    Raises UsageError when one is not there (see `locate`).
    """
    if data.source is not None:
        located = locate(data.source, revision=data.revision, split=data.split, subset=data.subset)
        return [Entry(located, data.format, data.columns, data.column, 1.0)]
    return [
        Entry(
            locate(each.source, revision=each.revision, split=each.split, subset=each.subset),
            each.format or data.format,
            data.columns if each.columns is None else each.columns,
            each.column or data.column,
            each.weight,
        )
        for each in data.mix
    ]


def selection_of(data: "DataSection") -> Selection:
    """Which rows of them."""
    return Selection(data.eval_rows, data.max_rows, data.fraction, data.deduplicate, data.fim.seed)


def load_rows(data: "DataSection") -> tuple[pl.DataFrame, pl.DataFrame]:
    """Training and held-out rows of a config's `data:`, in memory, disjoint, drawn with `fim.seed`.

    Raises UsageError when the source cannot be read (see `locate`, `batches`) or nothing is left to train on.
    """
    frames = [
        frame.rename({entry.column: data.column})
        for entry in entries_of(data)
        for frame in batches(entry.located.files, [entry.column], text_only=True)
        if frame.height
    ]
    rows = pl.concat(frames, how="vertical_relaxed") if frames else pl.DataFrame()
    apart = held_out_of(len(rows), data.eval_rows)
    if len(rows) <= apart:
        has = f"{data.source} has {len(rows)} rows and data.eval_rows holds out {apart}"
        raise UsageError(has, key="data.source", fix="none is left to train on")
    order = np.random.default_rng(data.fim.seed).permutation(len(rows))
    held_out, rest = order[:apart], order[apart:][: data.max_rows]
    return rows[rest], rows[held_out]
