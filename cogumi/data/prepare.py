"""From `data:` of a config to the rows a run trains and evaluates on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from cogumi.data.locate import STDLIB, Located, locate
from cogumi.data.selection import Selection, held_out_of
from cogumi.data.sources import batches
from cogumi.errors import UsageError

if TYPE_CHECKING:
    from cogumi.config import DataSection, Format

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
