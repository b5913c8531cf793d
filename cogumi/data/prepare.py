"""From `data:` of a config to the rows a run trains and evaluates on."""

from pathlib import Path

import numpy as np
import polars as pl

from cogumi.data.sample import sample_path
from cogumi.data.sources import read_rows
from cogumi.errors import UsageError

STDLIB = "cogumi:stdlib"


def load_rows(
    source: str, column: str, *, max_rows: int | None = None, eval_rows: int = 0, seed: int = 0
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Training and held-out rows, disjoint, drawn with `seed`; at most `max_rows` of the former.

    Raises UsageError when the source cannot be read (see `read_rows`) or nothing is left to train on.
    """
    path: str | Path = sample_path() if source == STDLIB else source
    rows = read_rows(path, [column])
    if len(rows) <= eval_rows:
        raise UsageError(
            f"data.source: {source} has {len(rows)} rows and data.eval_rows holds out {eval_rows}; none is left to train on"
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out, rest = order[:eval_rows], order[eval_rows:][:max_rows]
    return rows[rest], rows[held_out]
