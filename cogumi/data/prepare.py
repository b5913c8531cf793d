"""From `data:` of a config to the rows a run trains and evaluates on."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from cogumi.data.sample import sample_path
from cogumi.data.sources import read_rows
from cogumi.errors import UsageError

if TYPE_CHECKING:
    from cogumi.config import DataSection

STDLIB = "cogumi:stdlib"


def load_rows(data: "DataSection") -> tuple[pl.DataFrame, pl.DataFrame]:
    """Training and held-out rows of a config's `data:`, disjoint, drawn with `fim.seed`.

    Raises UsageError when the source cannot be read (see `read_rows`) or nothing is left to train on.
    """
    path: str | Path = sample_path() if data.source == STDLIB else data.source
    rows = read_rows(path, [data.column])
    if len(rows) <= data.eval_rows:
        has = f"{data.source} has {len(rows)} rows and data.eval_rows holds out {data.eval_rows}"
        raise UsageError(f"data.source: {has}; none is left to train on")
    order = np.random.default_rng(data.fim.seed).permutation(len(rows))
    held_out, rest = order[: data.eval_rows], order[data.eval_rows :][: data.max_rows]
    return rows[rest], rows[held_out]
