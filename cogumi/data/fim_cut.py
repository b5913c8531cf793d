"""Which rows become fill-in-the-middle examples, and where each is cut; or the three pieces as a source gives them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from cogumi.data.examples import Dropped
from cogumi.data.fim_layout import Controls
from cogumi.data.fim_tokens import PLAIN, PSM, SPM
from cogumi.data.rows import excerpt_of
from cogumi.errors import UsageError

if TYPE_CHECKING:
    from cogumi.data.fim_config import FimConfig

PIECES = ("prefix", "middle", "suffix")


class Dropping:
    """The rows dropped so far, by reason."""

    def __init__(self, first_row: int):
        self.first_row = first_row
        self.dropped: dict[str, Dropped] = {}

    def keep(self, frame: pl.DataFrame, keep: pl.Expr | pl.Series, reason: str, text: str) -> pl.DataFrame:
        """The rows to keep; the others are counted under `reason`, the first with its `text` column."""
        holds = (frame.select(keep).to_series() if isinstance(keep, pl.Expr) else keep).fill_null(False)
        kept = frame.filter(holds)
        if missing := frame.height - kept.height:
            first = frame.row((~holds).arg_max() or 0, named=True)
            found = Dropped(missing, self.first_row + first["row"], excerpt_of(first[text]))
            before = self.dropped.get(reason)
            self.dropped[reason] = before + found if before else found
        return kept


def cut_rows(
    rows: pl.DataFrame,
    columns: Mapping[str, str],
    controls: Controls,
    config: "FimConfig",
    fim_rate: float,
    first_row: int,
    dropping: Dropping,
) -> pl.DataFrame:
    """Examples: `row`, `order`, `prefix`, `middle`, `suffix`, and `shown_prefix` and `shown_suffix`, which trimming may
    shorten. A plain row is all middle. `columns` is {"source": column}, or names the three pieces."""
    frame = _draws(rows.height, first_row, config.seed)
    for name, column in columns.items():
        frame = _with_text(frame, rows, name, column, dropping)
    if "source" in columns:
        examples = _cut(frame, controls, config, fim_rate, dropping)
    else:
        examples = _given(frame, controls, config, dropping)
    return examples.with_columns(shown_prefix="prefix", shown_suffix="suffix")


def _draws(height: int, first_row: int, seed: int) -> pl.DataFrame:
    # Philox is a counter-based generator whose every count yields four 64-bit words: row i owns count first_row + i.
    bits = np.random.Philox(key=seed, counter=[first_row, 0, 0, 0])
    draws = np.random.Generator(bits).random((height, 4))
    return pl.DataFrame(draws, schema=["fim", "spm", "length", "start"]).with_row_index("row")


def _with_text(frame: pl.DataFrame, rows: pl.DataFrame, name: str, column: str, dropping: Dropping) -> pl.DataFrame:
    """The frame with a column of text; rows that have none are dropped."""
    if column not in rows.columns:
        raise UsageError(f"no column {column!r} in the rows", fix=f"they have: {', '.join(rows.columns)}")
    text = rows[column][frame["row"]]
    if text.dtype not in (pl.String, pl.Binary, pl.Null):
        raise UsageError(f"column {column!r} holds {text.dtype}, not text", fix="name a text column")
    # polars' own cast fails for the whole column at the first invalid byte, even when not strict.
    decoded = pl.Series([_decode(value) for value in text], dtype=pl.String) if text.dtype == pl.Binary else text
    frame = frame.with_columns(raw=text, **{name: decoded.cast(pl.String)})
    frame = dropping.keep(frame, pl.col("raw").is_not_null(), "null", "raw")
    return dropping.keep(frame, pl.col(name).is_not_null(), "not UTF-8", "raw").drop("raw")


def _cut(
    frame: pl.DataFrame, controls: Controls, config: "FimConfig", fim_rate: float, dropping: Dropping
) -> pl.DataFrame:
    frame = frame.with_columns(
        n=pl.col("source").str.len_chars(),
        order=pl.when(pl.col("fim") >= fim_rate).then(PLAIN).otherwise(_order(controls, config)),
    )
    shortest, longest = config.middle_chars
    # At least one character of context must stay, or there is nothing to complete from.
    least = pl.when(pl.col("order") == PLAIN).then(1).otherwise(shortest + 1)
    frame = dropping.keep(frame, pl.col("n") >= least, "too short to split", "source")
    frame = _without_special_texts(frame, "source", controls, dropping)

    n = pl.col("n").cast(pl.Int64)
    choices = pl.min_horizontal(pl.lit(longest, pl.Int64), n - 1) - shortest + 1
    plain = pl.col("order") == PLAIN
    frame = frame.with_columns(
        length=pl.when(plain).then(n).otherwise(shortest + (pl.col("length") * choices).cast(pl.Int64))
    )
    frame = frame.with_columns(
        start=pl.when(plain).then(0).otherwise((pl.col("start") * (n - pl.col("length") + 1)).cast(pl.Int64))
    )
    source, start, length = pl.col("source"), pl.col("start"), pl.col("length")
    return frame.select(
        "row",
        "order",
        prefix=source.str.slice(0, start),
        middle=source.str.slice(start, length),
        suffix=source.str.slice(start + length),
    )


def _given(frame: pl.DataFrame, controls: Controls, config: "FimConfig", dropping: Dropping) -> pl.DataFrame:
    """The pieces as they stand in the source: the cut is somebody's, only the order is drawn."""
    frame = frame.with_columns(order=_order(controls, config))
    frame = dropping.keep(frame, pl.col("middle") != "", "with an empty middle", "prefix")
    frame = dropping.keep(frame, (pl.col("prefix") != "") | (pl.col("suffix") != ""), "without context", "middle")
    for piece in PIECES:
        frame = _without_special_texts(frame, piece, controls, dropping)
    return frame.select("row", "order", *PIECES)


def _order(controls: Controls, config: "FimConfig") -> pl.Expr:
    return pl.when(pl.col("spm") < controls.spm_rate(config.spm_rate)).then(SPM).otherwise(PSM)


def _without_special_texts(frame: pl.DataFrame, name: str, controls: Controls, dropping: Dropping) -> pl.DataFrame:
    clean = ~pl.col(name).str.contains_any(controls.special_texts)
    return dropping.keep(frame, clean, "containing a special token", name)


def _decode(value: bytes | None) -> str | None:
    """The text of these bytes, or None where they are not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None
